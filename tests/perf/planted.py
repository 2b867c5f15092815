"""Subjects for the tests of adversarial timing: one honest, and one for each way to look faster than one is."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np

from perf.cheats import ROWS, WIDTH, cached, compute, honest, inputs, oracle

__all__ = ["cached", "honest", "inputs", "oracle"]


def replayed(config):
    last = []

    def run(given):
        last.append(compute(given["x"]))
        return {"y": last.pop(0) if len(last) > 1 else last[0]}

    return run


def good_in_warm_up(config):
    calls = []

    def run(given):
        calls.append(1)
        return {"y": compute(given["x"]) if len(calls) <= 3 else np.zeros_like(given["x"])}

    return run


def first_row_only(config):
    def run(given):
        y = np.zeros_like(given["x"])
        y[:1] = compute(given["x"][:1])
        return {"y": y}

    return run


def nan_as_wildcard(config):
    return lambda given: {"y": np.full_like(given["x"], np.nan)}


def coarse(config):
    """Computes in eighths: fast arithmetic on hardware that has it, wrong everywhere."""
    return lambda given: {"y": np.round(compute(given["x"]) * 8) / 8}


def mutated_inputs(config):
    def run(given):
        given["x"][:] = 0
        return {"y": np.zeros_like(given["x"])}

    return run


def correct_but_mutates(config):
    def run(given):
        y = compute(given["x"])
        given["x"][:] = 0
        return {"y": y}

    return run


def patched_timer(config):
    real, start = time.perf_counter, time.perf_counter()
    time.perf_counter = lambda: start + (real() - start) / 20
    return lambda given: {"y": compute(given["x"])}


def work_left_running(config):
    """Answers right, and goes on working behind the reply, as a side stream would."""

    def burn():
        while True:
            compute(np.ones((ROWS, WIDTH), np.float32))

    threading.Thread(target=burn, daemon=True).start()
    return lambda given: {"y": compute(given["x"])}


def pinned_cache(config):
    """Changes a device-wide setting that outlives it."""

    def run(given):
        Path(config["setting"]).write_text("30 MB")
        return {"y": compute(given["x"])}

    return run


class _Lazy:
    def __init__(self, x):
        self.x = x

    def __array__(self, dtype=None, copy=None):
        return compute(self.x)


def lazy(config):
    return lambda given: {"y": _Lazy(given["x"])}


def other_shape(config):
    return lambda given: {"y": compute(given["x"][:4])}


def hangs(config):
    return lambda given: time.sleep(60)


def dies(config):
    return lambda given: __import__("os")._exit(0)


def refuses_to_load(config):
    raise RuntimeError("no such GPU")
