"""Runs a few launches of one layer through their oracles on given buffers; one rank, FP64 unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from kimi_k3_decode.cache import Caches, KdaLayerCache, StepBatch
from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.launches import layer_plan
from kimi_k3_decode.operand_weights import Tensors, bind_weights, widen
from kimi_k3_decode.ops.arithmetic import EXACT, Arithmetic
from kimi_k3_decode.ops.contract import Access, Role
from kimi_k3_decode.ops.registry import ORACLES
from kimi_k3_decode.weights import ModelWeights

# NANO, and one test-only tag for the buffers of a step.
ATTENTION = ("in_proj", "kda", "mla_query", "mla_decode", "mla_merge", "mla_value", "o_proj")


def step_buffers(config: ModelConfig, caches: Caches, batch: StepBatch) -> Tensors:
    """Tables and states of a batch under the plan's buffer names."""
    found = {
        "table.tokens": batch.tokens_BQ.flatten().int(),
        "table.lengths": batch.lengths_B,
        "table.block_table": batch.block_table_BN,
        "table.slots": batch.slots_BQ,
        "table.accepted": batch.accepted_B,
        "table.live_rows": torch.tensor([batch.rows]),
    }
    for layer, cache in enumerate(caches.layers):
        if isinstance(cache, KdaLayerCache):
            found[f"state.L{layer:02d}.conv"] = cache.conv_SWC.unflatten(2, (3, config.kda_dim))
            found[f"state.L{layer:02d}.recurrent"] = cache.state_SHVK
        else:
            found[f"state.L{layer:02d}.pages"] = cache.pages_PTC
    return found


def run_ops(
    weights: ModelWeights,
    layer: int,
    ops: Iterable[str],
    buffers: Mapping[str, torch.Tensor],
    *,
    rows: int,
    q: int = 1,
    arithmetic: Arithmetic = EXACT,
    forced: bool = False,
) -> Tensors:
    """Executes the launches of `layer` whose op is in `ops`, in plan order; returns all buffers. Mailboxes carry one rank's part."""
    bound = widen(bind_weights(weights), arithmetic.dtype)
    found = dict(buffers)
    wanted = set(ops)
    for launch in layer_plan(weights.config, None, layer, rows, q, forced=frozenset({layer}) if forced else frozenset()):
        if launch.op not in wanted or (launch.op == "attn_res" and launch.id not in wanted and "attn_res" not in wanted):
            continue
        operands: Tensors = {}
        for operand in launch.contract.operands:
            names = launch.bindings[operand.name]
            if operand.role is Role.WEIGHT:
                operands[operand.name] = bound[names[0]]
            elif operand.role is Role.MAILBOX and operand.access is Access.READ_WRITE:
                part = found[names[0]]
                operands[operand.name] = part.unsqueeze(0) if operand.mailbox is not None and operand.mailbox.layout == "slot" else part
            elif operand.role not in (Role.OUTPUT, Role.SCRATCH) and operand.access is not Access.WRITE:
                operands[operand.name] = torch.stack([found[n] for n in names]) if operand.name == "blocks_NTD" else found[names[0]]
            elif operand.role is Role.STATE:
                operands[operand.name] = found[names[0]]
        out = ORACLES[launch.op](weights.config, launch.contract, operands, arithmetic)
        for operand in launch.contract.operands:
            if operand.role is Role.OUTPUT or (operand.role is Role.MAILBOX and operand.access is Access.WRITE):
                found[launch.bindings[operand.name][0]] = out[operand.name]
    return found
