"""Caches and the per-step batch both decode paths read: paged MLA latents, KDA conv windows and recurrent states, slots.

Layout (axes: P pages, S slots, B requests, Q tokens a request in this step, H heads, V and K state dims, W window, C channels):

* MLA, one layer: `pages_PTC` [P, page_tokens, kv_lora_rank + qk_rope_head_dim]; a request's token t lives in page
  `block_table_BN[b, t // page_tokens]`, row `t % page_tokens`. Page 0 is the null page and is never written.
* KDA, one layer: `conv_SWC` [S, q_max + 2, 3 * kda_dim] raw q | k | v projections (3 kept taps plus the drafts) and
  `state_SHVK` [S, H, V, K] float32 (float64 in the oracle). Slot 0 is the null slot: slots <= 0 are padding, never written.

Slot semantics of a step (kimi-k3 verify rules): `slots_BQ` and `accepted_B` (counts the anchor, >= 1). The recurrent state is read from
`slots[b, accepted - 1]`; token t writes `slots[b, t]` if > 0. The conv window of a request lives in `slots[b, 0]` and is read from offset
`accepted - 1`. Plain decode is q = 1, accepted = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kimi_k3_decode.config import ModelConfig, Shard

NULL_SLOT = 0
NULL_PAGE = 0


@dataclass
class MlaLayerCache:
    pages_PTC: torch.Tensor
    scale: float = 1.0  # of the FP8 form; 1.0 otherwise


@dataclass
class KdaLayerCache:
    conv_SWC: torch.Tensor
    state_SHVK: torch.Tensor


@dataclass
class StepBatch:
    """One decode or verify step. `lengths_B` counts the tokens already cached, so token t of request b has position lengths[b] + t."""

    tokens_BQ: torch.Tensor  # int64
    lengths_B: torch.Tensor  # int32
    block_table_BN: torch.Tensor  # int32
    slots_BQ: torch.Tensor  # int32
    accepted_B: torch.Tensor  # int32
    uniform: bool = True  # every request brings exactly Q tokens and none is still prefilling

    @property
    def rows(self) -> int:
        return self.tokens_BQ.numel()

    @property
    def q(self) -> int:
        return self.tokens_BQ.shape[1]


@dataclass
class StepOutput:
    """What a path returns. `taps_IBQD` are the DSpark taps; `routing` maps layer -> expert ids [T, top_k] in rank order of the scores."""

    logits_BQV: torch.Tensor  # float32 (float64 in the oracle)
    taps_IBQD: torch.Tensor | None = None
    routing: dict[int, torch.Tensor] | None = None


class CacheError(RuntimeError):
    """The caches cannot take what was asked (out of pages or of request places); the message says what to free or to allocate."""


@dataclass
class Caches:
    """The caches of up to `n_requests` requests, with the bookkeeping a step needs. Requests are places 0..n_requests - 1.

    `lengths_R[r]` tokens of request r are cached; `accepted_R[r]` is what its next step reads from; `slots_RQ[r]` are its KDA slots
    (any distinct positive numbers: permute them freely while the request is empty); `pages_R[r]` its page ids in token order.
    """

    config: ModelConfig
    dtype: torch.dtype
    page_tokens: int
    q_max: int
    layers: list[MlaLayerCache | KdaLayerCache]
    lengths_R: list[int]
    accepted_R: list[int]
    slots_RQ: list[list[int]]
    pages_R: list[list[int]]
    free_pages: list[int]
    free_requests: list[int]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        n_requests: int,
        max_tokens: int,
        q_max: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        page_tokens: int = 64,
        shard: Shard | None = None,
        n_pages: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Caches:
        """Room for `n_requests` of `max_tokens` each (or `n_pages` pages shared by all). `dtype` is that of the latents and conv taps.

        The recurrent state is FP32 (FP64 when `dtype` is). Memory is committed as pages are taken. Raises ValueError for sizes < 1.
        """
        sizes = {"n_requests": n_requests, "max_tokens": max_tokens, "q_max": q_max, "page_tokens": page_tokens}
        wrong = [f"{what}: got {size}, needs >= 1" for what, size in sizes.items() if size < 1]
        if wrong:
            raise ValueError("; ".join(wrong))
        shard = shard or Shard(config=config)
        pages = n_pages if n_pages is not None else n_requests * -(-max_tokens // page_tokens)
        slots = 1 + n_requests * q_max
        layers: list[MlaLayerCache | KdaLayerCache] = []
        for layer in range(config.n_layers):
            if config.is_kda(layer):
                conv = torch.zeros(slots, q_max + 2, 3 * shard.kda_dim, dtype=dtype, device=device)
                layers.append(KdaLayerCache(conv, _zero_states(slots, shard.kda_heads, config.kda_head_dim, dtype, device)))
            else:
                store = torch.empty(1 + pages, page_tokens, config.mla_cache_dim, dtype=dtype, device=device)
                store[NULL_PAGE] = 0
                layers.append(MlaLayerCache(store))
        return cls(
            config=config,
            dtype=dtype,
            page_tokens=page_tokens,
            q_max=q_max,
            layers=layers,
            lengths_R=[0] * n_requests,
            accepted_R=[1] * n_requests,
            slots_RQ=[[1 + r * q_max + t for t in range(q_max)] for r in range(n_requests)],
            pages_R=[[] for _ in range(n_requests)],
            free_pages=list(range(pages, 0, -1)),
            free_requests=list(range(n_requests - 1, -1, -1)),
        )

    @property
    def n_requests(self) -> int:
        return len(self.lengths_R)

    def kda(self, layer: int) -> KdaLayerCache:
        """The cache of a KDA layer; raises ValueError for an MLA layer."""
        cache = self.layers[layer]
        if not isinstance(cache, KdaLayerCache):
            raise ValueError(f"layer: got {layer}, needs a KDA layer")
        return cache

    def mla(self, layer: int) -> MlaLayerCache:
        """The cache of an MLA layer; raises ValueError for a KDA layer."""
        cache = self.layers[layer]
        if not isinstance(cache, MlaLayerCache):
            raise ValueError(f"layer: got {layer}, needs an MLA layer")
        return cache

    # ---- life of a request ----
    def acquire(self) -> int:
        """An empty request place. Raises CacheError when all are taken."""
        if not self.free_requests:
            raise CacheError(f"requests: got more than {self.n_requests}, needs a free place; release one or allocate more")
        return self.free_requests.pop()

    def release(self, request: int) -> None:
        """Empty a request and give its pages and its place back."""
        self.clear(request)
        if request not in self.free_requests:
            self.free_requests.append(request)

    def clear(self, request: int) -> None:
        """Forget a request's tokens; it keeps its place. Prefill of an empty request starts from a zero state, so nothing is wiped here."""
        self.free_pages.extend(reversed(self.pages_R[request]))
        self.pages_R[request] = []
        self.lengths_R[request] = 0
        self.accepted_R[request] = 1

    def reserve(self, request: int, n_tokens: int) -> None:
        """Take pages until `n_tokens` tokens fit. New pages are zeroed. Raises CacheError when none is left."""
        pages = self.pages_R[request]
        missing = -(-n_tokens // self.page_tokens) - len(pages)
        if missing <= 0:
            return
        if missing > len(self.free_pages):
            raise CacheError(
                f"pages: got {missing} more for request {request} with {len(self.free_pages)} free, needs enough; release requests first"
            )
        taken = [self.free_pages.pop() for _ in range(missing)]
        for cache in self.layers:
            if isinstance(cache, MlaLayerCache):
                cache.pages_PTC[torch.tensor(taken, device=cache.pages_PTC.device)] = 0
        pages.extend(taken)

    # ---- one step ----
    def batch(self, tokens_BQ: torch.Tensor | list[list[int]], requests: Sequence[int] | None = None, *, pad_to: int = 0) -> StepBatch:
        """The StepBatch that appends `tokens_BQ` [B, Q] to `requests` (0..B-1 when None), reserving their pages.

        `pad_to` > B adds padding rows: token 0, length 0, null slots and pages. Call `advance` after the step.
        """
        tokens = torch.as_tensor(tokens_BQ, dtype=torch.int64)
        requests = list(range(tokens.shape[0])) if requests is None else list(requests)
        n_rows, q = tokens.shape
        if len(requests) != n_rows or len(set(requests)) != n_rows or not 1 <= q <= self.q_max:
            raise ValueError(
                f"batch: got {n_rows} rows of {q} tokens for requests {requests}, needs distinct requests, one a row, "
                f"and 1 <= q <= {self.q_max}"
            )
        for request in requests:
            self.reserve(request, self.lengths_R[request] + q)
            if self.accepted_R[request] > q:
                self.settle(request)
        pad = max(pad_to - n_rows, 0)
        width = max((len(self.pages_R[r]) for r in requests), default=1)
        tables = [self.pages_R[r] + [NULL_PAGE] * (width - len(self.pages_R[r])) for r in requests] + [[NULL_PAGE] * width] * pad
        return StepBatch(
            tokens_BQ=torch.cat((tokens, tokens.new_zeros(pad, q))).to(self._device),
            lengths_B=self._int32([self.lengths_R[r] for r in requests] + [0] * pad),
            block_table_BN=self._int32(tables),
            slots_BQ=self._int32([self.slots_RQ[r][:q] for r in requests] + [[NULL_SLOT] * q] * pad),
            accepted_B=self._int32([self.accepted_R[r] for r in requests] + [1] * pad),
        )

    def advance(self, requests: Sequence[int], accepted: Sequence[int]) -> None:
        """After a step: keep the first `accepted[i]` (>= 1, the anchor counts) of the tokens just given to request i."""
        for request, count in zip(requests, accepted, strict=True):
            if not 1 <= count <= self.q_max:
                raise ValueError(f"accepted: got {count} for request {request}, needs 1..{self.q_max}")
            self.lengths_R[request] += count
            self.accepted_R[request] = count

    def settle(self, request: int) -> None:
        """Bring a request into the plain form (state in its first slot, conv taps at offset 0, accepted = 1); same meaning."""
        accepted = self.accepted_R[request]
        if accepted == 1:
            return
        first, source = self.slots_RQ[request][0], self.slots_RQ[request][accepted - 1]
        for cache in self.layers:
            if isinstance(cache, KdaLayerCache):
                cache.state_SHVK[first] = cache.state_SHVK[source]
                cache.conv_SWC[first, :3] = cache.conv_SWC[first, accepted - 1 : accepted + 2].clone()
        self.accepted_R[request] = 1

    # ---- copies ----
    def room_for(self, n_tokens: int) -> bool:
        """True when a new request of `n_tokens` tokens finds a place and its pages."""
        return bool(self.free_requests) and -(-n_tokens // self.page_tokens) <= len(self.free_pages)

    def adopt(self, source: Caches, request: int, n_tokens: int = 0) -> int:
        """Copy one request of `source` into an own place, with pages for `n_tokens` in all; returns the place. `source` keeps its copy.

        Raises CacheError when there is no room, ValueError when the page sizes differ.
        """
        if source.page_tokens != self.page_tokens:
            raise ValueError(f"page_tokens: got {source.page_tokens}, needs {self.page_tokens}; allocate both alike")
        length = source.lengths_R[request]
        if not self.room_for(max(n_tokens, length)):
            raise CacheError(
                f"caches: got a request of {max(n_tokens, length)} tokens, needs a free place and pages; release requests first"
            )
        source.settle(request)
        own = self.acquire()
        self.reserve(own, max(n_tokens, length))
        used = -(-length // self.page_tokens)
        theirs = torch.tensor(source.pages_R[request][:used], dtype=torch.int64, device=self._device)
        ours = torch.tensor(self.pages_R[own][:used], dtype=torch.int64, device=self._device)
        from_slot, to_slot = source.slots_RQ[request][0], self.slots_RQ[own][0]
        for mine, other in zip(self.layers, source.layers, strict=True):
            if isinstance(mine, KdaLayerCache) and isinstance(other, KdaLayerCache):
                mine.conv_SWC[to_slot, :3] = other.conv_SWC[from_slot, :3].to(mine.conv_SWC.dtype)
                mine.state_SHVK[to_slot] = other.state_SHVK[from_slot].to(mine.state_SHVK.dtype)
            elif isinstance(mine, MlaLayerCache) and isinstance(other, MlaLayerCache):
                mine.pages_PTC[ours] = other.pages_PTC[theirs].to(mine.pages_PTC.dtype)
        self.lengths_R[own], self.accepted_R[own] = length, 1
        return own

    def fork(self, dtype: torch.dtype | None = None) -> Caches:
        """An independent copy, in another `dtype` when given (the FP64 oracle continuing a BF16 prefill). Copies only pages in use."""
        dtype = dtype or self.dtype
        used = torch.tensor(sorted(page for pages in self.pages_R for page in pages), dtype=torch.int64, device=self._device)
        return replace(
            self,
            dtype=dtype,
            layers=[_copy_layer(cache, dtype, used) for cache in self.layers],
            lengths_R=list(self.lengths_R),
            accepted_R=list(self.accepted_R),
            slots_RQ=[list(slots) for slots in self.slots_RQ],
            pages_R=[list(pages) for pages in self.pages_R],
            free_pages=list(self.free_pages),
            free_requests=list(self.free_requests),
        )

    def _int32(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    @property
    def _device(self) -> torch.device:
        cache = self.layers[0]
        return cache.conv_SWC.device if isinstance(cache, KdaLayerCache) else cache.pages_PTC.device


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The recurrent state's dtype beside caches in `dtype`: FP32, or FP64 in the oracle."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _zero_states(slots: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    return torch.zeros(slots, heads, head_dim, head_dim, dtype=state_dtype(dtype), device=device)


def _copy_layer(cache: MlaLayerCache | KdaLayerCache, dtype: torch.dtype, used: torch.Tensor) -> MlaLayerCache | KdaLayerCache:
    if isinstance(cache, KdaLayerCache):
        return KdaLayerCache(cache.conv_SWC.to(dtype, copy=True), cache.state_SHVK.to(state_dtype(dtype), copy=True))
    pages = torch.empty_like(cache.pages_PTC, dtype=dtype)
    pages[NULL_PAGE] = 0
    pages[used] = cache.pages_PTC[used].to(dtype)
    return MlaLayerCache(pages, cache.scale)
