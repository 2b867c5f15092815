"""The limits of the evals lane: data, fixed by the policy before a run; `evals.measurements` makes the values they judge."""

from __future__ import annotations

from evals.policy import SuitePolicy
from validation.core.types import Limit

MIN_PATH_SHARE = 0.99  # of the candidate's decode rows; the rest may be steps outside its bounds


def limits_of(policy: SuitePolicy) -> tuple[Limit, ...]:
    """Every limit of a suite, fixed by the policy before the run."""
    points, low, high = f"{100 * policy.delta:g} points", *policy.token_band
    return (
        _limit("one_standard_error", "<=", 1.0, "standard errors", "the rule reviewers know: scores differ by at most one standard error"),
        _limit("proven_drop", "==", 0.0, "share", f"no drop at level {policy.alpha:g}, corrected over {policy.family} suites"),
        _limit("difference_lower_bound", ">", -policy.delta, "share", f"a drop of {points}, the margin of the policy, is excluded"),
        _limit("detectable_drop", "<=", policy.delta, "share", f"a drop of {points} would have been seen with power {policy.power:g}"),
        _limit("stock_in_range", ">", policy.floor, "share", "stock scores above the floor, so that harm could show"),
        _limit("stock_in_range", "<", policy.ceiling, "share", "stock scores below the ceiling, so that harm could show"),
        _limit("paired_share", ">=", policy.min_paired_share, "share", "the items of both sides had equal prompts and replies"),
        _limit("lost_replies", "==", 0.0, "count", "no reply of the candidate is missing or without a score"),
        _limit("swapped_replies", "==", 0.0, "count", "no reply belongs to another item"),
        _limit("stock_truncated_share", "<=", policy.max_truncated, "share", "the limit of new tokens leaves room for stock's replies"),
        _limit("truncated_share", "<=", policy.max_truncated, "share", "the candidate's replies end by themselves, as stock's do"),
        _limit(
            "path_share", ">=", MIN_PATH_SHARE, "share", "the candidate's replies were decoded by the candidate path, not by a fall back"
        ),
        _limit("token_ratio", ">=", low, "1", "replies are as long as stock's (the band of MLPerf inference)"),
        _limit("token_ratio", "<=", high, "1", "replies are as long as stock's (the band of MLPerf inference)"),
    )


def _limit(measurement: str, op: str, bound: float, unit: str, why: str) -> Limit:
    return Limit(measurement=measurement, op=op, bound=bound, unit=unit, why=why)


# All suites together.
FAMILY_LIMITS = (
    _limit("suites_with_a_drop", "==", 0.0, "count", "no suite drops after Holm's correction over all suites"),
    _limit("suites_not_judged", "==", 0.0, "count", "every suite was measured"),
)
