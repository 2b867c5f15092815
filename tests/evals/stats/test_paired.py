"""Paired statistics against scipy, statsmodels and closed forms."""

import numpy as np
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from evals.stats.paired import clustered_se, item_means, mean_with_error, non_inferiority, paired_difference


def _scores(seed, items=60, repeats=1, p=0.7):
    rng = np.random.default_rng(seed)
    return rng.binomial(1, p, size=(items, repeats)).astype(float)


def test_single_items_reproduce_scipy_sem_and_paired_t():
    stock, candidate = _scores(0, 120), _scores(1, 120)
    result = paired_difference(stock, candidate)
    assert mean_with_error(stock).se == pytest.approx(stats.sem(stock[:, 0]), rel=1e-12)
    assert result.se == pytest.approx(stats.sem((candidate - stock)[:, 0]), rel=1e-12)
    t = stats.ttest_rel(candidate[:, 0], stock[:, 0]).statistic
    assert result.mean / result.se == pytest.approx(t, rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_clusters_reproduce_statsmodels_cluster_robust_error(seed):
    rng = np.random.default_rng(seed)
    codes = np.sort(rng.integers(0, 14, size=90))
    codes = np.unique(codes, return_inverse=True)[1]
    values = rng.normal(size=90) + rng.normal(size=14)[codes]
    fit = sm.OLS(values, np.ones(90)).fit(cov_type="cluster", cov_kwds={"groups": codes})
    assert clustered_se(values, codes) == pytest.approx(float(fit.bse[0]), rel=1e-9)


def test_ignoring_clusters_of_identical_items_would_understate_the_error():
    values = np.repeat(np.random.default_rng(3).normal(size=20), 5)
    codes = np.repeat(np.arange(20), 5)
    assert clustered_se(values, codes) == pytest.approx(stats.sem(values[::5]), rel=1e-12)
    assert clustered_se(values, codes) > 2 * clustered_se(values, np.arange(100))


def test_repeats_are_averaged_inside_the_item_not_counted_as_items():
    once = _scores(5, 40)
    copied = np.repeat(once, 8, axis=1)
    assert mean_with_error(copied).se == pytest.approx(mean_with_error(once).se, rel=1e-12)
    assert mean_with_error(copied).n_items == 40


@pytest.mark.parametrize(("worse", "better", "n"), [(0, 0, 198), (3, 1, 198), (10, 2, 40), (0, 5, 30)])
def test_binary_runs_reproduce_bonett_and_price(worse, better, n):
    stock, candidate = np.zeros((n, 1)), np.zeros((n, 1))
    stock[:worse] = 1
    candidate[worse : worse + better] = 1
    result = paired_difference(stock, candidate)
    p12, p21 = (better + 1) / (n + 2), (worse + 1) / (n + 2)
    assert result.mean_adjusted == pytest.approx(p12 - p21, abs=1e-12)
    assert result.se_adjusted == pytest.approx(np.sqrt((p12 + p21 - (p12 - p21) ** 2) / (n + 2)), rel=1e-12)


def test_unmoved_items_still_have_an_error():
    same = _scores(7, 100)
    result = paired_difference(same, same)
    assert result.se == 0
    assert result.se_adjusted > 0
    assert result.mean_adjusted == 0


def test_non_inferiority_matches_scipy_one_sided_t_for_many_moving_items():
    rng = np.random.default_rng(11)
    stock, candidate = rng.uniform(size=(4000, 1)), rng.uniform(size=(4000, 1))
    result = non_inferiority(paired_difference(stock, candidate), delta=0.03)
    shifted = stats.ttest_1samp((candidate - stock)[:, 0], -0.03, alternative="greater")
    dropped = stats.ttest_1samp((candidate - stock)[:, 0], 0.0, alternative="less")
    assert result.p_value == pytest.approx(shifted.pvalue, rel=0.03)
    assert result.p_drop == pytest.approx(dropped.pvalue, rel=0.03)
    assert result.proven == bool(result.p_value < 0.05)


def test_non_inferiority_keeps_its_error_rate_when_the_drop_is_exactly_delta():
    rng = np.random.default_rng(12)
    proven = 0
    for _ in range(1500):
        # 300 items; 8 % lost and 3 % won, so the true drop is 0.05 = delta
        u = rng.uniform(size=(300, 1))
        stock, candidate = ((u < 0.08) | (u > 0.5)).astype(float), (((u >= 0.08) & (u < 0.11)) | (u > 0.5)).astype(float)
        proven += non_inferiority(paired_difference(stock, candidate), delta=0.05).proven
    assert proven / 1500 <= 0.07


def test_nan_is_no_evidence():
    stock = np.full((4, 2), np.nan)
    result = paired_difference(stock, stock)
    assert result.n_items == 0
    assert not non_inferiority(result, delta=0.5).proven
    assert np.isnan(mean_with_error(stock).mean)


def test_missing_repeats_leave_the_pair_not_the_item():
    stock = np.array([[1.0, 0.0], [1.0, np.nan]])
    candidate = np.array([[1.0, 1.0], [0.0, 1.0]])
    assert paired_difference(stock, candidate).mean == pytest.approx((0.5 - 1.0) / 2)
    assert item_means(np.array([[np.nan, np.nan], [1.0, np.nan]])).tolist()[1] == 1.0


def test_bad_input_is_one_clear_error():
    with pytest.raises(ValueError, match="outside"):
        mean_with_error(np.array([[2.0]]))
    with pytest.raises(ValueError, match="equal shapes"):
        paired_difference(np.zeros((3, 1)), np.zeros((4, 1)))
    with pytest.raises(ValueError, match="positive allowed drop"):
        non_inferiority(paired_difference(np.zeros((3, 1)), np.zeros((3, 1))), delta=0.0)
    with pytest.raises(ValueError, match="one cluster label"):
        mean_with_error(np.zeros((3, 1)), clusters=[1, 2])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=40))
def test_swapping_the_sides_flips_the_sign_only(pairs):
    stock, candidate = (np.array([[p[i] / 4] for p in pairs]) for i in (0, 1))
    a, b = paired_difference(stock, candidate), paired_difference(candidate, stock)
    assert a.mean == pytest.approx(-b.mean)
    assert a.se == pytest.approx(b.se)
    assert a.se_adjusted == pytest.approx(b.se_adjusted)
