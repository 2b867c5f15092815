"""The analytic model of a step: its launches from the plan, their traffic from the contracts, its floor, and projections.

A *floor* is physics: bytes over the memory rate. A *projection* is a guess with its assumptions written out: floor over the fraction of it
that was reached where something was measured, plus a cost per launch and per exchange between ranks. A projection is never a measurement
and never stands in a table without the word.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

from kimi_k3_decode.config import K3, NANO, ModelConfig, Shard
from kimi_k3_decode.launches import launch_graph
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.plan import bucket_of
from perf.hardware import Gpu, gpu
from perf.matrix import Cell
from perf.roofline import StepFloor, Traffic, step_floor, traffic

MODELS: dict[str, ModelConfig] = {config.name: config for config in (K3, NANO)}


@lru_cache(maxsize=128)
def _launches(model: str, tp: int, rows: int, q: int) -> tuple[tuple[Contract, int], ...]:
    """Distinct contracts of a step with how often each occurs, in plan order."""
    config = MODELS[model]
    counts: dict[str, tuple[Contract, int]] = {}
    for launch in launch_graph(config, Shard(config=config, tp=tp), rows, q):
        # Layers repeat: the first contract of a signature stands for the others, whose traffic is the same.
        key = f"{launch.op}|{sorted(launch.contract.parameters.items())}|{launch.contract.names}"
        contract, n = counts.get(key, (launch.contract, 0))
        counts[key] = (contract, n + 1)
    return tuple(counts.values())


def step_traffic(model: str, tp: int, rows: int, q: int, context_tokens: int) -> tuple[Traffic, ...]:
    """Every launch of one step on one rank. `rows` is padded to the prepared graph that takes it."""
    padded = bucket_of(rows)
    config = MODELS[model]
    shard = Shard(config=config, tp=tp)
    made: list[Traffic] = []
    for contract, n in _launches(model, tp, padded, q):
        one = traffic(contract, shard, rows=rows, q=q, context_tokens=context_tokens)
        made += [one] * n
    return tuple(made)


def cell_floor(cell: Cell, *, hbm_bytes_per_s: float | None = None) -> StepFloor:
    """The floor of a cell's step on its GPU.

    Raises:
        Unsupported: an unknown GPU, or more rows than the plan prepares.
    """
    return step_floor(step_traffic(cell.model, cell.tp, cell.rows, cell.q, cell.context_tokens), gpu(cell.gpu), hbm_bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What a projection rests on. `fraction_of_floor` and its evidence come from measured cells; the latencies are stated guesses."""

    fraction_of_floor: float
    fraction_evidence: str
    launch_us: float = 0.65  # dependent PDL launches in one graph on Hopper; an assumption for other GPUs
    exchange_us: float = 3.0  # one mailbox message between ranks: a store over NVLink and a poll
    overlap: float = 0.0  # share of exchange time hidden by prefetches and side streams

    def describe(self) -> dict[str, object]:
        return {"kind": "projection", **asdict(self)}


EXCHANGES_A_LAYER = 4  # o_proj, router and latent together, expert sums, layer output


def project_us(cell: Cell, assumptions: Assumptions) -> float:
    """Projected step time in microseconds: HBM floor / fraction + launches x launch_us + exchanges x exchange_us x (1 - overlap)."""
    config: ModelConfig = MODELS[cell.model]
    floor = cell_floor(cell)
    target: Gpu = gpu(cell.gpu)
    launches = len(floor.launches)
    exchanges = EXCHANGES_A_LAYER * config.n_layers
    memory_us = floor.hbm_bytes / target.hbm_bytes_per_s * 1e6 / assumptions.fraction_of_floor
    return memory_us + launches * assumptions.launch_us + exchanges * assumptions.exchange_us * (1 - assumptions.overlap)


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
