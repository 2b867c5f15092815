"""The gate's numbers for each suite, from `[limits.evals]` of the policy file; nothing here may be chosen after a run.

Light on purpose: the planning process imports it, and loads neither numpy nor lm-eval.
"""

from __future__ import annotations

from dataclasses import dataclass

from validation.core.types import HarnessError
from validation.policy import Policy

# Stock at or below this could not lose much: the guess rate of four choices plus a margin, or next to nothing.
FLOORS = {"gpqa_diamond_nano": 0.35, "gpqa_diamond_cot_zeroshot": 0.35}
DEFAULT_FLOOR = 0.10
CEILING = 0.985


@dataclass(frozen=True, kw_only=True)
class SuitePolicy:
    """What is decided before the run. Scores, shares and `delta` are fractions of one (0.02 is two points)."""

    suite: str
    delta: float  # allowed drop
    floor: float = 0.05  # stock at or below this cannot show harm (use the guess rate plus a margin for multiple choice)
    ceiling: float = 0.985  # stock at or above this cannot show much
    alpha: float = 0.05  # one-sided
    power: float = 0.80
    family: int = 4  # suites that are tested for a drop together
    max_truncated: float = 0.05
    token_band: tuple[float, float] = (0.90, 1.10)
    min_paired_share: float = 0.98

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.delta < 1:
            problems.append(f"delta {self.delta} (0 < delta < 1)")
        if not 0 <= self.floor < self.ceiling <= 1:
            problems.append(f"floor and ceiling {self.floor}, {self.ceiling} (0 <= floor < ceiling <= 1)")
        if not 0 < self.alpha < 0.5 or not 0.5 <= self.power < 1:
            problems.append(f"alpha and power {self.alpha}, {self.power} (0 < alpha < 0.5 <= power < 1)")
        if self.family < 1:
            problems.append(f"family {self.family} (>= 1)")
        if not 0 < self.token_band[0] < 1 < self.token_band[1]:
            problems.append(f"token_band {self.token_band} (below and above 1)")
        if problems:
            raise ValueError(f"gate policy of {self.suite}: got {'; '.join(problems)}; correct the policy file")


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
