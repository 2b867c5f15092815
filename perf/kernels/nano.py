"""The whole nano model on a GPU, as records: the schedule lane's own measures (validation/schedule/gpu.py), one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from kimi_k3_decode.config import NANO, Shard
from kimi_k3_decode.launches import launch_graph
from kimi_k3_decode.random_init import draw_weights
from perf.kernels.binaries import warm
from validation.core.types import Case, Check
from validation.schedule.gpu import gpu_checks

SEED = 11


def cases(names: Iterable[str], ranks: Iterable[int]) -> list[tuple[Check, Case]]:
    """Checks of the given short names (model, replays, delays) with their cases of these numbers of ranks."""
    named = [check for check in gpu_checks() if check.id.rsplit(".", 1)[-1] in names]
    return [(check, case) for check in named for case in check.cases() if case.params["tp"] in ranks]


def warm_up(ranks: Iterable[int], rows: int = 8) -> None:
    """Compile the kernels of steps of `rows` rows."""
    for tp in ranks:
        warm(NANO, launch_graph(NANO, Shard(config=NANO, tp=tp), rows, 1))


def run(records: Any, names: Iterable[str] = ("model", "replays", "delays"), ranks: Iterable[int] = (1, 2, 4)) -> int:
    """One record a case; returns how many did not hold."""
    weights = draw_weights(NANO, SEED).to(torch.bfloat16)
    failed = 0
    for check, case in cases(names, ranks):
        begin = time.perf_counter()
        record: dict[str, Any] = {"case": f"{check.id}-{case.id}"}
        try:
            measurements, details = check.measured_by(case, weights)  # type: ignore[attr-defined]
            values = {m.name: m.value for m in measurements}
            broken = [limit.measurement for limit in check.limits(case) if not limit.holds(values.get(limit.measurement, float("nan")))]
            record |= {**values, **details, "broken": broken, "holds": not broken}
        except Exception as error:
            record |= {"error": f"{type(error).__name__}: {error}"[:600], "holds": False}
        record["seconds"] = round(time.perf_counter() - begin, 2)
        records.add(record)
        failed += not record["holds"]
        print(record["case"], "holds" if record["holds"] else record, record["seconds"], flush=True)
    return failed
