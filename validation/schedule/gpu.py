"""The kernels themselves on a GPU (claim C-KERNEL-1): nano-K3 decoded by the compiled kernels, beside contract execution and the oracle.

model: the same bits with programmatic launches on and off, with graphs and single launches, and again; an error against the FP64 oracle
within the policy's multiple of contract execution's own, experts forced; and that the launches which ran are the plan's.
replays: thousands of graph replays with changing inputs and memory churn give the bits of the first pass, caches and states included.
delays: kernels that sleep at every wait and publish, on one, two and four ranks, give the bits of kernels that do not.
Without a GPU every case is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from validation.core.types import Case, Check, Limit, Measurement, Target
from validation.schedule.delays import SITES, delayed
from validation.schedule.gpu_runs import STEPS, digest, filled_caches, launches_of_a_step, on_device, relative_rms, replayed, walk

CLAIM = "C-KERNEL-1"
REPLAYS = 10_000
SEEDS = (1, 2)
SHAPES = ((1, 1), (3, 1), (8, 1), (9, 1), (64, 1), (1, 8), (8, 8))  # (requests, tokens a request); 9 are padded to 16 rows
RANKS = (1, 2)
DEVICE = "cuda"
WAYS: Mapping[str, Mapping[str, Any]] = {"pdl": {}, "no_pdl": {"pdl": False}, "single_launches": {"graphs": False}, "again": {}}


Measured = tuple[tuple[Measurement, ...], Mapping[str, Any]]
_WHY = "at most this multiple of contract execution's own error against the FP64 oracle, same caches, experts forced"
LIMITS: Mapping[str, tuple[Limit, ...]] = {
    "schedule.gpu.model": (
        Limit(measurement="distinct_results", op="==", bound=1, unit="count", why="not one bit depends on how the step is launched"),
        Limit(measurement="error_ratio", op="<=", bound=1.5, unit="1", why=_WHY),
        Limit(measurement="launches_off_plan", op="==", bound=0, unit="count", why="what ran is the plan, launch for launch"),
        Limit(measurement="steps", op=">=", bound=STEPS, unit="count", why="a comparison of nothing proves nothing"),
    ),
    "schedule.gpu.replays": (
        Limit(measurement="differing", op="==", bound=0, unit="count", why="a replay gives the bits of the first pass"),
        Limit(measurement="replays", op=">=", bound=REPLAYS, unit="count", why="rare races need many passes"),
    ),
    "schedule.gpu.delays": (
        Limit(measurement="distinct_results", op="==", bound=1, unit="count", why="not one bit depends on which block or rank is late"),
        Limit(measurement="sites_delayed", op=">=", bound=len(SITES), unit="count", why="every kind of wait and publish slept"),
        Limit(measurement="delayed_runs", op=">=", bound=len(SEEDS), unit="count", why="a comparison of nothing proves nothing"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """One rule; `measured_by(case, weights)` decodes with the kernels."""

    id: str
    planned: tuple[Case, ...]
    measured_by: Callable[[Case, Any], Measured]
    claim: str = CLAIM
    roles: tuple[str, ...] = ("stock",)
    must_kill: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ("gpu",)
    time_limit_s: float = 900.0

    def cases(self) -> Iterable[Case]:
        return self.planned

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return LIMITS[self.id]

    def measure(self, case: Case, targets: Mapping[str, Target]) -> Measured:
        import torch

        from validation.core.worker import Refused

        if not torch.cuda.is_available():
            raise Refused(("device: got no CUDA device, needs a Hopper or Blackwell GPU; use the embedded profile",))
        return self.measured_by(case, targets["stock"].weights)  # type: ignore[attr-defined]


def measure_kernels(case: Case, weights: Any) -> Measured:
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


def measure_replays(case: Case, weights: Any) -> Measured:
    """Replay one shape's graphs again and again; see `replayed`."""
    from kimi_k3_decode.gpu_step import GpuPath

    tp, requests, q = (int(case.params[key]) for key in ("tp", "requests", "q"))
    start = on_device(filled_caches(weights.config, requests, q, case.seed), DEVICE)
    differing, made = replayed(GpuPath(weights, tp, probes=False), start, int(case.params["replays"]), case.seed, q)
    return (
        Measurement(name="differing", value=differing, unit="count"),
        Measurement(name="replays", value=made, unit="count"),
    ), {}


def model_of(tp: int, weights: Any) -> Any:
    """The checkpoint, or for ranks that nano cannot be split over a seeded random model that can."""
    import torch

    from kimi_k3_decode.random_init import draw_weights
    from validation.schedule.execution import FOUR_RANKS

    return weights if tp <= max(RANKS) else draw_weights(FOUR_RANKS, tp).to(torch.bfloat16)


def measure_delays(case: Case, weights: Any) -> Measured:
    """Decode with kernels as they are, and with sleeping kernels of each seed, programmatic launches on."""
    from kimi_k3_decode.gpu_step import GpuPath

    tp, requests, q = (int(case.params[key]) for key in ("tp", "requests", "q"))
    model = model_of(tp, weights)
    start = filled_caches(model.config, requests, q, case.seed)

    def decoded() -> str:
        caches = on_device(start, DEVICE)
        return digest(walk(GpuPath(model, tp), caches, q, case.seed), caches)

    digests, sites = {"undelayed": decoded()}, 0
    for seed in SEEDS:
        with delayed(seed) as counts:
            digests[f"seed {seed}"] = decoded()
        sites = sum(count > 0 for count in counts.values())
    return (
        Measurement(name="distinct_results", value=len(set(digests.values())), unit="count"),
        Measurement(name="sites_delayed", value=sites, unit="count"),
        Measurement(name="delayed_runs", value=len(SEEDS), unit="count"),
    ), {"digests": digests}


def gpu_checks() -> list[Check]:
    def nano(tp: int, requests: int, q: int, **more: int) -> Case:
        return Case(subject="nano" if tp <= max(RANKS) else "four_ranks", params={"tp": tp, "requests": requests, "q": q, **more})

    model = tuple(nano(tp, n, q) for tp in RANKS for n, q in SHAPES)
    replays = tuple(nano(tp, 8, 1, replays=REPLAYS) for tp in RANKS)
    delays = tuple(nano(*shape) for shape in ((1, 3, 1), (2, 3, 1), (2, 2, 8), (4, 3, 1), (4, 2, 8)))
    return [
        KernelCheck(id="schedule.gpu.model", planned=model, measured_by=measure_kernels),
        KernelCheck(id="schedule.gpu.replays", planned=replays, measured_by=measure_replays),
        KernelCheck(id="schedule.gpu.delays", planned=delays, measured_by=measure_delays),
    ]
