"""Published tensor names of Kimi K3, their shapes and dtypes, and the way between a flat name -> tensor table and ModelWeights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.draft_model import draft_from_tensors, draft_shapes, draft_to_tensors
from kimi_k3_decode.mxfp4 import GROUP, Mxfp4
from kimi_k3_decode.weights import (
    DenseWeights,
    KdaWeights,
    LayerWeights,
    MlaWeights,
    ModelWeights,
    MoeWeights,
    published_dtype,
)

PREFIX = "language_model.model."
TOP_NAMES = {
    "embed_VD": f"{PREFIX}embed_tokens.weight",
    "out_res_norm": f"{PREFIX}output_attn_res_norm.weight",
    "out_res_proj": f"{PREFIX}output_attn_res_proj.weight",
    "norm": f"{PREFIX}norm.weight",
    "lm_head_VD": "language_model.lm_head.weight",
}
LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "attn_res_norm": "self_attention_res_norm.weight",
    "attn_res_proj": "self_attention_res_proj.weight",
    "mlp_res_norm": "mlp_res_norm.weight",
    "mlp_res_proj": "mlp_res_proj.weight",
}
KDA_NAMES = {
    "q_proj_CD": "q_proj.weight",
    "k_proj_CD": "k_proj.weight",
    "v_proj_CD": "v_proj.weight",
    "g_proj_CD": "g_proj.weight",
    "b_proj_HD": "b_proj.weight",
    "f_a_KD": "f_a_proj.weight",
    "f_b_CK": "f_b_proj.weight",
    "q_conv_CW": "q_conv1d.weight",
    "k_conv_CW": "k_conv1d.weight",
    "v_conv_CW": "v_conv1d.weight",
    "A_log_H": "A_log",
    "dt_bias_C": "dt_bias",
    "o_norm_K": "o_norm.weight",
    "o_proj_DC": "o_proj.weight",
}
MLA_NAMES = {
    "q_a_RD": "q_a_proj.weight",
    "q_a_norm_R": "q_a_layernorm.weight",
    "q_b_XR": "q_b_proj.weight",
    "kv_a_YD": "kv_a_proj_with_mqa.weight",
    "kv_a_norm_L": "kv_a_layernorm.weight",
    "kv_b_ZL": "kv_b_proj.weight",
    "g_proj_OD": "g_proj.weight",
    "o_proj_DO": "o_proj.weight",
}
DENSE_NAMES = {"gate_FD": "gate_proj.weight", "up_FD": "up_proj.weight", "down_DF": "down_proj.weight"}
MOE_NAMES = {
    "router_ED": "gate.weight",
    "router_bias_E": "gate.e_score_correction_bias",
    "latent_down_LD": "routed_expert_down_proj.weight",
    "latent_norm_L": "routed_expert_norm.weight",
    "latent_up_DL": "routed_expert_up_proj.weight",
}
EXPERT_PARTS = ("w1", "w2", "w3")
# Fields whose checkpoint form carries axes of size one; the first listed shape is the one we write, the others are read too.
_RES_PROJ = frozenset({"attn_res_proj", "mlp_res_proj", "out_res_proj"})
_CONV = frozenset({"q_conv_CW", "k_conv_CW", "v_conv_CW"})


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a published tensor must look like: any of `shapes` (the first is written) and exactly `dtype`."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype


def _spec(field: str, shape: tuple[int, ...]) -> TensorSpec:
    shapes: tuple[tuple[int, ...], ...] = (shape,)
    if field in _RES_PROJ:
        shapes = ((1, *shape),)
    elif field in _CONV:
        shapes = ((shape[0], 1, shape[1]), shape)
    elif field == "A_log_H":
        shapes = (shape, (1, 1, shape[0], 1))
    return TensorSpec(shapes=shapes, dtype=published_dtype(field))


def _kda_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, channels, head_dim, heads = config.hidden_size, config.kda_dim, config.kda_head_dim, config.kda_heads
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("q_proj_CD", "k_proj_CD", "v_proj_CD", "g_proj_CD"), (channels, hidden))
    shapes |= dict.fromkeys(("q_conv_CW", "k_conv_CW", "v_conv_CW"), (channels, config.conv_width))
    return shapes | {
        "b_proj_HD": (heads, hidden),
        "f_a_KD": (head_dim, hidden),
        "f_b_CK": (channels, head_dim),
        "A_log_H": (heads,),
        "dt_bias_C": (channels,),
        "o_norm_K": (head_dim,),
        "o_proj_DC": (hidden, channels),
    }


def _mla_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads, value = config.hidden_size, config.mla_heads, config.v_head_dim
    return {
        "q_a_RD": (config.q_lora_rank, hidden),
        "q_a_norm_R": (config.q_lora_rank,),
        "q_b_XR": (heads * config.qk_head_dim, config.q_lora_rank),
        "kv_a_YD": (config.mla_cache_dim, hidden),
        "kv_a_norm_L": (config.kv_lora_rank,),
        "kv_b_ZL": (heads * (config.qk_nope_head_dim + value), config.kv_lora_rank),
        "g_proj_OD": (heads * value, hidden),
        "o_proj_DO": (hidden, heads * value),
    }


def _dense_shapes(hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {"gate_FD": (width, hidden), "up_FD": (width, hidden), "down_DF": (hidden, width)}


def _moe_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, latent, experts = config.hidden_size, config.moe_latent_size, config.n_experts
    return {
        "router_ED": (experts, hidden),
        "router_bias_E": (experts,),
        "latent_down_LD": (latent, hidden),
        "latent_norm_L": (latent,),
        "latent_up_DL": (hidden, latent),
    }


def _expert_specs(config: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
    latent, width = config.moe_latent_size, config.moe_intermediate_size
    sizes = {"w1": (width, latent), "w2": (latent, width), "w3": (width, latent)}
    specs = {}
    for expert in range(config.n_experts):
        for part, (rows, columns) in sizes.items():
            name = f"{prefix}experts.{expert}.{part}"
            specs[f"{name}.weight_packed"] = TensorSpec(shapes=((rows, columns // 2),), dtype=torch.uint8)
            specs[f"{name}.weight_scale"] = TensorSpec(shapes=((rows, columns // GROUP),), dtype=torch.uint8)
    return specs


def _layer_specs(config: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    prefix, hidden = f"{PREFIX}layers.{layer}.", config.hidden_size
    specs = {prefix + name: _spec(field, (hidden,)) for field, name in LAYER_NAMES.items()}
    names, shapes = (KDA_NAMES, _kda_shapes(config)) if config.is_kda(layer) else (MLA_NAMES, _mla_shapes(config))
    specs |= {f"{prefix}self_attn.{name}": _spec(field, shapes[field]) for field, name in names.items()}
    if not config.is_moe(layer):
        dense = _dense_shapes(hidden, config.dense_intermediate_size)
        return specs | {f"{prefix}mlp.{name}": _spec(field, dense[field]) for field, name in DENSE_NAMES.items()}
    moe, shared = _moe_shapes(config), _dense_shapes(hidden, config.shared_intermediate_size)
    specs |= {f"{prefix}block_sparse_moe.{name}": _spec(field, moe[field]) for field, name in MOE_NAMES.items()}
    specs |= {f"{prefix}block_sparse_moe.shared_experts.{name}": _spec(field, shared[field]) for field, name in DENSE_NAMES.items()}
    return specs | _expert_specs(config, f"{prefix}block_sparse_moe.")


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Published name -> spec of every tensor a checkpoint of `config` holds, the drafter's included when it has one."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"embed_VD": (vocab, hidden), "lm_head_VD": (vocab, hidden)}
    specs = {name: _spec(field, shapes.get(field, (hidden,))) for field, name in TOP_NAMES.items()}
    for layer in range(config.n_layers):
        specs |= _layer_specs(config, layer)
    if config.draft is not None:
        specs |= {name: TensorSpec(shapes=(shape,), dtype=torch.bfloat16) for name, shape in draft_shapes(config).items()}
    return specs


# ---- ModelWeights -> table ----
def _put(table: dict[str, torch.Tensor], node: Any, names: Mapping[str, str], prefix: str) -> None:
    for field, name in names.items():
        tensor = getattr(node, field)
        if field in _RES_PROJ:
            tensor = tensor.unsqueeze(0)
        elif field in _CONV:
            tensor = tensor.unsqueeze(1)
        table[prefix + name] = tensor.to(published_dtype(field))


def to_tensors(weights: ModelWeights) -> dict[str, torch.Tensor]:
    """Published name -> contiguous tensor in the published dtype. Raises ValueError for a shard: only whole models are published."""
    if weights.tp != 1:
        raise ValueError(f"weights: got rank {weights.rank} of tp={weights.tp}, needs the whole model; save before sharding")
    table: dict[str, torch.Tensor] = {}
    _put(table, weights, TOP_NAMES, "")
    for layer, w in enumerate(weights.layers):
        prefix = f"{PREFIX}layers.{layer}."
        _put(table, w, LAYER_NAMES, prefix)
        _put(table, w.attn, KDA_NAMES if isinstance(w.attn, KdaWeights) else MLA_NAMES, f"{prefix}self_attn.")
        if isinstance(w.mlp, DenseWeights):
            _put(table, w.mlp, DENSE_NAMES, f"{prefix}mlp.")
            continue
        _put(table, w.mlp, MOE_NAMES, f"{prefix}block_sparse_moe.")
        _put(table, w.mlp.shared, DENSE_NAMES, f"{prefix}block_sparse_moe.shared_experts.")
        for part in EXPERT_PARTS:
            stack: Mxfp4 = getattr(w.mlp, part)
            for expert in range(stack.shape[0]):
                name = f"{prefix}block_sparse_moe.experts.{expert}.{part}"
                table[f"{name}.weight_packed"] = stack.codes_EOI[expert]
                table[f"{name}.weight_scale"] = stack.scales_EOG[expert]
    if weights.draft is not None:
        table |= {name: tensor.to(torch.bfloat16) for name, tensor in draft_to_tensors(weights.draft).items()}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in table.items()}


# ---- table -> ModelWeights ----
def _get(table: Mapping[str, torch.Tensor], names: Mapping[str, str], prefix: str) -> dict[str, torch.Tensor]:
    fields = {}
    for field, name in names.items():
        tensor = table[prefix + name]
        if field in _RES_PROJ or field == "A_log_H":
            tensor = tensor.flatten()
        elif field in _CONV:
            tensor = tensor.flatten(1)
        fields[field] = tensor
    return fields


def _moe_from(table: Mapping[str, torch.Tensor], config: ModelConfig, prefix: str) -> MoeWeights:
    def stack(part: str) -> Mxfp4:
        names = [f"{prefix}experts.{expert}.{part}" for expert in range(config.n_experts)]
        return Mxfp4(
            codes_EOI=torch.stack([table[f"{name}.weight_packed"] for name in names]),
            scales_EOG=torch.stack([table[f"{name}.weight_scale"] for name in names]),
        )

    shared = DenseWeights(**_get(table, DENSE_NAMES, f"{prefix}shared_experts."))
    return MoeWeights(shared=shared, **{part: stack(part) for part in EXPERT_PARTS}, **_get(table, MOE_NAMES, prefix))  # type: ignore[arg-type]


def from_tensors(config: ModelConfig, table: Mapping[str, torch.Tensor]) -> ModelWeights:
    """Build ModelWeights from a table that `tensor_specs` accepts (see checkpoint.py for the checks)."""
    layers = []
    for layer in range(config.n_layers):
        prefix = f"{PREFIX}layers.{layer}."
        attn: KdaWeights | MlaWeights
        mlp: DenseWeights | MoeWeights
        if config.is_kda(layer):
            attn = KdaWeights(**_get(table, KDA_NAMES, f"{prefix}self_attn."))
        else:
            attn = MlaWeights(**_get(table, MLA_NAMES, f"{prefix}self_attn."))
        if config.is_moe(layer):
            mlp = _moe_from(table, config, f"{prefix}block_sparse_moe.")
        else:
            mlp = DenseWeights(**_get(table, DENSE_NAMES, f"{prefix}mlp."))
        layers.append(LayerWeights(attn=attn, mlp=mlp, **_get(table, LAYER_NAMES, prefix)))
    draft = None if config.draft is None else draft_from_tensors(dict(table), config)
    return ModelWeights(config=config, layers=tuple(layers), draft=draft, **_get(table, TOP_NAMES, ""))  # type: ignore[arg-type]
