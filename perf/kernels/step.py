"""A whole decode step of one rank at full depth: 93 layers of random weights, about a hundred gigabytes, in CUDA graphs.

Every layer has its own weights, so each step reads them from memory. Messages are looped back to the rank: no link is crossed. Stock's
weights, laid out for its own products, do not fit beside these, so its steps are timed behind all others, not in turns with them.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from kimi_k3_decode.config import K3, Shard
from kimi_k3_decode.launches import launch_graph
from perf.kernels.conditions import Card
from perf.kernels.layer import RankLoop, two_steps
from perf.kernels.speed import STOCK_EXCLUDES, count_distinct, ratio_of, times_of, traffic_of, untimed
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
    chosen: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
    for rows, q in shapes:
        ids: dict[int, torch.Tensor] = {}
        case = f"k3-step-tp{tp}-r{rows}-q{q}"
        try:
            record = one_step(case, tp, rows, q, card, rate, weights, replays, ids)
        except torch.OutOfMemoryError as error:
            record = {"case": case, "error": f"out of memory: {str(error)[:200]}"}
        records.add(record)
        chosen[rows, q] = ids
        print({k: v for k, v in record.items() if not isinstance(v, list | dict | str)}, flush=True)
        torch.cuda.empty_cache()
    stock_steps(records, tp, card, weights, chosen, replays)


def stock_steps(
    records: Any,
    tp: int,
    card: Card,
    weights: dict[str, torch.Tensor],
    chosen: dict[tuple[int, int], dict[int, torch.Tensor]],
    replays: int,
) -> None:
    """Stock's steps over the same weights, which it takes over, choosing the same experts; timed as two subjects, against itself."""
    from perf.kernels.stock_step import StockStep, take_over

    stacked: dict[str, torch.Tensor] = {}
    take_over(K3, weights, stacked)
    for (rows, q), ids in chosen.items():
        if q > 1 or not ids:
            continue
        case = f"k3-stock-step-tp{tp}-r{rows}-q{q}"
        try:
            step = StockStep(K3, tp, rows, weights, stacked, ids, CONTEXT_TOKENS)
            graph = capture(step.issue, warmups=2)
            found = measured({"stock": graph, "stock_again": graph}, 1, card, replays)
            record: dict[str, Any] = {
                "case": case,
                "what": "the stock step of one rank, microseconds a step, timed behind the kernels' steps in the same process",
                "context_tokens": CONTEXT_TOKENS,
                "replays_count": replays,
                **times_of("stock", found.times["stock"]),
                **ratio_of("self_check", found.times["stock"], found.times["stock_again"]),
                "experts_read_count": sum(layer.experts_read() for layer in step.layers if K3.is_moe(layer.layer)) / len(ids),
                "stock_excludes": STOCK_EXCLUDES,
                "conditions": found.conditions,
                "throttled_attempts_discarded_count": found.discarded_count,
            }
            record = untimed(record, found) if found.throttled else record
            del step, graph
        except Exception as error:
            record = {"case": case, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        records.add(record)
        print({k: v for k, v in record.items() if not isinstance(v, list | dict)}, flush=True)
        torch.cuda.empty_cache()


def one_step(
    case: str,
    tp: int,
    rows: int,
    q: int,
    card: Card,
    rate: float,
    weights: dict[str, torch.Tensor],
    replays: int = 24,
    ids: dict[int, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """The record of one shape. `weights` are made where they are missing, and kept in it for the next shape; `ids` takes the experts that
    each layer chose."""
    begin = time.perf_counter()
    lengths = [CONTEXT_TOKENS] * (rows // q)
    loop = RankLoop(K3, two_steps(K3, tp, rows, q), lengths=lengths, shared_weights=weights).connect()
    torch.cuda.synchronize()
    prepared_s = time.perf_counter() - begin
    chosen = loop.chosen_experts()
    if ids is not None:
        ids.update(chosen)
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
        "conditions": found.conditions,
        "throttled_attempts_discarded_count": found.discarded_count,
        "prepared_s": round(prepared_s, 1),
    }
    if found.throttled:
        return untimed(record, found)
    if record["waits_that_ran_out_count"]:
        record["error"] = "a wait ran out; no time is shown"
    return record
