"""The gate: statuses that planted situations must get, and the rate at which equal backends pass."""

import numpy as np
import pandas as pd
import pytest

from evals.gate import advice, judge_family, judge_suite, one_standard_error
from evals.pairing import pair_answers
from evals.policy import SuitePolicy
from evals.stats.paired import MeanWithError
from evals.stats.sequential import Monitor
from validation.core.types import Status

POLICY = SuitePolicy(suite="s", delta=0.06)


def answers(scores_IR, *, tokens=50, truncated=False, prompt=lambda i: f"p{i}", cluster=lambda i: str(i), text=None):
    """One side's answers as the table `pair_answers` reads."""
    scores_IR = np.atleast_2d(np.asarray(scores_IR, dtype=float).T).T
    rows = [
        {
            "item": f"{i:04d}",
            "repeat": r,
            "cluster": cluster(i),
            "prompt_hash": prompt(i),
            "score": score,
            "tokens": tokens,
            "truncated": truncated,
            "text": text(i) if text else f"worked answer number {i} of repeat {r} with score {score}",
        }
        for i, row in enumerate(scores_IR)
        for r, score in enumerate(row)
    ]
    return pd.DataFrame(rows)


def gate(stock, candidate, policy=POLICY, **kwargs):
    return judge_suite(pair_answers("s", stock, candidate), policy, **kwargs)


@pytest.fixture
def stock_scores():
    return np.random.default_rng(0).binomial(1, 0.8, size=400).astype(float)


def flipped(scores, lose, win=0, seed=1):
    rng = np.random.default_rng(seed)
    out = scores.copy()
    out[rng.choice(np.flatnonzero(scores == 1), lose, replace=False)] = 0
    out[rng.choice(np.flatnonzero(scores == 0), win, replace=False)] = 1
    return out


def test_identical_backends_pass(stock_scores):
    result = gate(answers(stock_scores), answers(stock_scores))
    assert result.status is Status.PASS, result.reasons
    assert result.reasons == ()
    assert result.one_se.holds
    assert result.difference.mean == 0
    assert result.mcnemar.worse == result.mcnemar.better == 0


def test_a_few_flips_pass(stock_scores):
    assert gate(answers(stock_scores), answers(flipped(stock_scores, 3, 3))).status is Status.PASS


def test_a_planted_drop_fails(stock_scores):
    result = gate(answers(stock_scores), answers(flipped(stock_scores, 40, 4)))
    assert result.status is Status.FAIL
    assert "score drops by 9.00 points" in result.reasons[0]
    assert not result.one_se.holds


def test_a_proven_drop_within_one_se_fails_unless_it_is_below_delta():
    stock = np.array([1.0] * 112 + [0.0] * 113)  # one SE is 7.5 items
    candidate = stock.copy()
    candidate[:7] = 0
    for delta, status in ((0.005, Status.FAIL), (0.08, Status.PASS)):
        result = gate(answers(stock), answers(candidate), SuitePolicy(suite="s", delta=delta))
        assert result.one_se.holds
        assert result.p_drop < 0.0125
        assert result.status is status


def test_one_se_violated_by_chance_is_not_proven_not_failed(stock_scores):
    result = gate(answers(stock_scores), answers(flipped(stock_scores, 14, 4)))
    assert not result.one_se.holds
    assert result.p_drop > 0.0125
    assert result.status is Status.NOT_PROVEN


def test_a_gain_beyond_one_se_is_reported_as_such(stock_scores):
    result = gate(answers(stock_scores), answers(flipped(stock_scores, 0, 40)))
    assert result.status is Status.NOT_PROVEN
    assert any("one standard error" in r for r in result.reasons)


@pytest.mark.parametrize(("score", "word"), [(0.02, "floor"), (0.995, "ceiling")])
def test_floor_and_ceiling_are_not_proven_even_for_identical_backends(score, word):
    scores = (np.arange(400) < 400 * score).astype(float)
    result = gate(answers(scores), answers(scores))
    assert result.status is Status.NOT_PROVEN
    assert any(word in r for r in result.reasons)


def test_a_suite_too_small_to_see_delta_is_not_proven_and_says_what_would_decide():
    scores = np.array([1.0] * 24 + [0.0] * 6)
    result = gate(answers(scores), answers(scores))
    assert result.status is Status.NOT_PROVEN
    assert result.detectable_drop > POLICY.delta
    assert "would decide" in result.reasons[0]
    assert result.top_up is not None
    assert result.top_up.repeats_more >= 1


def test_advice_has_words_for_every_case():
    assert "would not change" in advice(None)


def test_no_pairs_is_not_proven():
    result = gate(answers(np.full(5, np.nan)), answers(np.full(5, np.nan)))
    assert result.status is Status.NOT_PROVEN
    assert "nothing was measured" in result.reasons[0]


def test_a_lost_reply_counts_as_wrong_and_fails(stock_scores):
    lost = stock_scores.copy()
    lost[3] = np.nan
    result = gate(answers(stock_scores), answers(lost))
    assert result.missing_candidate == 1
    assert result.candidate.mean == pytest.approx((stock_scores.sum() - stock_scores[3]) / 400)
    assert result.status is Status.FAIL
    absent = answers(stock_scores).drop(index=3)
    assert gate(answers(stock_scores), absent).missing_candidate == 1


def test_replies_that_stock_lost_leave_the_pairing(stock_scores):
    lost = stock_scores.copy()
    lost[:40] = np.nan
    result = gate(answers(lost), answers(stock_scores))
    assert (result.missing_stock, result.n_items) == (40, 360)
    assert result.status is Status.NOT_PROVEN


def test_items_with_other_prompts_are_never_compared(stock_scores):
    """The same item id may hold another question: without the digest 40 items would be compared with strangers."""
    shuffled = answers(1 - stock_scores, prompt=lambda i: f"p{i}" if i >= 40 else f"other{i}")
    shuffled.loc[40:, "score"] = stock_scores[40:]
    result = gate(answers(stock_scores), shuffled)
    assert result.prompts_differ == 40
    assert result.n_items == 360
    assert result.difference.mean == 0
    assert result.status is Status.NOT_PROVEN


def test_truncated_replies_of_the_candidate_fail_and_of_both_are_not_proven(stock_scores):
    cut = answers(stock_scores)
    cut.loc[:59, "truncated"] = True
    assert gate(answers(stock_scores), cut).status is Status.FAIL
    both = gate(cut, cut)
    assert both.status is Status.NOT_PROVEN
    assert both.truncated_candidate == pytest.approx(0.15)


@pytest.mark.parametrize(("tokens", "status"), [(44, Status.FAIL), (46, Status.PASS), (54, Status.PASS), (56, Status.FAIL)])
def test_token_count_band(stock_scores, tokens, status):
    assert gate(answers(stock_scores), answers(stock_scores, tokens=tokens)).status is status


def test_swapped_answers_are_named(stock_scores):
    def text(i):
        return f"a worked answer to question number {i}"

    swapped = answers(stock_scores, text=text)
    swapped.loc[10, "text"], swapped.loc[11, "text"] = text(11), text(10)
    result = gate(answers(stock_scores, text=text), swapped)
    assert result.swapped == 2
    assert result.status is Status.FAIL
    short = answers(stock_scores, text=lambda i: "The answer is (C)")
    assert gate(short, short).swapped == 0


def test_clusters_widen_the_error():
    rng = np.random.default_rng(2)
    per_cluster = rng.integers(0, 2, size=20)
    stock = np.repeat(per_cluster, 10).astype(float)
    candidate = np.repeat(rng.permutation(per_cluster), 10).astype(float)
    plain = gate(answers(stock), answers(candidate))
    clustered = gate(answers(stock, cluster=lambda i: i // 10), answers(candidate, cluster=lambda i: i // 10))
    assert clustered.difference.se > 2.5 * plain.difference.se
    assert clustered.mcnemar is None


def test_repeated_rows_and_absent_columns_are_refused(stock_scores):
    table = answers(stock_scores)
    with pytest.raises(ValueError, match="more than once"):
        pair_answers("s", pd.concat([table, table.iloc[:1]]), table)
    with pytest.raises(ValueError, match="'truncated' is absent"):
        pair_answers("s", table, table.drop(columns="truncated"))


def test_zero_standard_error_decides_nothing():
    same = MeanWithError(mean=1.0, se=0.0, n_items=10, n_clusters=10)
    assert not one_standard_error(same, same).holds


def test_policy_lists_every_problem_at_once():
    with pytest.raises(ValueError, match=r"delta.*floor.*alpha"):
        SuitePolicy(suite="s", delta=0, floor=0.9, ceiling=0.1, alpha=0.7)


def test_family_adds_holm_to_bonferroni(stock_scores):
    good = gate(answers(stock_scores), answers(stock_scores))
    bad = gate(answers(stock_scores), answers(flipped(stock_scores, 40)))
    assert judge_family([good, good]).status is Status.PASS
    family = judge_family([good, bad])
    assert family.status is Status.FAIL
    assert family.p_drop_holm[1] == pytest.approx(2 * bad.p_drop)
    assert judge_family([]).status is Status.NOT_PROVEN


def test_holm_sees_a_second_drop_that_its_own_suite_could_not_call(stock_scores):
    bad = gate(answers(stock_scores), answers(flipped(stock_scores, 40)))
    weak = gate(answers(stock_scores), answers(flipped(stock_scores, 14, 4)))
    assert weak.status is Status.NOT_PROVEN
    assert weak.p_drop < 0.05
    assert any("Holm" in r for r in judge_family([bad, weak]).reasons)


def test_equal_noisy_backends_never_fail_often_and_real_drops_seldom_pass():
    rng = np.random.default_rng(8)
    policy = SuitePolicy(suite="s", delta=0.06)
    counts = {"equal": [], "worse": []}
    for _ in range(60):
        p = rng.beta(3, 1, size=500)
        stock = rng.binomial(4, p) / 4
        for name, drop in (("equal", 0.0), ("worse", 0.12)):
            candidate = rng.binomial(4, p * (1 - drop)) / 4
            pairs = pair_answers("s", answers(stock), answers(candidate))
            counts[name].append(judge_suite(pairs, policy).status)
    assert counts["equal"].count(Status.FAIL) <= 0.05 * 60
    assert counts["worse"].count(Status.PASS) <= 0.05 * 60
    assert counts["worse"].count(Status.FAIL) >= 0.6 * 60


def test_sequential_looks_use_the_boundary_not_the_fixed_quantile(stock_scores):
    stock, candidate = answers(stock_scores), answers(flipped(stock_scores, 12, 8))
    fixed = gate(stock, candidate)
    monitor = Monitor.for_margin(0.02).add(fixed.difference.se_adjusted)
    early = gate(stock, candidate, monitor=monitor)
    assert early.non_inferiority.lower < fixed.non_inferiority.lower
    assert early.mcnemar is None
    final = gate(stock, candidate, monitor=Monitor.for_margin(0.02).add(fixed.difference.se_adjusted, last=True))
    assert final.non_inferiority.lower == pytest.approx(fixed.non_inferiority.lower, abs=2e-4)
