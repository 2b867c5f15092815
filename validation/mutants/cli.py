"""`fasttrack mutants`: run wrong candidates against the suite and print the kill table.

Exit codes: 0 every mutant killed by its named check and every control alive; 1 a survivor or a dead control; 2 something was not measured;
3 the suite itself could not work. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from validation.core import jsonio
from validation.core.settings import PROJECT_ROOT, load_settings
from validation.core.store import read_evidence, write_atomically
from validation.core.types import EXIT_CODES, Evidence, HarnessError, Outcome

app = typer.Typer(add_completion=False)
LANES = ("scope", "ordering", "numerics", "schedule", "evals", "perf")
NOT_RUN = "not run"
ORDER_KINDS = ("launch-graph", "schedule")
SIGNS = {"killed": "[green]X[/]", "alive": "·", "not run": " "}
TABLE_FILE = "kill_table.json"
LOG_WIDTH = 170  # characters; a log has no width of its own


@app.command()
def mutants(
    only: Annotated[str | None, typer.Option(help="Ids, fault classes or kinds, comma-separated; default: all.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A fixed few, at least one a lane: is the suite as sharp as it was? (a minute)")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the mutants and what is beyond reach here; runs nothing.")] = False,
    runs_dir: Annotated[str | None, typer.Option(help="Where run folders are kept.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Checkpoint folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Continue an interrupted run of the same code and settings.")] = True,
    evals: Annotated[
        int | None, typer.Option(min=0, help="Eval items to decode with each wrong path (default: 40 with a dozen of them; 0: none).")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only survivors and the result, for CI.")] = False,
) -> None:
    """Run wrong candidates and the checks that must kill them (at most 12 minutes on 2 cores, no GPU)."""
    from validation.mutants import checks
    from validation.mutants.catalogue import all_mutants

    chosen = select(only, quick=quick)
    out = Console(stderr=True, width=None if sys.stderr.isatty() else LOG_WIDTH)
    if list_:
        _show_list(out, chosen)
        _finish(0, mutants=len(chosen), classes=sum(bool(ids) for ids in _classes().values()))
    from validation.core.validate import run_validation

    settings = load_settings(None, {"lanes": ("mutants",), "jobs": 1, "runs_dir": runs_dir, "checkpoint": checkpoint})
    with checks.narrowed(chosen if len(chosen) < len(all_mutants()) else None, eval_rows=evals):
        result = run_validation(settings, argv=sys.argv, fresh=not resume, quiet=quiet)
    rows = table_rows(list(read_evidence(result.run_dir)))
    body = {"run": result.verdict.run, "rows": rows, "summary": summary(rows)}
    write_atomically(result.run_dir / TABLE_FILE, json.dumps(body, indent=1, allow_nan=False).encode() + b"\n")
    show(out, rows, quiet=quiet)
    report = _relative(Path(result.report)) if result.report else ""
    code = EXIT_CODES[result.verdict.status]
    _finish(code, run=result.verdict.run, verdict=result.verdict.status, report=report, table=_relative(result.run_dir / TABLE_FILE),
            **summary(rows))  # fmt: skip


def select(only: str | None, *, quick: bool = False) -> tuple[str, ...]:
    """Ids of the mutants named by id, class or kind, or the quick few. Raises HarnessError for a word that names none."""
    from validation.mutants.catalogue import QUICK, all_mutants

    found = all_mutants()
    if quick:
        if only is not None:
            raise HarnessError("mutants: got --quick and --only, needs one of them")
        return QUICK
    if only is None:
        return tuple(found)
    words = [word.strip() for word in only.split(",") if word.strip()]
    unknown = [word for word in words if not any(word in (m.id, m.fault, m.kind) for m in found.values())]
    if unknown or not words:
        raise HarnessError(f"mutants: got {unknown or only!r}, needs ids, fault classes or kinds; `--list` shows them")
    return tuple(m.id for m in found.values() if any(word in (m.id, m.fault, m.kind) for word in words))


def table_rows(records: Sequence[Evidence]) -> list[dict[str, Any]]:
    """One row a mutant, from its evidence; `state` is killed, survived, other lane, control alive, control dead, or not measured."""
    rows = []
    for record in records:
        values = {m.name: m.value for m in record.measurements}
        details = record.details
        measured = record.outcome is Outcome.MEASURED
        rows.append(
            {
                "mutant": record.case.subject,
                "evidence": record.id,
                "state": _state(values, details) if measured else "not measured",
                "fault": details.get("fault", ""),
                "kind": details.get("kind", ""),
                "sentence": details.get("sentence", ""),
                "claim": details.get("claim", ""),
                "named": details.get("named", ""),
                "killed_by": details.get("killed_by", []),
                "lanes": details.get("lanes", {}),
                "first": details.get("first", []),
                "errors": [*details.get("errors", []), *record.reasons],
                "seconds": round(record.seconds, 2),
            }
        )
    return rows


def _state(values: Mapping[str, float], details: Mapping[str, Any]) -> str:
    if details.get("control"):
        return "control dead" if values.get("breaches") else "control alive"
    if values.get("killed_by_named"):
        return "killed"
    return "other lane" if values.get("killed") else "survived"


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts by state, classes with a killed mutant, and what each lane alone would have let through (of the mutants it was shown)."""
    states = ("killed", "survived", "other lane", "control alive", "control dead", "not measured")
    wrong = [row for row in rows if not str(row["state"]).startswith("control")]
    alone = {}
    for lane in LANES:
        shown = [row for row in wrong if row["lanes"].get(lane, "not run") != "not run"]
        missed = sorted(row["mutant"] for row in shown if row["lanes"][lane] == "alive")
        alone[lane] = {"shown": len(shown), "missed": missed, "not_run": len(wrong) - len(shown)}
    return {
        "states": {state: sum(row["state"] == state for row in rows) for state in states},
        "classes_killed": sorted({row["fault"] for row in wrong if row["state"] == "killed" and str(row["fault"]).startswith("F")}),
        "lane_alone": alone,
        "seconds": round(sum(row["seconds"] for row in rows), 1),
    }


def show(out: Console, rows: Sequence[Mapping[str, Any]], *, quiet: bool) -> None:
    """The kill table: X killed, · shown and let through, blank not run. Survivors and dead controls in red."""
    table = Table("mutant", "class", *LANES, "killed by", "s", "first evidence", title="Kill table: X killed, · let through, blank not run")
    for row in rows:
        bad = row["state"] in ("survived", "control dead", "not measured", "other lane")
        if quiet and not bad:
            continue
        words = {"killed": row["named"], "control alive": "(control: alive)"}.get(row["state"], row["state"].upper())
        if row["state"] == "other lane":
            words = f"ONLY BY {', '.join(row['killed_by'])}, not by {row['named']}"
        marks = [SIGNS[row["lanes"].get(lane, "not run")] for lane in LANES]
        cells = [row["mutant"], row["fault"], *marks, escape(words), f"{row['seconds']:.1f}", row["evidence"]]
        table.add_row(*cells, style="bold red" if bad else None)
    if table.row_count:
        out.print(table)
    for row in rows:
        for error in row["errors"]:
            out.print(f"{row['mutant']}: {error}", markup=False)
    found = summary(rows)
    if not quiet:
        _show_alone(out, rows, found)
    if not quiet:
        _say_beyond_reach(out)
    out.print(f"{found['states']}; classes killed: {len(found['classes_killed'])} of 26", markup=False)


def _show_alone(out: Console, rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> None:
    table = Table("lane alone", "shown", "let through", "not shown", title="What one lane alone would have let through")
    for lane, row in found["lane_alone"].items():
        table.add_row(lane, str(row["shown"]), f"{len(row['missed'])}: {', '.join(row['missed'][:8])}", str(row["not_run"]))
    out.print(table)
    binary = [row["mutant"] for row in rows if row["kind"] in ("binary", "launch-graph", "toolchain") and row["state"] == "killed"]
    decoded = {
        row["mutant"]: row["lanes"]["evals"] for row in rows if row["kind"] != "eval" and row["lanes"].get("evals", NOT_RUN) != NOT_RUN
    }
    order = [row["mutant"] for row in rows if row["mutant"] in decoded and row["kind"] in ORDER_KINDS and row["state"] == "killed"]
    passed = [name for name in order if decoded[name] == "alive"]
    out.print(
        f"{len(binary)} faults killed live in binaries or in the launch graph, where an eval gives right answers until a race is lost. "
        f"A suite was decoded with {len(order)} faults of order that the audit killed; the evals gate let {len(passed)} of them through"
        + (f": {', '.join(passed)}." if passed else ".")
    )
    numbers = [name for name in decoded if name not in order]
    missed = [name for name in numbers if decoded[name] == "alive"]
    out.print(f"And with {len(numbers)} faults of numbers; it let {len(missed)} through{': ' if missed else ''}{', '.join(missed)}.")


def _say_beyond_reach(out: Console) -> None:
    from validation.mutants.catalogue import BEYOND_REACH

    names = ", ".join(BEYOND_REACH)
    out.print(
        f"A part of {names} shows on a GPU only, where a kernel with the fault planted would have to run; `--list` says why for each."
    )


def _classes() -> dict[str, list[str]]:
    from validation.mutants.catalogue import classes

    return classes()


def _show_list(out: Console, chosen: Sequence[str]) -> None:
    from validation.mutants.catalogue import BEYOND_REACH, all_mutants

    table = Table("mutant", "class", "kind", "what is wrong", "must be killed by", title="Mutants")
    for identity in chosen:
        mutant = all_mutants()[identity]
        table.add_row(mutant.id, mutant.fault, mutant.kind, mutant.sentence, mutant.killed_by or "(control)")
    out.print(table)
    for fault, words in BEYOND_REACH.items():
        out.print(f"{fault}, beyond reach here: {words}", markup=False)


def _relative(path: Path) -> str:
    return str(path.relative_to(PROJECT_ROOT)) if path.is_relative_to(PROJECT_ROOT) else str(path)


def _finish(code: int, **fields: Any) -> None:
    print(jsonio.dumps(fields), flush=True)
    raise SystemExit(code)
