"""McNemar and Holm against statsmodels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.contingency_tables import mcnemar as reference_mcnemar
from statsmodels.stats.multitest import multipletests

from evals.stats.exact import holm, mcnemar


@pytest.mark.parametrize(("worse", "better"), [(0, 0), (5, 1), (12, 12), (30, 9), (0, 7)])
def test_mcnemar_reproduces_statsmodels(worse, better):
    stock = np.array([1] * worse + [0] * better + [1] * 20 + [0] * 5)
    candidate = np.array([0] * worse + [1] * better + [1] * 20 + [0] * 5)
    result = mcnemar(stock, candidate)
    table = [[20, worse], [better, 5]]
    assert result.p_two_sided == pytest.approx(reference_mcnemar(table, exact=True).pvalue, abs=1e-12)
    assert (result.worse, result.better) == (worse, better)


def test_one_sided_drop_sums_the_binomial_tail():
    result = mcnemar([1] * 8 + [0] * 2, [0] * 8 + [1] * 2)
    tail = sum(__import__("math").comb(10, k) for k in range(8, 11)) / 2**10
    assert result.p_drop == pytest.approx(tail)


def test_mcnemar_refuses_scores_that_are_not_binary():
    with pytest.raises(ValueError, match="binary"):
        mcnemar([0.5, 1.0], [1.0, 1.0])


def test_mcnemar_leaves_nan_pairs_out():
    assert mcnemar([1, np.nan, 1], [0, 0, np.nan]).worse == 1


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_reproduces_statsmodels(p):
    assert holm(p) == pytest.approx(multipletests(p, method="holm")[1])


def test_a_suite_without_a_p_value_enlarges_the_family():
    adjusted = holm([0.01, np.nan, 0.2])
    assert adjusted[0] == pytest.approx(0.03)
    assert np.isnan(adjusted[1])
    assert adjusted[2] == pytest.approx(0.4)


def test_holm_refuses_impossible_p_values():
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        holm([1.5])
