"""Measures the case of one evidence record again and puts the two results side by side. Nothing is stored."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from validation.core import environment, jsonio
from validation.core.registry import PlannedCase
from validation.core.runner import WorkerDied, WorkerProcess, evidence_from_answer
from validation.core.settings import GIB, PROJECT_ROOT, Settings
from validation.core.store import PLAN_FILE, find_record, read_json, read_run
from validation.core.types import Evidence, HarnessError
from validation.core.validate import Plan, Say, profile_session

TIME_UNITS = frozenset({"us", "ms", "s", "tok/s", "tokens/s", "GB/s", "TFLOP/s", "time ratio"})
EXACT_RELATIVE = 1e-6  # round-off between library builds; everything else is seeded
TIME_RELATIVE = 0.5  # a busy machine; perf claims are judged by the perf lane, not by repro


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One measurement of the record beside the same one measured again."""

    name: str
    unit: str
    recorded: float
    repeated: float | None
    same: bool


def repro(identity: str, roots: Sequence[Path], say: Say) -> tuple[Evidence, Evidence, list[Comparison], list[str]]:
    """Measure exactly the case of one record again. Returns the record, the new one (not stored), the comparison and notes.

    Raises HarnessError when the record, its lane or its targets cannot be found.
    """
    run_dir, record = find_record(roots, identity)
    run = read_run(run_dir)
    plan = jsonio.decode(Plan, read_json(run_dir / PLAN_FILE), PLAN_FILE)
    item = next((p for p in plan.cases if p.check == record.check and p.case.id == record.case.id), None)
    if item is None:
        raise HarnessError(f"evidence: got {identity}, whose case is not in its run's plan, needs an intact run; try `verify`")
    settings = jsonio.decode(Settings, run.config["settings"], "settings")
    say(f"{identity}: {record.check} {record.case.id}, candidate {settings.candidate}, run {run.id}")
    repeated = _measure_once(settings, item, say)
    notes = []
    if run.config.get("code_sha256") != environment.code_digest():
        notes.append(f"the code differs from the run's (commit {run.commit[:12]}{', dirty' if run.dirty else ''})")
    if dict(record.fingerprints) != dict(repeated.fingerprints):
        notes.append("the targets' fingerprints differ from the record's")
    return record, repeated, compare(record, repeated), notes


def _measure_once(settings: Settings, item: PlannedCase, say: Say) -> Evidence:
    name = hashlib.sha256(f"{item.check}/{item.case.id}".encode()).hexdigest()[:12]
    scratch = PROJECT_ROOT / ".cache" / "work" / f"repro-{name}"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        with profile_session(settings, scratch, say):
            answer = _ask_once(WorkerProcess(settings, scratch, int(settings.memory_gib * GIB)), item)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if "harness_error" in answer:
        raise HarnessError(str(answer["harness_error"]))
    return evidence_from_answer(item, answer)


def _ask_once(worker: WorkerProcess, item: PlannedCase) -> dict[str, Any]:
    try:
        request = {"op": "measure", "lane": item.lane, "module": item.module, "check": item.check, "case": item.case}
        return worker.ask(request, item.time_limit_s)
    except WorkerDied as death:
        return {"outcome": "error", "reasons": [death.reason]}
    finally:
        worker.stop()


def compare(record: Evidence, repeated: Evidence) -> list[Comparison]:
    """Every measurement of the record, by name and position. Two NaN are the same; a missing one is not."""
    again: dict[str, list[float]] = {}
    for measurement in repeated.measurements:
        again.setdefault(measurement.name, []).append(measurement.value)
    rows = []
    for measurement in record.measurements:
        values = again.get(measurement.name, [])
        value = values.pop(0) if values else None
        tolerance = TIME_RELATIVE if measurement.unit in TIME_UNITS else EXACT_RELATIVE
        same = value is not None and _close(measurement.value, value, tolerance)
        rows.append(Comparison(name=measurement.name, unit=measurement.unit, recorded=measurement.value, repeated=value, same=same))
    return rows


def _close(a: float, b: float, relative: float) -> bool:
    if a != a or b != b:
        return a != a and b != b
    return a == b or abs(a - b) <= relative * max(abs(a), abs(b))
