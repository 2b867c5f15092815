"""The analytic model of a step: its launches from the plan, their traffic from the contracts, its floor, and projections.

A *floor* is physics: bytes over the memory rate. A *projection* is a guess with its assumptions written out: floor over the fraction of it
that was reached where something was measured (by launch, where launches were measured alone), plus latencies of launches and of exchanges
between ranks. Memory time scales with the target's memory rate; latencies stay, and the low end of a projection says what it would be if
they shrank as memory time does. A projection is never a measurement and never stands in a table without the word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from scipy.optimize import nnls

from kimi_k3_decode.config import K3, NANO, ModelConfig, Shard
from kimi_k3_decode.draft_model import draft_shapes
from kimi_k3_decode.launches import layer_plan
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.registry import CONTRACTS
from perf.hardware import Gpu, gpu
from perf.launch_fit import LaunchFits
from perf.matrix import MAX_ROWS, Cell, Scope
from perf.roofline import StepFloor, Traffic, step_floor, traffic
from validation.core.types import HarnessError

MODELS: dict[str, ModelConfig] = {config.name: config for config in (K3, NANO)}
TIMED_LAYER = 5  # a KDA + MoE layer, the kind that one-rank records time


@lru_cache(maxsize=256)
def _layer_contracts(model: str, tp: int, rows: int, q: int, layer: int) -> tuple[Contract, ...]:
    return tuple(launch.contract for launch in layer_plan(MODELS[model], Shard(config=MODELS[model], tp=tp), layer, rows, q))


@lru_cache(maxsize=256)
def _launches(model: str, tp: int, rows: int, q: int) -> tuple[tuple[Contract, int], ...]:
    """Contracts of a whole step with how often each occurs. Layers of one kind move the same bytes, so one stands for all of them."""
    config = MODELS[model]
    shard = Shard(config=config, tp=tp)
    kinds = Counter((config.is_kda(layer), config.is_moe(layer)) for layer in range(config.n_layers))
    first = {(config.is_kda(layer), config.is_moe(layer)): layer for layer in reversed(range(config.n_layers))}
    made = [(contract, n) for kind, n in kinds.items() for contract in _layer_contracts(model, tp, rows, q, first[kind])]
    final = next(contract for contract, _ in made if contract.op == "attn_res")
    ends = [
        CONTRACTS["embedding"](shard, rows=rows),
        final,
        CONTRACTS["lm_head"](shard, rows=rows),
        CONTRACTS["sample"](shard, rows=rows, top_k=1),
    ]
    return (*made, *((contract, 1) for contract in ends))


def _padded(rows: int, q: int) -> int:
    """Rows of the contracts that stand for a step; above the plan's bound (stock only) the largest plan's, whose weights are the same."""
    from kimi_k3_decode.plan import bucket_of

    return max(bucket_of(min(rows, MAX_ROWS)), q)


@lru_cache(maxsize=2048)
def step_traffic(
    model: str, tp: int, rows: int, q: int, context_tokens: int, scope: Scope = Scope.STEP, distinct: float | None = None
) -> tuple[Traffic, ...]:
    """Every launch of one step (or of one KDA + MoE layer) on one rank. Up to 64 rows padded to the prepared graph that takes them.

    distinct: experts that a layer reads; None takes the expectation under uniform routing.
    """
    padded = _padded(rows, q)
    shard = Shard(config=MODELS[model], tp=tp)
    layer = _layer_contracts(model, tp, padded, q, TIMED_LAYER) if scope is Scope.LAYER else ()
    made: list[Traffic] = []
    for contract, n in [(contract, 1) for contract in layer] or _launches(model, tp, padded, q):
        one = traffic(contract, shard, rows=rows, q=q, context_tokens=context_tokens, distinct=distinct)
        if rows > padded:
            one = replace(one, link_bytes=one.link_bytes * rows / padded)
        made += [one] * n
    return tuple(made)


def cell_floor(cell: Cell, *, hbm_bytes_per_s: float | None = None, distinct: float | None = None) -> StepFloor:
    """The floor of a cell's step (or layer) on its GPU; `distinct` as in `step_traffic`.

    Raises:
        Unsupported: an unknown GPU.
    """
    launches = step_traffic(cell.model, cell.tp, cell.rows, cell.q, cell.context_tokens, cell.scope, distinct)
    return step_floor(launches, gpu(cell.gpu), hbm_bytes_per_s)


@lru_cache(maxsize=64)
def _weight_bytes(model: str, tp: int) -> int:
    return sum(contract.weight_bytes * n for contract, n in _launches(model, tp, 1, 1))


def memory_bytes(cell: Cell) -> int:
    """Bytes one rank must hold: its weights (all experts), cached context of every request, and recurrent states with a slot a token."""
    config = MODELS[cell.model]
    shard = Shard(config=config, tp=cell.tp)
    context = cell.requests * cell.context_tokens * len(config.mla_layers) * config.mla_cache_dim * 2
    window = 3 * shard.kda_dim * (config.conv_width - 1) * 2
    states = cell.requests * cell.q * len(config.kda_layers) * (shard.kda_heads * config.kda_head_dim**2 * 4 + window)
    return _weight_bytes(cell.model, cell.tp) + context + states


def memory_refusal(cell: Cell) -> tuple[str, ...]:
    """The reason a cell cannot exist on its GPU, whatever runs it; empty when weights and caches fit."""
    needed, there = memory_bytes(cell), gpu(cell.gpu).memory_bytes
    if needed <= there:
        return ()
    what = f"{needed / 1e9:.0f} GB of weights, context and states a GPU"
    return (f"memory: got {what}, needs at most the {there / 1e9:.0f} GB of a {cell.gpu}; use more ranks or less context",)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What a projection rests on. The first three come from measured layers (`evidence`); the others are stated guesses."""

    fraction_of_floor: float  # memory floor over the time spent on it
    launch_us: float  # per launch
    launches_a_layer: int
    evidence: tuple[str, ...]
    fit_error: float  # largest |fitted / measured - 1| over the layers it was fitted to
    measured_on: str
    rows_measured: tuple[int, int]  # smallest and largest; other rows are extrapolated
    exchange_us: float  # what an exchange between ranks adds to launches that were measured on one rank alone
    exchanges_a_layer: int
    exchange_source: str
    fits: LaunchFits | None = None  # by launch; None: all launches alike

    def describe(self) -> dict[str, Any]:
        """JSON values only."""
        made = {"kind": "projection", **asdict(self)}
        if self.fits is not None:
            made["fits"]["overlap"] = {str(rows): share for rows, share in self.fits.overlap.items()}
        return made


@dataclass(frozen=True, kw_only=True)
class LayerPoint:
    """One measured layer: bytes it must move, launches it took, microseconds, its record."""

    hbm_bytes: float
    launches: int
    step_us: float
    rows: int
    evidence: str
    traffic: tuple[Traffic, ...] = ()


# Exchanges a layer and what each adds. Ours: o_proj, router and latent together, expert sums, layer output. Stock: all-reduces after
# o_proj, of the latent, and of the layer's output.
ALL_REDUCE_US = 3.0
ALL_REDUCE = (
    "an all-reduce of 8 bytes on 8 B200 takes 3 us, on 8 H200 2.3 us (NVIDIA/nccl issue 1940; larger ones and more ranks take longer)"
)
EXCHANGES = {
    "latency_specialized": (
        4,
        ALL_REDUCE_US / 2,
        "half of a published all-reduce, one of its two trips: publishing and polling, looped back, are in the measured launches; "
        + ALL_REDUCE,
    ),
    "auto": (3, ALL_REDUCE_US, f"a published all-reduce each, which the measured layers leave out; {ALL_REDUCE}"),
}


def fit_assumptions(points: Sequence[LayerPoint], measured_on: Gpu, backend: str, fits: LaunchFits | None = None) -> Assumptions:
    """time = bytes / (rate x fraction) + launches x launch_us, least squares of relative errors, neither term negative. With `fits` these
    two stand for the launches that were not measured alone.

    Raises:
        HarnessError: fewer than 3 measured layers, or layers from which the memory term cannot be told.
    """
    if len(points) < 3:
        raise HarnessError(f"projection: got {len(points)} measured layers, needs at least 3; publish layer records of this code")
    ideal_us = np.array([1e6 * p.hbm_bytes / measured_on.hbm_bytes_per_s for p in points])
    launches, measured_us = np.array([p.launches for p in points], float), np.array([p.step_us for p in points])
    table = np.stack([ideal_us, launches], axis=1)
    (slowness, launch_us), _ = nnls(table / measured_us[:, None], np.ones(len(points)))
    if slowness <= 0:
        raise HarnessError("projection: got layers whose time does not rise with their bytes, needs rows or ranks that differ more")
    fitted = table @ np.array([slowness, launch_us])
    if fits is not None:
        fitted = np.array([sum(fits.parts_us(p.traffic, p.rows, measured_on.hbm_bytes_per_s)[:2]) for p in points])
    error = np.abs(fitted / measured_us - 1).max()
    exchanges, exchange_us, source = EXCHANGES[backend]
    return Assumptions(
        fraction_of_floor=float(1 / slowness),
        launch_us=float(launch_us),
        launches_a_layer=max(p.launches for p in points),
        evidence=tuple(dict.fromkeys([*(p.evidence for p in points), *(fits.evidence if fits is not None else ())])),
        fit_error=float(error),
        measured_on=measured_on.name,
        rows_measured=(min(p.rows for p in points), max(p.rows for p in points)),
        exchange_us=exchange_us,
        exchanges_a_layer=exchanges,
        exchange_source=source,
        fits=fits,
    )


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Microseconds of a step by what they are spent on. `low_us`: if latencies shrank as memory time does; exchanges never do."""

    memory_us: float
    latency_us: float
    exchange_us: float
    faster: float  # the target's memory rate over that of the measured GPU

    @property
    def us(self) -> float:
        return self.memory_us + self.latency_us + self.exchange_us

    @property
    def low_us(self) -> float:
        return self.memory_us + self.latency_us / max(self.faster, 1.0) + self.exchange_us


def _parts(hbm_bytes: float, launches: float, layers: int, target: Gpu, a: Assumptions) -> Projection:
    return Projection(
        memory_us=1e6 * hbm_bytes / target.hbm_bytes_per_s / a.fraction_of_floor,
        latency_us=launches * a.launch_us,
        exchange_us=layers * a.exchanges_a_layer * a.exchange_us,
        faster=target.hbm_bytes_per_s / gpu(a.measured_on).hbm_bytes_per_s,
    )


def project(cell: Cell, assumptions: Assumptions) -> Projection:
    """The projected step: memory floor / fraction + latencies + exchanges; by launch where the assumptions are."""
    n_layers, target = MODELS[cell.model].n_layers, gpu(cell.gpu)
    if assumptions.fits is None:
        return _parts(cell_floor(cell).hbm_bytes, assumptions.launches_a_layer * n_layers, n_layers, target, assumptions)
    launches = step_traffic(cell.model, cell.tp, cell.rows, cell.q, cell.context_tokens)
    latency_us, memory_us, others = assumptions.fits.parts_us(launches, cell.rows, target.hbm_bytes_per_s)
    rest = _parts(sum(launch.hbm_bytes for launch in others), len(others), n_layers, target, assumptions)
    return replace(rest, memory_us=rest.memory_us + memory_us, latency_us=rest.latency_us + latency_us)


def project_draft_us(cell: Cell, assumptions: Assumptions) -> float:
    """Projected time of one draft pass: the drafter's weights and the LM head shared evenly over ranks, all launches alike."""
    config = MODELS[cell.model]
    n_layers = config.draft.n_layers if config.draft is not None else 0
    elements = sum(prod(shape) for shape in draft_shapes(config).values()) + config.vocab_size * config.hidden_size
    return _parts(2 * elements / cell.tp, assumptions.launches_a_layer * n_layers, n_layers, gpu(cell.gpu), assumptions).us


@dataclass(frozen=True, kw_only=True)
class Published:
    """A number published by others, with its conditions; a projection of the same cell is compared with it."""

    cell: Cell
    step_us: float
    source: str


# Kimi K3 on 16 GB300, batch 1, no speculation: 7.38 -> 3.90 ms a token (published with the specialised path, October 2026).
PUBLISHED = tuple(
    Published(
        cell=Cell(model="kimi-k3", gpu="GB300", tp=16, requests=1, q=1, context_tokens=1024, acceptance_length=1.0, backend=backend),
        step_us=step_us,
        source="GB300 x16, TP16, batch 1, no speculation",
    )
    for backend, step_us in (("auto", 7380.0), ("latency_specialized", 3900.0))
)
