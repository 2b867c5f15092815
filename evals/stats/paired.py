"""Scores of two backends on the same items: means, standard errors and non-inferiority.

Axes: `I` items, `R` repeats of an item. A score lies in [0, 1]; NaN marks a repeat that was not asked or has no score.

Sources: E. Miller, "Adding Error Bars to Evals", arXiv 2411.00640 (paired and clustered standard errors); D. G. Bonett and R. M. Price,
"Adjusted Wald confidence interval for a difference of binomial proportions based on paired data", J. Educ. Behav. Stat. 37 (2012) 479
(one pseudo-flip each way); D. J. Schuirmann, J. Pharmacokinet. Biopharm. 15 (1987) 657 (one-sided tests against a margin).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class MeanWithError:
    """Mean of item scores with its standard error (NaN where fewer than two clusters exist) and the number of independent units."""

    mean: float
    se: float
    n_items: int
    n_clusters: int


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """candidate - stock over shared items. All values are score units (0.01 is one point)."""

    mean: float
    se: float  # cluster-robust, from the observed differences alone: 0 when no item moved
    se_adjusted: float  # with one pseudo-flip each way: never 0, the honest spread when few or no items moved
    mean_adjusted: float  # shrunk by the two pseudo-flips, as Bonett and Price do
    correlation: float  # of item scores; NaN when one side is constant
    n_items: int
    n_clusters: int


@dataclass(frozen=True, kw_only=True)
class NonInferiority:
    """One-sided test of H0: candidate <= stock - delta. `lower` is the one-sided (1 - alpha) bound of the difference."""

    delta: float
    alpha: float
    lower: float
    upper: float  # one-sided (1 - alpha) bound from above: below 0 is a proven drop
    p_value: float  # of H0 "a drop of delta or more"
    p_drop: float  # of H0 "no drop"
    proven: bool  # lower > -delta


def item_means(scores_IR: Floats) -> Floats:
    """Average the repeats inside each item: [I, R] -> [I]; an item with no score stays NaN."""
    known_IR = ~np.isnan(scores_IR)
    count_I = known_IR.sum(axis=1)
    total_I = np.where(known_IR, scores_IR, 0.0).sum(axis=1)
    return np.where(count_I > 0, total_I / np.maximum(count_I, 1), np.nan)


def _codes(clusters: npt.ArrayLike | None, n: int) -> Ints:
    if clusters is None:
        return np.arange(n, dtype=np.int64)
    labels = np.asarray(clusters)
    if labels.shape != (n,):
        raise ValueError(f"clusters: got shape {labels.shape}, needs ({n},); give one cluster label an item")
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def clustered_se(values_I: Floats, codes_I: Ints) -> float:
    """Standard error of the mean of `values_I` when items of one cluster move together; NaN with fewer than two clusters.

    sqrt(G/(G-1) * sum_g (sum of residuals in g)^2) / n, which for clusters of one item is the ordinary sd/sqrt(n).
    """
    n, groups = len(values_I), int(codes_I.max(initial=-1)) + 1
    if groups < 2:
        return float("nan")
    sums_G = np.bincount(codes_I, weights=values_I - values_I.mean(), minlength=groups)
    return float(np.sqrt(groups / (groups - 1) * np.square(sums_G).sum()) / n)


def mean_with_error(scores_IR: Floats, clusters: npt.ArrayLike | None = None) -> MeanWithError:
    """Score of one backend: repeats averaged inside items, then clustered over `clusters` (default: each item its own)."""
    means_I = item_means(_matrix("scores", scores_IR))
    keep_I = ~np.isnan(means_I)
    codes_I = _codes(clusters, len(means_I))[keep_I]
    codes_I = np.unique(codes_I, return_inverse=True)[1].astype(np.int64)
    values_I = means_I[keep_I]
    if len(values_I) == 0:
        return MeanWithError(mean=float("nan"), se=float("nan"), n_items=0, n_clusters=0)
    return MeanWithError(
        mean=float(values_I.mean()),
        se=clustered_se(values_I, codes_I),
        n_items=len(values_I),
        n_clusters=int(codes_I.max()) + 1,
    )


def _matrix(what: str, scores_IR: npt.ArrayLike) -> Floats:
    array = np.asarray(scores_IR, dtype=np.float64)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise ValueError(f"{what}: got {array.ndim} axes, needs [items, repeats]; reshape it")
    bad = ~np.isnan(array) & ((array < 0) | (array > 1))
    if bad.any():
        raise ValueError(f"{what}: got {int(bad.sum())} value(s) outside [0, 1], needs scores in [0, 1]; rescale the metric")
    return array


def paired_item_differences(stock_IR: npt.ArrayLike, candidate_IR: npt.ArrayLike) -> Floats:
    """d_i [I]: mean over the repeats that both sides have; NaN where they share none."""
    stock, candidate = _matrix("stock scores", stock_IR), _matrix("candidate scores", candidate_IR)
    if stock.shape != candidate.shape:
        raise ValueError(f"paired scores: got {stock.shape} and {candidate.shape}, need equal shapes; pair the items first")
    return item_means(candidate - stock)


def paired_difference(stock_IR: npt.ArrayLike, candidate_IR: npt.ArrayLike, clusters: npt.ArrayLike | None = None) -> PairedDifference:
    """Paired difference over items that both sides answered; `clusters` holds one label an item.

    The pseudo-flips are one item up and one item down by one step of the score (1/R for R repeats), each a cluster of its own; for single
    binary runs the result is Bonett and Price's adjusted Wald interval.
    """
    stock, candidate = _matrix("stock scores", stock_IR), _matrix("candidate scores", candidate_IR)
    d_I = paired_item_differences(stock, candidate)
    keep_I = ~np.isnan(d_I)
    n = int(keep_I.sum())
    codes_I = np.unique(_codes(clusters, len(d_I))[keep_I], return_inverse=True)[1].astype(np.int64)
    if n == 0:
        nan = float("nan")
        return PairedDifference(mean=nan, se=nan, se_adjusted=nan, mean_adjusted=nan, correlation=nan, n_items=0, n_clusters=0)
    d = d_I[keep_I]
    groups = int(codes_I.max()) + 1
    step = 1.0 / float(np.median((~np.isnan(stock - candidate))[keep_I].sum(axis=1)))
    mean_adjusted = float(d.sum() / (n + 2))
    residuals_G = np.bincount(codes_I, weights=d - mean_adjusted, minlength=groups)
    pseudo = (step - mean_adjusted) ** 2 + (-step - mean_adjusted) ** 2
    return PairedDifference(
        mean=float(d.mean()),
        se=clustered_se(d, codes_I),
        se_adjusted=float(np.sqrt(np.square(residuals_G).sum() + pseudo) / (n + 2)) if groups > 1 else float("nan"),
        mean_adjusted=mean_adjusted,
        correlation=_correlation(item_means(stock)[keep_I], item_means(candidate)[keep_I]),
        n_items=n,
        n_clusters=groups,
    )


def _correlation(a_I: Floats, b_I: Floats) -> float:
    if len(a_I) < 2 or np.ptp(a_I) == 0 or np.ptp(b_I) == 0:
        return float("nan")
    return float(np.corrcoef(a_I, b_I)[0, 1])


def non_inferiority(difference: PairedDifference, delta: float, alpha: float = 0.05, critical: float | None = None) -> NonInferiority:
    """Paired non-inferiority against a margin fixed beforehand.

    `critical` replaces the t quantile (df = clusters - 1) when a sequential boundary governs the look. Comparisons with NaN are false, so
    nothing is proven without data.
    """
    if not delta > 0:
        raise ValueError(f"delta: got {delta}, needs a positive allowed drop; fix it in the policy before the run")
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha: got {alpha}, needs 0 < alpha < 0.5; 0.05 is the policy's default")
    mean, se = difference.mean_adjusted, difference.se_adjusted
    df = max(difference.n_clusters - 1, 1)
    quantile = float(stats.t.ppf(1 - alpha, df)) if critical is None else critical
    lower, upper = mean - quantile * se, mean + quantile * se
    known = not np.isnan(se)
    return NonInferiority(
        delta=delta,
        alpha=alpha,
        lower=lower,
        upper=upper,
        p_value=float(stats.t.sf((mean + delta) / se, df)) if known else float("nan"),
        p_drop=float(stats.t.cdf(mean / se, df)) if known else float("nan"),
        proven=bool(lower > -delta),
    )
