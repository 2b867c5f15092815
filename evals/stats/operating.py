"""What the one-standard-error rule does: simulated rates for equal backends and for a truly worse one.

Model: item i is answered rightly with probability p_i ~ Beta with mean p, so that a share `rho` of the variance of one answer lies between
items; the candidate's probability is p_i * (p - drop) / p; answers are independent given p_i. For rho = 0 and large n the rate at which
equal backends fail is 2 * (1 - Phi(1 / sqrt(2))), whatever the suite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

EQUAL_FAIL_RATE_INDEPENDENT = float(2 * stats.norm.sf(1 / math.sqrt(2)))


@dataclass(frozen=True, kw_only=True)
class SuiteModel:
    """One suite as the simulation sees it."""

    name: str
    n_items: int
    score: float  # stock's expected score
    repeats: int = 1


# Sizes of the public suites with scores typical of a strong model (for MRCR: in the middle of its length bins).
SUITE_MODELS = (
    SuiteModel(name="gsm8k", n_items=1319, score=0.95),
    SuiteModel(name="gpqa_diamond", n_items=198, score=0.80),
    SuiteModel(name="aime25", n_items=30, score=0.80),
    SuiteModel(name="aime25_8_repeats", n_items=30, score=0.80, repeats=8),
    SuiteModel(name="mrcr", n_items=100, score=0.70),
)


def one_se_fail_rate(model: SuiteModel, rho: float, drop: float, runs: int, seed: int) -> float:
    """Share of simulated runs in which |candidate - stock| exceeds one standard error of stock's score."""
    if not 0 <= rho < 1 or not 0 <= drop < model.score:
        raise ValueError(f"rho and drop: got {rho} and {drop}, need 0 <= rho < 1 and 0 <= drop < score {model.score}")
    rng = np.random.default_rng(seed)
    simulate = _single_run if model.repeats == 1 else _repeated
    stock, candidate, se = simulate(model, rho, drop, runs, rng)
    return float((np.abs(candidate - stock) > se).mean())


def _single_run(model: SuiteModel, rho: float, drop: float, runs: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Counts of the four outcomes of a pair are multinomial, so a run costs four numbers whatever the size of the suite."""
    p, n = model.score, model.n_items
    both = (p * p + rho * p * (1 - p)) * (p - drop) / p
    counts = rng.multinomial(n, [both, p - both, p - drop - both, 1 - 2 * p + drop + both], size=runs)
    stock, candidate = (counts[:, 0] + counts[:, 1]) / n, (counts[:, 0] + counts[:, 2]) / n
    return stock, candidate, np.sqrt(stock * (1 - stock) / (n - 1))


def _repeated(model: SuiteModel, rho: float, drop: float, runs: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    p, shape = model.score, (runs, model.n_items)
    concentration = 1 / rho - 1 if rho > 0 else 0.0
    p_items = rng.beta(p * concentration, (1 - p) * concentration, size=shape) if rho > 0 else np.full(shape, p)
    stock = rng.binomial(model.repeats, p_items) / model.repeats
    candidate = rng.binomial(model.repeats, p_items * (p - drop) / p) / model.repeats
    return stock.mean(axis=1), candidate.mean(axis=1), stock.std(axis=1, ddof=1) / math.sqrt(model.n_items)


def greedy_flip_fail_rate(model: SuiteModel, flip_share: float, runs: int, seed: int) -> float:
    """Fail rate when both backends decode greedily and a share of items flips, as many expected up as down."""
    p, n = model.score, model.n_items
    rng = np.random.default_rng(seed)
    right = round(n * p)
    lost = rng.binomial(right, min(flip_share / 2 / p, 1.0), size=runs)
    won = rng.binomial(n - right, min(flip_share / 2 / (1 - p), 1.0), size=runs)
    se = math.sqrt(right / n * (1 - right / n) / (n - 1))
    return float((np.abs(won - lost) / n > se).mean())
