"""Operands of the end of the MoE: the latent's reduction and norm, then up-projection rows plus the shared experts, published."""

from __future__ import annotations

from kimi_k3_decode.config import Shard
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.operands import FP32, consumes, given, output, publishes, split_k_workspace, weight


def latent_reduce(shard: Shard, *, rows: int) -> Contract:
    """Sum over ranks in rank order, rounded to BF16, then RMSNorm over the latent. Every rank does all rows."""
    c = shard.config
    return Contract(
        op="latent_reduce",
        operands=(
            consumes(
                "latent_RTL", FP32, writer="experts_down", reader="latent_reduce", layout="slot", R=shard.tp, T=rows, L=c.moe_latent_size
            ),
            weight("norm_L", L=c.moe_latent_size),
            output("latent_normed_TL", T=rows, L=c.moe_latent_size),
        ),
        parameters={"model": c.name, "tp": shard.tp, "rows": rows},
    )


def contract(shard: Shard, *, rows: int, workspace_splits: int = 1) -> Contract:
    """This rank's up-projection rows (complete sums) added to its shared partial (all columns) in FP32; slot `rank` on every rank.

    The weight operand is the row shard [hidden / tp, latent] of the up-projection, which the rank holds whole.
    """
    c = shard.config
    return Contract(
        op="moe_tail",
        operands=(
            given("latent_normed_TL", T=rows, L=c.moe_latent_size),
            given("shared_TD", FP32, T=rows, D=c.hidden_size),
            weight("latent_up_DL", D=shard.up_rows, L=c.moe_latent_size),
            *split_k_workspace(workspace_splits, rows, shard.up_rows),
            publishes("delta_RTD", FP32, writer="moe_tail", reader="attn_res", layout="slot", R=shard.tp, T=rows, D=c.hidden_size),
        ),
        parameters={"model": c.name, "tp": shard.tp, "rank": shard.rank, "rows": rows, "workspace_splits": workspace_splits},
    )
