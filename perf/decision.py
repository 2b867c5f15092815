"""The word said about two sets of interleaved times: faster, slower, no difference, or not enough to tell.

A difference is said only when the whole interval of the paired ratio lies on one side of 1, at a confidence so high that stock against
stock is not called different in some run of fifty, and only when it is larger than what a machine at rest shows.
"""

from __future__ import annotations

from collections.abc import Sequence

from perf.stats import paired_ratio

CONFIDENCE = 0.9995  # two-sided; the chance of a false word in fifty runs is then 2.5 %
SMALLEST_SHARE = 0.005  # a ratio nearer to 1 is called no difference whatever the interval
LEAST_PAIRS = 12  # a bootstrap of fewer pairs cannot reach the confidence


def decide(stock_us: Sequence[float], candidate_us: Sequence[float], *, seed: int = 0) -> str:
    """One of "faster", "slower", "no difference" or "too few pairs", of the candidate.

    Raises ValueError for samples that cannot be paired.
    """
    if min(len(stock_us), len(candidate_us)) < LEAST_PAIRS:
        return "too few pairs"
    ratio = paired_ratio(stock_us, candidate_us, seed=seed, confidence=CONFIDENCE)
    if ratio.low > 1 and ratio.value > 1 + SMALLEST_SHARE:
        return "faster"
    if ratio.high < 1 and ratio.value < 1 - SMALLEST_SHARE:
        return "slower"
    return "no difference"
