"""Operands of the shared experts (one MLP of all of them together), which run on a side stream beside routing."""

from __future__ import annotations

from kimi_k3_decode.config import Shard
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.operands import FP32, given, output, split_k_workspace, weight


def up(shard: Shard, *, rows: int, workspace_splits: int = 1) -> Contract:
    """SiTU(gate, up) of the full hidden: gate_up_ID holds this rank's gate rows, then its up rows."""
    c, inner = shard.config, shard.shared_intermediate
    return Contract(
        op="shared_up",
        operands=(
            given("x_TD", T=rows, D=c.hidden_size),
            weight("gate_up_ID", I=2 * inner, D=c.hidden_size),
            *split_k_workspace(workspace_splits, rows, 2 * inner),
            output("hidden_TI", T=rows, I=inner),
        ),
        parameters={"model": c.name, "tp": shard.tp, "rows": rows, "workspace_splits": workspace_splits},
    )


def down(shard: Shard, *, rows: int, workspace_splits: int = 1) -> Contract:
    """This rank's FP32 partial over its columns; `moe_tail` adds and publishes it."""
    c, inner = shard.config, shard.shared_intermediate
    return Contract(
        op="shared_down",
        operands=(
            given("hidden_TI", T=rows, I=inner),
            weight("down_DI", D=c.hidden_size, I=inner),
            *split_k_workspace(workspace_splits, rows, c.hidden_size),
            output("shared_TD", FP32, T=rows, D=c.hidden_size),
        ),
        parameters={"model": c.name, "tp": shard.tp, "rows": rows, "workspace_splits": workspace_splits},
    )
