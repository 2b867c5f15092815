"""Published whole steps of one rank: what they say, and whether they may be shown.

Such a step runs every layer with weights of its own, but its messages return to the same rank: waiting for peers is not in it. So it is no
cell of the matrix. Stock's step over the same weights is in the same record where both were timed in turns; only then is there a ratio.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kimi_k3_decode.config import K3, Shard
from kimi_k3_decode.launches import launch_graph
from perf.matrix import Cell
from perf.model import Assumptions, project
from perf.published import Store, correctness_reasons, read_store
from validation.core.types import Evidence, Measurement, Outcome, Run
from validation.core.worker import Refused

CASE = re.compile(r"k3-step-tp(?P<tp>\d+)-r(?P<rows>\d+)-q(?P<q>\d+)$")


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One record; `reasons` say why its time may not be shown."""

    tp: int
    rows: int
    q: int
    gpu: str
    conditions: str
    evidence: str
    correctness: tuple[str, ...]
    details: Mapping[str, Any]
    reasons: tuple[str, ...]

    @property
    def in_turns(self) -> bool:
        """Whether stock's times may stand beside these: timed in turns, and stock no different from itself."""
        told = self.details
        return told.get("stock_timed") == "in turns" and told.get("self_check_decision") == "no difference"


@lru_cache(maxsize=16)
def kernels_of_step(tp: int, rows: int, q: int) -> tuple[tuple[str, str], ...]:
    """(launch, id of its kernel) of a whole step of K3, in plan order."""
    from kimi_k3_decode.kernels import kernel_spec

    plan = launch_graph(K3, Shard(config=K3, tp=tp), rows, q)
    return tuple((launch.op, kernel_spec(K3, launch.contract).id) for launch in plan)


def read(store: Store) -> tuple[RankStep, ...]:
    """Every published step of one rank, judged against this checkout."""
    found = []
    for run, records in store.runs:
        for record in records:
            match = CASE.fullmatch(str(record.details.get("case")))
            if match is None:
                continue
            tp, rows, q = (int(match[name]) for name in ("tp", "rows", "q"))
            used, reasons = correctness_reasons(kernels_of_step(tp, rows, q), run.config.get("digests") or {}, store.checks)
            why = (*_own_reasons(record), *(f"stale: {r}" for r in store.stale.get(record.id, ("superseded by a newer record",))), *reasons)
            gpu = str(run.hardware.get("gpu", "unknown"))
            found.append(
                RankStep(
                    tp=tp, rows=rows, q=q, gpu=gpu, conditions=_conditions(run, gpu, rows, q), evidence=record.id, correctness=used,
                    details=record.details, reasons=why,
                )
            )  # fmt: skip
    return tuple(found)


def _conditions(run: Run, gpu: str, rows: int, q: int) -> str:
    """What a multiplier of such a step depends on."""
    speculation = "no speculation" if q == 1 else f"{q - 1} drafts, acceptance not applied"
    versions = ", ".join(f"{k} {v}" for k, v in run.hardware.items() if k in ("torch", "cuda", "driver"))
    sides = f"{gpu}; 1 GPU on both sides; batch {rows // q}; {speculation}; prefill not counted"
    return f"{sides}; {run.started_utc[:10]}; {versions or 'no versions'}"


def _own_reasons(record: Evidence) -> tuple[str, ...]:
    if record.outcome is not Outcome.MEASURED:
        return record.reasons or ("not measured",)
    late = record.details.get("waits_that_ran_out_count")
    return () if late == 0 else (f"waits that ran out: got {late!r}, needs 0",)


def published_step(tp: int, rows: int) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
    """The newest record that may be shown. Refused, with every reason, where there is none."""
    records = [step for step in read(read_store()) if (step.tp, step.rows, step.q) == (tp, rows, 1)]
    shown = [step for step in records if not step.reasons]
    if not shown:
        raise Refused(tuple(dict.fromkeys(r for step in records for r in step.reasons)) or ("nothing published",))
    step, told = shown[-1], shown[-1].details
    measurements = [
        Measurement(name="candidate_us", value=told["fused_us"], unit="us", samples=_samples(told, "fused")),
        Measurement(name="over_floor", value=told["over_floor"], unit="1"),
        Measurement(name="waits_that_ran_out_count", value=told["waits_that_ran_out_count"], unit="count"),
        Measurement(name="launches_count", value=told["launches_count"], unit="count"),
    ]
    if step.in_turns:
        measurements += beside_stock(told)
    details = {"source": "gpu_timer", "evidence": step.evidence, "correctness": ", ".join(step.correctness), "conditions": step.conditions}
    return tuple(measurements), details


def beside_stock(told: Mapping[str, Any]) -> list[Measurement]:
    """Stock's time and the speed-up with its interval, of a record whose steps were timed in turns."""
    ratios = (("speed_up", "speedup"), ("speed_up_low", "speedup_low"), ("speed_up_high", "speedup_high"))
    stock = Measurement(name="stock_us", value=told["stock_us"], unit="us", samples=_samples(told, "stock"))
    return [stock, *(Measurement(name=name, value=told[source], unit="1") for name, source in ratios)]


def _samples(told: Mapping[str, Any], side: str) -> tuple[float, ...]:
    return tuple(float(x) for x in told.get(f"{side}_samples", ()))


def tables(steps: Sequence[RankStep], assumptions: Mapping[str, Assumptions]) -> list[dict[str, Any]]:
    """The steps that may be shown, and what a projection of them is worth; empty when there is none."""
    from perf.markdown import table

    rows = [_row(step) for step in steps if not step.reasons]
    note = (
        "gpu_timer: embedding, 93 layers with weights of their own, final norm, LM head and sampling on one GPU. Messages return to the "
        "rank, so the wait for peers is not in it, nor are stock's all-reduces. Stock reads the same weights and stands here where it "
        "was timed in turns. The floor is bytes over that run's copy rate."
    )
    columns = ("share", "rows", "tokens a request", "context", "stock, ms", "step, ms", "speed-up", "floor, ms", "times the floor",
               "conditions", "evidence")  # fmt: skip
    made = [table("Whole steps of one rank", columns, rows, note)] if rows else []
    errors = projection_errors(steps, assumptions)
    if errors:
        shown = [_error_row(error) for error in errors]
        names = ("backend", "share", "rows", "tokens a request", "measured, ms", "projected, ms", "error", "hardware", "evidence")
        why = "PROJECTION without exchanges, on the GPU of the layers it rests on, with the experts that were read; no fit saw these steps."
        made.append(table("Projection against our own whole steps of one rank", names, shown, why))
    return made


def _error_row(error: Mapping[str, Any]) -> list[Any]:
    times = [f"{error[name] / 1000:.2f}" for name in ("measured_us", "projected_us")]
    return [
        error["backend"],
        f"TP{error['tp']}",
        error["rows"],
        error["q"],
        *times,
        f"{error['error']:+.1%}",
        error["gpu"],
        error["evidence"],
    ]


def projection_errors(steps: Sequence[RankStep], assumptions: Mapping[str, Assumptions]) -> list[dict[str, Any]]:
    """Each step that may be shown beside its projection from single layers, both sides where both were timed."""
    made = []
    for step in steps:
        for backend, name in (("latency_specialized", "fused"), ("auto", "stock")):
            a, us = assumptions.get(backend), step.details.get(f"{name}_us")
            if step.reasons or a is None or us is None or a.measured_on not in step.gpu:
                continue
            cell = Cell(
                model="kimi-k3", gpu=a.measured_on, tp=step.tp, requests=step.rows // step.q, q=step.q,
                context_tokens=int(step.details["context_tokens"]), acceptance_length=1.0, backend=backend,
            )  # fmt: skip
            projected_us = project(cell, a, distinct=step.details.get("experts_read_count")).alone_us
            made.append(
                {
                    "backend": backend, "tp": step.tp, "rows": step.rows, "q": step.q, "gpu": step.gpu, "evidence": step.evidence,
                    "measured_us": us, "projected_us": projected_us, "error": projected_us / us - 1,
                }
            )  # fmt: skip
    return made


def _row(step: RankStep) -> list[Any]:
    told = step.details
    stock, ratio = "–", "–"
    if step.in_turns:
        stock, ratio = f"{told['stock_us'] / 1000:.2f}", f"{told['speedup']:.2f}x ({told['speedup_low']:.2f}–{told['speedup_high']:.2f})"
    ours, floor = (f"{told[name] / 1000:.2f}" for name in ("fused_us", "floor_us"))
    place = [f"TP{step.tp}", step.rows, step.q, told["context_tokens"]]
    return [*place, stock, ours, ratio, floor, f"{told['over_floor']:.2f}", step.conditions, step.evidence]
