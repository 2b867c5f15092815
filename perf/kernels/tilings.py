"""Products alone: the scheduled kernel beside the library's, and every tiling in reach of a schedule. For tuning; a record if kept."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from kimi_k3_decode.config import K3, Shard
from kimi_k3_decode.device import launcher
from kimi_k3_decode.device.launcher import KernelSpec
from kimi_k3_decode.device.skinny import Tiling
from kimi_k3_decode.kernels import kernel_spec
from kimi_k3_decode.launches import Launch, layer_plan
from kimi_k3_decode.ops.contract import Contract, Role
from perf.kernels.check import Run
from perf.kernels.operands import Maker
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


def products(tp: int, rows: int, names: Collection[str] = ()) -> list[Launch]:
    """The product launches of a K3 layer, or those of them that are named."""
    plan = layer_plan(K3, Shard(config=K3, tp=tp), 5, rows)
    return [launch for launch in plan if launch.op in (names or PRODUCTS)]


def spec_of(launch: Launch, tiling: Tiling | None = None) -> KernelSpec:
    return kernel_spec(K3, launch.contract, **({"tiling": tiling} if tiling else {}))


def warm_up(tps: Collection[int], rows_list: Collection[int], sweep: Collection[str]) -> None:
    """Compile everything that `ops` will time, without the GPU."""
    for tp in tps:
        for rows in rows_list:
            for launch in products(tp, rows, sweep):
                base = spec_of(launch)
                for spec in (base, *(spec_of(launch, t) for t in tilings_around(base.make().core.t) if launch.op in sweep)):
                    with suppress(Exception):  # a tiling that does not compile is recorded when its turn comes
                        launcher.compiled(spec)


def ops(records: Any, tps: Collection[int] = (8, 16), rows_list: Collection[int] = (1, 8, 64), sweep: Collection[str] = ()) -> None:
    """Each product launch of a K3 layer: the scheduled kernel and the library product; of the launches in `sweep`, and of them alone, every
    tiling in reach."""
    rate = copy_rate_bytes_per_s()
    print(f"copy {rate / 1e12:.3f} TB/s", flush=True)
    for tp in tps:
        for rows in rows_list:
            for launch in products(tp, rows, sweep):
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
                if launch.op in sweep:
                    _sweep(records, launch, runs, copies, tp, rows)
                del runs, weights, graphs
                torch.cuda.empty_cache()


def _launch(runs: list[Run]) -> None:
    for run in runs:
        run.launch()


def _library(weights: list[torch.Tensor], x: torch.Tensor) -> None:
    for weight in weights:
        torch.nn.functional.linear(x, weight)


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
    for median, tiling in sorted(best, key=lambda pair: pair[0])[:4]:
        print("   ", round(median, 2), f"s{tiling.splits} w{tiling.warps_m}x{tiling.warps_k} d{tiling.depth}", flush=True)
