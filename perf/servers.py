"""`vllm bench` JSON of a server as cells of the matrix. The file says nothing about the setting, so the cell is named beside it."""

from __future__ import annotations

import re
from pathlib import Path

from kimi_k3_decode.config import Unsupported
from perf.bench_json import read_latency, read_serve
from perf.hardware import gpu
from perf.matrix import AcceptanceKind, Cell, CellResult, Source, realised_acceptance_problem
from perf.model import MODELS
from validation.core.types import HarnessError
from validation.policy import load_policy

CELL = re.compile(
    r"(?P<model>[\w.-]+?)-(?P<gpu>[A-Za-z0-9]+)-tp(?P<tp>\d+)-b(?P<requests>\d+)-q(?P<q>\d+)-c(?P<context>\d+)-al(?P<al>\d+(\.\d+)?)"
    r"-(?P<backend>auto|latency_specialized)(?P<mixed>-mixed)?$"
)

LONGEST_ID = 120


def parse_cell(text: str) -> Cell:
    """The inverse of `Cell.id`. Raises HarnessError."""
    match = CELL.fullmatch(text) if text.isascii() and len(text) <= LONGEST_ID else None
    if match is None or not all(int(match[name]) for name in ("tp", "requests", "q")):
        raise HarnessError(f"cell: got {text[:LONGEST_ID]!r}, needs an id such as kimi-k3-H200-tp8-b1-q8-c8192-al6-latency_specialized")
    return Cell(
        model=match["model"],
        gpu=match["gpu"],
        tp=int(match["tp"]),
        requests=int(match["requests"]),
        q=int(match["q"]),
        context_tokens=int(match["context"]),
        acceptance_length=float(match["al"]),
        backend=match["backend"],
        mixed_prefill=match["mixed"] is not None,
    )


def read_cell(text: str, path: Path, *, listed: bool = True) -> CellResult:
    """A `serve` or `latency` result as the cell named; a malformed file is an `error` cell with its reasons, and the sweep goes on.

    `listed`: only GPUs and models that the matrix knows. Two servers that are compared with each other may be of any.
    The step time is the time per output token times the acceptance length: draft and verify together.
    """
    cell = parse_cell(text)
    try:
        step_us, acceptance, conditions, reasons = _read(cell, path)
    except HarnessError as error:
        return CellResult(cell=cell, source=Source.SERVER, outcome="error", reasons=(str(error),))
    reasons = [*(_unknown(cell) if listed else ()), *cell.refusals(), *reasons]
    outcome = "error" if reasons else "measured"
    return CellResult(
        cell=cell,
        source=Source.SERVER,
        outcome=outcome,
        step_us=None if reasons else step_us,
        acceptance=acceptance,
        evidence=path.name,
        reasons=tuple(reasons),
        conditions=conditions,
    )


def _unknown(cell: Cell) -> list[str]:
    """What nothing here can stand beside: a GPU without rates, a model without dimensions."""
    found = [] if cell.model in MODELS else [f"model: got {cell.model!r}, needs one of {', '.join(MODELS)}"]
    try:
        gpu(cell.gpu)
    except Unsupported as error:
        found += error.reasons
    return found


def _read(cell: Cell, path: Path) -> tuple[float, AcceptanceKind, dict[str, object], list[str]]:
    conditions: dict[str, object] = {"hardware": cell.gpu, "gpus": cell.tp, "prefill": "mixed" if cell.mixed_prefill else "not counted"}
    if is_latency(path):
        latency = read_latency(path)
        reasons = [] if cell.q == 1 else ["speculation: got a latency file, which holds no acceptance length; use `vllm bench serve`"]
        return 1e6 * latency.median_s / latency.output_tokens, AcceptanceKind.NONE, conditions, reasons
    served = read_serve(path)
    conditions |= {"date": str(served.raw.get("date", "")), "versions": {}}
    conditions |= {"p90_tokens_per_s_per_user": served.p90_tokens_per_s_per_user, "end_to_end_tokens_per_s": served.output_tokens_per_s}
    if cell.q == 1:
        return 1e3 * served.median_tpot_ms, AcceptanceKind.NONE, conditions, []
    tolerance = load_policy().limit("perf", "acceptance_length_tolerance")
    realised = float("nan") if served.acceptance_length is None else served.acceptance_length
    problem = realised_acceptance_problem(cell.acceptance_length, realised, tolerance)
    return 1e3 * served.median_tpot_ms * cell.acceptance_length, AcceptanceKind.MEASURED, conditions, [problem] if problem else []


def is_latency(path: Path) -> bool:
    import json

    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(table, dict) and "avg_latency" in table
