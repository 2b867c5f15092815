"""Speed records: each launch alone with cold weights beside the library's product, tilings, and one rank's layers."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from kimi_k3_decode.config import K3, Shard
from kimi_k3_decode.device.skinny import Tiling
from kimi_k3_decode.launches import layer_plan
from kimi_k3_decode.ops.contract import Contract, Role
from perf.kernels.check import Run
from perf.kernels.layer import LayerLoop
from perf.kernels.operands import Maker
from perf.kernels.stock_layer import StockLayer, state_for
from perf.kernels.timing import Timed, capture, copy_rate_bytes_per_s, interleaved

COLD_BYTES = 320 << 20  # rotate until this much weight has passed between two uses of the same bytes
PRODUCTS = {
    "in_proj": "weight_PD",
    "o_proj": "weight_DC",
    "moe_front": "latent_down_LD",
    "shared_up": "gate_up_ID",
    "shared_down": "down_DI",
    "moe_tail": "latent_up_DL",
}


def _times(t: Timed) -> dict[str, float]:
    return {"median_us": round(t.median_us, 3), "low_us": round(t.low_us, 3), "high_us": round(t.high_us, 3)}


def _moved_bytes(contract: Contract) -> int:
    """Bytes of the dense weights (what a launch cannot avoid reading)."""
    return sum(o.bytes or 0 for o in contract.of_role(Role.WEIGHT))


def _rotation(contract: Contract, options: dict[str, Any] | None, copies: int, seed: int = 5) -> list[Run]:
    return [Run(K3, contract, Maker(K3, contract, seed + i).all(), pdl=True, options=options) for i in range(copies)]


def tilings_around(base: Tiling) -> list[Tiling]:
    """Valid neighbours of a schedule: other cluster splits, warp shapes and depths."""
    found = []
    for splits in (1, 2, 4, 8):
        for warps_m, warps_k in ((1, 8), (2, 4), (4, 2), (8, 1)):
            for depth in (5, 8, 14):
                try:
                    found.append(replace(base, splits=splits, warps_m=warps_m, warps_k=warps_k, depth=depth))
                except ValueError:
                    continue
    return found


def ops(records: Any) -> None:
    """Each product launch of a K3 layer: the scheduled kernel, the library product, and (K3_KERNELS_SWEEP) every tiling in reach."""
    rate = copy_rate_bytes_per_s()
    print(f"copy {rate / 1e12:.3f} TB/s", flush=True)
    sweep = os.environ.get("K3_KERNELS_SWEEP", "")
    for tp in (8,) if sweep else (8, 16):
        for rows in (1, 8, 64):
            plan = layer_plan(K3, Shard(config=K3, tp=tp), 5, rows)
            for launch in plan:
                if launch.op not in PRODUCTS:
                    continue
                size = _moved_bytes(launch.contract)
                copies = max(2, -(-COLD_BYTES // size))
                runs = _rotation(launch.contract, None, copies)
                weights = [run.tensors[PRODUCTS[launch.op]] for run in runs]
                x = runs[0].tensors[launch.contract.operands[0].name].flatten(1)
                graphs = {
                    "kernel": capture(partial(_launch, runs)),
                    "library": capture(partial(_library, weights, x)),
                }
                times = interleaved(graphs, copies, replays=40)
                record = {
                    "op": launch.op, "tp": tp, "rows": rows, "kernel": runs[0].spec.id, "weight_bytes": size,
                    "floor_us": round(size / rate * 1e6, 3), "copy_bytes_per_s": rate,
                    **{name: _times(t) for name, t in times.items()},
                }  # fmt: skip
                records.add(record)
                print(launch.op, tp, rows, runs[0].spec.variant, {k: v["median_us"] for k, v in record.items() if isinstance(v, dict)},
                      record["floor_us"], flush=True)  # fmt: skip
                if sweep and f"{tp}" in sweep.split(",") and rows in (1, 64):
                    _sweep(records, launch, runs, copies, tp, rows)
                del runs, weights, graphs
                torch.cuda.empty_cache()


def _launch(runs: list[Run]) -> None:
    for run in runs:
        run.launch()


def _library(weights: list[torch.Tensor], x: torch.Tensor) -> None:
    for weight in weights:
        torch.nn.functional.linear(x, weight)


def _issue(stock: list[StockLayer]) -> None:
    for layer in stock:
        layer.issue()


def _sweep(records: Any, launch: Any, runs: list[Run], copies: int, tp: int, rows: int) -> None:
    base = runs[0].spec.make().core.t
    best = []
    for tiling in tilings_around(base):
        try:
            tried = [Run(K3, launch.contract, run.tensors, pdl=True, options={"tiling": tiling}) for run in runs]
            graph = capture(partial(_launch, tried), warmups=1)
            t = interleaved({"kernel": graph}, copies, replays=8)["kernel"]
        except Exception as error:
            records.add({"sweep": launch.op, "tp": tp, "rows": rows, "tiling": asdict(tiling), "error": str(error)[:200]})
            continue
        records.add({"sweep": launch.op, "tp": tp, "rows": rows, "tiling": asdict(tiling), "median_us": t.median_us})
        best.append((t.median_us, tiling))
    for median, tiling in sorted(best, key=lambda pair: pair[0])[:3]:
        print("   ", round(median, 2), f"s{tiling.splits} w{tiling.warps_m}x{tiling.warps_k} d{tiling.depth}", flush=True)


def layers(records: Any) -> None:
    """Two KDA + MoE layers of one K3 rank in one graph, with PDL and side stream off one at a time, and the stock layer: us a layer."""
    for tp in (8, 16):
        weights: dict[str, torch.Tensor] = {}
        for rows, q in ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (64, 1), (8, 8)):
            graphs = {}
            loops = []
            for name, pdl, side in (("pdl", True, True), ("no_pdl", False, True), ("one_stream", True, False)):
                loop = LayerLoop(K3, tp, (4, 5), rows, q, pdl=pdl, side=side, shared_weights=weights)
                graphs[name] = capture(loop.issue)
                loops.append(loop)
            if q == 1:
                stock = [StockLayer(K3, tp, layer, rows, weights, state_for(K3, tp, rows)) for layer in (4, 5)]
                graphs["stock"] = capture(partial(_issue, stock))
            times = interleaved(graphs, 2, replays=50)
            sick = [int(loop.health[0]) for loop in loops]
            record = {"tp": tp, "rows": rows, "q": q, "sick": sick, **{name: _times(t) for name, t in times.items()}}
            records.add(record)
            print("layer", tp, rows, q, {k: v["median_us"] for k, v in record.items() if isinstance(v, dict)}, sick, flush=True)
            if rows in (1, 64) and q == 1:
                _profile(records, loops[0], tp, rows)
                alone = LayerLoop(K3, tp, (4, 5), rows, q, pdl=False, side=False, shared_weights=weights)
                alone.issue()
                torch.cuda.synchronize()
                _profile(records, alone, tp, rows)
        del weights
        torch.cuda.empty_cache()


def _profile(records: Any, loop: LayerLoop, tp: int, rows: int) -> None:
    """Kernel times of one eager pass without overlap, from the profiler; and the set of kernels executed."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            loop.issue()
            torch.cuda.synchronize()
    names = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA and "kernel" in e.name]
    table: dict[str, list[float]] = {}
    for event in names:
        table.setdefault(event.name[-90:], []).append(event.device_time)
    per = len(loop.bound)
    records.add({"profile": f"tp{tp}-r{rows}", "launches": per, "executed": len(names) / 3, "kernels": table})
    last = sorted(names, key=lambda e: e.time_range.start)[-per:]
    if loop.pdl:
        for event in last[: per // 2 + 2]:
            start = event.time_range.start - last[0].time_range.start
            print(f"    {start:8.2f} .. {start + event.device_time:8.2f}  {event.name[23:80]}", flush=True)
        return
    for bound, event in list(zip(loop.bound, last, strict=False))[: per // 2]:
        print(f"    {bound.launch.id:22s} {event.device_time:8.2f} us  {event.name[:70]}", flush=True)
