"""Group-sequential boundaries, so that repeats can be added until the interval decides without inflating the error rate.

Each look k has an information fraction t_k (information is 1/SE^2, so t is independent of how repeats and items share the work). The
statistics have the joint law of Brownian motion seen at t_k; the critical value of look k is chosen so that the error spent up to then is
f(t_k). Sources: K. K. G. Lan and D. L. DeMets, Biometrika 70 (1983) 659 (spending functions); P. C. O'Brien and T. R. Fleming,
Biometrics 35 (1979) 549; S. J. Pocock, Biometrika 64 (1977) 191; P. Armitage, C. K. McPherson and B. C. Rowe, J. R. Stat. Soc. A 132
(1969) 235 (the recursive integration).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

_GRID = 1201  # points of the density of the not-yet-decided paths; the boundaries agree with published tables to 1e-3
_REACH = 8.0  # standard deviations below zero at which that density is cut
_NOTHING = 1e-13  # error too small to spend: the look cannot decide


def spent(fraction: float, alpha: float, spending: str = "obrien_fleming") -> float:
    """Error that may have been spent at information fraction t in [0, 1] of a one-sided level-alpha test."""
    t = min(max(fraction, 0.0), 1.0)
    if t == 0:
        return 0.0
    if spending == "obrien_fleming":
        return float(2 * stats.norm.sf(stats.norm.isf(alpha / 2) / math.sqrt(t)))
    if spending == "pocock":
        return alpha * math.log1p((math.e - 1) * t)
    raise ValueError(f"spending: got {spending!r}, needs 'obrien_fleming' or 'pocock'; fix it in the policy")


def boundaries(fractions: Sequence[float], alpha: float, spending: str = "obrien_fleming") -> tuple[float, ...]:
    """One-sided critical values (standard errors) for looks at increasing information fractions; inf where nothing may be spent yet."""
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha: got {alpha}, needs 0 < alpha < 0.5; 0.05 is the policy's default")
    return critical_values(fractions, [spent(t, alpha, spending) for t in fractions])


def critical_values(information: Sequence[float], spent_by_look: Sequence[float]) -> tuple[float, ...]:
    """Critical values (standard errors) such that the error used up to look k is `spent_by_look[k]`; the unit of information is free."""
    steps = list(itertools.pairwise(information))
    if any(not t > 0 for t in information) or any(b <= a for a, b in steps):
        raise ValueError(f"information: got {list(information)}, needs positive increasing values; merge equal looks")
    critical: list[float] = []
    before, used = 0.0, 0.0
    u: npt.NDArray[np.float64] = np.zeros(1)
    mass: npt.NDArray[np.float64] = np.ones(1)  # probability of each grid point among paths not stopped yet
    for t, total in zip(information, spent_by_look, strict=True):
        sd = math.sqrt(t - before)
        bound = math.inf
        if total - used > _NOTHING:
            bound, used = _solve(u, mass, sd, total - used), total
        critical.append(bound / math.sqrt(t))
        x = np.linspace(-_REACH * math.sqrt(t), min(bound, _REACH * math.sqrt(t)), _GRID)
        density = (stats.norm.pdf((x[:, None] - u[None, :]) / sd) / sd) @ mass
        weights = np.full(_GRID, x[1] - x[0])
        weights[[0, -1]] *= 0.5
        u, mass, before = x, density * weights, t
    return tuple(critical)


def _solve(u: npt.NDArray[np.float64], mass: npt.NDArray[np.float64], sd: float, quota: float) -> float:
    def excess(bound: float) -> float:
        return float(stats.norm.sf((bound - u) / sd) @ mass) - quota

    low, high = float(u.min()) - _REACH * sd, float(u.max()) + 2 * _REACH * sd
    return float(optimize.brentq(excess, low, high, xtol=1e-10))


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """Looks made so far in one suite. `information_max` is 1/SE^2 at which the fixed test would have the wanted power.

    `add` returns a new monitor, so past looks, and the error they spent, cannot be rewritten.
    """

    alpha: float
    information_max: float
    spending: str = "obrien_fleming"
    information: tuple[float, ...] = ()
    spent: tuple[float, ...] = ()  # cumulative, one entry a look

    @staticmethod
    def for_margin(delta: float, alpha: float = 0.05, power: float = 0.80, spending: str = "obrien_fleming") -> Monitor:
        """Plan the information that a one-sided test needs to see a drop of `delta` (score units)."""
        if not delta > 0:
            raise ValueError(f"delta: got {delta}, needs a positive allowed drop; fix it in the policy before the run")
        z = float(stats.norm.isf(alpha) + stats.norm.ppf(power))
        return Monitor(alpha=alpha, information_max=(z / delta) ** 2, spending=spending)

    def add(self, se: float, *, last: bool = False) -> Monitor:
        """Record a look with standard error `se` (score units). `last` spends everything that is left: the budget ends here."""
        if not se > 0:
            raise ValueError(f"standard error: got {se}, needs a positive number; use the adjusted one, which is never 0")
        if self.exhausted:
            raise ValueError(f"looks: got one more after all of alpha {self.alpha} was spent, needs none; start a new run for new evidence")
        information = 1.0 / se**2
        if self.information and information <= self.information[-1]:
            information = self.information[-1] * (1 + 1e-6)  # an SE estimate may grow by chance; information does not shrink
        due = self.alpha if last else spent(information / self.information_max, self.alpha, self.spending)
        total = max(due, self.spent[-1] if self.spent else 0.0)
        return replace(self, information=(*self.information, information), spent=(*self.spent, total))

    @property
    def fraction(self) -> float:
        """Information of the latest look over the planned maximum, at most 1; 0 before the first look."""
        return min(self.information[-1] / self.information_max, 1.0) if self.information else 0.0

    @property
    def exhausted(self) -> bool:
        """True when all of alpha was spent: no further look is allowed."""
        return bool(self.spent) and self.spent[-1] >= self.alpha * (1 - 1e-12)

    @property
    def critical(self) -> float:
        """Critical value (standard errors) of the latest look."""
        if not self.information:
            raise ValueError("looks: got none, needs at least one; add a look first")
        return critical_values(self.information, self.spent)[-1]
