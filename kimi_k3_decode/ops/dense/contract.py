"""Operands of the dense MLP of the first layer: as the shared experts, but its second half publishes by itself."""

from __future__ import annotations

from kimi_k3_decode.config import Shard
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.operands import FP32, given, output, publishes, split_k_workspace, weight


def up(shard: Shard, *, rows: int, workspace_splits: int = 1) -> Contract:
    """SiTU(gate, up): gate_up_ID holds this rank's gate rows, then its up rows."""
    c, inner = shard.config, shard.dense_intermediate
    return Contract(
        op="dense_up",
        operands=(
            given("x_TD", T=rows, D=c.hidden_size),
            weight("gate_up_ID", I=2 * inner, D=c.hidden_size),
            *split_k_workspace(workspace_splits, rows, 2 * inner),
            output("hidden_TI", T=rows, I=inner),
        ),
        parameters={"model": c.name, "tp": shard.tp, "rows": rows, "workspace_splits": workspace_splits},
    )


def down(shard: Shard, *, rows: int, workspace_splits: int = 1) -> Contract:
    """This rank's FP32 partial over its columns, published to every rank."""
    c, inner = shard.config, shard.dense_intermediate
    return Contract(
        op="dense_down",
        operands=(
            given("hidden_TI", T=rows, I=inner),
            weight("down_DI", D=c.hidden_size, I=inner),
            *split_k_workspace(workspace_splits, rows, c.hidden_size),
            publishes("delta_RTD", FP32, writer="dense_down", reader="attn_res", layout="slot", R=shard.tp, T=rows, D=c.hidden_size),
        ),
        parameters={"model": c.name, "tp": shard.tp, "rows": rows, "workspace_splits": workspace_splits},
    )
