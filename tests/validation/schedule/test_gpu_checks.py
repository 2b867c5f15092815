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
from validation.schedule import gpu

CASE = Case(subject="nano", params={"tp": 1, "requests": 3, "q": 1})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_case_is_refused_with_the_reason() -> None:
    with pytest.raises(Refused, match="needs a Hopper or Blackwell GPU"):
        gpu.KernelCheck().measure(CASE, {})


def judged(monkeypatch: pytest.MonkeyPatch, build: Any, launches: tuple[int, int] = (26, 26)) -> dict[str, bool]:
    weights = random_weights(NANO, seed=0)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_step, "GpuPath", lambda w, tp, **_: build(w, tp=tp))
    monkeypatch.setattr(gpu, "launches_of_a_step", lambda *_: launches)
    values = {m.name: m.value for m in gpu.measure_kernels(CASE, weights)[0]}
    return {limit.measurement: limit.holds(values[limit.measurement]) for limit in gpu.KernelCheck().limits(CASE)}


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
