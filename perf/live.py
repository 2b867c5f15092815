"""Speeds measured here and now, where there is a GPU: one rank's layers beside stock, and its whole step. Heavy to import.

A speed is told only with its correctness: every kernel that is timed is first compared with its FP64 oracle in the same process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

from validation.core.kernels_here import CAPABILITIES
from validation.core.types import Measurement
from validation.core.worker import Refused

ARCHITECTURES = tuple(tuple(map(int, capability.split("."))) for capability in CAPABILITIES)  # as torch tells them


def reasons_against() -> tuple[str, ...]:
    """Why nothing can be timed here; empty on a machine that can."""
    import torch

    if not torch.cuda.is_available():
        return ("device: got no CUDA device, needs a Hopper or Blackwell GPU",)
    found = torch.cuda.get_device_capability()
    reasons = [] if found in ARCHITECTURES else [f"device: got compute capability {found}, needs one of {ARCHITECTURES}"]
    needed = {"fla": "fla-core", "pynvml": "nvidia-ml-py", "triton": "triton"}
    reasons += [f"{package}: got no such package, needs it for stock and for conditions" for m, package in needed.items() if not _there(m)]
    return tuple(reasons)


def _there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _correct(launches: Iterable[Any], rank: int) -> list[str]:
    """Kernels compared with their oracle; raises Refused naming those that do not hold."""
    from kimi_k3_decode.config import K3
    from kimi_k3_decode.kernels import kernel_spec
    from perf.kernels.check import check

    kernels = {kernel_spec(K3, launch.contract).id: launch for launch in launches}
    wrong = [name for name, one in kernels.items() if not check(K3, one.contract, 77, name, rank=rank).judged()]
    if wrong:
        raise Refused(tuple(f"correctness: {name} is further from its oracle than allowed, or broke a promise" for name in wrong))
    return list(kernels)


def _measurements(record: Mapping[str, Any], names: Mapping[str, str]) -> list[Measurement]:
    """Times of a record under the names of the lane, samples included."""
    return [
        Measurement(name=f"{shown}_us", value=record[f"{name}_us"], unit="us", samples=tuple(record[f"{name}_samples"]))
        for name, shown in names.items()
    ]


def layer(tp: int, rows: int, q: int = 1) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
    """One rank's KDA + MoE layer beside stock, both timed now. Refused where the clock or the kernels cannot be trusted."""
    from kimi_k3_decode.config import K3
    from perf.kernels.conditions import Card
    from perf.kernels.layer import layers_of
    from perf.kernels.speed import LAYERS, LayerBench
    from perf.kernels.timing import copy_rate_bytes_per_s

    kernels = _correct(layers_of(K3, tp, LAYERS, rows, q), rank=0)
    record, _ = LayerBench(tp, Card(), copy_rate_bytes_per_s()).one(rows, q)
    if "error" in record:
        raise Refused((str(record["error"]),))
    problems = []
    if record["self_check_decision"] != "no difference":
        problems.append(f"stock against stock: {record['self_check_decision']} ({record['self_check']}), needs no difference")
    if record["buffers_differing"]:
        problems.append(f"bits depend on how the layer is launched: {record['buffers_differing'][:4]}")
    if record["waits_that_ran_out_count"]:
        problems.append(f"waits that ran out: got {record['waits_that_ran_out_count']}, needs 0")
    if problems:
        raise Refused(tuple(problems))
    ratios = [
        Measurement(name=name, value=record[source], unit="1")
        for name, source in (("speed_up", "speedup"), ("speed_up_low", "speedup_low"), ("speed_up_high", "speedup_high"))
    ]
    floor = Measurement(name="over_floor", value=record["over_floor"], unit="1")
    measured = (*_measurements(record, {"stock": "stock", "fused": "candidate"}), *ratios, floor)
    return measured, {"source": "gpu_timer", "correctness": kernels, "record": _without_samples(record)}


def rank_step(tp: int, rows: int, q: int = 1) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
    """The whole step of one rank at full depth, timed now, in turns with stock's where both fit."""
    from kimi_k3_decode.config import K3, Shard
    from kimi_k3_decode.launches import launch_graph
    from perf.kernels.conditions import Card
    from perf.kernels.step import one_step
    from perf.kernels.timing import copy_rate_bytes_per_s
    from perf.rank_steps import beside_stock

    kernels = _correct(launch_graph(K3, Shard(config=K3, tp=tp), rows, q), rank=0)
    record = one_step(f"k3-step-tp{tp}-r{rows}-q{q}", tp, rows, q, Card(), copy_rate_bytes_per_s(), {})
    if "error" in record:
        raise Refused((str(record["error"]),))
    counts = [Measurement(name=name, value=record[name], unit="count") for name in ("waits_that_ran_out_count", "launches_count")]
    floor = Measurement(name="over_floor", value=record["over_floor"], unit="1")
    stock = beside_stock(record) if record.get("stock_timed") == "in turns" else []
    if stock and record["self_check_decision"] != "no difference":
        raise Refused((f"stock against stock: {record['self_check_decision']} ({record['self_check']}), needs no difference",))
    details = {"source": "gpu_timer", "correctness": kernels, "record": _without_samples(record)}
    return (*_measurements(record, {"fused": "candidate"}), floor, *counts, *stock), details


def _without_samples(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not name.endswith("_samples")}
