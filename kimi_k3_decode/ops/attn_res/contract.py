"""Operands of an Attention Residuals boundary: add the sublayer's delta, save a block where due, mix the sources, normalise."""

from __future__ import annotations

from kimi_k3_decode.config import Shard
from kimi_k3_decode.ops.contract import Contract, ContractError
from kimi_k3_decode.ops.operands import FP32, consumes, given, output, weight

DELTAS = ("none", "mailbox")


def contract(
    shard: Shard,
    *,
    rows: int,
    n_blocks: int,
    delta: str = "mailbox",
    restart: bool = False,
    writes_block: bool = False,
    final: bool = False,
    writer: str = "",
) -> Contract:
    """Contract of one boundary on one rank.

    n_blocks: saved blocks that are sources here, not counting one written by this launch.
    delta: "none" at the first boundary (the prefix is the embedding), else "mailbox" (partial sums of every rank).
    restart: the prefix *is* the delta (pre-MLP boundary of a block-write layer); there is no prefix to read.
    writes_block: the updated prefix is saved as a block and dropped as prefix. final: the mixture is rounded to BF16 before its norm.
    writer: op that publishes the delta ("o_proj", "moe_tail" or "dense_down").
    """
    reasons = []
    if delta not in DELTAS:
        reasons.append(f"delta: got {delta!r}, needs one of {DELTAS}")
    if restart and (delta == "none" or writes_block):
        reasons.append("restart: got True, needs a mailbox delta and no block write; the prefix restarts at the attention output")
    if delta == "mailbox" and not writer:
        reasons.append("writer: got '', needs the op that publishes the delta")
    if reasons:
        raise ContractError("Contract attn_res", reasons)
    hidden = shard.config.hidden_size
    operands = []
    if not restart:
        operands.append(given("prefix_TD", T=rows, D=hidden))
    if delta == "mailbox":
        operands.append(consumes("delta_RTD", FP32, writer=writer, reader="attn_res", layout="slot", R=shard.tp, T=rows, D=hidden))
    if n_blocks:
        operands.append(given("blocks_NTD", N=n_blocks, T=rows, D=hidden))
    operands += [
        weight("res_score_D", FP32, D=hidden, note="w_norm * w_proj, exact in FP32"),
        weight("norm_D", D=hidden),
    ]
    if writes_block:
        operands.append(output("block_out_TD", T=rows, D=hidden))
    elif delta == "mailbox":
        operands.append(output("prefix_out_TD", T=rows, D=hidden))
    operands.append(output("x_TD", T=rows, D=hidden))
    return Contract(
        op="attn_res",
        operands=tuple(operands),
        parameters={
            "model": shard.config.name,
            "tp": shard.tp,
            "rows": rows,
            "n_blocks": n_blocks,
            "delta": delta,
            "restart": restart,
            "writes_block": writes_block,
            "final": final,
        },
    )
