"""Token errors, ratios and drift against closed forms and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from validation.numerics.errors import (
    Slope,
    concatenate,
    drift,
    geometric_mean,
    largest,
    ratio,
    ratio_low,
    root_mean_square,
    slope,
    token_errors,
    worst_tokens,
)


def logits(n=50, vocab=100, seed=0):
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def test_errors_of_one_token_by_hand():
    oracle = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    path = torch.tensor([[1.0, 2.0, 0.0]], dtype=torch.float64)
    total = math.log(math.exp(2) + math.exp(1) + 1)
    found = token_errors(oracle, path, top=2)
    probability = [math.exp(2 - total), math.exp(1 - total)]
    assert float(found.kl) == pytest.approx(probability[0] * 1 + probability[1] * -1)
    assert float(found.rms) == pytest.approx(1.0)  # -1 and +1 on the two most likely tokens
    assert float(found.largest) == pytest.approx(1.0)
    assert not bool(found.agrees)
    assert float(found.margin) == pytest.approx(1.0)
    assert float(found.lead_lost) == pytest.approx(1.0)


def test_kl_is_scipys():
    oracle, path = logits(), logits(seed=1)
    expected = stats.entropy(torch.softmax(oracle, -1).numpy(), torch.softmax(path, -1).numpy(), axis=-1)
    np.testing.assert_allclose(token_errors(oracle, path).kl.numpy(), expected, rtol=1e-10)


def test_a_constant_shift_of_logits_is_no_error():
    oracle = logits()
    found = token_errors(oracle, oracle + 7.5)
    assert root_mean_square(found.rms) < 1e-12
    assert bool(found.agrees.all())
    assert largest(found.lead_lost) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_logit_is_never_small(bad):
    oracle = logits()
    path = oracle.clone()
    path[3, 99] = bad
    found = token_errors(oracle, path)
    assert found.non_finite == 1
    assert math.isnan(root_mean_square(found.rms))
    assert math.isnan(largest(found.largest))
    assert math.isnan(float(found.kl.mean()))
    assert not bool(found.agrees[3])
    assert worst_tokens(found, [65] * 60, list(range(50)), count=1)[0]["position"] == 3


def test_ratio_has_no_loophole():
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(0.0, 0.0) == 1.0
    assert ratio(1e-30, 0.0) == math.inf
    assert math.isnan(ratio(math.nan, 1.0))
    assert math.isnan(ratio(1.0, math.nan))
    assert math.isnan(ratio(math.nan, 0.0))


def test_nothing_measured_is_nan():
    empty = torch.zeros(0)
    assert math.isnan(root_mean_square(empty))
    assert math.isnan(largest(empty))


def test_the_geometric_mean_is_scipys():
    values = torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert geometric_mean(values) == pytest.approx(float(stats.gmean(values.numpy())))
    assert geometric_mean(torch.tensor([1.0, 0.0])) == 0.0
    assert math.isnan(geometric_mean(torch.tensor([1.0, math.nan])))
    assert math.isnan(geometric_mean(torch.zeros(0)))


def test_the_low_end_of_a_ratio():
    """Against scipy's paired bootstrap; one outlier alone does not lift it, a factor on all tokens does."""
    generator = torch.Generator().manual_seed(2)
    stock = torch.rand(80, generator=generator, dtype=torch.float64) + 0.5
    candidate = stock * (1 + 0.3 * torch.randn(80, generator=generator, dtype=torch.float64)).abs()

    def statistic(c, s, axis):
        return c.sum(axis) / s.sum(axis)

    sample = (candidate.numpy(), stock.numpy())
    expected = stats.bootstrap(sample, statistic, paired=True, method="percentile", rng=np.random.default_rng(0))
    assert ratio_low(candidate, stock) == pytest.approx(expected.confidence_interval.low, abs=0.02)
    assert ratio_low(2 * candidate, stock) == pytest.approx(2 * ratio_low(candidate, stock))
    assert ratio_low(stock, stock) == 1.0
    outlier = stock.clone()
    outlier[0] = 1e3
    assert ratio_low(outlier, stock) < 1.5
    assert math.isnan(ratio_low(torch.tensor([math.nan, 1.0]), torch.ones(2)))
    assert math.isnan(ratio_low(torch.zeros(0), torch.zeros(0)))


def test_slope_is_scipys_with_its_interval():
    generator = np.random.default_rng(0)
    x = generator.normal(size=40)
    y = 0.3 * x + generator.normal(size=40)
    fit = stats.linregress(x, y)
    half = stats.t.ppf(0.975, 38) * fit.stderr
    found = slope(x.tolist(), y.tolist())
    assert (found.value, found.low, found.high) == pytest.approx((fit.slope, fit.slope - half, fit.slope + half))


@pytest.mark.parametrize(("x", "y"), [([1, 2], [1, 2]), ([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [1, math.nan, 2]), ([], [])])
def test_a_slope_of_nothing_is_nan(x, y):
    assert all(map(math.isnan, vars_of(slope(x, y))))


def vars_of(found: Slope):
    return found.value, found.low, found.high


def test_drift_sees_a_candidate_that_ages():
    positions = [1024 * 2**i for i in range(6) for _ in range(40)]
    oracle = logits(len(positions))
    noise = torch.randn(oracle.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    doublings = torch.log2(torch.tensor(positions, dtype=torch.float64)).unsqueeze(-1) - 10
    other = torch.randn(oracle.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    stock = token_errors(oracle, oracle + 0.01 * noise)
    steady = drift(positions, token_errors(oracle, oracle + 0.01 * other), stock)
    ageing = drift(positions, token_errors(oracle, oracle + 0.01 * torch.exp(0.2 * doublings) * other), stock)
    assert abs(steady.value) < 0.03
    assert ageing.value == pytest.approx(0.2, abs=0.03)
    assert ageing.low > 0.15
    same = drift(positions, stock, stock)
    assert vars_of(same) == pytest.approx((0.0, 0.0, 0.0), abs=1e-12)


def test_concatenation_keeps_every_token():
    a, b = token_errors(logits(5), logits(5, seed=1)), token_errors(logits(7, seed=2), logits(7, seed=3))
    joined = concatenate([a, b])
    assert joined.rms.tolist() == a.rms.tolist() + b.rms.tolist()
    assert joined.non_finite == 0
