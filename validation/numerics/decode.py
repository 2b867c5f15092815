"""Teacher-forced decode of several paths over the same tokens from identical caches: the machinery of every end-to-end comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kimi_k3_decode.cache import Caches, KdaLayerCache, MlaLayerCache, StepBatch
from validation.numerics.errors import TokenErrors, concatenate, token_errors

Routing = dict[int, torch.Tensor]
FORCED, FREE = "forced", "free"  # expert choices of the oracle, or a path's own


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one path gave over a window: logits [N, V] (request by request within a step) and its expert choices per step."""

    logits_NV: torch.Tensor
    routings: list[Routing]
    non_finite_cache: int  # values in the pages and slots of the requests after the last step


def decode_window(
    path: Any, caches: Caches, requests: Sequence[int], steps_BQ: Sequence[torch.Tensor], routings: Sequence[Routing] | None = None
) -> Trace:
    """Run `steps_BQ` (each int64 [B, Q]) in order, all tokens accepted. `routings` forces the expert ids of each step.

    `caches` are advanced; fork them before. Memory: one step's logits a step.
    """
    logits, chosen = [], []
    for index, tokens_BQ in enumerate(steps_BQ):
        batch: StepBatch = caches.batch(tokens_BQ, requests)
        out = path.step(batch, caches, routing=routings[index] if routings is not None else None)
        logits.append(out.logits_BQV.flatten(0, 1))
        chosen.append(out.routing or {})
        caches.advance(requests, [tokens_BQ.shape[1]] * len(requests))
    return Trace(logits_NV=torch.cat(logits), routings=chosen, non_finite_cache=non_finite_in(caches, requests))


def non_finite_in(caches: Caches, requests: Sequence[int]) -> int:
    """NaN and infinite values in what the requests hold: written pages, conv windows and states of their slots."""
    pages = sorted({page for request in requests for page in caches.pages_R[request][-2:]})
    slots = sorted({slot for request in requests for slot in caches.slots_RQ[request]})
    count = 0
    for cache in caches.layers:
        if isinstance(cache, KdaLayerCache):
            count += sum(int((~torch.isfinite(part[slots])).sum()) for part in (cache.conv_SWC, cache.state_SHVK))
        elif isinstance(cache, MlaLayerCache):
            count += int((~torch.isfinite(cache.pages_PTC[pages].float())).sum())
    return count


def fork_shared(caches: Caches, dtype: torch.dtype | None = None) -> Caches:
    """A copy of caches whose requests share pages: each page is copied once, however often it is used."""
    tables = caches.pages_R
    caches.pages_R = [sorted({page for pages in tables for page in pages})]
    copied = caches.fork(dtype)
    caches.pages_R = tables
    copied.pages_R = [list(pages) for pages in tables]
    return copied


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Errors against the oracle under one routing, of candidate and stock, over the same tokens."""

    candidate: TokenErrors
    stock: TokenErrors
    candidate_non_finite_cache: int


def compare_paths(
    targets: Mapping[str, Any],
    caches: Mapping[str, Caches],
    requests: Sequence[int],
    steps_BQ: Sequence[torch.Tensor],
    routings: Sequence[str] = (FORCED, FREE),
) -> dict[str, Compared]:
    """Decode with the oracle once, then with candidate and stock under each routing. `caches` maps a role to what it forks from."""

    def run(role: str, forced: Sequence[Routing] | None) -> Trace:
        return decode_window(targets[role].path, fork_shared(caches[role]), requests, steps_BQ, forced)

    oracle = run("oracle", None)
    found = {}
    for routing in routings:
        forced = oracle.routings if routing == FORCED else None
        stock, candidate = run("stock", forced), run("candidate", forced)
        found[routing] = Compared(
            candidate=token_errors(oracle.logits_NV, candidate.logits_NV),
            stock=token_errors(oracle.logits_NV, stock.logits_NV),
            candidate_non_finite_cache=candidate.non_finite_cache,
        )
    return found


def join(parts: Sequence[Compared]) -> Compared:
    """Several windows as one."""
    return Compared(
        candidate=concatenate([part.candidate for part in parts]),
        stock=concatenate([part.stock for part in parts]),
        candidate_non_finite_cache=sum(part.candidate_non_finite_cache for part in parts),
    )
