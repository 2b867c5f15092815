"""How much longer one server takes than another over the same requests, with an interval. Pure numbers.

Requests go out in waves: as many at once as the concurrency says, and the next wave when all are answered. So both sides stand under the
same load at every moment, and what disturbs one request of a wave (a pause of the machine, a neighbour's long step) disturbs its wave only.
Each request is paired with the same request on the other side, the logarithms of the ratios are averaged inside a wave, and waves, not
requests, are drawn again for the interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from evals.serving.noise_rule import widened

Waves = Sequence[Sequence[float]]  # seconds of each request, wave by wave; NaN where it was lost
DRAWS = 4000
COVERAGE = 0.95


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Geometric mean of the ratios of times, 1: as fast. NaN with fewer than two waves to compare."""

    ratio: float
    low: float
    high: float
    waves: int
    requests: int


def pace(taken: Waves, references: Sequence[Waves]) -> Pace:
    """`taken` against the geometric mean of the references, request by request. Requests lost anywhere are left out.

    Raises ValueError when the passes do not hold the same requests.
    """
    shapes = {tuple(len(wave) for wave in one) for one in (taken, *references)}
    if len(shapes) != 1 or not references:
        raise ValueError(f"waves: got {len(references)} references and {len(shapes)} shapes, needs the same requests in each pass")
    logs = [_log_ratios(wave, [one[number] for one in references]) for number, wave in enumerate(taken)]
    means = np.array([one.mean() for one in logs if one.size])
    requests = sum(one.size for one in logs)
    if len(means) < 2:
        return Pace(ratio=math.nan, low=math.nan, high=math.nan, waves=len(means), requests=requests)
    low, high = _interval(means)
    return Pace(ratio=float(np.exp(means.mean())), low=math.exp(low), high=math.exp(high), waves=len(means), requests=requests)


def _log_ratios(wave: Sequence[float], references: Sequence[Sequence[float]]) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.asarray(wave, dtype=float)) - np.mean([np.log(np.asarray(one, dtype=float)) for one in references], axis=0)
    kept: np.ndarray = logs[np.isfinite(logs)]
    return kept


def _interval(means: np.ndarray) -> tuple[float, float]:
    """Bootstrap percentiles of the mean over waves, widened for few of them."""
    n = len(means)
    tail = widened((1 - COVERAGE) / 2, n)
    drawn = means[np.random.default_rng(n).integers(n, size=(DRAWS, n))].mean(axis=1)
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return float(low), float(high)


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """The candidate against both passes of stock, and stock's second pass against its first. Shares: 0.5 is half as long again.

    `low` and `high` bound the candidate's slow-down, after what stock differs from itself is taken off, or added.
    """

    candidate: Pace
    stock: Pace
    low: float
    high: float


def slowdown(stock: Waves, candidate: Waves, again: Waves, *, in_turn: bool) -> Slowdown:
    """What stock's two passes differ by is no finding about the candidate, so the interval is widened by it on both sides.

    `in_turn`: the passes took turns wave by wave, and what disturbs the machine is in the waves already. Otherwise each pass stands
    minutes apart from the others and has met its own disturbance, of which stock's two passes are the only sample: one degree of freedom,
    and a wide interval unless stock repeats itself well.
    """
    against, own = pace(candidate, [stock, again]), pace(again, [stock])
    apart = abs(math.log(own.ratio)) if own.ratio > 0 else math.nan
    # Of a pass: apart / sqrt(2). Of the candidate's from the mean of stock's two: that times sqrt(1 + 1 / 2).
    reach = 1.0 if in_turn else float(stats.t.ppf(0.5 + COVERAGE / 2, 1)) * math.sqrt(1.5 / 2)
    drift = math.exp(reach * apart)
    return Slowdown(candidate=against, stock=own, low=against.low / drift - 1, high=against.high * drift - 1)
