"""Operands of the MoE front: this rank's router rows and latent-down rows, published to every rank."""

from __future__ import annotations

from kimi_k3_decode.config import Shard
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.operands import BF16, FP32, given, publishes, split_k_workspace, weight


def contract(shard: Shard, *, rows: int, workspace_splits: int = 1) -> Contract:
    """Router logits stay FP32; the latent is complete per column, so it is rounded to BF16 before it is published."""
    c = shard.config
    return Contract(
        op="moe_front",
        operands=(
            given("x_TD", T=rows, D=c.hidden_size),
            weight("router_ED", E=shard.router_rows, D=c.hidden_size),
            weight("latent_down_LD", L=shard.latent_rows, D=c.hidden_size),
            *split_k_workspace(workspace_splits, rows, shard.router_rows + shard.latent_rows),
            publishes("logits_TE", FP32, writer="moe_front", reader="route", layout="columns", T=rows, E=c.n_experts),
            publishes("latent_box_TL", BF16, writer="moe_front", reader="route", layout="columns", T=rows, L=c.moe_latent_size),
        ),
        parameters={"model": c.name, "tp": shard.tp, "rows": rows, "workspace_splits": workspace_splits},
    )
