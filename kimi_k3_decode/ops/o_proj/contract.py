"""Operands of the row-parallel output projection, which publishes its partial sum in every rank's mailbox."""

from __future__ import annotations

from kimi_k3_decode.config import Shard
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.operands import FP32, attention_columns, given, publishes, split_k_workspace, weight


def contract(shard: Shard, *, rows: int, attention: str, workspace_splits: int = 1) -> Contract:
    """a_TC [T, C] times this rank's columns weight_DC [D, C]; the FP32 partial goes to slot `rank` of delta_RTD on every rank.

    The sum over ranks is rounded to BF16 once, by the consumer (`attn_res`).
    """
    columns, hidden = attention_columns(shard, attention), shard.config.hidden_size
    return Contract(
        op="o_proj",
        operands=(
            given("a_TC", T=rows, C=columns),
            weight("weight_DC", D=hidden, C=columns),
            *split_k_workspace(workspace_splits, rows, hidden),
            publishes("delta_RTD", FP32, writer="o_proj", reader="attn_res", layout="slot", R=shard.tp, T=rows, D=hidden),
        ),
        parameters={"model": shard.config.name, "tp": shard.tp, "rows": rows, "attention": attention, "workspace_splits": workspace_splits},
    )
