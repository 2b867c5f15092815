"""Operands of the KDA recurrence: conv + SiLU, L2 norms, F_B and gates, FP32 state, gated RMSNorm, with the verify slot semantics."""

from __future__ import annotations

from kimi_k3_decode.config import Shard
from kimi_k3_decode.ops.contract import Contract, ContractError
from kimi_k3_decode.ops.operands import BF16, FP32, given, output, state, table, weight


def contract(shard: Shard, *, rows: int, q: int = 1) -> Contract:
    """Rows are requests x q. Slots <= 0 are padding: never written, and their rows output zeros.

    conv_SWC holds raw q | k | v projections of this rank, [slots, q_max + 2, 3 x kda_dim] (a view with those three parts strided is
    passed as conv_SW3C); state_SHVK is FP32. `accepted_B` counts the anchor, so it is 1..q_max.
    """
    if rows % q:
        raise ContractError("Contract kda", [f"rows: got {rows}, needs a multiple of q={q}; pad by whole requests"])
    c, heads, head_dim, width = shard.config, shard.kda_heads, shard.config.kda_head_dim, shard.kda_dim
    requests = rows // q
    return Contract(
        op="kda",
        operands=(
            given("proj_TP", T=rows, P=shard.in_proj_rows),
            weight("conv_weight_CW", FP32, C=3 * width, W=c.conv_width, note="q | k | v channels; the last tap is the current token"),
            weight("f_b_CK", C=width, K=head_dim),
            weight("a_log_H", FP32, H=heads),
            weight("dt_bias_C", FP32, C=width),
            weight("o_norm_V", V=head_dim, note="shared by all heads"),
            table("slots_BQ", B=requests, Q=q),
            table("accepted_B", B=requests),
            state("conv_SW3C", BF16, S=None, W=None, N=3, C=width),
            state("state_SHVK", FP32, S=None, H=heads, V=head_dim, K=head_dim),
            output("out_TC", T=rows, C=width),
        ),
        parameters={"model": c.name, "tp": shard.tp, "rows": rows, "q": q},
    )
