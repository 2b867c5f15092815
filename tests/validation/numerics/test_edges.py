"""The edge checks on a small random model: honest paths hold every limit, and each planted fault breaks the limit it must."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from kimi_k3_decode.config import NANO
from kimi_k3_decode.step import SpecializedPath
from kimi_k3_decode.stock import StockPath
from kimi_k3_decode.weights import random_weights
from validation.mutants.paths import PATH_MUTANTS
from validation.numerics.edges import LIMITS, edge_checks
from validation.numerics.slices import draw_tokens, poison_unused, prefilled, slice_model

CHECKS = {check.id: check for check in edge_checks()}
WEIGHTS = random_weights(NANO, 5)


def target(name, build, dtype=torch.bfloat16):
    settings = SimpleNamespace(seed=0)
    prefiller = StockPath(WEIGHTS)
    return SimpleNamespace(
        name=name, build=build, dtype=dtype, weights=WEIGHTS, prefiller=prefiller, settings=settings, fingerprint=lambda: name
    )


def targets(name, build):
    return {
        "candidate": target(name, build),
        "stock": target("stock", StockPath),
        "oracle": target("oracle", lambda weights: StockPath(weights.to(torch.float64), torch.float64), torch.float64),
    }


def violated(check, case, found) -> list[str]:
    values = {m.name: m.value for m in check.measure(case, found)[0]}
    return [limit.measurement for limit in check.limits(case) if not limit.holds(values.get(limit.measurement, math.nan))]


def some(identity: str) -> list:
    """The first and the last case, and one between."""
    cases = list(CHECKS[identity].cases())
    return [cases[0], cases[len(cases) // 2], cases[-1]]


@pytest.mark.parametrize("identity", sorted(CHECKS))
@pytest.mark.parametrize(("name", "build"), [("stock", StockPath), ("specialized", SpecializedPath)])
def test_honest_paths_hold(identity, name, build):
    for case in some(identity):
        assert violated(CHECKS[identity], case, targets(name, build)) == [], case.id


@pytest.mark.parametrize(
    ("mutant", "identity", "broken"),
    [
        ("router_ties_high", "numerics.ties", "wrong_ids"),
        ("router_not_renormalised", "numerics.routing_scale", "error_ratio"),
        ("padding_routed", "numerics.padding", "rows_changed"),
        ("slots_assumed_dense", "numerics.slots", "rows_changed"),
        ("null_slot_written", "numerics.slots", "slots_changed"),
        ("kda_state_transposed", "numerics.state_layout", "error_ratio"),
        ("nan_swallowed", "numerics.nonfinite", "swallowed"),
        ("kda_wrong_accepted_slot", "numerics.verify", "error_ratio"),
        ("depends_on_rows", "numerics.row_count", "error_ratio"),
        ("autotune_bad_choice", "numerics.row_count", "error_ratio"),
    ],
)
def test_the_named_fault_breaks_the_limit(mutant, identity, broken):
    found = targets(mutant, PATH_MUTANTS[mutant].build)
    cases = CHECKS[identity].cases()
    assert any(broken in violated(CHECKS[identity], case, found) for case in cases)


def test_a_crash_on_a_bit_pattern_is_counted_not_raised():
    def build(weights):
        def step(batch, caches, **options):
            if bool(weights.embed_VD[batch.tokens_BQ].isnan().any()):
                raise RuntimeError("watchdog: message never arrived")
            return StockPath(weights).step(batch, caches, **options)

        return SimpleNamespace(step=step)

    check = CHECKS["numerics.nonfinite"]
    case = next(case for case in check.cases() if case.params["form"] == "patterns")
    assert violated(check, case, targets("crashing", build)) == ["broken"]


def test_every_edge_has_cases_and_limits_nan_cannot_meet():
    for identity, check in CHECKS.items():
        assert list(check.cases())
        assert all(not limit.holds(math.nan) for limit in LIMITS[identity])


def test_poison_leaves_what_requests_read():
    weights = slice_model(WEIGHTS)
    clean = prefilled(weights, (5, 70), q_max=2, seed=1, spare=1)
    dirty = clean.fork()
    poison_unused(dirty, math.nan)
    assert any(bool(cache.conv_SWC.isnan().any()) for cache in dirty.layers if hasattr(cache, "conv_SWC"))
    tokens = draw_tokens(weights, (2, 1), 3)
    path = StockPath(weights)
    first, second = path.step(clean.batch(tokens), clean), path.step(dirty.batch(tokens), dirty)
    assert torch.equal(first.logits_BQV, second.logits_BQV)
