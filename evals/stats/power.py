"""What a suite could have seen: the minimum detectable drop, and how many repeats or items would decide.

The detectable drop at one-sided level alpha and power 1 - beta is (t_{1-alpha} + t_{1-beta}) * SE_d, the usual approximation to the
noncentral t (Miller 2024, section 5; Schuirmann 1987 for the margin form).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from evals.stats.paired import item_means


@dataclass(frozen=True, kw_only=True)
class DifferenceVariance:
    """Variance of one item's difference, split into what repeats average away and what they do not (score units squared)."""

    between_items: float
    within_item: float
    n_items: int
    repeats: int
    split_known: bool  # False with one repeat an item: everything is then booked as `within_item`, the most hopeful reading


@dataclass(frozen=True, kw_only=True)
class TopUp:
    """What would bring the detectable drop down to the allowed one."""

    repeats_total: int | None  # repeats an item in all; None when no number of repeats can
    repeats_more: int | None
    items_total: int  # items needed at the present repeats
    hopeful: bool  # the split was not known, so `repeats_total` is a lower bound


def detection_factor(n_clusters: int, alpha: float = 0.05, power: float = 0.80) -> float:
    """Standard errors a drop must span to be seen: about 2.49 for many clusters, more for few. NaN below two clusters."""
    if n_clusters < 2:
        return float("nan")
    df = n_clusters - 1
    return float(stats.t.ppf(1 - alpha, df) + stats.t.ppf(power, df))


def detectable_drop(se_difference: float, n_clusters: int, alpha: float = 0.05, power: float = 0.80) -> float:
    """Smallest true drop (score units) found with the given power by a one-sided test of level alpha."""
    return detection_factor(n_clusters, alpha, power) * se_difference


def difference_variance(differences_IR: npt.ArrayLike) -> DifferenceVariance:
    """Method-of-moments split of the paired differences [I, R] (NaN: repeat not available)."""
    d_IR = np.asarray(differences_IR, dtype=np.float64)
    d_IR = d_IR[~np.isnan(d_IR).all(axis=1)]
    counts_I = (~np.isnan(d_IR)).sum(axis=1)
    means_I = item_means(d_IR) if len(d_IR) else np.zeros(0)
    n = len(means_I)
    total = float(means_I.var(ddof=1)) if n > 1 else float("nan")
    repeated = counts_I > 1
    if not repeated.any():
        return DifferenceVariance(between_items=0.0, within_item=total, n_items=n, repeats=1, split_known=False)
    within = float(np.nanvar(d_IR[repeated], axis=1, ddof=1).mean())
    repeats = float(1.0 / np.mean(1.0 / counts_I))
    return DifferenceVariance(
        between_items=max(total - within / repeats, 0.0), within_item=within, n_items=n, repeats=round(repeats), split_known=True
    )


def top_up(variance: DifferenceVariance, detectable: float, allowed: float, n_clusters: int, alpha: float = 0.05) -> TopUp | None:
    """Repeats (or items) that would make `detectable` at most `allowed`; None when it already is or nothing was measured."""
    if math.isnan(detectable) or detectable <= allowed:
        return None
    needed = (allowed / detection_factor(n_clusters, alpha)) ** 2 * variance.n_items  # variance of one item's mean that suffices
    items = math.ceil(variance.n_items * (detectable / allowed) ** 2)
    # Scale so that the split describes the same spread as the (clustered, adjusted) standard error behind `detectable`.
    observed = variance.between_items + variance.within_item / variance.repeats
    spread = (detectable / detection_factor(n_clusters, alpha)) ** 2 * variance.n_items
    scale = spread / observed if observed > 0 else 1.0
    between = variance.between_items * scale
    within = variance.within_item * scale if observed > 0 else spread * variance.repeats
    if between >= needed:
        return TopUp(repeats_total=None, repeats_more=None, items_total=items, hopeful=not variance.split_known)
    total = math.ceil(within / (needed - between) - 1e-9)
    return TopUp(
        repeats_total=total,
        repeats_more=max(total - variance.repeats, 1),
        items_total=items,
        hopeful=not variance.split_known,
    )
