"""The gate of one eval suite, and of all of them together.

Reviewers know one rule: |score(candidate) - score(stock)| <= one standard error of the score. It is reported as they expect it. Alone it
fails equal backends up to 48 % of the time and lets real drops through, so a verdict also needs what makes it honest: pairing by item,
non-inferiority against a drop fixed beforehand, the smallest drop that could have been seen, truncation, token counts and lost replies.

    pass        one-SE rule holds, a drop of delta is excluded, and a drop of delta could have been seen
    fail        a drop is proven (Holm or Bonferroni over suites) and is not both below delta and within one SE; or replies were lost,
                swapped, cut off or changed in length
    not_proven  everything else, with what would decide it

The claim "no suite dropped by delta" needs every suite's test to succeed, so those tests need no correction (an intersection-union test,
R. L. Berger, Technometrics 24 (1982) 295); the claim "some suite dropped" does, and gets Holm's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from evals.pairing import PairedAnswers
from evals.policy import SuitePolicy
from evals.stats.exact import McNemar, holm, mcnemar
from evals.stats.paired import MeanWithError, NonInferiority, PairedDifference, mean_with_error, non_inferiority, paired_difference
from evals.stats.power import TopUp, detectable_drop, difference_variance, top_up
from evals.stats.sequential import Monitor
from validation.core.types import Status


@dataclass(frozen=True, kw_only=True)
class OneStandardError:
    """The rule as reviewers know it; `ratio` is |difference| over the standard error of stock's score (NaN when that is 0)."""

    difference: float
    se: float
    ratio: float
    holds: bool


@dataclass(frozen=True, kw_only=True)
class SuiteGate:
    """Everything measured on one suite, and the status that follows. `reasons` explain a status other than pass."""

    suite: str
    policy: SuitePolicy
    n_items: int
    n_repeats: int
    stock: MeanWithError
    candidate: MeanWithError
    one_se: OneStandardError
    difference: PairedDifference
    non_inferiority: NonInferiority
    mcnemar: McNemar | None  # only for one binary run an item
    p_drop: float  # exact McNemar where it applies, else the paired t test; not corrected
    detectable_drop: float
    top_up: TopUp | None
    truncated_stock: float
    truncated_candidate: float
    p_truncated: float  # exact one-sided test: H0 "the candidate is not cut off more often"
    token_ratio: float
    paired_share: float
    prompts_differ: int
    missing_stock: int
    missing_candidate: int
    swapped: int
    looks: int
    drop_proven: bool = False  # at level alpha / family
    status: Status = Status.NOT_PROVEN
    reasons: tuple[str, ...] = ()

    @property
    def harmful(self) -> bool:
        """A proven drop that is not both below delta and within one standard error."""
        return self.drop_proven and not self.small

    @property
    def small(self) -> bool:
        return self.non_inferiority.proven and self.one_se.holds

    @property
    def cut_off(self) -> bool:
        """The candidate's replies hit the token limit too often, and provably more often than stock's."""
        return self.truncated_candidate > self.policy.max_truncated and self.p_truncated < self.policy.alpha / self.policy.family


@dataclass(frozen=True, kw_only=True)
class FamilyGate:
    """All suites together; `p_drop_holm` is in the order of `suites`, `dropped` names those with a harmful drop after correction."""

    suites: tuple[str, ...]
    p_drop_holm: tuple[float, ...]
    dropped: tuple[str, ...]
    status: Status
    reasons: tuple[str, ...]


def one_standard_error(stock: MeanWithError, candidate: MeanWithError) -> OneStandardError:
    """The one-SE rule over the same items; a standard error of 0 or NaN decides nothing, so it does not hold."""
    difference = candidate.mean - stock.mean
    ratio = abs(difference) / stock.se if stock.se > 0 else float("nan")
    return OneStandardError(difference=difference, se=stock.se, ratio=ratio, holds=bool(ratio <= 1.0))


def judge_suite(pairs: PairedAnswers, policy: SuitePolicy, monitor: Monitor | None = None) -> SuiteGate:
    """Apply the gate to one suite's pairs. `monitor` (with this look added) supplies the critical value when looks are repeated."""
    stock = mean_with_error(pairs.stock, pairs.clusters)
    candidate = mean_with_error(pairs.candidate, pairs.clusters)
    difference = paired_difference(pairs.stock, pairs.candidate, pairs.clusters)
    critical = monitor.critical if monitor is not None else None
    test = non_inferiority(difference, policy.delta, policy.alpha, critical)
    exact = _exact_test(pairs) if monitor is None else None
    detectable = detectable_drop(difference.se_adjusted, difference.n_clusters, policy.alpha, policy.power)
    variance = difference_variance(pairs.candidate - pairs.stock)
    measured = {
        "one_se": one_standard_error(stock, candidate),
        "difference": difference,
        "non_inferiority": test,
        "p_drop": exact.p_drop if exact is not None else test.p_drop,
        "detectable_drop": detectable,
        "top_up": top_up(variance, detectable, policy.delta, difference.n_clusters, policy.alpha),
        "truncated_stock": pairs.truncated_share("stock"),
        "truncated_candidate": pairs.truncated_share("candidate"),
        "p_truncated": mcnemar(1 - pairs.truncated_flags("stock"), 1 - pairs.truncated_flags("candidate")).p_drop,
        "token_ratio": pairs.token_ratio,
        "paired_share": pairs.paired_share,
    }
    draft = SuiteGate(
        suite=pairs.suite,
        policy=policy,
        n_items=difference.n_items,
        n_repeats=pairs.stock.shape[1] if pairs.stock.ndim == 2 else 0,
        stock=stock,
        candidate=candidate,
        mcnemar=exact,
        prompts_differ=pairs.prompts_differ,
        missing_stock=pairs.missing_stock,
        missing_candidate=pairs.missing_candidate,
        swapped=pairs.swapped,
        looks=len(monitor.information) if monitor is not None else 1,
        **measured,  # type: ignore[arg-type]
    )
    return decide(replace(draft, drop_proven=_drop_proven(draft, monitor)))


def _exact_test(pairs: PairedAnswers) -> McNemar | None:
    """McNemar where it is exact: one binary run an item and no cluster of several items."""
    single = pairs.stock.ndim == 2 and pairs.stock.shape[1] == 1
    values = np.concatenate([pairs.stock.ravel(), pairs.candidate.ravel()])
    values = values[~np.isnan(values)]
    independent = len(np.unique(pairs.clusters)) == len(pairs.clusters)
    if not single or not independent or len(values) == 0 or not np.isin(values, (0.0, 1.0)).all():
        return None
    return mcnemar(pairs.stock[:, 0], pairs.candidate[:, 0])


def _drop_proven(gate: SuiteGate, monitor: Monitor | None) -> bool:
    """A drop at level alpha / family: Bonferroni, so that it stands whatever the other suites say (Holm can only add to it)."""
    level = gate.policy.alpha / gate.policy.family
    if monitor is None:
        return bool(gate.p_drop < level)
    strict = Monitor(
        alpha=level,
        information_max=monitor.information_max,
        spending=monitor.spending,
        information=monitor.information,
        spent=tuple(s * level / monitor.alpha for s in monitor.spent),
    )
    return bool(gate.difference.mean_adjusted < -strict.critical * gate.difference.se_adjusted)


def decide(gate: SuiteGate) -> SuiteGate:
    """Give `gate` the status and reasons that follow from what was measured."""
    failures = _failures(gate)
    gaps = _gaps(gate)
    status = Status.FAIL if failures else Status.NOT_PROVEN if gaps else Status.PASS
    return replace(gate, status=status, reasons=tuple([*failures, *gaps]))


def points(share: float) -> str:
    """A share as points of score, signed where it is a difference."""
    return f"{100 * share:.2f} points"


def _failures(gate: SuiteGate) -> list[str]:
    policy, reasons = gate.policy, []
    if gate.harmful:
        reasons.append(f"score drops by {points(-gate.difference.mean)} (p = {gate.p_drop:.2g}, uncorrected over {policy.family} suites)")
    if gate.missing_candidate > 0:
        reasons.append(f"{gate.missing_candidate} replies of the candidate are missing or have no score (stock has them)")
    if gate.swapped > 0:
        reasons.append(f"{gate.swapped} replies of the candidate are stock's replies to another item: swapped between requests")
    if gate.cut_off:
        shares = f"{gate.truncated_candidate:.1%} of the candidate's and {gate.truncated_stock:.1%} of stock's"
        reasons.append(f"{shares} replies hit the token limit")
    low, high = policy.token_band
    if not math.isnan(gate.token_ratio) and not low <= gate.token_ratio <= high:
        reasons.append(f"the candidate writes {gate.token_ratio:.1%} of stock's tokens, outside {low:.0%} to {high:.0%}")
    return reasons


def _gaps(gate: SuiteGate) -> list[str]:
    policy, reasons = gate.policy, []
    if gate.n_items == 0 or math.isnan(gate.difference.se_adjusted):
        return ["no pairs to compare: nothing was measured"]
    if not gate.paired_share >= policy.min_paired_share:
        lost = f"{gate.prompts_differ} prompts differ, {gate.missing_stock} stock and {gate.missing_candidate} candidate replies missing"
        reasons.append(f"only {gate.paired_share:.1%} of the items form pairs ({lost})")
    if gate.stock.mean <= policy.floor:
        reasons.append(f"stock scores {gate.stock.mean:.3f}, at the floor {policy.floor}: harm could not show")
    if gate.stock.mean >= policy.ceiling:
        reasons.append(f"stock scores {gate.stock.mean:.3f}, at the ceiling {policy.ceiling}: the suite is too easy to tell")
    if gate.truncated_candidate > policy.max_truncated and not gate.cut_off:
        reasons.append(
            f"{gate.truncated_candidate:.1%} of the candidate's replies hit the token limit, more than stock's but not provably so"
        )
    if gate.truncated_stock > policy.max_truncated:
        reasons.append(f"{gate.truncated_stock:.1%} of stock's replies hit the token limit: the limit is measured, not the model")
    if not gate.detectable_drop <= policy.delta:
        reasons.append(
            f"smallest detectable drop {points(gate.detectable_drop)} exceeds the allowed {points(policy.delta)}; {advice(gate.top_up)}"
        )
    elif not gate.non_inferiority.proven:
        reasons.append(f"a drop of {points(policy.delta)} is not excluded (lower bound {points(gate.non_inferiority.lower)})")
    if math.isnan(gate.one_se.ratio):
        reasons.append("all items score alike on stock: one standard error is 0 and says nothing")
    elif not gate.one_se.holds:
        reasons.append(f"difference {points(gate.one_se.difference)} exceeds one standard error {points(gate.one_se.se)}, as chance can")
    return reasons


def advice(needed: TopUp | None) -> str:
    """What would decide, in words."""
    if needed is None:
        return "more data would not change this"
    if needed.repeats_total is None:
        return f"items differ too much for repeats to help: about {needed.items_total} items would decide"
    least = "at least " if needed.hopeful else ""
    return f"{least}{needed.repeats_more} more sampled repeats an item, or {needed.items_total} items, would decide"


def judge_family(gates: Sequence[SuiteGate]) -> FamilyGate:
    """All suites: pass only if each passes; a Holm-corrected drop fails even where the suite's own Bonferroni test did not."""
    adjusted = holm([gate.p_drop for gate in gates])
    reasons, dropped = [], []
    for gate, p in zip(gates, adjusted, strict=True):
        if gate.harmful or (p < gate.policy.alpha and not gate.small):
            dropped.append(gate.suite)
            if not gate.harmful:
                reasons.append(f"{gate.suite}: score drops by {points(-gate.difference.mean)} (Holm p = {p:.2g})")
        reasons.extend(f"{gate.suite}: {reason}" for reason in gate.reasons)
    failed = bool(dropped) or any(gate.status is Status.FAIL for gate in gates)
    passed = bool(gates) and all(gate.status is Status.PASS for gate in gates)
    return FamilyGate(
        suites=tuple(gate.suite for gate in gates),
        p_drop_holm=tuple(float(p) for p in adjusted),
        dropped=tuple(dropped),
        status=Status.FAIL if failed else Status.PASS if passed else Status.NOT_PROVEN,
        reasons=tuple(reasons),
    )
