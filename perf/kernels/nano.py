"""The whole nano model on a GPU: kernels beside contract execution and the FP64 oracle, and what must not change a bit.

Bit-identity is asked of logits and of every cache after several steps, between: PDL on and off, graphs and single launches, repeated runs.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Any

import torch

from kimi_k3_decode.cache import Caches, KdaLayerCache, MlaLayerCache, StepOutput
from kimi_k3_decode.config import NANO
from kimi_k3_decode.gpu_step import GpuPath, RankTimeout
from kimi_k3_decode.random_init import draw_weights
from kimi_k3_decode.step import SpecializedPath
from kimi_k3_decode.weights import ModelWeights

STEPS = 4
SEED = 11


def on_device(caches: Caches, device: str) -> Caches:
    """A copy of `caches` on another device."""
    layers: list[MlaLayerCache | KdaLayerCache] = []
    for cache in caches.layers:
        if isinstance(cache, KdaLayerCache):
            layers.append(KdaLayerCache(cache.conv_SWC.to(device, copy=True), cache.state_SHVK.to(device, copy=True)))
        else:
            layers.append(MlaLayerCache(cache.pages_PTC.to(device, copy=True), cache.scale))
    copied = replace(caches.fork(), layers=layers)
    return copied


def started(requests: int, q: int) -> Caches:
    """Caches with random but valid contents: `requests` requests of different lengths."""
    caches = Caches.allocate(NANO, requests, 160, q_max=q, dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(SEED)
    for request in range(requests):
        length = 5 + 13 * request % 90
        caches.reserve(request, length)
        caches.lengths_R[request] = length
    for cache in caches.layers:
        if isinstance(cache, KdaLayerCache):
            cache.conv_SWC.copy_(torch.randn(cache.conv_SWC.shape, generator=random))
            cache.state_SHVK.copy_(torch.randn(cache.state_SHVK.shape, generator=random) * 0.2)
        else:
            cache.pages_PTC.copy_(torch.randn(cache.pages_PTC.shape, generator=random))
    return caches


def walk(path: Any, caches: Caches, requests: int, q: int, routing: list[dict[int, torch.Tensor]] | None = None) -> list[StepOutput]:
    """STEPS steps of fixed random tokens; accepted counts cycle through 1..q."""
    random = torch.Generator().manual_seed(SEED + 1)
    outputs = []
    for step in range(STEPS):
        tokens = torch.randint(3, NANO.vocab_size, (requests, q), generator=random)
        batch = caches.batch(tokens)
        outputs.append(path.step(batch, caches, routing=routing[step] if routing else None))
        caches.advance(range(requests), [1 + (step + r) % q for r in range(requests)])
    return outputs


def digest(outputs: list[StepOutput], caches: Caches) -> str:
    """SHA-256 over the logits of all steps and every cache."""
    found = hashlib.sha256()
    tensors = [o.logits_BQV for o in outputs]
    for cache in caches.layers:
        tensors += [cache.conv_SWC, cache.state_SHVK] if isinstance(cache, KdaLayerCache) else [cache.pages_PTC[1:]]
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt())


def _flips(found: dict[int, torch.Tensor], wanted: dict[int, torch.Tensor]) -> int:
    """Rows whose set of experts differs, over all layers."""
    return sum(int((found[k].cpu().sort(-1).values != wanted[k].sort(-1).values).any(-1).sum()) for k in wanted)


def run(records: Any) -> None:
    weights = draw_weights(NANO, SEED)
    weights = weights.to(torch.bfloat16)
    for tp in (1, 2):
        for requests, q in ((1, 1), (3, 1), (8, 1), (2, 8), (64, 1)):
            try:
                _compare(records, weights, tp, requests, q)
            except RankTimeout as error:
                records.add({"case": f"nano-tp{tp}-b{requests}-q{q}", "error": f"RankTimeout: {error}"})
                print(f"nano-tp{tp}-b{requests}-q{q}", error, flush=True)
    _replays(records, weights)


def _compare(records: Any, weights: ModelWeights, tp: int, requests: int, q: int) -> None:
    start = started(requests, q)
    exact = walk(SpecializedPath(weights.to(torch.float64), torch.float64, tp=tp), start.fork(torch.float64), requests, q)
    routing: list[dict[int, torch.Tensor]] = [dict(o.routing or {}) for o in exact]
    contract = walk(SpecializedPath(weights, tp=tp), start.fork(), requests, q, routing)
    digests = {}
    forced = None
    ways: dict[str, dict[str, bool]] = {"pdl": {}, "no_pdl": {"pdl": False}, "eager": {"graphs": False}, "again": {}}
    for name, options in ways.items():
        path = GpuPath(weights, tp, **options)
        caches = on_device(start, "cuda")
        free = walk(path, caches, requests, q)
        digests[name] = digest(free, caches)
        if name == "pdl":
            caches = on_device(start, "cuda")
            forced = walk(path, caches, requests, q, [{k: v.cuda() for k, v in r.items()} for r in routing])
            flips = sum(_flips(f.routing or {}, r) for f, r in zip(free, routing, strict=True))
    assert forced is not None
    record: dict[str, Any] = {
        "case": f"nano-tp{tp}-b{requests}-q{q}",
        "kernel_vs_fp64": [relative(f.logits_BQV, e.logits_BQV) for f, e in zip(forced, exact, strict=True)],
        "contract_vs_fp64": [relative(c.logits_BQV, e.logits_BQV) for c, e in zip(contract, exact, strict=True)],
        "kernel_vs_contract": [relative(f.logits_BQV, c.logits_BQV) for f, c in zip(forced, contract, strict=True)],
        "rows_with_other_experts_free": flips,
        "digests": digests,
        "bit_identical": len(set(digests.values())) == 1,
    }
    records.add(record)
    print(record["case"], [f"{x:.4f}" for x in record["kernel_vs_fp64"]], [f"{x:.4f}" for x in record["contract_vs_fp64"]],
          "identical" if record["bit_identical"] else digests, "flips", flips, flush=True)  # fmt: skip


def _replays(records: Any, weights: ModelWeights, replays: int = 10_000) -> None:
    """The same step again and again, from the same caches, with other work and allocator churn between: one digest."""
    for tp in (1, 2):
        path = GpuPath(weights, tp, probes=False)
        start = on_device(started(8, 1), "cuda")
        caches = on_device(start, "cuda")
        random = torch.Generator().manual_seed(SEED + 2)
        batches = [caches.batch(torch.randint(3, NANO.vocab_size, (8, 1), generator=random)) for _ in range(8)]
        first: dict[int, torch.Tensor] = {}
        differing = 0
        begin = time.perf_counter()
        for i in range(replays // tp):
            for cache, source in zip(caches.layers, start.layers, strict=True):
                if isinstance(cache, KdaLayerCache) and isinstance(source, KdaLayerCache):
                    cache.conv_SWC.copy_(source.conv_SWC)
                    cache.state_SHVK.copy_(source.state_SHVK)
            churn = torch.empty((i % 97 + 1) << 14, device="cuda").fill_(float("nan"))
            logits = path.step(batches[i % 8], caches).logits_BQV
            if i < 8:
                first[i] = logits.clone()
            elif not torch.equal(logits, first[i % 8]):
                differing += 1
            del churn
        seconds = time.perf_counter() - begin
        records.add({"case": f"nano-tp{tp}-replays", "replays": replays // tp, "differing": differing, "seconds": seconds})
        print(f"replays tp{tp}", replays // tp, "differing", differing, f"{seconds:.1f} s", flush=True)
