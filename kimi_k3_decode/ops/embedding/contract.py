"""Operands of the embedding gather, which starts the residual prefix."""

from __future__ import annotations

from kimi_k3_decode.config import Shard
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.operands import output, table, weight


def contract(shard: Shard, *, rows: int) -> Contract:
    """Every rank holds the whole table: a step reads `rows` rows of it, so sharding would save memory only and cost an exchange."""
    c = shard.config
    return Contract(
        op="embedding",
        operands=(
            table("tokens_T", T=rows),
            weight("embed_VD", V=c.vocab_size, D=c.hidden_size),
            output("prefix_TD", T=rows, D=c.hidden_size),
        ),
        parameters={"model": c.name, "tp": shard.tp, "rows": rows},
    )
