"""Operands of routing: sigmoid + bias top-k with exact ties by lowest id, weights, and lists of rows by expert."""

from __future__ import annotations

from kimi_k3_decode.config import Shard
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.operands import BF16, FP32, INT32, consumes, output, table, weight


def contract(shard: Shard, *, rows: int, forced: bool = False) -> Contract:
    """Every rank routes all rows. Outputs per row, in falling order of biased score: ids and BF16 weights (scaling included).

    Lists: pairs_N holds pair numbers t * top_k + z grouped by expert, rows rising; group e is offsets_E[e]..offsets_E[e + 1].
    Rows >= live_rows_N[0] are padding: ids -1, weights 0, in no list. forced: ids come from a table; weights still from the scores.
    """
    c, top_k = shard.config, shard.config.n_experts_per_token
    return Contract(
        op="route",
        operands=(
            consumes("logits_TE", FP32, writer="moe_front", reader="route", layout="columns", T=rows, E=c.n_experts),
            consumes("latent_box_TL", BF16, writer="moe_front", reader="route", layout="columns", T=rows, L=c.moe_latent_size),
            weight("bias_E", FP32, E=c.n_experts),
            table("live_rows_N", N=1),
            *((table("forced_TZ", T=rows, Z=top_k),) if forced else ()),
            output("ids_TZ", INT32, T=rows, Z=top_k),
            output("weights_TZ", T=rows, Z=top_k),
            output("offsets_E", INT32, E=c.n_experts + 1),
            output("pairs_N", INT32, N=rows * top_k),
            output("latent_TL", T=rows, L=c.moe_latent_size, note="the mailbox copied out, so that only this launch polls and re-arms"),
        ),
        parameters={"model": c.name, "tp": shard.tp, "rows": rows, "forced": forced},
    )
