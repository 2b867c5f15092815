"""The weight operands of every launch of one rank, under the buffer names the plan binds them to (`<launch id>.<operand>`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kimi_k3_decode.config import ModelConfig, Shard
from kimi_k3_decode.mxfp4 import Mxfp4
from kimi_k3_decode.weights import DenseWeights, KdaWeights, LayerWeights, MlaWeights, ModelWeights, MoeWeights

Tensors = dict[str, torch.Tensor]


def bind_weights(weights: ModelWeights, tp: int = 1, rank: int = 0) -> Tensors:
    """Buffer name -> tensor for rank `rank` of `tp`, in the dtypes of the contracts when `weights` are BF16 (wider when they are wider).

    `weights` are whole; raises Unsupported with every reason when they cannot be split.
    """
    config = weights.config
    mine = replace(weights, draft=None).shard(tp, rank) if tp > 1 else weights
    shard = Shard(config=config, tp=tp, rank=rank)
    found: Tensors = {"embedding.embed_VD": weights.embed_VD}
    for layer, part in enumerate(mine.layers):
        for name, tensor in _layer(part, shard).items():
            found[f"L{layer:02d}.{name}"] = tensor
    found |= {
        "final_res.res_score_D": _score(weights.out_res_norm, weights.out_res_proj),
        "final_res.norm_D": weights.norm,
        "lm_head.lm_head_VD": mine.lm_head_VD,
    }
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _score(norm_D: torch.Tensor, proj_D: torch.Tensor) -> torch.Tensor:
    """w_norm * w_proj: exact in FP32 for BF16 factors."""
    dtype = torch.promote_types(norm_D.dtype, torch.float32)
    return norm_D.to(dtype) * proj_D.to(dtype)


def _layer(layer: LayerWeights, shard: Shard) -> Tensors:
    found = {
        "attn_res.res_score_D": _score(layer.attn_res_norm, layer.attn_res_proj),
        "attn_res.norm_D": layer.input_norm,
        "mlp_res.res_score_D": _score(layer.mlp_res_norm, layer.mlp_res_proj),
        "mlp_res.norm_D": layer.post_norm,
    }
    if isinstance(layer.attn, KdaWeights):
        found |= _kda(layer.attn, shard)
    else:
        found |= _mla(layer.attn, shard.config)
    return found | (_moe(layer.mlp, shard) if isinstance(layer.mlp, MoeWeights) else _dense("dense", layer.mlp))


def _kda(w: KdaWeights, shard: Shard) -> Tensors:
    rows = torch.cat((w.q_proj_CD, w.k_proj_CD, w.v_proj_CD, w.g_proj_CD, w.f_a_KD, w.b_proj_HD))
    padding = rows.new_zeros(shard.in_proj_rows - rows.shape[0], rows.shape[1])
    return {
        "in_proj.weight_PD": torch.cat((rows, padding)),
        "kda.conv_weight_CW": torch.cat((w.q_conv_CW, w.k_conv_CW, w.v_conv_CW)),
        "kda.f_b_CK": w.f_b_CK,
        "kda.a_log_H": w.A_log_H,
        "kda.dt_bias_C": w.dt_bias_C,
        "kda.o_norm_V": w.o_norm_K,
        "o_proj.weight_DC": w.o_proj_DC,
    }


def _mla(w: MlaWeights, config: ModelConfig) -> Tensors:
    if w.g_proj_OD is None:
        raise ValueError("MLA weights: got no output gate, need one; only the drafter has none")
    kv_b_HZL = w.kv_b_ZL.unflatten(0, (-1, config.qk_nope_head_dim + config.v_head_dim))
    return {
        "in_proj.weight_PD": torch.cat((w.q_a_RD, w.kv_a_YD, w.g_proj_OD)),
        "mla_query.q_norm_P": w.q_a_norm_R,
        "mla_query.q_b_PC": w.q_b_XR,
        "mla_query.kv_norm_L": w.kv_a_norm_L,
        "mla_query.w_uk_HKL": kv_b_HZL[:, : config.qk_nope_head_dim],
        "mla_value.w_uv_HVL": kv_b_HZL[:, config.qk_nope_head_dim :],
        "o_proj.weight_DC": w.o_proj_DO,
    }


def _dense(prefix: str, w: DenseWeights) -> Tensors:
    return {f"{prefix}_up.gate_up_ID": torch.cat((w.gate_FD, w.up_FD)), f"{prefix}_down.down_DI": w.down_DF}


def _moe(w: MoeWeights, shard: Shard) -> Tensors:
    begin = shard.rank * shard.up_rows
    found = {
        "moe_front.router_ED": w.router_ED,
        "moe_front.latent_down_LD": w.latent_down_LD,
        "route.bias_E": w.router_bias_E,
        "latent_reduce.norm_L": w.latent_norm_L,
        "moe_tail.latent_up_DL": w.latent_up_DL[begin : begin + shard.up_rows],
    }
    for launch, name, out, matrix in (("experts_up", "w1", "I", w.w1), ("experts_up", "w3", "I", w.w3), ("experts_down", "w2", "L", w.w2)):
        found[f"{launch}.{name}_E{out}J"] = matrix.codes_EOI
        found[f"{launch}.{name}_scale_E{out}G"] = matrix.scales_EOG
    return found | _dense("shared", w.shared)


def widen(bound: Tensors, dtype: torch.dtype) -> Tensors:
    """For contract execution: every floating weight in `dtype`, and each expert matrix unpacked once under its plain name (`w1`)."""
    wide: Tensors = {}
    for name, tensor in bound.items():
        wide[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if tensor.dtype == torch.uint8 and "_scale_" not in name:
            launch, operand = name.rsplit(".", 1)
            matrix, axes = operand.split("_", 1)
            scales = bound[f"{launch}.{matrix}_scale_{axes[:-1]}G"]
            wide[f"{launch}.{matrix}"] = Mxfp4(codes_EOI=tensor, scales_EOG=scales).dequantize(dtype)
    return wide


def transform(bound: Tensors, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Tensors:
    """A copy with `change(name, tensor)` in place of each tensor; how a planted fault alters one operand of the candidate."""
    return {name: change(name, tensor) for name, tensor in bound.items()}
