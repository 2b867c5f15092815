"""Alpha spending: published boundaries, an independent multivariate-normal computation, and simulated error rates."""

import math

import numpy as np
import pytest
from scipy import stats

from evals.stats.sequential import Monitor, boundaries, critical_values, spent

# One-sided 0.025, five equally spaced looks; tabulated for the Lan-DeMets forms of both designs (e.g. in the documentation of ldbounds).
PUBLISHED = {
    "obrien_fleming": (4.8769, 3.3569, 2.6803, 2.2898, 2.0310),
    "pocock": (2.4380, 2.4268, 2.4101, 2.3966, 2.3859),
}


@pytest.mark.parametrize("spending", PUBLISHED)
def test_published_boundaries(spending):
    assert boundaries([0.2, 0.4, 0.6, 0.8, 1.0], 0.025, spending) == pytest.approx(PUBLISHED[spending], abs=2e-3)


def test_uneven_looks_spend_alpha_by_the_multivariate_normal():
    fractions = [0.3, 0.55, 1.0]
    critical = boundaries(fractions, 0.05)
    covariance = [[math.sqrt(min(a, b) / max(a, b)) for a in fractions] for b in fractions]
    never = stats.multivariate_normal(mean=np.zeros(3), cov=covariance).cdf(np.array(critical))
    assert 1 - never == pytest.approx(0.05, abs=2e-4)


def test_one_look_is_the_fixed_test():
    assert boundaries([1.0], 0.05)[0] == pytest.approx(stats.norm.isf(0.05), abs=1e-6)


def test_spending_starts_at_nothing_and_ends_at_alpha():
    for spending in PUBLISHED:
        assert spent(0.0, 0.05, spending) == 0
        assert spent(1.0, 0.05, spending) == pytest.approx(0.05)
        assert spent(1.7, 0.05, spending) == pytest.approx(0.05)
    with pytest.raises(ValueError, match="spending"):
        spent(0.5, 0.05, "peeking")


def test_monitored_looks_keep_the_error_rate_and_naive_peeking_does_not():
    rng = np.random.default_rng(4)
    looks, items, delta = 6, 120, 0.1
    # Each look adds one sampled repeat of every item; the true drop is exactly delta, so "proven" is always wrong.
    d = rng.normal(loc=-delta, scale=0.6, size=(4000, items, looks))
    means = np.cumsum(d.mean(axis=1), axis=1) / np.arange(1, looks + 1)
    errors = 0.6 / np.sqrt(items * np.arange(1, looks + 1))
    monitor = Monitor(alpha=0.05, information_max=1 / errors[-1] ** 2)
    critical = []
    for k, se in enumerate(errors):
        monitor = monitor.add(float(se), last=k == looks - 1)
        critical.append(monitor.critical)
    z = (means + delta) / errors
    assert (z > np.array(critical)).any(axis=1).mean() == pytest.approx(0.05, abs=0.012)
    assert (z > 1.645).any(axis=1).mean() > 0.10


def test_last_look_spends_what_is_left_even_when_information_falls_short():
    monitor = Monitor.for_margin(0.05).add(0.05).add(0.04, last=True)
    assert monitor.spent[-1] == pytest.approx(0.05)
    assert monitor.critical < boundaries([0.2, 0.3], 0.05)[-1]
    with pytest.raises(ValueError, match="all of alpha"):
        monitor.add(0.03)


def test_past_looks_cannot_be_rewritten_and_shrinking_information_is_tolerated():
    first = Monitor.for_margin(0.05).add(0.05)
    second = first.add(0.06)
    assert first.information == second.information[:1]
    assert second.information[1] > second.information[0]


def test_refusals():
    with pytest.raises(ValueError, match="increasing"):
        critical_values([0.5, 0.5], [0.01, 0.02])
    with pytest.raises(ValueError, match="never 0"):
        Monitor.for_margin(0.05).add(0.0)
    with pytest.raises(ValueError, match="at least one"):
        _ = Monitor.for_margin(0.05).critical
