"""The schedule lane on a small random model: honest paths hold, and faults of the plan, the messages and the buffers are seen."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from kimi_k3_decode.config import NANO
from kimi_k3_decode.step import SpecializedPath
from kimi_k3_decode.stock import StockPath
from kimi_k3_decode.weights import random_weights
from validation.core.types import Case
from validation.mutants.catalogue import all_mutants
from validation.mutants.paths import PATH_MUTANTS
from validation.schedule.checks import LIMITS, checks
from validation.schedule.execution import dead_buffers, nan_in_new_memory
from validation.schedule.static import awkward

CHECKS = {check.id: check for check in checks() if not check.id.startswith("schedule.gpu.")}
WEIGHTS = random_weights(NANO, 5)


def targets(build):
    def target(make, dtype=torch.bfloat16):
        settings = SimpleNamespace(seed=0)
        return SimpleNamespace(build=make, dtype=dtype, weights=WEIGHTS, settings=settings, fingerprint=lambda: str(make))

    def oracle(weights):
        return StockPath(weights.to(torch.float64), torch.float64)

    return {"candidate": target(build), "stock": target(lambda weights: StockPath(weights)), "oracle": target(oracle, torch.float64)}


def violated(identity, build, case=None) -> list[str]:
    check = CHECKS[identity]
    case = case or next(iter(check.cases()))
    values = {m.name: m.value for m in check.measure(case, targets(build))[0]}
    return [limit.measurement for limit in check.limits(case) if not limit.holds(values.get(limit.measurement, math.nan))]


def replay(n: int) -> Case:
    return Case(subject="steps", params={"replays": n})


@pytest.mark.parametrize("identity", ["schedule.messages", "schedule.prefetch", "schedule.graph", "schedule.ranks", "schedule.poison"])
def test_the_specialised_path_holds(identity):
    assert violated(identity, SpecializedPath) == []


def test_stock_as_the_candidate_holds():
    def stock(weights):
        return StockPath(weights)

    for identity in ("schedule.poison", "schedule.ranks"):
        assert violated(identity, stock) == []
    assert violated("schedule.replay", stock, replay(25)) == ["replays"]  # fewer than the limit asks for, and nothing else


@pytest.mark.parametrize(
    ("mutant", "broken"),
    [
        ("publish_without_canonical", "stuck"),
        ("rearm_dropped", "overwritten"),
        ("one_box_parity", "broken"),
        ("tail_before_shared", "broken"),
        ("prefetch_of_inputs", "not_weights"),
        ("edge_to_shared_dropped", "races"),
        ("edge_to_tail_dropped", "races"),
        ("kda_never_waits", "races"),
        ("first_launch_early", "races"),
    ],
)
def test_a_planted_fault_breaks_its_limit(mutant, broken):
    found = all_mutants()[mutant]
    with found.plant():
        assert broken in violated(found.killed_by, SpecializedPath)
    assert violated("schedule.messages", SpecializedPath) == []  # the fault is gone again


def test_a_baked_parity_shows_in_the_second_replay():
    with all_mutants()["parity_baked"].plant():
        assert "broken" in violated("schedule.replay", SpecializedPath, replay(12))
    assert violated("schedule.replay", SpecializedPath, replay(12)) == ["replays"]


def test_a_tile_nobody_writes_is_counted():
    assert "unwritten" in violated("schedule.poison", PATH_MUTANTS["last_tile_unwritten"].build)


@pytest.mark.parametrize("mutant", ["al_off_by_one", "row_zero_dropped", "synthetic_too_long"])
def test_acceptance_counted_wrongly_is_seen(mutant):
    with all_mutants()[mutant].plant():
        assert violated("schedule.acceptance", SpecializedPath)


def test_acceptance_holds():
    assert violated("schedule.acceptance", SpecializedPath) == []


def test_new_memory_holds_nan_only_inside():
    with nan_in_new_memory():
        assert bool(torch.empty(7).isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


def test_buffers_die_with_their_last_reader():
    def launch(reads, writes):
        return SimpleNamespace(inputs=tuple((name, (name,)) for name in reads), outputs=tuple((name, name) for name in writes))

    graph = [launch([], ["a"]), launch(["a", "table.x"], ["b"]), launch(["a", "b"], ["a"]), launch(["a", "state.y"], ["unread"])]
    assert dead_buffers(graph) == {2: ("b",), 3: ("a",)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_awkward_data_holds_the_words_that_matter(dtype):
    value = awkward(torch.Size((4, 16)), dtype, torch.Generator().manual_seed(1), 0x7FA55A5A)
    words = value.view(torch.int32)
    assert bool((words == -1).any())
    assert bool((words == 0x7FA55A5A).any())
    assert bool(value.isnan().any())


def test_no_limit_can_be_met_by_nothing():
    for identity in CHECKS:
        assert all(not limit.holds(math.nan) for limit in LIMITS[identity])
        assert any(limit.op == ">=" for limit in LIMITS[identity])
