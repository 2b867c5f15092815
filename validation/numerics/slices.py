"""A few layers of a checkpoint as a model of its own: every mechanism, a fraction of the cost. Used where bits and rules are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kimi_k3_decode.cache import Caches, KdaLayerCache, MlaLayerCache
from kimi_k3_decode.stock import StockPath
from kimi_k3_decode.weights import ModelWeights

# KDA with the dense MLP, KDA with MoE, MLA with MoE, and KDA with MoE on a layer that writes a residual block.
LAYERS = (0, 1, 3, 4)
FIRST_TOKEN = 32  # of the tokens drawn: the embedded tokenizer's printable characters


def slice_model(weights: ModelWeights, layers: Sequence[int] = LAYERS) -> ModelWeights:
    """`layers` of `weights` (those that exist) in order, without a drafter; embedding, final mixture and head as they are."""
    config = weights.config
    chosen = [layer for layer in layers if layer < config.n_layers]
    kda = tuple(place for place, layer in enumerate(chosen) if config.is_kda(layer))
    smaller = replace(
        config,
        name=f"{config.name}-slice",
        n_layers=len(chosen),
        kda_layers=kda,
        mla_layers=tuple(place for place in range(len(chosen)) if place not in kda),
        draft=None,
    )
    return replace(weights, config=smaller, layers=tuple(weights.layers[layer] for layer in chosen), draft=None)


def change_moe(weights: ModelWeights, change: Callable[[Any], Any]) -> ModelWeights:
    """`change(MoeWeights) -> MoeWeights` in every MoE layer."""
    layers = tuple(
        replace(layer, mlp=change(layer.mlp)) if weights.config.is_moe(place) else layer for place, layer in enumerate(weights.layers)
    )
    return replace(weights, layers=layers)


def draw_tokens(weights: ModelWeights, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Seeded int64 tokens; never an id below FIRST_TOKEN, so special rows of the embedding stay unused."""
    low = min(FIRST_TOKEN, weights.config.vocab_size // 2)
    return torch.randint(low, weights.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def prefilled(weights: ModelWeights, lengths: Sequence[int], *, q_max: int, seed: int, room: int = 32, spare: int = 0) -> Caches:
    """BF16 caches with one request a length, filled by the stock path; `spare` more request places stay empty."""
    caches = Caches.allocate(weights.config, len(lengths) + spare, max(lengths) + room, q_max=q_max)
    requests = [caches.acquire() for _ in lengths]
    texts = [draw_tokens(weights, (n,), seed * 1000 + place).tolist() for place, n in enumerate(lengths)]
    StockPath(weights, torch.bfloat16).prefill(texts, caches, requests)
    return caches


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that NaN equals NaN and -0.0 differs from 0.0."""
    return tensor.contiguous().view(torch.uint8)


def digest_of(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of the tensor's bytes."""
    return hashlib.sha256(bits(tensor).numpy().tobytes()).hexdigest()


def rows_that_differ(first: torch.Tensor, second: torch.Tensor) -> int:
    """Rows (axis 0) whose bits differ."""
    return int((bits(first).flatten(1) != bits(second).flatten(1)).any(1).sum())


def cached_bits(caches: Caches, requests: Sequence[int]) -> dict[str, str]:
    """Digest of everything each request holds: name -> SHA-256. Rows behind a request's length and unused taps are left out."""
    found = {}
    for request in requests:
        length = caches.lengths_R[request]
        for layer, cache in enumerate(caches.layers):
            if isinstance(cache, KdaLayerCache):
                slots = caches.slots_RQ[request]
                accepted = caches.accepted_R[request]
                taps = cache.conv_SWC[slots[0], accepted - 1 : accepted + 2]
                found[f"{request}.{layer}.conv"] = digest_of(taps)
                found[f"{request}.{layer}.state"] = digest_of(cache.state_SHVK[slots[accepted - 1]])
            elif isinstance(cache, MlaLayerCache):
                pages = torch.tensor(caches.pages_R[request], dtype=torch.int64)
                found[f"{request}.{layer}.pages"] = digest_of(cache.pages_PTC[pages].flatten(0, 1)[:length])
    return found


def poison_unused(caches: Caches, value: float) -> None:
    """Fill everything no request may read with `value`: null slot, free pages, rows behind each length, slots of old drafts.

    The null page stays as it is: it is zero by contract, and a path may point masked positions at it.
    """
    live = [r for r in range(caches.n_requests) if caches.lengths_R[r]]
    for cache in caches.layers:
        if isinstance(cache, KdaLayerCache):
            states = {caches.slots_RQ[r][caches.accepted_R[r] - 1] for r in live}
            windows = {caches.slots_RQ[r][0]: caches.accepted_R[r] for r in live}
            cache.state_SHVK[[s for s in range(cache.state_SHVK.shape[0]) if s not in states]] = value
            for slot in range(cache.conv_SWC.shape[0]):
                accepted = windows.get(slot)
                if accepted is None:
                    cache.conv_SWC[slot] = value
                else:
                    cache.conv_SWC[slot, : accepted - 1], cache.conv_SWC[slot, accepted + 2 :] = value, value
        elif isinstance(cache, MlaLayerCache):
            seen = torch.zeros(cache.pages_PTC.shape[:2], dtype=torch.bool)
            seen[0] = True
            for request in live:
                pages = torch.tensor(caches.pages_R[request], dtype=torch.int64)
                rows = seen[pages].flatten()
                rows[: caches.lengths_R[request]] = True
                seen[pages] = rows.view(len(pages), -1)
            cache.pages_PTC[~seen] = value
