"""How far from stock a candidate may be, in multiples of how far stock is from itself. Pure numbers; light to import.

There is no oracle over HTTP: stock is run twice in ways that must not matter (started again, among other requests, with another share of
prefill), and the candidate is run beside it. Each run is off the truth by its own rounding. Say stock's runs are off by 1, of which two
of them have the mean-square share `shared` in common (the same kernels round at the same points), and the candidate is off by `own`, with
nothing in common with stock (it rounds elsewhere). Then

    stock is off stock by sqrt(2 (1 - shared)),   the candidate is off stock by sqrt(1 + own^2),

and what a server can be asked for is the ratio of the two, `expected_ratio`. It is above 1 for a candidate as good as stock (own = 1),
because stock's repetition is no independent run. So the factor is not a matter of taste but of `shared`, and that can be measured where
the truth is known: on nano-K3 against FP64, with passes as the servers get them, two stock runs have up to three quarters in common
(`tests/serving/test_noise_rule.py` measures it). NOISE_FACTOR is the ratio there of a candidate that is exactly as good as stock:

    expected_ratio(own=1, shared=SHARED_MOST) = 2

A smaller factor fails sound candidates; 1.5 does as soon as stock's runs share 0.56. What 2 lets through depends on `shared`: the
policy's own = 1.5 where stock shares 0.59 and more than that where it shares less; such a fault is for the embedded lane, which has an
oracle and looks at each sublayer. A shift that all tokens have shows here from a little above the factor on.

Judged is the low end of an interval, so that chance fails nobody: with four contexts a run has LIMITS ratios, and each interval leaves
TAIL below, so that at most one run in twenty fails any of them even for a candidate at the very factor. Tokens near each other share a
state and a context, so intervals are made from blocks of BLOCK_TOKENS consecutive tokens. The same tests simulate whole runs: how often a
sound candidate is failed, and how large a shift is always found.
"""

from __future__ import annotations

import math

SHARED_MOST = 0.75
BLOCK_TOKENS = 8
LIMITS = 27  # typical, RMS and KL: alone and among other requests at each of four contexts, and once over all of them
TAIL = 0.05 / LIMITS


def widened(tail: float, count: int) -> float:
    """The bootstrap quantile that leaves `tail` beyond it for a mean of `count` values, as Student's t does (Hesterberg 2015)."""
    from scipy import stats

    return float(stats.norm.cdf(-math.sqrt(count / (count - 1)) * float(stats.t.ppf(1 - tail, count - 1))))


def expected_ratio(*, own: float, shared: float) -> float:
    """Distance of a candidate with `own` times stock's error from stock, over stock's distance from itself. `shared` below 1."""
    return math.sqrt((1 + own**2) / (2 * (1 - shared)))


NOISE_FACTOR = 2.0  # expected_ratio(own=1, shared=SHARED_MOST)
