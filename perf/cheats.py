"""Small subjects for the timing of subjects: one honest, one that answers from what it kept. Light to import (numpy only).

The mutants lane and the tests time them; the tests add one subject for each further way to look faster than one is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from perf.subject import Arrays

ROWS, WIDTH, DEPTH = 16, 192, 24
_WEIGHT = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
ERROR_LIMIT = 1e-4  # of a row of the honest subject's float32 against float64

Run = Callable[[Arrays], dict[str, np.ndarray]]


def inputs(seed: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).standard_normal((ROWS, WIDTH)).astype(np.float32)}


def compute(x: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """DEPTH residual layers of tanh(x W) on x [ROWS, WIDTH]."""
    x, weight = x.astype(dtype), _WEIGHT.astype(dtype)
    for _ in range(DEPTH):
        x = np.tanh(x @ weight) + x
    return x


def oracle(given: Arrays) -> dict[str, np.ndarray]:
    return {"y": compute(given["x"], np.float64)}


def honest(config: Mapping[str, Any]) -> Run:
    """`extra_us` makes it slower by that much: a real difference."""
    extra_s = 1e-6 * config.get("extra_us", 0)

    def run(given: Arrays) -> dict[str, np.ndarray]:
        began = time.perf_counter()
        y = compute(given["x"])
        while time.perf_counter() - began < extra_s:
            pass
        return {"y": y}

    return run


def cached(config: Mapping[str, Any]) -> Run:
    """The first answer for a shape is every later answer."""
    kept: dict[tuple[int, ...], np.ndarray] = {}
    return lambda given: {"y": kept.setdefault(given["x"].shape, compute(given["x"]))}
