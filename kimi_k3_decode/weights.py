"""Model weights as checked, immutable dataclasses: random, sharded, digested. Reading and writing folders is in `checkpoint.py`.
The drafter's own classes are in `draft_model.py`.

Axis letters of the fields: V vocabulary, D hidden, C = heads x 128 KDA channels, H KDA heads, K KDA head dim, W conv taps,
R q_lora rank, L latent (kv_lora in MLA, MoE latent in the MoE), X = heads x (nope + pe), Y = kv_lora + pe, Z = heads x (nope + v),
O = heads x v, F intermediate, E experts, M Markov rank. Matrices are [out, in] as published.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.draft_model import DraftWeights
from kimi_k3_decode.mxfp4 import Mxfp4


@dataclass(frozen=True, kw_only=True)
class KdaWeights:
    """One KDA sublayer. Conv taps, `A_log_H` and `dt_bias_C` (head-major channels) are FP32; the rest BF16."""

    q_proj_CD: torch.Tensor
    k_proj_CD: torch.Tensor
    v_proj_CD: torch.Tensor
    g_proj_CD: torch.Tensor  # output gate
    b_proj_HD: torch.Tensor  # beta
    f_a_KD: torch.Tensor  # decay, low-rank half A; no activation between A and B
    f_b_CK: torch.Tensor
    q_conv_CW: torch.Tensor  # the last tap is the current token
    k_conv_CW: torch.Tensor
    v_conv_CW: torch.Tensor
    A_log_H: torch.Tensor
    dt_bias_C: torch.Tensor
    o_norm_K: torch.Tensor  # shared by all heads
    o_proj_DC: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class MlaWeights:
    """One MLA sublayer, BF16. Rows of `q_b_XR` are per head [nope | pe], of `kv_a_YD` [latent | pe], of `kv_b_ZL` per head [k_nope | v].

    `g_proj_OD` is the output gate.
    """

    q_a_RD: torch.Tensor
    q_a_norm_R: torch.Tensor
    q_b_XR: torch.Tensor
    kv_a_YD: torch.Tensor
    kv_a_norm_L: torch.Tensor  # over the latent only; the pe channels stay un-normed
    kv_b_ZL: torch.Tensor
    g_proj_OD: torch.Tensor
    o_proj_DO: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class DenseWeights:
    """A SiTU MLP, BF16: `down(SiTU(gate x, up x))`. Used by layer 0 and by the shared experts."""

    gate_FD: torch.Tensor
    up_FD: torch.Tensor
    down_DF: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class MoeWeights:
    """One latent MoE. `router_bias_E` (the correction bias) is FP32, experts MXFP4, the rest BF16. `w1` is g, `w3` is u, `w2` down."""

    router_ED: torch.Tensor
    router_bias_E: torch.Tensor
    latent_down_LD: torch.Tensor
    latent_norm_L: torch.Tensor
    latent_up_DL: torch.Tensor
    w1: Mxfp4  # [E, F, L]
    w2: Mxfp4  # [E, L, F]
    w3: Mxfp4  # [E, F, L]
    shared: DenseWeights  # one MLP of n_shared x F in total, reads the full hidden


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer: norms [D], Attention Residuals norm and projection [D] before attention (`attn_res_*`) and the MLP (`mlp_res_*`)."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    attn_res_norm: torch.Tensor
    attn_res_proj: torch.Tensor
    mlp_res_norm: torch.Tensor
    mlp_res_proj: torch.Tensor
    attn: KdaWeights | MlaWeights
    mlp: DenseWeights | MoeWeights


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """All weights of one model, or of one tensor-parallel rank of it (`tp`, `rank`)."""

    config: ModelConfig
    embed_VD: torch.Tensor
    layers: tuple[LayerWeights, ...]
    out_res_norm: torch.Tensor
    out_res_proj: torch.Tensor
    norm: torch.Tensor
    lm_head_VD: torch.Tensor
    draft: DraftWeights | None = None
    tp: int = 1
    rank: int = 0

    def to(self, dtype: torch.dtype) -> ModelWeights:
        """The same values in `dtype` (bfloat16, float32 or float64). FP32 parameters are never narrowed; MXFP4 codes stay codes."""

        def cast(tensor: torch.Tensor, published: torch.dtype) -> torch.Tensor:
            return tensor.to(torch.promote_types(published, dtype))

        return _map_tensors(self, cast)

    def to_device(self, device: torch.device | str) -> ModelWeights:
        """The same weights on another device, MXFP4 codes included."""
        return _map_tensors(self, lambda tensor, _: tensor.to(device), codes=True)

    def shard(self, tp: int, rank: int) -> ModelWeights:
        """Rank `rank` of `tp`: see `sharding.py` for which axis of which tensor is split. Raises Unsupported with every reason."""
        from kimi_k3_decode.sharding import shard_weights

        return shard_weights(self, tp, rank)

    def digest(self) -> str:
        """Hex SHA-256 over field paths, dtypes, shapes and bytes of every tensor, and over the configuration."""
        digest = hashlib.sha256(repr((self.config, self.tp, self.rank)).encode())
        for path, tensor in named_tensors(self):
            digest.update(f"{path}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in named_tensors(self))


# The published FP32 fields (kimi-k3 fine print); every other floating point tensor is BF16.
FP32_FIELDS = frozenset({"q_conv_CW", "k_conv_CW", "v_conv_CW", "A_log_H", "dt_bias_C", "router_bias_E"})


def published_dtype(field_name: str) -> torch.dtype:
    """Storage dtype of a field in a published checkpoint."""
    if field_name in ("codes_EOI", "scales_EOG"):
        return torch.uint8
    return torch.float32 if field_name in FP32_FIELDS else torch.bfloat16


def named_tensors(node: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(dotted field path, tensor) of every tensor below a weights dataclass, in field order."""
    for field in fields(node):
        value = getattr(node, field.name)
        path = f"{prefix}{field.name}"
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            for index, item in enumerate(value):
                yield from named_tensors(item, f"{path}.{index}.")
        elif is_dataclass(value) and not isinstance(value, ModelConfig):
            yield from named_tensors(value, f"{path}.")


def _map_tensors(node: Any, change: Callable[[torch.Tensor, torch.dtype], torch.Tensor], *, codes: bool = False) -> Any:
    """A copy of a weights dataclass with `change(tensor, published dtype)` applied to each tensor; MXFP4 codes only when `codes`."""
    if isinstance(node, Mxfp4) and not codes:
        return node
    changed: dict[str, Any] = {}
    for field in fields(node):
        value = getattr(node, field.name)
        if isinstance(value, torch.Tensor):
            changed[field.name] = change(value, published_dtype(field.name))
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            changed[field.name] = tuple(_map_tensors(item, change, codes=codes) for item in value)
        elif is_dataclass(value) and not isinstance(value, ModelConfig):
            changed[field.name] = _map_tensors(value, change, codes=codes)
    return replace(node, **changed)


def random_weights(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> ModelWeights:
    """Weights of a healthy scale drawn from `seed`. The same seed gives the same (BF16-representable) values in every dtype."""
    from kimi_k3_decode.random_init import draw_weights

    return draw_weights(config, seed).to(dtype)


def load_checkpoint(folder: str | Path) -> ModelWeights:
    """Read a published-format folder (config.json, model.safetensors or index + shards); see `checkpoint.load_checkpoint`."""
    from kimi_k3_decode import checkpoint

    return checkpoint.load_checkpoint(folder)


def save_checkpoint(weights: ModelWeights, folder: str | Path) -> None:
    """Write config.json and model.safetensors under the published names; see `checkpoint.save_checkpoint`."""
    from kimi_k3_decode import checkpoint

    checkpoint.save_checkpoint(weights, folder)
