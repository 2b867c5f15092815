"""The perf lane: the matrix is whole and labelled, the timing machinery works on this machine, and what GPU records show.

Light to import. On a GPU `perf.layer` and `perf.rank_step` measure here and now; elsewhere they judge published records of this code, and
refuse where a speed may not be shown. `perf.step` is about whole steps on all ranks, and stays unproven until some are published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from validation.core.types import Case, Check, Limit, Measurement, Target

Found = tuple[tuple[Measurement, ...], Mapping[str, Any]]
LEAST_PAIRS = 12
ERROR_LIMIT = 0.7  # the same as perf.cpu_engine's, which is not light to import; a test compares them
WORKLOAD_ERROR_LIMIT = 0.4  # perf.workloads'
ROWS, TPS = (1, 2, 4, 8, 16, 32, 64), (8, 16)
MATRIX_GPUS = 2


def _zero(name: str, why: str) -> Limit:
    return Limit(measurement=name, op="==", bound=0, unit="count", why=why)


def _least(name: str, bound: float, why: str) -> Limit:
    return Limit(measurement=name, op=">=", bound=bound, unit="count", why=why)


def _count(name: str, value: int) -> Measurement:
    return Measurement(name=name, value=float(value), unit="count")


FASTER = (Limit(measurement="speed_up_low", op=">", bound=1.0, unit="1", why="faster with the spread on both sides against it"),)
LIMITS: Mapping[str, tuple[Limit, ...]] = {
    "perf.matrix": (
        Limit(
            measurement="cells",
            op="==",
            bound=1792 * MATRIX_GPUS,
            unit="count",
            why="batch x TP x speculation x context x backend, all of them",
        ),
        _zero("refused_without_reason", "a hole in a table is explained"),
        _zero("shown_without_evidence", "a measured number names its record"),
        _zero("shown_without_correctness", "no speed of a kernel without its passing correctness record"),
        _zero("projected_without_assumptions", "a projection names what it rests on"),
        _zero("multipliers_without_conditions", "a multiplier without its conditions is not printed"),
    ),
    "perf.cpu_engine": (
        _zero("objections", "each timed reply was right, inputs intact, no work left running, the clock untouched"),
        _least("pairs", LEAST_PAIRS, "fewer pairs carry no decision"),
        Limit(measurement="worst_error", op="<=", bound=ERROR_LIMIT, unit="1", why="timed replies are checked against the FP64 oracle"),
    ),
    "perf.self_check": (
        _zero("objections", "stock is not accused"),
        _zero("called_different", "stock against stock is no difference"),
        _least("pairs", LEAST_PAIRS, "fewer pairs carry no decision"),
    ),
    "perf.acceptance": (
        _least("verify_steps", 16, "a mean of a few steps says nothing"),
        Limit(measurement="mean_length", op=">", bound=1.0, unit="tokens", why="the real drafter gets something accepted"),
    ),
    "perf.workloads": (
        _zero("objections", "each timed reply was right, inputs intact, no work left running, the clock untouched"),
        _least("pairs", 3, "an interval needs a few"),
        _least("decoded_tokens", 1, "a workload that decodes nothing measures nothing"),
        Limit(
            measurement="worst_error",
            op="<=",
            bound=WORKLOAD_ERROR_LIMIT,
            unit="1",
            why="timed replies are checked against the FP64 oracle",
        ),
    ),
    "perf.layer": FASTER,
    "perf.step": FASTER,
    "perf.rank_step": (
        _zero("waits_that_ran_out_count", "a step that gave up waiting has no time"),
        _least("launches_count", 1, "a step of nothing has no time"),
        Limit(measurement="over_floor", op=">=", bound=1.0, unit="1", why="faster than memory allows means that bytes were not read"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class PerfCheck:
    """One rule of the lane; `measured_by` gives measurements and details."""

    id: str
    claim: str
    planned: tuple[Case, ...]
    measured_by: Callable[[Case, Mapping[str, Target]], Found]
    roles: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ("embedded", "gpu")
    must_kill: tuple[str, ...] = ()
    time_limit_s: float = 240.0

    def cases(self) -> Iterable[Case]:
        return self.planned

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return LIMITS[self.id]

    def measure(self, case: Case, targets: Mapping[str, Target]) -> Found:
        return self.measured_by(case, targets)


def matrix(case: Case, targets: Mapping[str, Target]) -> Found:
    """Every cell of the matrix without the engine, which has its own check; leaves matrix.json, .csv and .md as artifacts."""
    import os
    from pathlib import Path

    from perf.build import build, figures_data, speed_ups, write
    from perf.markdown import tables
    from perf.matrix import Source

    made = build()
    if scratch := os.environ.get("FASTTRACK_SCRATCH"):
        write(made, Path(scratch) / "artifacts")
    shown = [r for r in made.layers.results if r.step_us is not None]
    ratios = speed_ups(made.results)
    printed = [r for r in shown if r.cell.id in ratios and not ratios[r.cell.id][1]]
    needed = ("hardware", "gpus", "prefill", "date", "versions")
    measurements = (
        _count("cells", len(made.steps)),
        _count("refused", sum(r.outcome == "refused" for r in made.steps)),
        _count("refused_without_reason", sum(r.outcome == "refused" and not r.reasons for r in made.steps)),
        _count("layers_shown", len(shown)),
        _count("layers_not_shown", len(made.layers.results) - len(shown)),
        _count("shown_without_evidence", sum(not r.evidence for r in shown)),
        _count("shown_without_correctness", sum(not r.correctness for r in shown if r.cell.backend != "auto")),
        _count(
            "projected_without_assumptions", sum(r.source is Source.PROJECTION and not r.conditions.get("assumptions") for r in made.steps)
        ),
        _count("multipliers_without_conditions", sum(any(r.conditions.get(k) in (None, "", {}) for k in needed) for r in printed)),
    )
    return measurements, {"tables": tables(made), "perf": figures_data(made)}


def _row(case: Case, candidate: str) -> dict[str, Any]:
    from perf import cpu_engine

    control = candidate == "stock"
    shape = (int(case.params["requests"]), int(case.params["q"]))
    return cpu_engine.measure(candidate, (shape,), pairs=3 * LEAST_PAIRS if control else LEAST_PAIRS, control=False)[0]


def engine(case: Case, targets: Mapping[str, Target]) -> Found:
    """One shape of the nano engine, stock against the run's candidate, or against stock for the self-check."""
    from perf import cpu_engine

    control = case.subject == "stock_against_stock"
    row = _row(case, "stock" if control else targets["candidate"].name)
    different = row.get("decision") in ("faster", "slower")
    worst = sorted((row["stock_worst_error"], row["candidate_worst_error"]), key=lambda e: (e != e, e))[-1]
    measurements = [
        _count("objections", len(row["reasons"])),
        _count("pairs", int(row.get("pairs", 0))),
        _count("called_different", int(different)),
        Measurement(name="worst_error", value=worst, unit="1"),
        *(
            Measurement(name=f"{side}_us", value=row[f"{side}_us"], unit="us", samples=tuple(row[f"{side}_samples_us"]))
            for side in ("stock", "candidate")
        ),
    ]  # fmt: skip
    measurements += [
        Measurement(name=name, value=row[name], unit="time ratio") for name in ("speed_up", "speed_up_low", "speed_up_high") if name in row
    ]
    kept = {k: v for k, v in row.items() if not k.endswith("samples_us")}
    return tuple(measurements), {"source": "cpu_engine", "conditions": cpu_engine.conditions(), "row": kept}


def acceptance(case: Case, targets: Mapping[str, Target]) -> Found:
    """Mean accepted length of the shipped drafter, verified by the candidate."""
    from perf import cpu_engine

    found = cpu_engine.measured_acceptance(targets["candidate"].name)
    measured = (_count("verify_steps", found["verify_steps"]), Measurement(name="mean_length", value=found["mean_length"], unit="tokens"))
    return measured, {"acceptance": found}


def workloads(case: Case, targets: Mapping[str, Target]) -> Found:
    """Prefill mixed in and an agentic trace, each side in a process of its own."""
    from perf import workloads as replayed
    from perf.markdown import workload_table

    found = replayed.measure(targets["candidate"].name)
    rows = {name: found[name] for name in ("mixed_prefill", "agentic")}
    measurements = [
        Measurement(name=f"{name}.{side}.{key}", value=value, unit="tok/s")
        for name, row in rows.items()
        for side, values in row["sides"].items()
        for key, value in values.items()
    ]
    measurements += [
        Measurement(name=f"{name}.{key}", value=row[key], unit="time ratio")
        for name, row in rows.items()
        for key in ("speed_up", "speed_up_low", "speed_up_high", "decode_speed_up", "decode_speed_up_low", "decode_speed_up_high")
        if key in row
    ]
    measurements += [
        _count("objections", sum(len(row["reasons"]) for row in rows.values())),
        _count("pairs", min(row["pairs"] for row in rows.values())),
        _count("decoded_tokens", min(row["decoded_tokens"] for row in rows.values())),
    ]
    worst = sorted((row["worst_error"] for row in rows.values()), key=lambda e: (e != e, e))[-1]
    measurements.append(Measurement(name="worst_error", value=worst, unit="1"))
    return tuple(measurements), {"source": "cpu_engine", "conditions": found["conditions"], "tables": [workload_table(found)]}


def layer(case: Case, targets: Mapping[str, Target]) -> Found:
    """One rank's layer beside stock: timed here where that is possible, else as published."""
    from perf import live

    return published(case, targets) if live.reasons_against() else live.layer(int(case.params["tp"]), int(case.params["rows"]))


def rank_step(case: Case, targets: Mapping[str, Target]) -> Found:
    """One rank's whole step: timed here where that is possible, else as published."""
    from perf import live
    from perf.rank_steps import published_step

    tp, rows = int(case.params["tp"]), int(case.params["rows"])
    return published_step(tp, rows) if live.reasons_against() else live.rank_step(tp, rows)


def published(case: Case, targets: Mapping[str, Target]) -> Found:
    """Speed-up of a published cell with the quartiles of both sides against it. Refused, with every reason, where none may be shown."""
    from perf.markdown import conditions_text
    from perf.matrix import Scope
    from perf.published import OURS, STOCK, read_published
    from validation.core.worker import Refused

    scope = Scope.LAYER if case.subject == "layer" else Scope.STEP
    wanted = [
        r for r in read_published().results
        if r.cell.scope is scope and (r.cell.tp, r.cell.rows, r.cell.q) == (case.params["tp"], case.params["rows"], 1)
    ]  # fmt: skip
    sides = {r.cell.backend: r for r in wanted}
    ours, stock = sides.get(OURS), sides.get(STOCK)
    reasons = [f"{name}: nothing published" for name, side in ((OURS, ours), (STOCK, stock)) if side is None]
    reasons += [f"{side.cell.backend}: {reason}" for side in wanted for reason in side.reasons]
    if reasons or ours is None or stock is None or not ours.step_us or not stock.step_us:
        raise Refused(tuple(dict.fromkeys(reasons)) or ("no time is recorded",))
    low, high = (stock.step_low_us or 0.0) / (ours.step_high_us or 1.0), (stock.step_high_us or 0.0) / (ours.step_low_us or 1.0)
    measurements = (
        Measurement(name="stock_us", value=stock.step_us, unit="us"),
        Measurement(name="candidate_us", value=ours.step_us, unit="us"),
        Measurement(name="speed_up", value=stock.step_us / ours.step_us, unit="1"),
        Measurement(name="speed_up_low", value=low, unit="1"),
        Measurement(name="speed_up_high", value=high, unit="1"),
    )
    return measurements, {
        "source": "gpu_timer",
        "conditions": conditions_text(ours),
        "evidence": ours.evidence,
        "correctness": ours.correctness,
    }


def checks() -> list[Check]:
    shapes = tuple(Case(subject="nano", params={"requests": n, "q": q}) for n, q in ((1, 1), (8, 1), (64, 1)))
    grid = tuple({"tp": tp, "rows": rows} for tp in TPS for rows in ROWS)
    deep = tuple(Case(subject="rank_step", params={"tp": 16, "rows": rows}) for rows in (1, 8, 64))
    both = ("candidate", "stock")
    return [
        PerfCheck(id="perf.matrix", claim="C-PERF-2", planned=(Case(subject="kimi-k3"),), measured_by=matrix),
        PerfCheck(
            id="perf.self_check", claim="C-PERF-2", planned=(Case(subject="stock_against_stock", params={"requests": 1, "q": 1}),),
            measured_by=engine, roles=("stock",),
        ),
        PerfCheck(id="perf.cpu_engine", claim="C-PERF-2", planned=shapes, measured_by=engine, roles=both),
        PerfCheck(
            id="perf.acceptance", claim="C-PERF-2", planned=(Case(subject="nano", params={"drafts": 7}),),
            measured_by=acceptance, roles=both,
        ),
        PerfCheck(id="perf.workloads", claim="C-PERF-2", planned=(Case(subject="nano"),), measured_by=workloads, roles=both),
        PerfCheck(id="perf.layer", claim="C-PERF-1", planned=tuple(Case(subject="layer", params=p) for p in grid), measured_by=layer),
        PerfCheck(id="perf.rank_step", claim="C-PERF-1", planned=deep, measured_by=rank_step, profiles=("gpu",)),
        PerfCheck(
            id="perf.step", claim="C-PERF-1", planned=tuple(Case(subject="step", params=p) for p in grid), measured_by=published,
            profiles=("gpu",),
        ),
    ]  # fmt: skip
