"""Where long caches come from: one real prefill that grows through all contexts, and synthetic caches with the statistics of a real one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kimi_k3_decode.cache import Caches, MlaLayerCache
from validation.numerics.decode import fork_shared
from validation.numerics.textsource import tokens_ending_at

NEAR_TOKENS = (1024, 4096, 16384, 32768)
WINDOW = (1,) * 16 + (8,) * 10  # tokens a step at the end of each near context: plain decode, then verify steps
PREFILL_CHUNK_TOKENS = 1024

SOURCE_TOKENS = 4096  # of the real prefill that synthetic caches are drawn from
POOL_PAGES = 768  # distinct pages; a far context visits them in a seeded random order, again and again
Q_MAX = 8


@dataclass(frozen=True, kw_only=True)
class Window:
    """What a comparison starts from: caches per role, the requests in them, steps [B, Q], and every token's position and text."""

    caches: Mapping[str, Caches]
    requests: list[int]
    steps_BQ: list[torch.Tensor]
    positions: list[int]  # of each decoded token, in the order of the logits
    tokens: list[int]  # of the first request, from position `first_position` on
    first_position: int


class NearContexts:
    """One text and one growing prefill. `window(n)` gives the last tokens of the first n; contexts are cheapest in rising order.

    The prefill always stops at the same places, so that a window does not depend on which other windows were asked for.
    """

    def __init__(self, prefiller: Any, seed: int, contexts: Sequence[int] = NEAR_TOKENS) -> None:
        config = prefiller.config
        self._prefiller = prefiller
        self._contexts = tuple(contexts)
        self._tokens = tokens_ending_at(contexts, seed, bos=config.bos_token_id, vocab_size=config.vocab_size)
        self._caches = Caches.allocate(config, 1, contexts[-1] + Q_MAX, q_max=Q_MAX)
        self._request = self._caches.acquire()
        self._done = 0

    def window(self, context_tokens: int) -> Window:
        """The last tokens of the first `context_tokens`, which must be one of the contexts."""
        n_window = sum(WINDOW)
        start = context_tokens - n_window
        if start < self._done:  # asked for again, out of order
            self._caches.clear(self._request)
            self._done = 0
        for stop in [c - n_window for c in self._contexts if self._done < c - n_window <= start]:
            self._prefiller.prefill([self._tokens[self._done : stop]], self._caches, [self._request], chunk_tokens=PREFILL_CHUNK_TOKENS)
            self._done = stop
        steps, begin = [], start
        for q in WINDOW:
            steps.append(torch.tensor([self._tokens[begin : begin + q]]))
            begin += q
        return Window(
            caches=_per_role(self._caches),
            requests=[self._request],
            steps_BQ=steps,
            positions=list(range(start, context_tokens)),
            tokens=self._tokens,
            first_position=0,
        )


def _per_role(caches: Caches) -> dict[str, Caches]:
    """Candidate and stock share what they fork from; the oracle's is upcast, so that all start from the same values."""
    return {"candidate": caches, "stock": caches, "oracle": fork_shared(caches, torch.float64)}


@dataclass(frozen=True, kw_only=True)
class FarCase:
    """Decode at far positions: `lengths` tokens are cached before the first step, `pattern` tokens a step follow, `n_requests` at once."""

    length_tokens: int
    pattern: tuple[int, ...]
    n_requests: int


FAR: Mapping[int, FarCase] = {
    65536: FarCase(length_tokens=65528, pattern=(7, 1, 1, 8, 8), n_requests=2),  # ... 65535 | 65536 ...
    131072: FarCase(length_tokens=131064, pattern=(7, 1, 1, 8), n_requests=2),
    262144: FarCase(length_tokens=262136, pattern=(8, 1, 8), n_requests=2),
    1048575: FarCase(length_tokens=1048559, pattern=(8, 8, 1), n_requests=1),  # the last token stands at position 1,048,575
}


class FarContexts:
    """Synthetic caches: pages drawn from a normal distribution with the mean and covariance of each layer's real entries, after as many
    real ones; recurrent states and conv windows are real. Pages are shared between places of a context, so memory stays small."""

    def __init__(self, prefiller: Any, seed: int, pool_pages: int = POOL_PAGES) -> None:
        self._prefiller, self._seed, self._pool_pages = prefiller, seed, pool_pages
        config = prefiller.config
        self._tokens = tokens_ending_at([SOURCE_TOKENS], seed, bos=config.bos_token_id, vocab_size=config.vocab_size)
        source = Caches.allocate(config, 1, SOURCE_TOKENS, q_max=Q_MAX)
        self._source, self._source_request = source, source.acquire()
        prefiller.prefill([self._tokens], source, [self._source_request], chunk_tokens=PREFILL_CHUNK_TOKENS)

    def window(self, far: FarCase, seed: int) -> Window:
        """The window of one far case; `seed` chooses pages, their order and the tokens."""
        caches = self._caches(far, seed)
        rng = random.Random(f"{self._seed}-{seed}-tokens")
        n_window, requests = sum(far.pattern), list(range(far.n_requests))
        starts = [rng.randrange(len(self._tokens) - n_window) for _ in requests]
        texts = [self._tokens[start : start + n_window] for start in starts]
        steps, positions, begin = [], [], 0
        for q in far.pattern:
            steps.append(torch.tensor([text[begin : begin + q] for text in texts]))
            positions += [far.length_tokens + begin + i for _ in requests for i in range(q)]
            begin += q
        return Window(
            caches=_per_role(caches),
            requests=requests,
            steps_BQ=steps,
            positions=positions,
            tokens=texts[0],
            first_position=far.length_tokens,
        )

    def _caches(self, far: FarCase, seed: int) -> Caches:
        source, page_tokens = self._source, self._source.page_tokens
        pool = list(range(1, self._pool_pages + 1))
        n_private = 1 + -(-sum(far.pattern) // page_tokens)  # pages a request writes
        caches = Caches.allocate(
            source.config, far.n_requests, page_tokens, q_max=Q_MAX, n_pages=self._pool_pages + far.n_requests * n_private
        )
        generator = torch.Generator().manual_seed(self._seed * 1000 + seed)
        for layer, cache in enumerate(caches.layers):
            if isinstance(cache, MlaLayerCache):
                self._fill_pages(cache, source.mla(layer), generator)
            else:
                _copy_request(source, self._source_request, caches, layer)
        rng = random.Random(f"{self._seed}-{seed}-pages")
        n_shared = far.length_tokens // page_tokens
        private = iter(range(self._pool_pages + 1, self._pool_pages + 1 + far.n_requests * n_private))
        for request in range(far.n_requests):
            own = [next(private) for _ in range(n_private)]
            caches.lengths_R[request] = far.length_tokens
            caches.pages_R[request] = rng.choices(pool, k=n_shared) + own
        caches.free_pages, caches.free_requests = [], []
        return caches

    def _fill_pages(self, cache: MlaLayerCache, source: MlaLayerCache, generator: torch.Generator) -> None:
        """All real pages first, then draws; private pages too, since a context need not end at a page's end."""
        real_PTC = source.pages_PTC[self._source.pages_R[self._source_request]]
        real_NC = real_PTC.flatten(0, 1).double()
        mean_C, covariance_CC = real_NC.mean(0), torch.cov(real_NC.T)
        eye = torch.eye(covariance_CC.shape[0], dtype=torch.float64)
        factor_CC = torch.linalg.cholesky(covariance_CC + 1e-9 * covariance_CC.diagonal().mean() * eye)
        noise = torch.randn(cache.pages_PTC[1:].shape, generator=generator)
        cache.pages_PTC[1:] = (noise @ factor_CC.T.float() + mean_C.float()).to(cache.pages_PTC.dtype)
        n_real = min(len(real_PTC), self._pool_pages)
        cache.pages_PTC[1 : n_real + 1] = real_PTC[:n_real]


def _copy_request(source: Caches, request: int, caches: Caches, layer: int) -> None:
    """Give every request of `caches` the recurrent state and conv window of one real request."""
    slot = source.slots_RQ[request][0]
    for slots in caches.slots_RQ:
        caches.kda(layer).state_SHVK[slots[0]] = source.kda(layer).state_SHVK[slot]
        caches.kda(layer).conv_SWC[slots[0]] = source.kda(layer).conv_SWC[slot]
