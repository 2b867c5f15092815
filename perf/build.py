"""The whole matrix: every cell listed, refused ones with their reasons, the rest filled from what there is, each with its source.

gpu_timer   published records of this code (one rank's share of a layer), where their correctness stands
projection  the analytic model with assumptions fitted to those records; never a measurement
model       the floor alone, where nothing published may carry a projection
cpu_engine  the nano engine on this machine, when asked for: a test of the machinery
server      `vllm bench` JSON, when given
"""

from __future__ import annotations

import csv
import datetime
import io
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perf.hardware import gpu
from perf.markdown import CONTEXT_SHOWN, conditions_text, page
from perf.matrix import AcceptanceKind, Cell, CellResult, Source, comparison_refusals, enumerate_cells
from perf.model import (
    PUBLISHED as PUBLISHED_BY_OTHERS,
)
from perf.model import Assumptions, cell_floor, fit_assumptions, memory_refusal, project, project_draft_us
from perf.published import OURS, STOCK, PublishedCells, launch_fits, published_workloads, read_published, read_store
from perf.rank_steps import RankStep
from perf.rank_steps import projection_errors as rank_step_errors
from perf.rank_steps import read as read_rank_steps
from validation.core import jsonio
from validation.core.store import write_atomically
from validation.core.types import HarnessError

GPUS_SHOWN = ("H200", "GB300")


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """`steps` holds one result a cell of the enumeration; `layers` the published layers; `engine` and `servers` other sources."""

    steps: tuple[CellResult, ...]
    layers: PublishedCells
    assumptions: Mapping[str, Assumptions]  # by backend; empty when nothing published carries one
    no_projection: str  # why, when it is empty
    engine: tuple[CellResult, ...] = ()
    engine_rows: tuple[dict[str, Any], ...] = ()
    acceptance: Mapping[str, Any] = field(default_factory=dict)
    servers: tuple[CellResult, ...] = ()
    workloads: tuple[Mapping[str, Any], ...] = ()
    rank_steps: tuple[RankStep, ...] = ()

    @property
    def results(self) -> tuple[CellResult, ...]:
        return (*self.steps, *self.layers.results, *self.engine, *self.servers)


def build(
    gpus: Sequence[str] = GPUS_SHOWN,
    *,
    published: PublishedCells | None = None,
    engine_rows: Sequence[dict[str, Any]] = (),
    acceptance: Mapping[str, Any] | None = None,
    servers: Iterable[CellResult] = (),
    workloads: Sequence[Mapping[str, Any]] = (),
) -> Matrix:
    """Fill every cell. Raises Unsupported for an unknown GPU, HarnessError when a published run cannot be read."""
    from perf import cpu_engine

    for name in gpus:
        gpu(name)
    store = None if published else read_store()
    layers = published or read_published(store=store)
    assumptions, why = _assumptions(layers)
    steps = tuple(_step(cell, assumptions, why) for name in gpus for cell in enumerate_cells(gpu=name))
    return Matrix(
        steps=steps,
        layers=layers,
        assumptions=assumptions,
        no_projection=why,
        engine=tuple(cpu_engine.results(engine_rows)),
        engine_rows=tuple(engine_rows),
        acceptance=acceptance or {},
        servers=tuple(servers),
        workloads=(*workloads, *(published_workloads(store) if store else ())),
        rank_steps=read_rank_steps(store) if store else (),
    )


def _assumptions(layers: PublishedCells) -> tuple[dict[str, Assumptions], str]:
    if layers.gpu is None:
        return {}, "no published layer of this code may be shown, so that no projection has a measured fraction to rest on"
    try:
        fits = {OURS: launch_fits(layers), STOCK: None}  # stock's launches were timed together only
        return {b: fit_assumptions(layers.points[b], gpu(layers.gpu), b, fits[b]) for b in (OURS, STOCK)}, ""
    except HarnessError as error:
        return {}, str(error)


def _step(cell: Cell, assumptions: Mapping[str, Assumptions], why: str) -> CellResult:
    acceptance = AcceptanceKind.NONE if cell.q == 1 else AcceptanceKind.APPLIED
    reasons = (*cell.refusals(), *memory_refusal(cell))
    if reasons:
        return CellResult(cell=cell, source=Source.MODEL, outcome="refused", reasons=reasons, acceptance=acceptance)
    floor_us = cell_floor(cell).hbm_us
    if cell.backend not in assumptions:
        return CellResult(cell=cell, source=Source.MODEL, outcome="modelled", floor_us=floor_us, reasons=(why,), acceptance=acceptance)
    rests_on = assumptions[cell.backend]
    low, high = rests_on.rows_measured
    projected = project(cell, rests_on)
    return CellResult(
        cell=cell,
        source=Source.PROJECTION,
        outcome="modelled",
        step_us=projected.us,
        step_low_us=projected.low_us,
        step_high_us=projected.us,
        draft_us=0.0 if cell.q == 1 else project_draft_us(cell, rests_on),
        floor_us=floor_us,
        acceptance=acceptance,
        conditions={
            "assumptions": cell.backend,
            "extrapolated": [] if low <= cell.rows <= high else [f"rows: {cell.rows} is outside the measured {low}..{high}"],
        },
    )


# ---- what follows from it ----
def speed_ups(results: Iterable[CellResult]) -> dict[str, tuple[float, tuple[str, ...]]]:
    """Cell id of ours -> (stock's time over ours, reasons why the multiplier may not be printed as measured)."""
    by_id = {r.cell.id: r for r in results}
    found = {}
    for result in by_id.values():
        if result.cell.backend != OURS:
            continue
        other = by_id.get(result.cell.id.replace(f"-{OURS}", f"-{STOCK}"))
        if other is None or not result.step_us or not other.step_us or other.source is not result.source:
            continue
        ratio = (other.step_us + other.draft_us) / (result.step_us + result.draft_us)
        found[result.cell.id] = (ratio, comparison_refusals(other, result) if result.source is not Source.PROJECTION else ())
    return found


def projection_errors(assumptions: Mapping[str, Assumptions]) -> list[dict[str, Any]]:
    """The projection beside each number that others published, and the speed-ups of both: what a projection is worth."""
    made = []
    for other in PUBLISHED_BY_OTHERS:
        if other.cell.backend not in assumptions:
            continue
        projected = project(other.cell, assumptions[other.cell.backend])
        made.append(
            {
                "cell": other.cell.id,
                "conditions": other.source,
                "published_us": other.step_us,
                "projected_us": projected.us,
                "projected_low_us": projected.low_us,
                "memory_us": projected.memory_us,
                "latency_us": projected.latency_us,
                "exchange_us": projected.exchange_us,
                "error": projected.us / other.step_us - 1,
                "low_error": projected.low_us / other.step_us - 1,
                "evidence": list(assumptions[other.cell.backend].evidence),
            }
        )
    return made


def speed_up_errors(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Published and projected speed-up of each pair of `projection_errors` that differs in its backend only."""
    by_cell = {row["cell"]: row for row in rows}
    made = []
    for name, ours in by_cell.items():
        stock = by_cell.get(name.replace(f"-{OURS}", f"-{STOCK}"))
        if stock is None or stock is ours:
            continue
        published, projected = (stock[key] / ours[key] for key in ("published_us", "projected_us"))
        made.append({"conditions": ours["conditions"], "published": published, "projected": projected, "error": projected / published - 1})
    return made


def counts(matrix: Matrix) -> dict[str, int]:
    """How many cells by outcome and source."""
    return dict(sorted(Counter(f"{r.outcome} ({r.source.value})" for r in matrix.results).items()))


def flat(result: CellResult, speed_up: float | None) -> dict[str, Any]:
    """One row of the CSV and JSON."""
    cell = result.cell
    return {
        "cell": cell.id,
        "scope": cell.scope.value,
        "source": result.source.value,
        "outcome": result.outcome,
        "model": cell.model,
        "gpu": cell.gpu,
        "tp": cell.tp,
        "requests": cell.requests,
        "q": cell.q,
        "rows": cell.rows,
        "padded_rows": cell.padded_rows,
        "context_tokens": cell.context_tokens,
        "acceptance_length": cell.acceptance_length,
        "acceptance": result.acceptance.value,
        "decode_backend": cell.backend,
        "mixed_prefill": cell.mixed_prefill,
        "step_us": result.step_us,
        "step_low_us": result.step_low_us,
        "step_high_us": result.step_high_us,
        "draft_us": result.draft_us if result.step_us else None,
        "tokens_per_s_per_user": result.tokens_per_s_per_user,
        "tokens_per_s": result.tokens_per_s,
        "speed_up": speed_up,
        "floor_us": result.floor_us,
        "fraction_of_floor": result.fraction_of_floor,
        "evidence": result.evidence,
        "correctness": result.correctness,
        "reasons": "; ".join(result.reasons),
    }


def rows_of(matrix: Matrix) -> list[dict[str, Any]]:
    ratios = speed_ups(matrix.results)
    made = []
    for result in matrix.results:
        ratio, refused = ratios.get(result.cell.id, (None, ()))
        made.append(flat(result, None if refused else ratio))
    return made


def figures_data(matrix: Matrix) -> dict[str, Any]:
    """What the report draws: layers shown, launches of a layer, and projected steps at one context. JSON values only."""
    ratios = speed_ups(matrix.results)
    layers = [
        {
            "tp": r.cell.tp, "rows": r.cell.rows, "q": r.cell.q, "backend": r.cell.backend, "gpu": r.cell.gpu, "us": r.step_us,
            "low_us": r.step_low_us, "high_us": r.step_high_us, "floor_us": r.floor_us, "evidence": r.evidence,
            "launches": r.conditions.get("launches"), "conditions": conditions_text(r),
        }
        for r in matrix.layers.results
        if r.step_us is not None
    ]  # fmt: skip
    steps = [
        {
            "gpu": r.cell.gpu, "tp": r.cell.tp, "requests": r.cell.requests, "q": r.cell.q, "rows": r.cell.rows,
            "al": r.cell.acceptance_length, "backend": r.cell.backend, "user": r.tokens_per_s_per_user, "total": r.tokens_per_s,
            "speed_up": ratios[r.cell.id][0] if r.cell.id in ratios else None, "source": r.source.value,
        }
        for r in matrix.steps
        if r.step_us is not None and r.cell.context_tokens == CONTEXT_SHOWN
    ]  # fmt: skip
    launches = [
        {
            "tp": p.tp,
            "rows": p.rows,
            "gpu": p.gpu,
            "backend": p.backend,
            "evidence": p.evidence,
            "launches": [[n, statistics.median(s)] for n, s in p.launches],
        }
        for p in matrix.layers.launches
    ]
    basis = {b: {"evidence": list(a.evidence), "measured_on": a.measured_on} for b, a in matrix.assumptions.items()}
    return {"layers": layers, "steps": steps, "launches": launches, "basis": basis, "context_tokens": CONTEXT_SHOWN}


def write(matrix: Matrix, folder: Path) -> dict[str, Path]:
    """matrix.json, matrix.csv and matrix.md below `folder`. Raises HarnessError when it cannot be written."""
    rows = rows_of(matrix)
    body = {
        "made_utc": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "counts": counts(matrix),
        "assumptions": {backend: a.describe() for backend, a in matrix.assumptions.items()},
        "no_projection": matrix.no_projection,
        "projection_against_published": projection_errors(matrix.assumptions),
        "speed_up_against_published": speed_up_errors(projection_errors(matrix.assumptions)),
        "projection_against_rank_steps": rank_step_errors(matrix.rank_steps, matrix.assumptions),
        "cpu_engine": list(matrix.engine_rows),
        "acceptance": dict(matrix.acceptance),
        "workloads": [dict(found) for found in matrix.workloads],
        "conditions": {r.cell.id: r.conditions for r in (*matrix.layers.results, *matrix.engine, *matrix.servers)},
        "cells": rows,
    }
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    paths = {kind: folder / f"matrix.{kind}" for kind in ("json", "csv", "md")}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HarnessError(f"matrix: got {error}, needs a writable folder {folder}") from error
    write_atomically(paths["json"], jsonio.dumps(body).encode() + b"\n")
    write_atomically(paths["csv"], text.getvalue().encode())
    write_atomically(paths["md"], page(matrix).encode())
    return paths
