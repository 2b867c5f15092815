"""A whole decode step of one rank at full depth: 93 layers of random weights, about a hundred gigabytes, in CUDA graphs.

Every layer has its own weights, so each step reads them from memory. Messages are looped back to the rank: no link is crossed. Stock reads
the very same weights and chooses the same experts, and its steps are timed in turns with the kernels'. Where its activations and caches do
not fit beside theirs, it is timed behind them, which the record says; no ratio is formed then.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from kimi_k3_decode.config import K3, Shard
from kimi_k3_decode.launches import launch_graph
from perf.decision import decide
from perf.kernels.conditions import Card
from perf.kernels.layer import RankLoop, two_steps
from perf.kernels.speed import STOCK_EXCLUDES, count_distinct, ratio_of, stock_times, times_of, traffic_of, untimed
from perf.kernels.timing import Measured, capture, copy_rate_bytes_per_s, measured

SHAPES = ((1, 1), (8, 1), (64, 1), (64, 8))  # (rows, tokens a request)
CONTEXT_TOKENS = 1024
STEPS = 2  # in one graph: mailbox parities alternate from step to step
WHAT = (
    "the whole step of one rank (embedding, 93 layers, final norm, LM head, sample), microseconds a step, two steps in one CUDA graph, "
    "every layer its own random weights, messages looped back to the same rank"
)
IN_TURNS = "in turns"
BEHIND = "behind the kernels' steps, not in turns: both do not fit into memory at once"

Tensors = dict[str, torch.Tensor]
Graphs = dict[str, torch.cuda.CUDAGraph]


def steps(records: Any, tp: int = 16, shapes: tuple[tuple[int, int], ...] = SHAPES, replays: int = 24) -> None:
    """One record a shape; programmatic launches on and off, and stock beside it where a request has one token."""
    card = Card()
    rate = copy_rate_bytes_per_s()
    torch.cuda.empty_cache()
    weights: Tensors = {}
    for rows, q in shapes:
        case = f"k3-step-tp{tp}-r{rows}-q{q}"
        try:
            record = one_step(case, tp, rows, q, card, rate, weights, replays)
        except torch.OutOfMemoryError as error:
            record = {"case": case, "error": f"out of memory: {str(error)[:200]}"}
        records.add(record)
        print({k: v for k, v in record.items() if not isinstance(v, list | dict)}, flush=True)
        torch.cuda.empty_cache()


def one_step(case: str, tp: int, rows: int, q: int, card: Card, rate: float, weights: Tensors, replays: int = 24) -> dict[str, Any]:
    """The record of one shape. `weights` are made where they are missing, and kept in it for the next shape.

    Raises torch.OutOfMemoryError where the kernels' own step does not fit.
    """
    begin = time.perf_counter()
    lengths = [CONTEXT_TOKENS] * (rows // q)
    loop = RankLoop(K3, two_steps(K3, tp, rows, q), lengths=lengths, shared_weights=weights).connect()
    torch.cuda.synchronize()
    prepared_s = time.perf_counter() - begin
    chosen = loop.chosen_experts()
    graphs: Graphs = {"fused": capture(loop.issue, warmups=1)}
    loop.pdl = False
    graphs["without_pdl"] = capture(loop.connect().issue, warmups=1)
    stock, told = _stock_beside(tp, rows, weights, chosen) if q == 1 else (None, {"stock_timed": "not at all: one token a request only"})
    found = measured(graphs | (stock.graphs if stock else {}), STEPS, card, replays)
    record = _record(case, tp, rows, q, loop, chosen, found, rate)
    record |= {
        "replays_count": replays,
        "weights_bytes": sum(t.numel() * t.element_size() for t in weights.values()),
        "prepared_s": round(prepared_s, 1),
        **told,
    }
    if stock:
        record |= stock_times(dict(found.times))
    elif told["stock_timed"] == BEHIND:
        del loop, graphs  # weights stay
        torch.cuda.empty_cache()
        record |= _stock_alone(tp, rows, weights, chosen, card, replays)
    record["seconds"] = round(time.perf_counter() - begin, 1)
    if found.throttled:
        return untimed(record, found)
    if record["waits_that_ran_out_count"]:
        record["error"] = "a wait ran out; no time is shown"
    return record


def _record(
    case: str, tp: int, rows: int, q: int, loop: RankLoop, chosen: dict[int, torch.Tensor], found: Measured, rate: float
) -> dict[str, Any]:
    """What the kernels' own times say, beside the floor of the experts that were really read."""
    shard = Shard(config=K3, tp=tp)
    plan = launch_graph(K3, shard, rows, q)
    distinct = count_distinct(chosen)
    moved = sum(t.hbm_bytes for t in traffic_of(plan, shard, rows, q, distinct, CONTEXT_TOKENS))
    fused = found.times["fused"]
    return {
        "case": case,
        "what": WHAT,
        "ops": sorted({launch.op for launch in plan}),
        "layers_count": K3.n_layers,
        "launches_count": len(plan),
        "context_tokens": CONTEXT_TOKENS,
        **times_of("fused", fused),
        **times_of("without_pdl", found.times["without_pdl"]),
        **ratio_of("without_pdl_over_fused", found.times["without_pdl"], fused),
        "moved_bytes": moved,
        "floor_us": round(1e6 * moved / rate, 1),
        "over_floor": round(fused.median_us / (1e6 * moved / rate), 4),
        "copy_rate_bytes": rate,
        "experts_read_count": sum(distinct.values()) / len(distinct),
        "waits_that_ran_out_count": int(loop.health[0]),
        "finite_logits_count": int(torch.isfinite(loop.buffers["logits"].float()).sum()),
        "conditions": found.conditions,
        "throttled_attempts_discarded_count": found.discarded_count,
    }


# ---- stock ----
class _Stock:
    """Stock's steps captured as often as the kernels' graphs hold them; keeps the tensors that every replay reads."""

    def __init__(self, tp: int, rows: int, weights: Tensors, chosen: dict[int, torch.Tensor]) -> None:
        from perf.kernels.stock_step import StockStep

        self.step = StockStep(K3, tp, rows, weights, chosen, CONTEXT_TOKENS)
        graph = capture(self._issue)
        # Two subjects, so that stock is also timed against itself.
        self.graphs: Graphs = {"stock": graph, "stock_again": graph}

    def _issue(self) -> None:
        for _ in range(STEPS):
            self.step.issue()

    def told(self) -> dict[str, Any]:
        return {"stock_experts_read_count": self.step.experts_read(), "stock_excludes": STOCK_EXCLUDES}


def _stock_beside(tp: int, rows: int, weights: Tensors, chosen: dict[int, torch.Tensor]) -> tuple[_Stock | None, dict[str, Any]]:
    """Stock ready to be timed in turns, or None, and what the record says of it: the kernels' own record stands without it."""
    try:
        stock = _Stock(tp, rows, weights, chosen)
    except torch.OutOfMemoryError:
        return None, {"stock_timed": BEHIND}
    except Exception as error:
        return None, {"stock_timed": "not at all", "stock_error": f"{type(error).__name__}: {str(error)[:300]}"}
    return stock, {"stock_timed": IN_TURNS, **stock.told()}


def _stock_alone(tp: int, rows: int, weights: Tensors, chosen: dict[int, torch.Tensor], card: Card, replays: int) -> dict[str, Any]:
    """Stock's times behind the kernels': its own spread and self-check, and no ratio to theirs."""
    try:
        stock = _Stock(tp, rows, weights, chosen)
        found = measured(stock.graphs, STEPS, card, replays)
    except Exception as error:
        return {"stock_error": f"{type(error).__name__}: {str(error)[:300]}"}
    if found.throttled:
        return {"stock_error": f"the card throttled in every attempt: {', '.join(found.throttled)}; no time is shown"}
    one, two = found.times["stock"], found.times["stock_again"]
    return {
        **times_of("stock", one),
        "stock_again_us": round(two.median_us, 3),
        **ratio_of("self_check", one, two),
        "self_check_decision": decide(one.samples_us, two.samples_us),
        "stock_conditions": found.conditions,
        **stock.told(),
    }
