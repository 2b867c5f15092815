"""Decoding with the kernels on GPUs, so that runs can be compared bit for bit: caches, walks, digests, and what the profiler saw.

Light to import. Everything here also works with contract execution in the kernels' place, which is how it is tested without a GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

STEPS = 4
CONTEXT_TOKENS = 96


def filled_caches(config: Any, requests: int, q: int, seed: int) -> Any:
    """Caches of `requests` requests of different lengths with random contents."""
    import torch

    from kimi_k3_decode.cache import Caches

    caches = Caches.allocate(config, requests, CONTEXT_TOKENS + STEPS * q, q_max=q)
    random = torch.Generator().manual_seed(seed + 1)
    for number in range(requests):
        request, length = caches.acquire(), 1 + 13 * number % (CONTEXT_TOKENS - 1)
        caches.reserve(request, length)
        caches.lengths_R[request] = length
    for part in parts_of(caches):
        part.copy_(0.2 * torch.randn(part.shape, generator=random))
    return caches


def parts_of(caches: Any) -> Iterator[Any]:
    """Every tensor that a step may change: conv windows, recurrent states, pages."""
    from kimi_k3_decode.cache import KdaLayerCache

    for cache in caches.layers:
        yield from (cache.conv_SWC, cache.state_SHVK) if isinstance(cache, KdaLayerCache) else (cache.pages_PTC,)


def on_device(caches: Any, device: Any) -> Any:
    """A copy of `caches` on another device."""
    from kimi_k3_decode.cache import KdaLayerCache, MlaLayerCache

    layers: list[Any] = []
    for cache in caches.layers:
        if isinstance(cache, KdaLayerCache):
            layers.append(KdaLayerCache(cache.conv_SWC.to(device, copy=True), cache.state_SHVK.to(device, copy=True)))
        else:
            layers.append(MlaLayerCache(cache.pages_PTC.to(device, copy=True), cache.scale))
    return replace(caches.fork(), layers=layers)


def merged(each: Sequence[Any]) -> Any:
    """One set of caches on the first one's device from one a rank: each rank's heads, and the pages, which all must hold alike.

    Raises ValueError where two ranks' pages differ.
    """
    import torch

    from kimi_k3_decode.cache import KdaLayerCache, MlaLayerCache

    first = next(parts_of(each[0])).device
    layers: list[Any] = []
    for caches in zip(*(c.layers for c in each), strict=True):
        if isinstance(caches[0], KdaLayerCache):
            heads = [c.state_SHVK.chunk(len(each), 1)[rank].to(first) for rank, c in enumerate(caches)]
            width = [c.conv_SWC.unflatten(2, (3, -1)).chunk(len(each), 3)[rank].to(first) for rank, c in enumerate(caches)]
            layers.append(KdaLayerCache(torch.cat(width, 3).flatten(2), torch.cat(heads, 1)))
        else:
            pages = [c.pages_PTC.to(first) for c in caches]
            if not all(torch.equal(bits(pages[0][1:]), bits(page[1:])) for page in pages):
                raise ValueError("caches: got different pages on two ranks, needs the same context on all")
            layers.append(MlaLayerCache(pages[0], caches[0].scale))
    return replace(each[0].fork(), layers=layers)


def walk(path: Any, caches: Any, q: int, seed: int, routing: list[dict[int, Any]] | None = None) -> list[Any]:
    """STEPS steps of seeded tokens; accepted counts cycle through 1..q, so every slot is read from. `caches`: one, or one a rank."""
    import torch

    each = caches if isinstance(caches, Sequence) else (caches,)
    random = torch.Generator().manual_seed(seed + 2)
    requests, outputs = list(range(each[0].n_requests)), []
    for step in range(STEPS):
        tokens = torch.randint(4, each[0].config.vocab_size, (len(requests), q), generator=random)
        batch, *_ = (one.batch(tokens, requests) for one in each)
        outputs.append(path.step(batch, caches, routing=routing[step] if routing else None))
        for one in each:
            one.advance(requests, [1 + (step + request) % q for request in requests])
    return outputs


def launches_of_a_step(path: Any, caches: Any, q: int) -> tuple[int, int]:
    """(launches the plan has over all ranks, kernels of this project that the profiler saw in one step)."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from kimi_k3_decode.launches import launch_graph
    from kimi_k3_decode.plan import padded_requests

    requests = list(range(caches.n_requests))
    tokens = torch.full((len(requests), q), 5)
    path.step(caches.batch(tokens, requests), caches)  # loads and binds
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        path.step(caches.batch(tokens, requests), caches)
        torch.cuda.synchronize()
    ran = sum(event.count for event in seen.key_averages() if "kimi_k3_decode" in event.key)
    rows = padded_requests(len(requests), q) * q
    planned = sum(len(launch_graph(path.config, rank.shard, rows, q, top_k=path.top_k)) for rank in path._ranks)
    return planned, ran


def bits(tensor: Any) -> Any:
    """The tensor's bytes: what a comparison of bits is made on, NaN included."""
    import torch

    return tensor.contiguous().view(torch.uint8)


def digest(outputs: list[Any], caches: Any) -> str:
    """SHA-256 over the logits of all steps and over every cache but the null page and slot."""
    found = hashlib.sha256()
    for tensor in (*(output.logits_BQV for output in outputs), *(part[1:] for part in parts_of(caches))):
        found.update(bits(tensor).cpu().numpy().tobytes())
    return found.hexdigest()


def relative_rms(found: list[Any], wanted: list[Any]) -> float:
    """||found - wanted|| / ||wanted|| over all steps; NaN stays NaN."""
    difference = sum(float((a.double().cpu() - b.double().cpu()).square().sum()) for a, b in zip(found, wanted, strict=True))
    return (difference / sum(float(b.double().square().sum()) for b in wanted)) ** 0.5


def replayed(path: Any, start: Any, replays: int, seed: int, q: int = 1, inputs: int = 8) -> tuple[int, int]:
    """(passes that differ from the first one of the same input, passes made).

    `inputs` different batches take turns; caches are put back before each step, and memory of changing size is taken, filled with NaN and
    given back between steps. Logits and every cache are compared bit for bit.
    """
    import torch

    device = next(parts_of(start)).device
    caches = on_device(start, device)
    random = torch.Generator().manual_seed(seed + 3)
    requests = list(range(caches.n_requests))
    shape = (len(requests), q)
    batches = [caches.batch(torch.randint(4, caches.config.vocab_size, shape, generator=random), requests) for _ in range(inputs)]
    kept, changed = list(parts_of(start)), list(parts_of(caches))
    known: list[Any] = []
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(replays):
        torch._foreach_copy_(changed, kept)
        churn = torch.empty((number % 97 + 1) << 14, device=device).fill_(float("nan"))
        logits = path.step(batches[number % inputs], caches).logits_BQV
        found = torch.cat([bits(logits).flatten(), *(bits(part[1:]).flatten() for part in changed)])
        if number < inputs:
            known.append(found)
        else:
            wrong += (found != known[number % inputs]).any()
        del churn
    return int(wrong), replays
