"""Operands of the end of a step: the LM head over this rank's vocabulary, and sampling from the gathered logits."""

from __future__ import annotations

from kimi_k3_decode.config import Shard
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.operands import FP32, INT32, consumes, given, output, publishes, weight


def lm_head(shard: Shard, *, rows: int) -> Contract:
    """Logits of this rank's vocabulary rows in FP32, published as a column block to every rank."""
    c = shard.config
    return Contract(
        op="lm_head",
        operands=(
            given("x_TD", T=rows, D=c.hidden_size),
            weight("lm_head_VD", V=shard.vocab_rows, D=c.hidden_size),
            publishes("logits_box_TV", FP32, writer="lm_head", reader="sample", layout="columns", T=rows, V=c.vocab_size),
        ),
        parameters={"model": c.name, "tp": shard.tp, "rows": rows},
    )


def sample(shard: Shard, *, rows: int, top_k: int) -> Contract:
    """Full logits copied out, and the `top_k` largest per row in falling order, ties to the lower id; the first is the greedy token."""
    c = shard.config
    return Contract(
        op="sample",
        operands=(
            consumes("logits_box_TV", FP32, writer="lm_head", reader="sample", layout="columns", T=rows, V=c.vocab_size),
            output("logits_TV", FP32, T=rows, V=c.vocab_size),
            output("top_ids_TZ", INT32, T=rows, Z=top_k),
            output("top_logits_TZ", FP32, T=rows, Z=top_k),
        ),
        parameters={"model": c.name, "tp": shard.tp, "rows": rows, "top_k": top_k},
    )
