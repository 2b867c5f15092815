"""Operands of the fused attention input projection: KDA q, k, v, gate, F_A, beta; or MLA q_a, kv_a, gate."""

from __future__ import annotations

from kimi_k3_decode.config import Shard
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.operands import given, output, projection_rows, split_k_workspace, weight


def contract(shard: Shard, *, rows: int, attention: str, workspace_splits: int = 1) -> Contract:
    """x_TD [T, D] times weight_PD [P, D] transposed, into proj_TP [T, P] (BF16).

    Row order of P on one rank: KDA q | k | v | gate (kda_dim each) | F_A (head dim, replicated) | beta (heads) | zero padding to 16;
    MLA q_a (q_lora_rank) | kv_a (latent, key channels) | gate (heads x v_head_dim).
    workspace_splits > 1: split-K partials go through global memory instead of a cluster.
    """
    columns, hidden = projection_rows(shard, attention), shard.config.hidden_size
    return Contract(
        op="in_proj",
        operands=(
            given("x_TD", T=rows, D=hidden),
            weight("weight_PD", P=columns, D=hidden),
            *split_k_workspace(workspace_splits, rows, columns),
            output("proj_TP", T=rows, P=columns),
        ),
        parameters={"model": shard.config.name, "tp": shard.tp, "rows": rows, "attention": attention, "workspace_splits": workspace_splits},
    )
