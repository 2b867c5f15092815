"""Measures the cases of `checks.py` in a worker."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kimi_k3_decode.cache import Caches
from kimi_k3_decode.weights import ModelWeights
from validation.core.types import Case, Measurement
from validation.numerics.slices import cached_bits, draw_tokens, prefilled, rows_that_differ
from validation.schedule.acceptance import measure_acceptance
from validation.schedule.execution import LastOfAll, Poison, build, model_for, nan_in_new_memory
from validation.schedule.static import measure_graph, measure_messages, measure_prefetch

Result = tuple[tuple[Measurement, ...], Mapping[str, Any]]
# (requests, tokens a request) of a step and what is accepted of it; every parity, shape change and accepted count occurs.
ROLLOUT = ((3, 1, 1), (3, 4, 2), (3, 4, 4), (2, 1, 1), (3, 4, 1), (1, 1, 1), (3, 1, 1))
SHAPES = ((1, 1), (3, 1), (1, 4), (8, 1), (2, 4), (5, 1), (1, 8), (9, 1))
RANDOM_ORDERS = 3


def counts(**values: int) -> tuple[Measurement, ...]:
    return tuple(Measurement(name=name, value=value, unit="count") for name, value in values.items())


def _seed(case: Case, targets: Mapping[str, Any]) -> int:
    return int(case.seed + 1000 * targets["stock"].settings.seed)


def _rollout(path: Any, caches: Caches, weights: ModelWeights, seed: int, steps: Sequence[tuple[int, int, int]] = ROLLOUT) -> torch.Tensor:
    """Logits [rows, V] of all steps; the caches end as the path left them."""
    found = []
    for number, (n, q, accepted) in enumerate(steps):
        out = path.step(caches.batch(draw_tokens(weights, (n, q), seed + number), range(n)), caches)
        found.append(out.logits_BQV.flatten(0, 1))
        caches.advance(range(n), [accepted] * n)
    return torch.cat(found)


class _Compared:
    """Runs that must equal the first, bit for bit."""

    def __init__(self, logits: torch.Tensor, kept: Mapping[str, str]) -> None:
        self._logits, self._kept = logits, kept
        self.rows_changed = self.cache_changed = self.broken = 0
        self.errors: list[str] = []

    def add(self, run: Callable[[], tuple[torch.Tensor, Mapping[str, str]]]) -> None:
        try:
            logits, kept = run()
        except Exception as error:  # whatever it is, the step did not come through
            self.broken += 1
            self.errors.append(f"{type(error).__name__}: {error}"[:300])
            return
        self.rows_changed += rows_that_differ(logits, self._logits)
        self.cache_changed += sum(kept[name] != self._kept[name] for name in self._kept)

    def measurements(self, **more: int) -> tuple[Measurement, ...]:
        return counts(
            rows_changed=self.rows_changed, cache_changed=self.cache_changed, broken=self.broken, rows=self._logits.shape[0], **more
        )


# ---- ranks ----
def measure_ranks(case: Case, targets: Mapping[str, Any]) -> Result:
    """One rollout with the ranks in turn, at random, and with each of them as late as the protocol allows."""
    tp, seed = int(case.params["tp"]), _seed(case, targets)
    weights = model_for(targets["stock"].weights, tp, layers=(0, 1, 3))
    base = prefilled(weights, (70, 5, 40), q_max=4, seed=seed)

    def run(order: Any) -> tuple[torch.Tensor, Mapping[str, str]]:
        path, _ = build(targets["candidate"], weights, tp)
        if order is not None and hasattr(path, "_order"):
            path._order = order
        caches = base.fork()
        return _rollout(path, caches, weights, seed), cached_bits(caches, range(3))

    ranks = build(targets["candidate"], weights, tp)[1]
    try:
        compared = _Compared(*run(None))
    except Exception as error:
        measured = counts(rows_changed=0, cache_changed=0, broken=1, rows=0, orders=0, ranks=ranks)
        return measured, {"errors": [f"{type(error).__name__}: {error}"[:300]]}
    orders = [*(random.Random(seed * 10 + i) for i in range(RANDOM_ORDERS)), *(LastOfAll(rank) for rank in range(tp))]
    for order in orders:
        compared.add(partial(run, order))
    return compared.measurements(orders=len(orders), ranks=ranks), {"model": weights.config.name, "errors": compared.errors}


# ---- poison ----
def measure_poison(case: Case, targets: Mapping[str, Any]) -> Result:
    """The same steps clean, and with NaN in new memory and in every buffer that holds nothing of use."""
    n, q, seed = int(case.params["requests"]), int(case.params["q"]), _seed(case, targets)
    weights = model_for(targets["stock"].weights, 1)
    base = prefilled(weights, [4 + 9 * i for i in range(n)], q_max=q, seed=seed)
    steps = [(n, q, 1 + step % q) for step in range(3)]
    clean = base.fork()
    try:
        logits = _rollout(targets["candidate"].build(weights), clean, weights, seed, steps)
    except Exception as error:
        errors = [f"{type(error).__name__}: {error}"[:300]]
        return counts(rows_changed=0, cache_changed=0, broken=1, rows=0, unwritten=0, poisoned=0), {"errors": errors}
    compared = _Compared(logits, cached_bits(clean, range(n)))
    poisons: list[Poison] = []

    def run() -> tuple[torch.Tensor, Mapping[str, str]]:
        path, caches = targets["candidate"].build(weights), base.fork()
        if hasattr(path, "_execute"):
            poisons.append(Poison(path))
        with nan_in_new_memory():
            return _rollout(path, caches, weights, seed, steps), cached_bits(caches, range(n))

    compared.add(run)
    poisoned = sum(poison.poisoned for poison in poisons) if poisons else int(not compared.broken)  # new memory alone counts as one
    unwritten = sum(poison.unwritten for poison in poisons)
    return compared.measurements(unwritten=unwritten, poisoned=poisoned), {"errors": compared.errors, "named_buffers": bool(poisons)}


# ---- replay ----
def measure_replay(case: Case, targets: Mapping[str, Any]) -> Result:
    """One path for all steps, of changing inputs and shapes, against a path built afresh for each step."""
    replays, seed = int(case.params["replays"]), _seed(case, targets)
    weights = model_for(targets["stock"].weights, 1, layers=(0, 3))  # one KDA layer, one MLA layer, both kinds of MLP
    base = prefilled(weights, [3 + 2 * i for i in range(9)], q_max=8, seed=seed, room=64)
    lived, target = targets["candidate"].build(weights), targets["candidate"]
    rows = changed = broken = differing = 0
    errors: list[str] = []
    picked = torch.randint(len(SHAPES), (replays,), generator=torch.Generator().manual_seed(seed)).tolist()
    caches = base.fork()
    for step, shape in enumerate(picked):
        n, q = SHAPES[shape]
        requests = [(step + i) % 9 for i in range(n)]
        if any(caches.lengths_R[request] + q > 64 for request in requests):
            caches = base.fork()
        batch = caches.batch(draw_tokens(weights, (n, q), seed + step), requests)
        twin = caches.fork()
        try:
            got = lived.step(batch, caches).logits_BQV.flatten(0, 1)
        except Exception as error:
            broken += 1
            errors.append(f"step {step}, {type(error).__name__}: {error}"[:300])
            caches = twin
            if broken >= 8:
                break
            continue
        want = target.build(weights).step(batch, twin).logits_BQV.flatten(0, 1)
        rows += got.shape[0]
        changed += rows_that_differ(got, want)
        for advanced in (caches, twin):
            advanced.advance(requests, [1 + step % q] * n)
        mine, fresh = cached_bits(caches, requests), cached_bits(twin, requests)
        differing += sum(mine[name] != fresh[name] for name in mine)
    measured = counts(rows_changed=changed, cache_changed=differing, broken=broken, rows=rows, replays=len(picked), shapes=len({*picked}))
    return measured, {"errors": errors}


MEASURES: Mapping[str, Callable[[Case, Mapping[str, Any]], Result]] = {
    "schedule.ranks": torch.inference_mode()(measure_ranks),
    "schedule.poison": torch.inference_mode()(measure_poison),
    "schedule.replay": torch.inference_mode()(measure_replay),
    "schedule.acceptance": torch.inference_mode()(measure_acceptance),
    "schedule.messages": measure_messages,
    "schedule.prefetch": measure_prefetch,
    "schedule.graph": measure_graph,
}
