"""Stock beside the kernels at full depth, as far as it can be tried without a GPU: whose weights it reads, and what a record says."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kimi_k3_decode.config import NANO, ModelConfig, Shard
from kimi_k3_decode.launches import launch_graph
from kimi_k3_decode.ops.contract import Role
from perf import rank_steps
from perf.hardware import gpu
from perf.kernels.operands import Maker
from perf.kernels.timing import Measured, timed
from perf.matrix import Cell
from perf.model import fit_assumptions, project
from perf.rank_steps import RankStep
from tests.perf.test_published import planted_layers

ROWS = 2
SMALL: ModelConfig = replace(NANO, mla_heads=8)  # as in K3, both kinds of attention are as wide
FACTORIES = ("randn", "empty", "arange", "randint", "zeros", "rand")


class _Ops(ModuleType):
    """The stock's own kernels, none of which runs; what the grouped product was given is kept."""

    def __init__(self) -> None:
        super().__init__("perf.kernels.triton_ops")
        self.grouped_codes: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def grouped(self, x: Any, codes: Any, *_: Any) -> None:
        self.grouped_codes.append(codes)

    def empty_lists(self, pairs: int, device: str) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(pairs, dtype=torch.int32) for _ in range(3))


@pytest.fixture
def step(monkeypatch) -> Iterator[Any]:
    """perf.kernels.step on the CPU, without the packages that only a GPU machine has."""
    before = set(sys.modules)
    recurrence = ModuleType("fla.ops.kda.fused_recurrent")
    recurrence.fused_recurrent_kda_fwd = lambda *_, **__: None  # type: ignore[attr-defined]
    ops = _Ops()
    for name in ("fla", "fla.ops", "fla.ops.kda"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.kda.fused_recurrent", recurrence)
    monkeypatch.setitem(sys.modules, "perf.kernels.triton_ops", ops)
    monkeypatch.setattr(importlib.import_module("perf.kernels"), "triton_ops", ops, raising=False)
    for name in FACTORIES:
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, _made=made, **k: _made(*a, **{key: v for key, v in k.items() if key != "device"}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    module = importlib.import_module("perf.kernels.step")
    monkeypatch.setattr(module, "K3", SMALL)
    monkeypatch.setattr(module, "capture", lambda issue, **_: issue() or SimpleNamespace())
    monkeypatch.setattr(module, "RankLoop", _Loop)
    monkeypatch.setattr(module, "measured", _measured)
    yield module
    for name in [name for name in sys.modules if name.startswith("perf.kernels") and name not in before]:
        del sys.modules[name]


class _Loop:
    """A rank's loop that launches nothing."""

    def __init__(self, *_: Any, shared_weights: dict[str, torch.Tensor], **__: Any) -> None:
        shared_weights.update(weights())
        self.health, self.buffers, self.pdl = [0], {"logits": torch.zeros(2)}, True

    def connect(self) -> _Loop:
        return self

    def chosen_experts(self) -> dict[int, torch.Tensor]:
        return chosen()

    def issue(self) -> None:
        pass


def _measured(graphs: dict[str, Any], launches: int, card: Any, replays: int) -> Measured:
    """The fused step twice as fast as everything else, by construction."""
    center = {name: 50.0 if name == "fused" else 100.0 for name in graphs}
    times = {name: timed([us + 0.01 * (i % 3) for i in range(replays)]) for name, us in center.items()}
    return Measured(times=times, conditions={"throttled": []}, discarded_count=0)


def weights() -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for launch in launch_graph(SMALL, Shard(config=SMALL, tp=1), ROWS, 1):
        for o in launch.contract.operands:
            if o.role is Role.WEIGHT:
                made |= {name: Maker(SMALL, launch.contract, 1, "cpu").operand(o) for name in launch.bindings[o.name] if name not in made}
    return made


def chosen() -> dict[int, torch.Tensor]:
    return {layer: torch.zeros(ROWS, SMALL.n_experts_per_token, dtype=torch.int64) for layer in range(1, SMALL.n_layers)}


def test_stock_reads_the_kernels_own_weights(step) -> None:
    from perf.kernels.stock_step import StockStep

    shared = weights()
    before = {name: tensor.clone() for name, tensor in shared.items()}
    StockStep(SMALL, 1, ROWS, shared, chosen(), 64).issue()
    codes = [matrix for given in sys.modules["perf.kernels.triton_ops"].grouped_codes for matrix in given]
    places = {tensor.data_ptr() for tensor in shared.values()}
    assert len(codes) == 3 * (SMALL.n_layers - SMALL.n_dense_layers)
    assert {matrix.data_ptr() for matrix in codes} <= places  # a stacked copy would lie elsewhere
    assert all(torch.equal(shared[name], before[name]) for name in before)


def test_stock_is_timed_in_turns_where_both_fit(step) -> None:
    record = step.one_step("case", 1, ROWS, 1, None, 4e12, {})
    assert record["stock_timed"] == "in turns"
    assert record["speedup"] == pytest.approx(2.0, abs=0.01)
    assert record["self_check_decision"] == "no difference"
    assert len(record["stock_samples"]) == len(record["fused_samples"]) == 24


def test_stock_is_timed_behind_and_without_a_ratio_where_both_do_not_fit(step, monkeypatch) -> None:
    real, tries = step._Stock, []

    def too_large_at_first(*arguments: Any) -> Any:
        tries.append(arguments)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    monkeypatch.setattr(step, "_Stock", too_large_at_first)
    record = step.one_step("case", 1, ROWS, 1, None, 4e12, {})
    assert record["stock_timed"].startswith("behind the kernels' steps, not in turns")
    assert record["stock_us"] == pytest.approx(100.0, abs=0.1)
    assert "speedup" not in record


def test_a_stock_that_cannot_run_costs_its_own_times_only(step, monkeypatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(step, "_Stock", broken)
    record = step.one_step("case", 1, ROWS, 1, None, 4e12, {})
    assert record["fused_us"] == pytest.approx(50.0, abs=0.1)
    assert record["stock_error"] == "RuntimeError: no such kernel"
    assert "error" not in record
    assert "stock_us" not in record


def test_stock_kernels_are_told_by_their_place_in_the_layer(step) -> None:
    from perf.kernels.speed import in_order
    from perf.kernels.stock_layer import LAUNCHES

    layer = [(f"kernel_{place}", float(place)) for place in range(len(LAUNCHES))]
    found = in_order(layer * 6, 6)["launches_in_order"]
    assert [name for name, _ in found] == list(LAUNCHES)
    assert found[3][1] == [3.0] * 6
    cut_in_two = in_order([*layer, ("reduce", 1.0)] * 6, 6)["launches_in_order"]
    assert [name for name, _ in cut_in_two[-2:]] == ["kernel_21", "reduce"]
    assert "needs the same in each" in in_order(layer * 5 + layer[::-1], 6)["error"]
    assert "needs the same in each" in in_order((layer * 6)[:-1], 6)["error"]
    assert "needs the same in each" in in_order([], 6)["error"]


# ---- what is shown of it ----
def rank_step(**told: Any) -> RankStep:
    details = {
        "fused_us": 7000.0, "floor_us": 2200.0, "over_floor": 3.18, "context_tokens": 1024, "stock_us": 12600.0, "speedup": 1.8,
        "speedup_low": 1.79, "speedup_high": 1.81, "self_check_decision": "no difference", "waits_that_ran_out_count": 0,
        "launches_count": 1000, **told,
    }  # fmt: skip
    words = "NVIDIA H200; 1 GPU on both sides; batch 1; no speculation; prefill not counted; 2026-11-30; torch 2"
    return RankStep(
        tp=16, rows=1, q=1, gpu="NVIDIA H200", conditions=words, evidence="E-1", correctness=("E-2",), details=details, reasons=()
    )  # fmt: skip


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ({"stock_timed": "in turns"}, ["12.60", "7.00", "1.80x (1.79–1.81)"]),
        ({"stock_timed": "behind the kernels' steps"}, ["–", "7.00", "–"]),
        ({}, ["–", "7.00", "–"]),
        ({"stock_timed": "in turns", "self_check_decision": "slower"}, ["–", "7.00", "–"]),
    ],
)
def test_a_ratio_of_whole_steps_needs_turns_and_a_stock_like_itself(monkeypatch, told, shown) -> None:
    monkeypatch.setattr(rank_steps, "read", lambda store: (rank_step(**told),))
    (table,) = rank_steps.tables((rank_step(**told),), {})
    (row,) = table["rows"]
    assert row[4:7] == shown
    assert "prefill not counted" in row[table["columns"].index("conditions")]
    measured, _ = rank_steps.published_step(16, 1)
    assert ("speed_up" in {m.name for m in measured}) == (shown[2] != "–")


def test_the_projection_is_held_against_whole_steps_that_no_fit_saw() -> None:
    rests_on = fit_assumptions(planted_layers((1.3, 1.2, 4.0, 0.05)), gpu("H200"), "latency_specialized")
    given = {"latency_specialized": rests_on, "auto": replace(rests_on, exchange_us=9.0)}
    step = rank_step(stock_timed="in turns", experts_read_count=16.0)
    ours, stock = rank_steps.projection_errors((step,), given)
    assert ours["error"] == pytest.approx(ours["projected_us"] / 7000.0 - 1)
    assert (ours["backend"], stock["backend"], stock["measured_us"]) == ("latency_specialized", "auto", 12600.0)
    cell = Cell(model="kimi-k3", gpu="H200", tp=16, requests=1, q=1, context_tokens=1024, acceptance_length=1.0, backend="auto")
    projected = project(cell, given["auto"], distinct=16.0)
    assert stock["projected_us"] == pytest.approx(projected.us - projected.exchange_us)  # one rank alone
    assert rank_steps.projection_errors((replace(step, reasons=("stale",)),), given) == []
    assert rank_steps.projection_errors((replace(step, gpu="NVIDIA B200"),), given) == []
    assert [table["title"] for table in rank_steps.tables((step,), given)] == [
        "Whole steps of one rank",
        "Projection against our own whole steps of one rank",
    ]
