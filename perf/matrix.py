"""The cells of the perf matrix, the scope that refuses some of them, and the table every source fills.

A cell is a setting, not a result. `enumerate_cells` lists all of them, refused ones included with their reasons, so that a hole in a
table is always explained. Results carry their source; a table never mixes sources unlabelled.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

BATCHES = (1, 2, 4, 8, 16, 32, 64)
TPS = (8, 16)
CONTEXTS_TOKENS = (1024, 8192, 32768, 131072)
ACCEPTANCE_LENGTHS = tuple(1 + 0.5 * i for i in range(15))  # 1 ... 8
DRAFTS = 7
MAX_ROWS = 64
PREPARED_ROWS = (*range(1, 9), 16, 32, 64)
BACKENDS = ("auto", "latency_specialized")


class Source(enum.StrEnum):
    """Where a result comes from."""

    GPU_TIMER = "gpu_timer"  # our kernels under CUDA-graph replay
    SERVER = "server"  # vllm bench JSON
    CPU_ENGINE = "cpu_engine"  # the nano engine on this machine: a test of the machinery
    MODEL = "model"  # the roofline: a floor, not a measurement
    PROJECTION = "projection"  # floor x measured fraction + latencies, on hardware that was not measured


class Scope(enum.StrEnum):
    """What was timed. A layer of one rank is not a step: its messages return to itself, and 92 other layers are missing."""

    STEP = "step"  # the whole decode or verify step on all ranks
    LAYER = "layer_of_one_rank"  # one KDA + MoE layer, one rank's share


class AcceptanceKind(enum.StrEnum):
    NONE = "none"  # no speculation
    APPLIED = "applied"  # tokens/s = requests x AL / (verify + draft step)
    MEASURED = "measured"  # a real drafter accepted this many


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting. `context_tokens` counts cached tokens of each request; `acceptance_length` is 1 without speculation."""

    model: str
    gpu: str
    tp: int
    requests: int
    q: int
    context_tokens: int
    acceptance_length: float
    backend: str
    mixed_prefill: bool = False
    scope: Scope = Scope.STEP

    @property
    def rows(self) -> int:
        return self.requests * self.q

    @property
    def padded_rows(self) -> int | None:
        """Rows of the prepared graph that holds this step; None past the last one."""
        return next((bucket for bucket in PREPARED_ROWS if bucket >= self.rows), None)

    @property
    def id(self) -> str:
        parts = [self.model, self.gpu, f"tp{self.tp}", f"b{self.requests}", f"q{self.q}", f"c{self.context_tokens}"]
        parts += [f"al{self.acceptance_length:g}", self.backend] + (["mixed"] if self.mixed_prefill else [])
        parts += ["layer"] if self.scope is Scope.LAYER else []
        return "-".join(parts)

    def refusals(self) -> tuple[str, ...]:
        """Every reason this cell is outside the scope of the specialised path; stock cells are never refused for rows."""
        found = []
        if self.q not in (1, DRAFTS + 1):
            found.append(f"q: got {self.q}, needs 1 (no speculation) or {DRAFTS + 1} (anchor and {DRAFTS} drafts)")
        if self.q == 1 and self.acceptance_length != 1:
            found.append(f"acceptance_length: got {self.acceptance_length:g} without speculation, needs 1")
        if not 1 <= self.acceptance_length <= self.q:
            found.append(f"acceptance_length: got {self.acceptance_length:g}, needs 1..{self.q}")
        if self.backend == "latency_specialized":
            if self.rows > MAX_ROWS:
                found.append(f"rows: got {self.requests} x {self.q} = {self.rows}, needs <= {MAX_ROWS}; such a step runs stock")
            if self.tp not in TPS and self.model == "kimi-k3":
                found.append(f"tp: got {self.tp}, needs one of {TPS}")
        return tuple(found)


def enumerate_cells(
    *,
    model: str = "kimi-k3",
    gpu: str,
    tps: Sequence[int] = TPS,
    batches: Sequence[int] = BATCHES,
    contexts_tokens: Sequence[int] = CONTEXTS_TOKENS,
    backends: Sequence[str] = BACKENDS,
) -> Iterator[Cell]:
    """Batch x TP x (no speculation | DSpark-7 at every acceptance length) x context x backend, in a fixed order."""
    speculation = [(1, 1.0), *((DRAFTS + 1, al) for al in ACCEPTANCE_LENGTHS)]
    for tp, requests, (q, al), context, backend in itertools.product(tps, batches, speculation, contexts_tokens, backends):
        yield Cell(model=model, gpu=gpu, tp=tp, requests=requests, q=q, context_tokens=context, acceptance_length=al, backend=backend)


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What is known of a cell. Times in microseconds, rates in tokens per second; `evidence` is empty only for model and projection."""

    cell: Cell
    source: Source
    outcome: str  # measured | refused | error | unpublishable (with reasons; its time is not shown) | modelled
    step_us: float | None = None
    step_low_us: float | None = None
    step_high_us: float | None = None
    draft_us: float = 0.0
    floor_us: float | None = None
    acceptance: AcceptanceKind = AcceptanceKind.NONE
    evidence: str = ""
    correctness: str = ""  # id of the passing correctness record of the same kernel digest and case
    kernel_digest: str = ""
    reasons: tuple[str, ...] = ()
    conditions: dict[str, Any] = field(default_factory=dict)  # hardware, GPU count, prefill share, date, versions

    @property
    def tokens_per_s(self) -> float | None:
        """None for one layer: its time is not a step's."""
        if self.cell.scope is not Scope.STEP:
            return None
        return tokens_per_s(self.cell.requests, self.cell.acceptance_length, self.step_us, self.draft_us)

    @property
    def tokens_per_s_per_user(self) -> float | None:
        total = self.tokens_per_s
        return None if total is None else total / self.cell.requests

    @property
    def fraction_of_floor(self) -> float | None:
        """Floor over measured time: 1 is the physical limit."""
        return None if not self.step_us or self.floor_us is None else self.floor_us / self.step_us


def tokens_per_s(requests: int, acceptance_length: float, verify_us: float | None, draft_us: float = 0.0) -> float | None:
    """requests x AL / (verify step + draft step); None when nothing was measured."""
    if verify_us is None or verify_us <= 0:
        return None
    return requests * acceptance_length / ((verify_us + draft_us) * 1e-6)


def realised_acceptance_problem(asked: float, realised: float, tolerance: float) -> str:
    """Empty when the realised acceptance length is within `tolerance` (a share) of the asked one; else the reason the cell fails."""
    if realised != realised or abs(realised - asked) > tolerance * asked:
        return f"acceptance length: got {realised:.3f}, needs {asked:g} within {tolerance:.0%}; the cell does not count"
    return ""


COMPARED = ("hardware", "gpus", "acceptance", "prefill", "model", "scope", "context_tokens")


def comparison_refusals(a: CellResult, b: CellResult, *, allow: Iterable[str] = ()) -> tuple[str, ...]:
    """Reasons a multiplier between two results is not printed. `allow` names differences that were asked for; they become labels."""
    sides = []
    for result in (a, b):
        sides.append(
            {
                "hardware": result.cell.gpu,
                "gpus": result.conditions.get("gpus", result.cell.tp),
                "acceptance": (result.acceptance.value, result.cell.acceptance_length),
                "prefill": result.cell.mixed_prefill,
                "model": result.cell.model,
                "scope": result.cell.scope.value,
                "context_tokens": result.cell.context_tokens,
                "source": result.source.value,
            }
        )
    found = [
        f"{k}: got {sides[0][k]} against {sides[1][k]}" for k in (*COMPARED, "source") if sides[0][k] != sides[1][k] and k not in allow
    ]
    found += [f"{r.cell.id}: {r.outcome}" for r in (a, b) if r.outcome != "measured" or not r.step_us]
    missing = [k for r in (a, b) for k in ("hardware", "date", "versions") if r.source != Source.MODEL and not r.conditions.get(k)]
    found += [f"conditions: {name} is not recorded" for name in sorted(set(missing))]
    return tuple(found)
