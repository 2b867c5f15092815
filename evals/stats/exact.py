"""Exact McNemar for single binary runs, and Holm's correction over suites.

Sources: Q. McNemar, Psychometrika 12 (1947) 153; T. G. Dietterich, Neural Computation 10 (1998) 1895 (its use for two classifiers on one
test set); S. Holm, Scand. J. Stat. 6 (1979) 65.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats


@dataclass(frozen=True, kw_only=True)
class McNemar:
    """Items that changed sides. `worse` were right under stock only; `better` under the candidate only."""

    worse: int
    better: int
    p_two_sided: float
    p_drop: float  # one-sided: H0 "losing is not more likely than gaining"


def mcnemar(stock_I: npt.ArrayLike, candidate_I: npt.ArrayLike) -> McNemar:
    """Exact test over the discordant pairs; both arrays [I] hold 0 or 1, and pairs with NaN are left out."""
    stock, candidate = np.asarray(stock_I, dtype=float), np.asarray(candidate_I, dtype=float)
    keep = ~np.isnan(stock) & ~np.isnan(candidate)
    stock, candidate = stock[keep], candidate[keep]
    for what, values in (("stock", stock), ("candidate", candidate)):
        if not np.isin(values, (0.0, 1.0)).all():
            raise ValueError(f"{what} scores: got values other than 0 and 1, needs binary scores; use the paired difference instead")
    worse = int(((stock == 1) & (candidate == 0)).sum())
    better = int(((stock == 0) & (candidate == 1)).sum())
    flips = worse + better
    if flips == 0:
        return McNemar(worse=0, better=0, p_two_sided=1.0, p_drop=1.0)
    return McNemar(
        worse=worse,
        better=better,
        p_two_sided=float(stats.binomtest(worse, flips, 0.5).pvalue),
        p_drop=float(stats.binomtest(worse, flips, 0.5, alternative="greater").pvalue),
    )


def holm(p_values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Adjusted p-values in the order given. A NaN counts as a test that was made (it enlarges the family) and stays NaN."""
    p = np.asarray(p_values, dtype=float)
    if ((p < 0) | (p > 1)).any():
        raise ValueError(f"p-values: got {p.tolist()}, needs values in [0, 1]; check the tests that made them")
    order = np.argsort(p)  # NaN sorts last
    factors = len(p) - np.arange(len(p))
    stepped = np.minimum(p[order] * factors, 1.0)
    adjusted = np.full(len(p), np.nan)
    known = ~np.isnan(stepped)
    adjusted[order[known]] = np.maximum.accumulate(stepped[known])
    return adjusted
