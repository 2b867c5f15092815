"""Tensor-parallel shards of the weights: which axis of which tensor a rank holds. Blocks are contiguous and in rank order.

Column-parallel (rows split): q, k, v, g, beta, F_B, conv taps, A_log, dt_bias, q_b, kv_b, gate/up, expert w1/w3, router rows, latent-down
rows, embedding and LM head. Row-parallel (columns split; partial outputs are summed over ranks): o_proj, down, expert w2. Whole on every
rank: norms, residual projections, F_A, q_a, kv_a, the correction bias, the latent up-projection (computed by row shard), `fc`, Markov W1.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from kimi_k3_decode.config import ModelConfig, Unsupported
from kimi_k3_decode.mxfp4 import GROUP, Mxfp4
from kimi_k3_decode.weights import ModelWeights

# fmt: off
SPLIT_ROWS = frozenset((
    "embed_VD", "lm_head_VD", "q_proj_CD", "k_proj_CD", "v_proj_CD", "g_proj_CD", "b_proj_HD", "f_b_CK", "q_conv_CW", "k_conv_CW",
    "v_conv_CW", "A_log_H", "dt_bias_C", "q_b_XR", "kv_b_ZL", "g_proj_OD", "gate_FD", "up_FD", "router_ED", "latent_down_LD",
    "w1", "w3",
    # of the drafter
    "q_b", "kv_b", "gate", "up", "markov_out",
))
SPLIT_COLUMNS = frozenset(("o_proj_DC", "o_proj_DO", "down_DF", "w2", "o", "down"))
# fmt: on


def shard_reasons(config: ModelConfig, tp: int, rank: int) -> tuple[str, ...]:
    """Every reason why `config` cannot be split over `tp` ranks; empty when it can."""
    reasons = []
    if tp < 1 or not 0 <= rank < max(tp, 1):
        return (f"rank: got {rank} of tp={tp}, needs 0 <= rank < tp",)
    sizes = {
        "kda_heads": config.kda_heads,
        "mla_heads": config.mla_heads,
        "vocab_size": config.vocab_size,
        "n_experts": config.n_experts,
        "moe_latent_size": config.moe_latent_size,
        "shared_intermediate_size": config.shared_intermediate_size,
        "dense_intermediate_size": config.dense_intermediate_size,
    }
    if config.draft is not None:
        sizes |= {"draft.n_heads": config.draft.n_heads, "draft.intermediate_size": config.draft.intermediate_size}
    reasons += [f"{what}: got {size} over tp={tp}, needs a multiple" for what, size in sizes.items() if size % tp]
    if config.moe_intermediate_size % (tp * GROUP):
        reasons.append(
            f"moe_intermediate_size: got {config.moe_intermediate_size} over tp={tp}, needs a multiple of {GROUP} a rank (an MXFP4 scale)"
        )
    return tuple(reasons)


def _block(size: int, tp: int, rank: int) -> tuple[int, int]:
    return size // tp * rank, size // tp * (rank + 1)


def _shard_value(name: str, value: Any, tp: int, rank: int) -> Any:
    if isinstance(value, Mxfp4):
        _, rows, columns = value.shape
        return value.rows(*_block(rows, tp, rank)) if name in SPLIT_ROWS else value.columns(*_block(columns, tp, rank))
    if isinstance(value, torch.Tensor):
        if name in SPLIT_ROWS:
            begin, end = _block(value.shape[0], tp, rank)
            return value[begin:end].clone()
        if name in SPLIT_COLUMNS:
            begin, end = _block(value.shape[1], tp, rank)
            return value[:, begin:end].clone(memory_format=torch.contiguous_format)
        return value
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return tuple(_shard_node(item, tp, rank) for item in value)
    return _shard_node(value, tp, rank) if is_dataclass(value) and not isinstance(value, ModelConfig) else value


def _shard_node(node: Any, tp: int, rank: int) -> Any:
    return replace(node, **{f.name: _shard_value(f.name, getattr(node, f.name), tp, rank) for f in fields(node)})


def shard_weights(weights: ModelWeights, tp: int, rank: int) -> ModelWeights:
    """Rank `rank` of `tp`. Raises Unsupported naming every size that does not divide, or when `weights` are a shard already."""
    reasons = shard_reasons(weights.config, tp, rank)
    if weights.tp != 1:
        reasons += (f"weights: got rank {weights.rank} of tp={weights.tp}, need whole weights; shard the original",)
    if reasons:
        raise Unsupported("shard", reasons)
    return replace(_shard_node(weights, tp, rank), tp=tp, rank=rank)
