"""Detectable drop and repeats needed, against statsmodels' power solver and by simulation."""

import numpy as np
import pytest
from statsmodels.stats.power import TTestPower

from evals.stats.power import DifferenceVariance, detectable_drop, difference_variance, top_up


@pytest.mark.parametrize("n", [30, 100, 198, 1319])
def test_detectable_drop_agrees_with_the_noncentral_t(n):
    effect = TTestPower().solve_power(nobs=n, alpha=0.05, power=0.80, alternative="larger")
    assert detectable_drop(1 / np.sqrt(n), n) == pytest.approx(effect, rel=0.01)


@pytest.mark.parametrize(
    ("n", "p", "repeats", "low", "high"),
    [
        (1319, 0.95, 1, 0.01, 0.022),
        (198, 0.8, 1, 0.04, 0.102),
        (198, 0.8, 8, 0.016, 0.036),
        (30, 0.8, 1, 0.09, 0.265),
        (100, 0.7, 1, 0.07, 0.165),
    ],
)
def test_public_suites_have_the_documented_detectable_drops(n, p, repeats, low, high):
    """Spread over share of variance between items 0 .. 0.8; the same numbers stand in the documentation of the gate."""
    se = [np.sqrt(2 * p * (1 - p) * (1 - rho) / repeats / n) for rho in (0.0, 0.8)]
    assert detectable_drop(se[0], n) == pytest.approx(high, rel=0.06)
    assert low * 0.9 < detectable_drop(se[1], n) < low * 1.35


def test_variance_split_recovers_the_planted_parts():
    rng = np.random.default_rng(0)
    d = rng.normal(scale=0.2, size=(4000, 1)) + rng.normal(scale=0.5, size=(4000, 6))
    split = difference_variance(d)
    assert split.between_items == pytest.approx(0.04, rel=0.15)
    assert split.within_item == pytest.approx(0.25, rel=0.05)
    assert split.repeats == 6
    assert split.split_known


def test_repeats_asked_for_do_decide():
    rng = np.random.default_rng(1)
    n, within, between = 200, 0.30, 0.02
    d = rng.normal(scale=np.sqrt(between), size=(n, 1)) + rng.normal(scale=np.sqrt(within), size=(n, 2))
    split = difference_variance(d)
    detectable = detectable_drop(np.sqrt(d.mean(axis=1).var(ddof=1) / n), n)
    needed = top_up(split, detectable, allowed=0.05, n_clusters=n)
    assert needed is not None
    assert needed.repeats_total is not None
    after = detectable_drop(np.sqrt((split.between_items + split.within_item / needed.repeats_total) / n), n)
    before = detectable_drop(np.sqrt((split.between_items + split.within_item / (needed.repeats_total - 1)) / n), n)
    assert after <= 0.05 < before
    assert needed.repeats_more == needed.repeats_total - 2


def test_no_number_of_repeats_helps_when_items_differ():
    split = DifferenceVariance(between_items=0.2, within_item=0.01, n_items=30, repeats=2, split_known=True)
    detectable = detectable_drop(np.sqrt(0.205 / 30), 30)
    needed = top_up(split, detectable, allowed=0.05, n_clusters=30)
    assert needed is not None
    assert needed.repeats_total is None
    assert needed.items_total > 300


def test_single_runs_give_a_lower_bound_only():
    split = difference_variance(np.array([[0.0], [1.0], [-1.0], [0.0]] * 10))
    assert not split.split_known
    needed = top_up(split, detectable=0.2, allowed=0.1, n_clusters=40)
    assert needed is not None
    assert needed.hopeful
    assert needed.repeats_total == 4


def test_enough_is_enough_and_nothing_is_nothing():
    split = difference_variance(np.zeros((10, 1)))
    assert top_up(split, detectable=0.01, allowed=0.02, n_clusters=10) is None
    assert top_up(split, detectable=float("nan"), allowed=0.02, n_clusters=1) is None
    assert np.isnan(detectable_drop(0.1, 1))
