"""Statistics of interleaved timings: medians and ratios with bootstrap intervals, and comparisons of many cells at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests

RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its two-sided interval at `confidence`."""

    value: float
    low: float
    high: float
    n: int
    confidence: float = 0.95

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


def _clean(samples: Sequence[float], what: str) -> np.ndarray:
    array = np.asarray(samples, dtype=float)
    if array.ndim != 1 or array.size < 3 or not np.isfinite(array).all() or (array <= 0).any():
        raise ValueError(f"{what}: got {array.size} samples, needs at least 3 finite positive times; measure again")
    return array


def median_interval(samples: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """The median with its distribution-free interval from order statistics (binomial quantiles; Conover 1999, section 3.2)."""
    ordered = np.sort(_clean(samples, "median"))
    n = ordered.size
    low = int(stats.binom.ppf((1 - confidence) / 2, n, 0.5))
    low_index, high_index = max(low - 1, 0), min(n - low, n - 1)
    return Interval(
        value=float(np.median(ordered)), low=float(ordered[low_index]), high=float(ordered[high_index]), n=n, confidence=confidence
    )


def paired_ratio(stock: Sequence[float], candidate: Sequence[float], *, seed: int = 0, confidence: float = 0.95) -> Interval:
    """Median of stock[i] / candidate[i] over interleaved pairs, with a percentile bootstrap over pairs.

    Pairs, not medians of each side: drift of clocks and temperature hits both members of a pair.

    Raises:
        ValueError: fewer than 3 pairs, sides of different length, or a time that is not finite and positive.
    """
    a, b = _clean(stock, "stock"), _clean(candidate, "candidate")
    if a.size != b.size:
        raise ValueError(f"pairs: got {a.size} stock and {b.size} candidate samples, needs as many of each; interleave them")
    ratios = a / b
    picks = np.random.default_rng(seed).integers(0, a.size, size=(RESAMPLES, a.size))
    medians = np.median(ratios[picks], axis=1)
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(medians, [tail, 100 - tail])
    return Interval(value=float(np.median(ratios)), low=float(low), high=float(high), n=int(a.size), confidence=confidence)


def slowdown_p_value(base: Sequence[float], candidate: Sequence[float], margin: float) -> float:
    """One-sided p-value that the candidate is slower than base by more than `margin` (a share): Mann-Whitney on candidate/(1+margin)."""
    a, b = _clean(base, "base"), _clean(candidate, "candidate")
    return float(stats.mannwhitneyu(b / (1 + margin), a, alternative="greater").pvalue)


def holm(p_values: Sequence[float], alpha: float = 0.05) -> tuple[tuple[bool, ...], tuple[float, ...]]:
    """Holm's step-down over cells: (rejected, adjusted p-values). Source: Holm 1979; computed by statsmodels."""
    if not len(p_values):
        return (), ()
    rejected, adjusted, _, _ = multipletests(list(p_values), alpha=alpha, method="holm")
    return tuple(bool(r) for r in rejected), tuple(float(p) for p in adjusted)
