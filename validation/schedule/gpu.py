"""The kernels themselves on a GPU (claim C-KERNEL-1): nano-K3 decoded by the compiled kernels, beside contract execution and the oracle.

Asked of each case: the same bits with programmatic launches on and off, with graphs and single launches, and again; an error against the
FP64 oracle within the policy's multiple of contract execution's own, experts forced; and that the launches which ran are the plan's.
Without a GPU every case is refused with the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from validation.core.types import Case, Check, Limit, Measurement, Target

CLAIM = "C-KERNEL-1"
SHAPES = ((1, 1), (3, 1), (8, 1), (64, 1), (1, 8), (8, 8))  # (requests, tokens a request)
RANKS = (1, 2)
STEPS = 4
CONTEXT_TOKENS = 96
DEVICE = "cuda"
WAYS: Mapping[str, Mapping[str, bool]] = {"pdl": {}, "no_pdl": {"pdl": False}, "single_launches": {"graphs": False}, "again": {}}


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """One batch shape on one number of virtual ranks, a few steps each."""

    id: str = "schedule.gpu.model"
    claim: str = CLAIM
    roles: tuple[str, ...] = ("stock",)
    must_kill: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ("gpu",)
    time_limit_s: float = 900.0

    def cases(self) -> Iterable[Case]:
        return [Case(subject="nano", params={"tp": tp, "requests": n, "q": q}) for tp in RANKS for n, q in SHAPES]

    def limits(self, case: Case) -> tuple[Limit, ...]:
        why = "at most this multiple of contract execution's own error against the FP64 oracle, same caches, experts forced"
        return (
            Limit(measurement="distinct_results", op="==", bound=1, unit="count", why="not one bit depends on how the step is launched"),
            Limit(measurement="error_ratio", op="<=", bound=1.5, unit="1", why=why),
            Limit(measurement="launches_off_plan", op="==", bound=0, unit="count", why="what ran is the plan, launch for launch"),
            Limit(measurement="steps", op=">=", bound=STEPS, unit="count", why="a comparison of nothing proves nothing"),
        )

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        import torch

        from validation.core.worker import Refused

        if not torch.cuda.is_available():
            raise Refused(("device: got no CUDA device, needs a Hopper or Blackwell GPU; use the embedded profile",))
        return measure_kernels(case, targets["stock"].weights)  # type: ignore[attr-defined]


def measure_kernels(case: Case, weights: Any) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
    """Decode with the kernels in every way of `WAYS`, with contract execution, and in FP64."""
    import torch

    from kimi_k3_decode.gpu_step import GpuPath
    from kimi_k3_decode.step import SpecializedPath

    tp, requests, q = (int(case.params[key]) for key in ("tp", "requests", "q"))
    start = filled_caches(weights.config, requests, q, case.seed)
    exact = walk(SpecializedPath(weights.to(torch.float64), torch.float64, tp=tp), start.fork(torch.float64), q, case.seed)
    routing = [dict(output.routing or {}) for output in exact]
    contract = walk(SpecializedPath(weights, tp=tp), start.fork(), q, case.seed, routing)
    digests = {}
    for name, options in WAYS.items():
        caches = on_device(start, DEVICE)
        digests[name] = digest(walk(GpuPath(weights, tp, **options), caches, q, case.seed), caches)
    planned, ran = launches_of_a_step(GpuPath(weights, tp, graphs=False, probes=False), on_device(start, DEVICE), q)
    on_gpu = [{layer: ids.to(DEVICE) for layer, ids in chosen.items()} for chosen in routing]
    forced = walk(GpuPath(weights, tp), on_device(start, DEVICE), q, case.seed, on_gpu)
    errors = [relative_rms([o.logits_BQV for o in outputs], [e.logits_BQV for e in exact]) for outputs in (forced, contract)]
    return (
        Measurement(name="distinct_results", value=len(set(digests.values())), unit="count"),
        Measurement(name="error_ratio", value=errors[0] / errors[1] if errors[1] else float("nan"), unit="1"),
        Measurement(name="kernel_error", value=errors[0], unit="1"),
        Measurement(name="contract_error", value=errors[1], unit="1"),
        Measurement(name="launches_off_plan", value=abs(planned - ran), unit="count"),
        Measurement(name="launches", value=ran, unit="count"),
        Measurement(name="steps", value=len(exact), unit="count"),
    ), {"digests": digests}


def filled_caches(config: Any, requests: int, q: int, seed: int) -> Any:
    """Caches of `requests` requests of different lengths with random contents."""
    import torch

    from kimi_k3_decode.cache import Caches, KdaLayerCache

    caches = Caches.allocate(config, requests, CONTEXT_TOKENS + STEPS * q, q_max=q)
    random = torch.Generator().manual_seed(seed + 1)
    for number in range(requests):
        request, length = caches.acquire(), 1 + 13 * number % (CONTEXT_TOKENS - 1)
        caches.reserve(request, length)
        caches.lengths_R[request] = length
    for cache in caches.layers:
        parts = (cache.conv_SWC, cache.state_SHVK) if isinstance(cache, KdaLayerCache) else (cache.pages_PTC,)
        for part in parts:
            part.copy_(0.2 * torch.randn(part.shape, generator=random))
    return caches


def on_device(caches: Any, device: str) -> Any:
    """A copy of `caches` on another device."""
    from kimi_k3_decode.cache import KdaLayerCache, MlaLayerCache

    layers: list[Any] = []
    for cache in caches.layers:
        if isinstance(cache, KdaLayerCache):
            layers.append(KdaLayerCache(cache.conv_SWC.to(device, copy=True), cache.state_SHVK.to(device, copy=True)))
        else:
            layers.append(MlaLayerCache(cache.pages_PTC.to(device, copy=True), cache.scale))
    return replace(caches.fork(), layers=layers)


def walk(path: Any, caches: Any, q: int, seed: int, routing: list[dict[int, Any]] | None = None) -> list[Any]:
    """STEPS steps of seeded tokens; accepted counts cycle through 1..q, so every slot is read from."""
    import torch

    random = torch.Generator().manual_seed(seed + 2)
    requests, outputs = list(range(caches.n_requests)), []
    for step in range(STEPS):
        tokens = torch.randint(4, caches.config.vocab_size, (len(requests), q), generator=random)
        batch = caches.batch(tokens, requests)
        outputs.append(path.step(batch, caches, routing=routing[step] if routing else None))
        caches.advance(requests, [1 + (step + request) % q for request in requests])
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


def digest(outputs: list[Any], caches: Any) -> str:
    """SHA-256 over the logits of all steps and over every cache but the null page."""
    import torch

    from kimi_k3_decode.cache import KdaLayerCache

    tensors = [output.logits_BQV for output in outputs]
    for cache in caches.layers:
        tensors += [cache.conv_SWC[1:], cache.state_SHVK[1:]] if isinstance(cache, KdaLayerCache) else [cache.pages_PTC[1:]]
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def relative_rms(found: list[Any], wanted: list[Any]) -> float:
    """||found - wanted|| / ||wanted|| over all steps; NaN stays NaN."""
    difference = sum(float((a.double().cpu() - b.double().cpu()).square().sum()) for a, b in zip(found, wanted, strict=True))
    return (difference / sum(float(b.double().square().sum()) for b in wanted)) ** 0.5


def gpu_checks() -> list[Check]:
    return [KernelCheck()]
