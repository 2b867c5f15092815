"""The analytic model of a step: its launches from the plan, their traffic from the contracts, its floor, and projections.

A *floor* is physics: bytes over the memory rate. A *projection* is a guess with its assumptions written out: floor over the fraction of it
that was reached where something was measured (routed experts, which are read in pieces, apart from all other bytes), plus latencies of
launches and of exchanges between ranks. Memory time scales with the target's memory rate; latencies stay, and the low end of a projection
says what it would be if they shrank as memory time does. A projection is never a measurement and never stands in a table without the word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from scipy.optimize import lsq_linear

from kimi_k3_decode.config import K3, NANO, ModelConfig, Shard
from kimi_k3_decode.draft_model import draft_shapes
from kimi_k3_decode.launches import layer_plan
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.registry import CONTRACTS
from perf.hardware import Gpu, gpu
from perf.launch_fit import LaunchFits
from perf.matrix import MAX_ROWS, Cell, Scope
from perf.roofline import StepFloor, Traffic, expert_bytes, step_floor, traffic
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
    return _floor(cell.model, cell.tp, cell.rows, cell.q, cell.context_tokens, cell.scope, distinct, gpu(cell.gpu), hbm_bytes_per_s)


@lru_cache(maxsize=2048)
def _floor(
    model: str, tp: int, rows: int, q: int, context_tokens: int, scope: Scope, distinct: float | None, target: Gpu, rate: float | None
) -> StepFloor:
    """Cells that differ in their acceptance or backend alone have one floor."""
    return step_floor(step_traffic(model, tp, rows, q, context_tokens, scope, distinct), target, rate)


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
    """What a projection rests on. Fractions and latencies come from measured layers (`evidence`); exchanges are stated guesses."""

    fraction_of_floor: float  # memory floor over the time spent on it, of all bytes but those of routed experts; at most 1
    fraction_of_experts: float  # the same of routed experts
    launch_us: float  # per launch
    row_us: float  # per launch and token row
    launches_a_layer: int  # of the measured layer
    evidence: tuple[str, ...]
    fit_error: float  # largest |fitted / measured - 1| over the layers it was fitted to
    measured_on: str
    rows_measured: tuple[int, int]  # smallest and largest; other rows are extrapolated
    exchange_us: float  # what an exchange between ranks adds to launches that were measured on one rank alone
    exchanges_a_layer: int
    exchange_source: str
    fits: LaunchFits | None = None  # what each launch alone costs: shown beside, no projection rests on it

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


# A layer's terms: bytes of routed experts, all other bytes, launches, launches x rows. No byte moves faster than the memory.
LOWEST = (1.0, 1.0, 0.0, 0.0)
LEAST_POINTS, POINTS_FOR_ALL_TERMS = 3, 5
LEAST_SPREAD = 1.2  # of the layers' bytes: closer together, their time tells nothing about bytes


def _terms(experts_us: float, others_us: float, launches: float, rows: int, *, all_terms: bool = True) -> list[float]:
    return [experts_us, others_us, launches, launches * rows] if all_terms else [experts_us + others_us, launches]


def _floors_us(hbm_bytes: float, experts: float, bytes_per_s: float) -> tuple[float, float]:
    """Memory floors of the routed experts' bytes and of the rest of `hbm_bytes`."""
    return 1e6 * experts / bytes_per_s, 1e6 * (hbm_bytes - experts) / bytes_per_s


def fit_assumptions(points: Sequence[LayerPoint], measured_on: Gpu, backend: str, fits: LaunchFits | None = None) -> Assumptions:
    """time = expert bytes / (rate x fraction) + other bytes / (rate x fraction) + launches x (launch_us + rows x row_us), least squares of
    relative errors. With few layers one fraction stands for all bytes, and rows cost nothing.

    Raises:
        HarnessError: fewer than 3 measured layers, or layers from which the memory term cannot be told.
    """
    if len(points) < LEAST_POINTS:
        raise HarnessError(
            f"projection: got {len(points)} measured layers, needs at least {LEAST_POINTS}; publish layer records of this code"
        )
    if max(p.hbm_bytes for p in points) < LEAST_SPREAD * min(p.hbm_bytes for p in points):
        raise HarnessError("projection: got layers that move the same bytes, needs rows or ranks that differ more")
    all_terms = len(points) >= POINTS_FOR_ALL_TERMS
    floors = [_floors_us(p.hbm_bytes, expert_bytes(p.traffic), measured_on.hbm_bytes_per_s) for p in points]
    table = np.array([_terms(*floor, p.launches, p.rows, all_terms=all_terms) for floor, p in zip(floors, points, strict=True)])
    measured_us = np.array([p.step_us for p in points])
    lowest = LOWEST if all_terms else LOWEST[1:3]
    found = lsq_linear(table / measured_us[:, None], np.ones(len(points)), bounds=(lowest, [np.inf] * len(lowest))).x
    experts, others, launch_us, row_us = found if all_terms else (found[0], *found, 0.0)
    exchanges, exchange_us, source = EXCHANGES[backend]
    return Assumptions(
        fraction_of_floor=float(1 / others),
        fraction_of_experts=float(1 / experts),
        launch_us=float(launch_us),
        row_us=float(row_us),
        launches_a_layer=max(p.launches for p in points),
        evidence=tuple(dict.fromkeys([*(p.evidence for p in points), *(fits.evidence if fits is not None else ())])),
        fit_error=float(np.abs(table @ found / measured_us - 1).max()),
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
    def alone_us(self) -> float:
        """Of one rank that waits for no other."""
        return self.memory_us + self.latency_us

    @property
    def us(self) -> float:
        return self.memory_us + self.latency_us + self.exchange_us

    @property
    def low_us(self) -> float:
        return self.memory_us + self.latency_us / max(self.faster, 1.0) + self.exchange_us


def _parts(floors_us: tuple[float, float], launches: float, rows: int, layers: int, target: Gpu, a: Assumptions) -> Projection:
    return Projection(
        memory_us=floors_us[0] / a.fraction_of_experts + floors_us[1] / a.fraction_of_floor,
        latency_us=launches * (a.launch_us + rows * a.row_us),
        exchange_us=layers * a.exchanges_a_layer * a.exchange_us,
        faster=target.hbm_bytes_per_s / gpu(a.measured_on).hbm_bytes_per_s,
    )


# Stock launches of a layer beyond those of the measured KDA + MoE layer: an MLA layer has six more before its o_proj (perf/kernels/
# stock_step.py), a dense layer eleven fewer behind it; embedding, final norm, LM head and sampling are four more a step.
STOCK_MLA_MORE, STOCK_DENSE_FEWER, STOCK_ENDS = 6, 11, 4


def launches_of(cell: Cell, a: Assumptions) -> int:
    """Launches of the cell's step, or of the measured layer: ours by the plan, stock's by count."""
    if cell.scope is Scope.LAYER:
        return a.launches_a_layer
    config = MODELS[cell.model]
    if cell.backend != "auto":
        return sum(n for _, n in _launches(cell.model, cell.tp, _padded(cell.rows, cell.q), cell.q))
    beyond = STOCK_MLA_MORE * len(config.mla_layers) - STOCK_DENSE_FEWER * config.n_dense_layers + STOCK_ENDS
    return a.launches_a_layer * config.n_layers + beyond


def project(cell: Cell, assumptions: Assumptions, *, distinct: float | None = None) -> Projection:
    """The projected step (or layer): memory floors over the fractions + latencies + exchanges. `distinct` as in `step_traffic`."""
    target = gpu(cell.gpu)
    floor = cell_floor(cell, distinct=distinct)
    floors = _floors_us(floor.hbm_bytes, floor.expert_bytes, target.hbm_bytes_per_s)
    layers = MODELS[cell.model].n_layers if cell.scope is Scope.STEP else 1
    return _parts(floors, launches_of(cell, assumptions), cell.rows, layers, target, assumptions)


def project_draft_us(cell: Cell, assumptions: Assumptions) -> float:
    """Projected time of one draft pass: the drafter's weights and the LM head shared evenly over ranks."""
    config, target = MODELS[cell.model], gpu(cell.gpu)
    n_layers = config.draft.n_layers if config.draft is not None else 0
    elements = sum(prod(shape) for shape in draft_shapes(config).values()) + config.vocab_size * config.hidden_size
    floors = (0.0, 1e6 * 2 * elements / cell.tp / target.hbm_bytes_per_s)
    return _parts(floors, assumptions.launches_a_layer * n_layers, cell.rows, n_layers, target, assumptions).us


@dataclass(frozen=True, kw_only=True)
class Published:
    """A number published by others, with its conditions; a projection of the same cell is compared with it."""

    cell: Cell
    step_us: float
    source: str


def _published(backend: str, us: float, source: str, scope: Scope) -> Published:
    cell = Cell(
        model="kimi-k3", gpu="GB300", tp=16, requests=1, q=1, context_tokens=1024, acceptance_length=1.0, backend=backend, scope=scope
    )  # fmt: skip
    return Published(cell=cell, step_us=us, source=source)


# Kimi K3, published with the specialised path in October 2026: 7.38 -> 3.90 ms a token on 16 GB300, and one layer as a timeline, 23 kernels
# and about 130 us -> 13 kernels and about 69 us. The timeline's conditions are not told; 93 such layers are 64 % above the step.
STEP_SOURCE = "GB300 x16, TP16, batch 1, no speculation"
LAYER_SOURCE = "one layer's timeline; its GPU, TP and batch are not told, here taken for those of the step"
PUBLISHED = (
    _published("auto", 7380.0, STEP_SOURCE, Scope.STEP),
    _published("latency_specialized", 3900.0, STEP_SOURCE, Scope.STEP),
    _published("auto", 130.0, LAYER_SOURCE, Scope.LAYER),
    _published("latency_specialized", 69.0, LAYER_SOURCE, Scope.LAYER),
)
