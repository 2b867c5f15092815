"""Published whole steps of one rank: what they say, and whether they may be shown.

Such a step runs every layer with weights of its own, but its messages return to the same rank: waiting for peers is not in it. So it is no
cell of the matrix. Stock's step is a record of its own, timed behind it: the weights of both do not fit into one card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kimi_k3_decode.config import K3, Shard
from kimi_k3_decode.launches import launch_graph
from perf.published import correctness_reasons, kernel_checks
from validation.core.store import read_evidence, read_run
from validation.core.types import Evidence, Measurement, Outcome
from validation.core.worker import Refused
from validation.freshness.published import PUBLISHED, freshness, published_runs
from validation.policy import load_policy

CASE = re.compile(r"k3-step-tp(?P<tp>\d+)-r(?P<rows>\d+)-q(?P<q>\d+)$")


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One record; `reasons` say why its time may not be shown."""

    tp: int
    rows: int
    q: int
    gpu: str
    evidence: str
    correctness: tuple[str, ...]
    details: Mapping[str, Any]
    reasons: tuple[str, ...]


@lru_cache(maxsize=16)
def kernels_of_step(tp: int, rows: int, q: int) -> tuple[tuple[str, str], ...]:
    """(launch, id of its kernel) of a whole step of K3, in plan order."""
    from kimi_k3_decode.kernels import kernel_spec

    plan = launch_graph(K3, Shard(config=K3, tp=tp), rows, q)
    return tuple((launch.op, kernel_spec(K3, launch.contract).id) for launch in plan)


def read(root: Path = PUBLISHED) -> tuple[RankStep, ...]:
    """Every published step of one rank, judged against this checkout. Raises HarnessError when a run cannot be read."""
    if not published_runs(root):
        return ()
    policy = load_policy()
    stale = {cell.evidence: cell.reasons for cell in freshness(root, policy).cells}
    everything = [(read_run(folder), list(read_evidence(folder))) for folder in published_runs(root)]
    checks = kernel_checks((r for _, records in everything for r in records), stale, policy.limit("numerics", "error_ratio"))
    found = []
    for run, records in everything:
        for record in records:
            match = CASE.fullmatch(str(record.details.get("case")))
            if match is None:
                continue
            tp, rows, q = (int(match[name]) for name in ("tp", "rows", "q"))
            used, reasons = correctness_reasons(kernels_of_step(tp, rows, q), run.config.get("digests") or {}, checks)
            why = (*_own_reasons(record), *(f"stale: {r}" for r in stale.get(record.id, ("superseded by a newer record",))), *reasons)
            gpu = str(run.hardware.get("gpu", "unknown"))
            found.append(
                RankStep(tp=tp, rows=rows, q=q, gpu=gpu, evidence=record.id, correctness=used, details=record.details, reasons=why)
            )
    return tuple(found)


def _own_reasons(record: Evidence) -> tuple[str, ...]:
    if record.outcome is not Outcome.MEASURED:
        return record.reasons or ("not measured",)
    late = record.details.get("waits_that_ran_out_count")
    return () if late == 0 else (f"waits that ran out: got {late!r}, needs 0",)


def published_step(tp: int, rows: int) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
    """The newest record that may be shown. Refused, with every reason, where there is none."""
    records = [step for step in read() if (step.tp, step.rows, step.q) == (tp, rows, 1)]
    shown = [step for step in records if not step.reasons]
    if not shown:
        raise Refused(tuple(dict.fromkeys(r for step in records for r in step.reasons)) or ("nothing published",))
    step, told = shown[-1], shown[-1].details
    samples = tuple(float(x) for x in told.get("fused_samples", ()))
    return (
        Measurement(name="candidate_us", value=told["fused_us"], unit="us", samples=samples),
        Measurement(name="over_floor", value=told["over_floor"], unit="1"),
        Measurement(name="waits_that_ran_out_count", value=told["waits_that_ran_out_count"], unit="count"),
        Measurement(name="launches_count", value=told["launches_count"], unit="count"),
    ), {"source": "gpu_timer", "evidence": step.evidence, "correctness": ", ".join(step.correctness), "hardware": step.gpu}


def tables() -> list[dict[str, Any]]:
    """One table of the steps that may be shown; empty when there is none."""
    from perf.markdown import table

    rows = [_row(step) for step in read() if not step.reasons]
    note = (
        "gpu_timer: embedding, 93 layers with weights of their own, final norm, LM head and sampling on one GPU. Messages return to the "
        "rank, so the wait for peers is not in it. Stock is timed behind it, not in turns. The floor is bytes over that run's copy rate."
    )
    columns = ("share", "rows", "tokens a request", "context", "step, ms", "floor, ms", "times the floor", "hardware", "evidence")
    return [table("Whole steps of one rank", columns, rows, note)] if rows else []


def _row(step: RankStep) -> list[Any]:
    told = step.details
    times = [f"{told[name] / 1000:.2f}" for name in ("fused_us", "floor_us")]
    return [f"TP{step.tp}", step.rows, step.q, told["context_tokens"], *times, f"{told['over_floor']:.2f}", step.gpu, step.evidence]
