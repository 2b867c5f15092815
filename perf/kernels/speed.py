"""One rank's KDA + MoE layer beside the stock layer: times with conditions, what each measure is worth, and how far the floor is.

Both sides read the same weights, choose the same experts and are timed in turns. Stock is timed twice, as two subjects: stock against stock
has to be no difference, else nothing of that record may be believed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kimi_k3_decode.config import K3, Shard
from kimi_k3_decode.launches import Launch, layer_plan
from kimi_k3_decode.ops.contract import Role
from perf.decision import decide
from perf.kernels.check import Run
from perf.kernels.conditions import Card
from perf.kernels.layer import LayerLoop
from perf.kernels.operands import Maker
from perf.kernels.stock_layer import LAUNCHES, StockLayer, adopt_routing, state_for
from perf.kernels.timing import Measured, Timed, capture, copy_rate_bytes_per_s, measured
from perf.roofline import EXPERT_OPS, Traffic, traffic
from perf.stats import paired_ratio
from validation.schedule.gpu_runs import bits

LAYERS = (4, 5)
MLA_LAYER = 3
CONTEXT_TOKENS = 1024  # cached tokens of each request where a launch reads them
SHAPES = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (64, 1), (8, 8), (16, 8), (32, 8), (64, 8))  # (rows, tokens a request)
PROFILED = (1, 8, 64)
LAYER_REPLAYS, LAUNCH_REPLAYS = 160, 96  # many, so that a slow-down little beyond the policy's margin is decided
COLD_BYTES = 320 << 20  # rotate until this much weight has passed between two uses of the same bytes
WHAT = (
    "one rank's KDA + MoE layer (mean of layers 4 and 5), microseconds a layer, one CUDA graph, replays interleaved ABBA, weights of both "
    "layers larger than L2, messages looped back to the same rank; both sides read the same weights and choose the same experts"
)
STOCK_EXCLUDES = "every exchange between ranks (its all-reduces); its numbers are not compared with the oracle"
# One measure switched off at a time: what the fused layer is built with then.
ABLATIONS: dict[str, dict[str, bool]] = {"without_pdl": {"pdl": False}, "without_side_stream": {"side": False}}


def times_of(name: str, t: Timed) -> dict[str, Any]:
    """Median and quartiles for the record's numbers; every sample beside them."""
    return {
        f"{name}_us": round(t.median_us, 3), f"{name}_low_us": round(t.low_us, 3), f"{name}_high_us": round(t.high_us, 3),
        f"{name}_samples": [round(x, 3) for x in t.samples_us],
    }  # fmt: skip


def ratio_of(name: str, slower: Timed, faster: Timed) -> dict[str, float]:
    """Median of slower / faster over pairs, with its 95 % bootstrap interval."""
    found = paired_ratio(slower.samples_us, faster.samples_us)
    return {name: round(found.value, 4), f"{name}_low": round(found.low, 4), f"{name}_high": round(found.high, 4)}


def stock_times(times: dict[str, Timed]) -> dict[str, Any]:
    """The stock sides of a record, and whether stock differs from itself."""
    one, two = times["stock"], times["stock_again"]
    return {
        **times_of("stock", one),
        "stock_again_us": round(two.median_us, 3),
        **ratio_of("self_check", one, two),
        "self_check_decision": decide(one.samples_us, two.samples_us),
        **ratio_of("speedup", one, times["fused"]),
    }


def traffic_of(plan: list[Launch], shard: Shard, rows: int, q: int, distinct: dict[int, int], context_tokens: int = 0) -> list[Traffic]:
    """Bytes each launch must move with the experts that were really chosen."""
    return [
        traffic(launch.contract, shard, rows=rows, q=q, context_tokens=context_tokens, distinct=distinct.get(launch.layer or -1))
        for launch in plan
    ]


def count_distinct(chosen: dict[int, torch.Tensor]) -> dict[int, int]:
    return {layer: int(ids.unique().numel()) for layer, ids in chosen.items()}


def untimed(record: dict[str, Any], found: Measured) -> dict[str, Any]:
    """The record without its times: the card slowed itself down in every attempt."""
    kept = ("case", "op", "what", "kernel", "conditions", "throttled_attempts_discarded_count")
    why = f"the card throttled in every attempt: {', '.join(found.throttled)}; no time is shown"
    return {**{name: record[name] for name in kept if name in record}, "error": why}


def differing_buffers(one: LayerLoop, other: LayerLoop) -> list[str]:
    """Buffers whose bits differ after as many passes of both: activations, mailboxes, caches and states."""
    return [name for name in one.buffers if not torch.equal(bits(one.buffers[name]), bits(other.buffers[name]))]


class LayerBench:
    """All loops of one rank count: they share weights, which are too large to make twice."""

    def __init__(self, tp: int, card: Card, rate: float) -> None:
        self.tp, self.card, self.rate = tp, card, rate
        self.weights: dict[str, torch.Tensor] = {}
        self.stock: list[StockLayer] = []  # of the last shape

    def one(self, rows: int, q: int, replays: int = LAYER_REPLAYS) -> tuple[dict[str, Any], LayerLoop]:
        """The record of one shape, and the fused loop it timed."""
        loops = {"fused": LayerLoop(K3, self.tp, LAYERS, rows, q, shared_weights=self.weights)}
        for name, off in ABLATIONS.items():
            loops[name] = LayerLoop(K3, self.tp, LAYERS, rows, q, shared_weights=self.weights, **off)
        measures = [name for name in loops if name != "fused"]
        chosen = {name: loop.chosen_experts() for name, loop in loops.items()}["fused"]
        differing = [f"{name} {buffer}" for name in measures for buffer in differing_buffers(loops["fused"], loops[name])]
        stock = [StockLayer(K3, self.tp, layer, rows, self.weights, state_for(K3, self.tp, rows, q), q=q) for layer in LAYERS]
        for layer in stock:
            adopt_routing(layer, chosen[layer.layer])
        self.stock = stock
        graphs = {name: capture(loop.issue) for name, loop in loops.items()}
        issue = partial(_issue, stock)
        graphs |= {"stock": capture(issue), "stock_again": capture(issue)}
        found = measured(graphs, len(LAYERS), self.card, replays)
        distinct = count_distinct(chosen)
        moved = traffic_of(loops["fused"].plan, Shard(config=K3, tp=self.tp), rows, q, distinct)
        floor_us = 1e6 * sum(t.hbm_bytes for t in moved) / len(LAYERS) / self.rate
        record: dict[str, Any] = {
            "case": f"k3-tp{self.tp}-r{rows}-q{q}",
            "what": WHAT,
            "ops": sorted({launch.op for launch in loops["fused"].plan}),
            "replays_count": replays,
            **times_of("fused", found.times["fused"]),
            **stock_times(dict(found.times)),
            "floor_us": round(floor_us, 3),
            "over_floor": round(found.times["fused"].median_us / floor_us, 4),
            "copy_rate_bytes": self.rate,
            "moved_bytes": sum(t.hbm_bytes for t in moved) / len(LAYERS),
            "experts_read_count": sum(distinct.values()) / len(distinct),
            "stock_experts_read_count": sum(layer.experts_read() for layer in stock) / len(stock),
            "buffers_differing": differing,
            "buffers_differing_count": len(differing),
            "waits_that_ran_out_count": sum(int(loop.health[0]) for loop in loops.values()),
            "stock_launches": list(LAUNCHES),
            "stock_excludes": STOCK_EXCLUDES,
            "conditions": found.conditions,
            "throttled_attempts_discarded_count": found.discarded_count,
        }
        for name in measures:
            record |= times_of(name, found.times[name]) | ratio_of(f"{name}_over_fused", found.times[name], found.times["fused"])
        return (untimed(record, found) if found.throttled else record), loops["fused"]


def _issue(stock: list[StockLayer]) -> None:
    for layer in stock:
        layer.issue()


def layers(records: Any, profiles: Any, tps: tuple[int, ...] = (8, 16), shapes: tuple[tuple[int, int], ...] = SHAPES) -> None:
    """The layer records of `tps` x `shapes`, and single passes under the profiler for some."""
    card = Card()
    rate = copy_rate_bytes_per_s()
    torch.cuda.empty_cache()
    for tp in tps:
        bench = LayerBench(tp, card, rate)
        for rows, q in shapes:
            try:
                record, fused = bench.one(rows, q)
            except torch.OutOfMemoryError as error:
                records.add({"case": f"k3-tp{tp}-r{rows}-q{q}", "error": f"out of memory: {str(error)[:200]}"})
                continue
            records.add(record)
            if "error" in record:
                print(record["case"], record["error"], flush=True)
                continue
            print(record["case"], {k: v for k, v in record.items() if k.endswith("_us")}, record["speedup"], record["over_floor"],
                  record["self_check_decision"], flush=True)  # fmt: skip
            if rows in PROFILED and q == 1:
                profiles.add(profiled(fused, tp, rows, "pdl"))
                alone = LayerLoop(K3, tp, LAYERS, rows, q, pdl=False, side=False, shared_weights=bench.weights)
                profiles.add(profiled(alone, tp, rows, "alone"))
                profiles.add(profiled_stock(bench.stock, tp, rows))
            torch.cuda.empty_cache()


def profiled(loop: LayerLoop, tp: int, rows: int, way: str, passes: int = 3) -> dict[str, Any]:
    """Kernel times of eager passes from the profiler, by kernel; and how many kernels ran beside how many the plan has."""
    events = _events_of(loop.issue, passes)
    ours = [event for event in events if "kimi_k3_decode" in event[0]]
    table: dict[str, list[float]] = {}
    for name, us in ours:
        table.setdefault(name[-90:], []).append(us)
    return {
        "case": f"k3-tp{tp}-r{rows}-{way}",
        "what": "profiler, eager passes over two layers: microseconds of each kernel (with programmatic launches a time includes its wait)",
        "planned_count": len(loop.bound) * passes,
        "executed_count": len(ours),
        "other_kernels_count": len(events) - len(ours),
        "kernels": table,
    }


def profiled_stock(stock: list[StockLayer], tp: int, rows: int, passes: int = 3) -> dict[str, Any]:
    """Kernel times of eager passes of the stock layers, in order of launching; a library product may be two kernels. An error is told."""
    record: dict[str, Any] = {
        "case": f"k3-tp{tp}-r{rows}-stock",
        "what": "profiler, eager passes over two stock layers: microseconds of each kernel in order, one sample a layer and pass",
    }
    try:
        kernels = [event for event in _events_of(partial(_issue, stock), passes) if not event[0].startswith("Mem")]
    except Exception as error:  # the layer's own records stand without this picture
        return record | {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return record | in_order(kernels, passes * len(stock))


def _events_of(work: Callable[[], None], passes: int) -> list[tuple[str, float]]:
    """(name, microseconds) of all that the GPU did in `passes` eager passes, in order."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(passes):
            work()
            torch.cuda.synchronize()
    events = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(e.name, float(e.device_time)) for e in sorted(events, key=lambda e: e.time_range.start)]


def in_order(kernels: Sequence[tuple[str, float]], times: int) -> dict[str, Any]:
    """`launches_in_order`: (name, samples) of each place of a sequence that ran `times` times; an error where it did not repeat."""
    each, rest = divmod(len(kernels), times)
    places = [kernels[place::each] for place in range(each)] if each and not rest else []
    if not places or any(len({name for name, _ in place}) > 1 for place in places):
        return {"error": f"got {len(kernels)} kernels in {times} passes of one layer, needs the same in each"}
    names = LAUNCHES if each == len(LAUNCHES) else [place[0][0][:60] for place in places]
    return {"launches_in_order": [[name, [us for _, us in place]] for name, place in zip(names, places, strict=True)]}


def placement(records: Any, tps: tuple[int, ...], process: int) -> None:
    """One row of `tps` in this process alone: the same code in another process gives other times for both sides, which no interval within
    one process shows."""
    kept = ("what", "ops", "floor_us", "over_floor", "conditions", "throttled_attempts_discarded_count", "error")
    for tp in tps:
        record, _ = LayerBench(tp, Card(), copy_rate_bytes_per_s()).one(1, 1)
        numbers = {
            name: value
            for name, value in record.items()
            if name.startswith(("fused", "stock_us", "stock_samples", "speedup", "self_check"))
        }
        record = {"case": f"{record['case']}-process{process}", **numbers, **{name: record[name] for name in kept if name in record}}
        records.add(record)
        print({name: value for name, value in record.items() if not isinstance(value, list | dict)}, flush=True)
        torch.cuda.empty_cache()


# ---- each launch alone ----
def launches(records: Any, rows_list: tuple[int, ...] = (1, 8, 64), tps: tuple[int, ...] = (8, 16)) -> None:
    """Every launch of a KDA + MoE layer alone, back to back over rotated weights: achieved bytes a second beside the copy rate."""
    card = Card()
    rate = copy_rate_bytes_per_s()
    for tp in tps:
        shard = Shard(config=K3, tp=tp)
        for rows in rows_list:
            attention = [launch for launch in layer_plan(K3, shard, MLA_LAYER, rows) if launch.op.startswith("mla_")]
            for launch in (*layer_plan(K3, shard, LAYERS[-1], rows), *attention):
                record = _one_launch(launch, shard, rows, card, rate)
                records.add(record)
                print(record["case"], record.get("launch_us"), record.get("floor_us"), record.get("fraction_of_copy_rate"), flush=True)
                torch.cuda.empty_cache()


def _one_launch(launch: Launch, shard: Shard, rows: int, card: Card, rate: float) -> dict[str, Any]:
    routed = launch.op in EXPERT_OPS
    lengths = [CONTEXT_TOKENS] * rows
    needed = traffic(launch.contract, shard, rows=rows, context_tokens=CONTEXT_TOKENS).hbm_bytes
    copies = max(2, min(64, int(-(-COLD_BYTES // max(1.0, needed)))))
    made = [Maker(K3, launch.contract, 5 + i, lengths=lengths).all() for i in range(1 if routed else copies)]
    if routed:  # the same weights throughout, but other experts of them each time
        names = {o.name for o in launch.contract.of_role(Role.WEIGHT)}
        for i in range(1, copies):
            maker = Maker(K3, launch.contract, 5 + i)
            own = {o.name: maker.operand(o) for o in launch.contract.operands if o.role is not Role.SCRATCH and o.name not in names}
            made.append({**{name: made[0][name] for name in names}, **own})
    runs = [Run(K3, launch.contract, tensors, pdl=True) for tensors in made]
    found = measured({"kernel": capture(partial(_launch, runs))}, copies, card, replays=LAUNCH_REPLAYS)
    distinct = sum(int((r.tensors["offsets_E"].diff() > 0).sum()) for r in runs) / copies if routed else None
    moved = traffic(launch.contract, shard, rows=rows, distinct=distinct, context_tokens=CONTEXT_TOKENS).hbm_bytes
    median_us = found.times["kernel"].median_us
    record: dict[str, Any] = {
        "op": launch.op,
        "case": f"k3-tp{shard.tp}-r{rows}-{launch.id.split('.')[-1]}",
        "what": "one launch back to back over rotated copies of its operands (programmatic launches), microseconds a launch",
        "kernel": runs[0].spec.id,
        "replays_count": LAUNCH_REPLAYS,
        **times_of("launch", found.times["kernel"]),
        "moved_bytes": moved,
        "floor_us": round(1e6 * moved / rate, 3),
        "achieved_per_s_bytes": moved / (median_us * 1e-6),
        "copy_rate_bytes": rate,
        "fraction_of_copy_rate": round(moved / (median_us * 1e-6) / rate, 4),
        "conditions": found.conditions,
        "throttled_attempts_discarded_count": found.discarded_count,
    }
    if found.throttled:
        return untimed(record, found)
    return record


def _launch(runs: list[Run]) -> None:
    for run in runs:
        run.launch()
