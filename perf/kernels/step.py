"""A whole decode step of one rank at full depth: 93 layers of random weights, about a hundred gigabytes, in CUDA graphs.

Every layer has its own weights, so each step reads them from memory. Messages are looped back to the rank: no link is crossed. Stock is not
timed at this depth: its weights, laid out for its own products, do not fit beside these.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from kimi_k3_decode.config import K3, Shard
from kimi_k3_decode.launches import launch_graph
from perf.kernels.conditions import Card
from perf.kernels.layer import RankLoop, two_steps
from perf.kernels.speed import count_distinct, ratio_of, times_of, traffic_of, untimed
from perf.kernels.timing import capture, copy_rate_bytes_per_s, measured

SHAPES = ((1, 1), (8, 1), (64, 1), (64, 8))  # (rows, tokens a request)
CONTEXT_TOKENS = 1024
STEPS = 2  # in one graph: mailbox parities alternate from step to step
WHAT = (
    "the whole step of one rank (embedding, 93 layers, final norm, LM head, sample), microseconds a step, two steps in one CUDA graph, "
    "every layer its own random weights, messages looped back to the same rank"
)


def steps(records: Any, tp: int = 16, shapes: tuple[tuple[int, int], ...] = SHAPES, replays: int = 24) -> None:
    """One record a shape; programmatic launches on and off."""
    card = Card()
    rate = copy_rate_bytes_per_s()
    torch.cuda.empty_cache()
    weights: dict[str, torch.Tensor] = {}
    for rows, q in shapes:
        case = f"k3-step-tp{tp}-r{rows}-q{q}"
        try:
            record = one_step(case, tp, rows, q, card, rate, weights, replays)
        except torch.OutOfMemoryError as error:
            record = {"case": case, "error": f"out of memory: {str(error)[:200]}"}
        records.add(record)
        print({k: v for k, v in record.items() if not isinstance(v, list | dict | str)}, flush=True)
        torch.cuda.empty_cache()


def one_step(
    case: str, tp: int, rows: int, q: int, card: Card, rate: float, weights: dict[str, torch.Tensor], replays: int = 24
) -> dict[str, Any]:
    """The record of one shape. `weights` are made where they are missing, and kept in it for the next shape."""
    begin = time.perf_counter()
    lengths = [CONTEXT_TOKENS] * (rows // q)
    loop = RankLoop(K3, two_steps(K3, tp, rows, q), lengths=lengths, shared_weights=weights).connect()
    torch.cuda.synchronize()
    prepared_s = time.perf_counter() - begin
    chosen = loop.chosen_experts()
    graphs = {"fused": capture(loop.issue, warmups=1)}
    loop.pdl = False
    graphs["without_pdl"] = capture(loop.connect().issue, warmups=1)
    found = measured(graphs, STEPS, card, replays)
    shard = Shard(config=K3, tp=tp)
    plan = launch_graph(K3, shard, rows, q)
    distinct = count_distinct(chosen)
    moved = sum(t.hbm_bytes for t in traffic_of(plan, shard, rows, q, distinct, CONTEXT_TOKENS))
    fused = found.times["fused"]
    record: dict[str, Any] = {
        "case": case,
        "what": WHAT,
        "ops": sorted({launch.op for launch in plan}),
        "layers_count": K3.n_layers,
        "launches_count": len(plan),
        "context_tokens": CONTEXT_TOKENS,
        "replays_count": replays,
        **times_of("fused", fused),
        **times_of("without_pdl", found.times["without_pdl"]),
        **ratio_of("without_pdl_over_fused", found.times["without_pdl"], fused),
        "weights_bytes": sum(t.numel() * t.element_size() for t in weights.values()),
        "moved_bytes": moved,
        "floor_us": round(1e6 * moved / rate, 1),
        "over_floor": round(fused.median_us / (1e6 * moved / rate), 4),
        "copy_rate_bytes": rate,
        "experts_read_count": sum(distinct.values()) / len(distinct),
        "waits_that_ran_out_count": int(loop.health[0]),
        "finite_logits_count": int(torch.isfinite(loop.buffers["logits"].float()).sum()),
        "stock": "not timed at this depth: its weights do not fit beside these",
        "conditions": found.conditions,
        "throttled_attempts_discarded_count": found.discarded_count,
        "prepared_s": round(prepared_s, 1),
    }
    if found.throttled:
        return untimed(record, found)
    if record["waits_that_ran_out_count"]:
        record["error"] = "a wait ran out; no time is shown"
    return record
