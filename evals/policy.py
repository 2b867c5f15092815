"""The gate's numbers for each suite, from `[limits.evals]` of the policy file; nothing here may be chosen after a run."""

from __future__ import annotations

from evals.gate import SuitePolicy
from validation.core.types import HarnessError
from validation.policy import Policy

# Stock at or below this could not lose much: the guess rate of four choices plus a margin, or next to nothing.
FLOORS = {"gpqa_diamond_nano": 0.35, "gpqa_diamond_cot_zeroshot": 0.35}
DEFAULT_FLOOR = 0.10
CEILING = 0.985


def suite_policy(suite: str, policy: Policy, family: int) -> SuitePolicy:
    """The policy of one suite among `family` suites judged together. Raises HarnessError where the file has no number for it."""
    margins = policy.limits.get("evals", {}).get("margin", {})
    if suite not in margins:
        raise HarnessError(f"policy {policy.name}: got no [limits.evals.margin] {suite}, needs its allowed drop; fix it before the run")
    return SuitePolicy(
        suite=suite,
        delta=float(margins[suite]),
        floor=FLOORS.get(suite, DEFAULT_FLOOR),
        ceiling=CEILING,
        alpha=policy.limit("evals", "alpha"),
        power=policy.limit("evals", "power"),
        family=family,
        max_truncated=policy.limit("evals", "truncation_share_max"),
        token_band=(policy.limit("evals", "token_ratio_min"), policy.limit("evals", "token_ratio_max")),
    )
