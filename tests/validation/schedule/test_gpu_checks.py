"""The GPU check of the schedule lane: refused without a GPU; its measuring is tried with contract execution in the kernels' place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kimi_k3_decode import gpu_step
from kimi_k3_decode.config import NANO
from kimi_k3_decode.step import SpecializedPath
from kimi_k3_decode.weights import random_weights
from validation.core.types import Case
from validation.core.worker import Refused
from validation.mutants import path_factory
from validation.schedule import gpu, gpu_runs

CHECKS = {check.id: check for check in gpu.gpu_checks()}
CASE = Case(subject="nano", params={"tp": 1, "requests": 3, "q": 1})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_case_is_refused_with_the_reason() -> None:
    for check in CHECKS.values():
        with pytest.raises(Refused, match="needs a Hopper or Blackwell GPU"):
            check.measure(CASE, {})


def judged(monkeypatch: pytest.MonkeyPatch, build: Any, launches: tuple[int, int] = (26, 26)) -> dict[str, bool]:
    weights = random_weights(NANO, seed=0)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_step, "GpuPath", lambda w, tp, **_: build(w, tp=tp))
    monkeypatch.setattr(gpu, "launches_of_a_step", lambda *_: launches)
    values = {m.name: m.value for m in gpu.measure_kernels(CASE, weights)[0]}
    return {limit.measurement: limit.holds(values[limit.measurement]) for limit in CHECKS["schedule.gpu.model"].limits(CASE)}


def test_equal_kernels_hold_and_a_launch_too_few_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(judged(monkeypatch, SpecializedPath).values())
    assert not judged(monkeypatch, SpecializedPath, launches=(26, 25))["launches_off_plan"]


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not judged(monkeypatch, path_factory("kda_gate_bound"))["error_ratio"]


def test_a_result_that_depends_on_the_launch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def build(weights: Any, tp: int) -> Any:
        built.append(1)
        return path_factory("kda_gate_bound")(weights, tp=tp) if len(built) == 2 else SpecializedPath(weights, tp=tp)

    assert not judged(monkeypatch, build)["distinct_results"]


def counted(monkeypatch: pytest.MonkeyPatch, build: Any) -> dict[str, float]:
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_step, "GpuPath", lambda w, tp, **_: build(w, tp))
    case = Case(subject="nano", params={"tp": 1, "requests": 2, "q": 1, "replays": 12})
    return {m.name: m.value for m in gpu.measure_replays(case, random_weights(NANO, seed=0))[0]}


class Forgetful:
    """Leaves a trace in the caches at one late step, and nothing in the logits."""

    def __init__(self, weights: Any, tp: int) -> None:
        self._path, self._steps = SpecializedPath(weights, tp=tp), 0

    def step(self, batch: Any, caches: Any, **options: Any) -> Any:
        output = self._path.step(batch, caches, **options)
        self._steps += 1
        if self._steps == 10:
            next(iter(caches.layers)).state_SHVK[1, 0, 0, 0] += 1
        return output


def test_replays_are_compared_with_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(monkeypatch, lambda w, tp: SpecializedPath(w, tp=tp)) == {"differing": 0, "replays": 12}
    assert counted(monkeypatch, Forgetful)["differing"] == 1


def test_delays_reach_every_site_and_leave_nothing_behind() -> None:
    pytest.importorskip("cutlass")
    from kimi_k3_decode.device import skinny, sync
    from kimi_k3_decode.ops.route import kernel as route

    before = sync.grid_wait, skinny.grid_wait, route.poll_many
    with gpu.delayed(3) as counts:
        assert skinny.grid_wait is not before[1]
        assert route.poll_many is not before[2]
    assert all(counts[site] >= 1 for site in gpu.SITES)
    assert (sync.grid_wait, skinny.grid_wait, route.poll_many) == before


def test_caches_of_two_ranks_are_put_together() -> None:
    whole = gpu.filled_caches(NANO, 2, 1, seed=4)
    first, second = gpu_runs.on_device(whole, "cpu"), gpu_runs.on_device(whole, "cpu")
    for mine, own in ((first, slice(NANO.kda_heads // 2, None)), (second, slice(0, NANO.kda_heads // 2))):
        for layer in NANO.kda_layers:
            mine.layers[layer].state_SHVK[:, own] = float("nan")
    together = gpu_runs.merged((first, second))
    assert gpu_runs.digest([], together) == gpu_runs.digest([], whole)
    second.layers[NANO.mla_layers[0]].pages_PTC[1] += 1
    with pytest.raises(ValueError, match="different pages"):
        gpu_runs.merged((first, second))


def test_the_candidate_kernels_keeps_the_callers_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    from validation.targets import kernels
    from validation.targets.engine import find_candidate

    weights = random_weights(NANO, seed=0)
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_step, "GpuPath", SpecializedPath)
    start = gpu.filled_caches(NANO, 2, 2, seed=6)
    results = []
    for path in (SpecializedPath(weights), find_candidate("kernels")(weights)):
        caches = gpu_runs.on_device(start, "cpu")
        results.append(gpu_runs.digest(gpu.walk(path, caches, 2, 6), caches))
    assert results[0] == results[1]
