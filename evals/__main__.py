"""`python -m evals`: run eval suites on both paths of a checkpoint without the other lanes, and print the gate.

Exit codes as everywhere: 0 pass, 1 fail, 2 not proven, 3 harness error. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from validation.core.settings import Settings
from validation.core.types import EXIT_CODES, EXIT_HARNESS_ERROR, HarnessError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


class Bars:
    """One bar a suite on standard error, with the time that is left."""

    def __init__(self, console: Console) -> None:
        name = TextColumn("{task.description}", markup=False)
        columns = (name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.display = Progress(*columns, console=console)
        self._tasks: dict[str, Any] = {}

    def advance(self, suite: str, done: int, total: int) -> None:
        if suite not in self._tasks:
            self._tasks[suite] = self.display.add_task(suite, total=total)
        self.display.update(self._tasks[suite], completed=done, total=total)


class Quiet:
    """No bars."""

    def advance(self, suite: str, done: int, total: int) -> None:
        return None


@app.command("list")
def list_suites() -> None:
    """List the suites, with the margin that the policy allows each (seconds)."""
    from evals.tasks.loading import NANO_SUITES, SUITES
    from validation.policy import load_policy

    margins = load_policy().limits.get("evals", {}).get("margin", {})
    table = Table("suite", "data", "allowed drop")
    for suite in SUITES:
        table.add_row(
            suite, "shipped" if suite in NANO_SUITES else "local files or the hub", f"{100 * margins.get(suite, float('nan')):g} points"
        )
    Console(markup=False).print(table)


@app.command()
def run(
    suite: Annotated[
        list[str] | None, typer.Option(help="Suite to run; may be given several times. Default: the four nano suites.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Rows of each suite, spread evenly over its file. Default: all.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Sampled repeats an item (suites that sample).")] = None,
    max_repeats: Annotated[int | None, typer.Option(help="Top repeats up to this number until the gate decides.")] = None,
    candidate: Annotated[str, typer.Option(help="specialized | stock | a mutant's id | module:factory")] = "specialized",
    checkpoint: Annotated[str, typer.Option(help="Checkpoint folder.")] = Settings.checkpoint,
    seed: Annotated[int, typer.Option(help="Base of the sampling seeds.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the per-item records; the same folder resumes.")] = Path(".cache/evals"),
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
) -> None:
    """Run suites on stock and candidate and judge them (nano: minutes on two cores, no GPU)."""
    from evals.tasks.loading import NANO_SUITES

    console = _console()
    try:
        settings = Settings(candidate=candidate, checkpoint=checkpoint, seed=seed)
        bars = Quiet() if quiet else Bars(console)
        verdict = _run(settings, tuple(suite or NANO_SUITES), (limit, repeats, max_repeats), out, bars, console)
    except HarnessError as error:
        console.print(f"[bold red]harness error[/] {error}", highlight=False)
        print(json.dumps({"run": str(out), "verdict": "harness_error", "report": None}))
        raise typer.Exit(EXIT_HARNESS_ERROR) from None
    print(json.dumps({"run": str(out), "verdict": verdict.value, "report": None}))
    raise typer.Exit(EXIT_CODES[verdict])


def _run(
    settings: Settings, suites: tuple[str, ...], plan: tuple[int | None, int | None, int | None], out: Path, bars: Any, console: Console
) -> Any:
    """Run and judge; returns the family's status."""
    import contextlib

    from evals.embedded import embedded_engine
    from evals.gate import judge_family
    from evals.generation import PATHS, PairedSession
    from evals.policy import suite_policy
    from evals.records import RecordFile
    from evals.run import SuitePlan, run_suite
    from validation.policy import load_policy
    from validation.targets.engine import open_targets

    policy = load_policy(settings.path(settings.policy))
    policies = [suite_policy(name, policy, len(suites)) for name in suites]
    source = open_targets(settings)
    targets = {path: source.get(path) for path in PATHS}
    gates = []
    with RecordFile(out / f"records-{settings.seed}.jsonl") as records, getattr(bars, "display", contextlib.nullcontext()):
        fingerprints = {path: targets[path].fingerprint() for path in PATHS}
        session = PairedSession(embedded_engine(targets), records, fingerprints, base_seed=settings.seed, progress=bars)
        for one in policies:
            chosen = SuitePlan(limit=plan[0], repeats=plan[1], max_repeats=plan[2])
            gates.append(run_suite(one.suite, session, one, chosen).gate)
    family = judge_family(gates)
    _show(gates, family, console)
    return family.status


def _console() -> Console:
    """Names of suites and files are printed as they are: a bracket in one is no markup."""
    return Console(stderr=True, markup=False)


def _show(gates: list[Any], family: Any, console: Console) -> None:
    table = Table("suite", "items", "stock", "candidate", "difference ± SE", "one SE", "lower bound", "detectable", "Holm p", "status")
    for gate, p in zip(gates, family.p_drop_holm, strict=True):
        table.add_row(
            gate.suite,
            f"{gate.n_items} x {gate.n_repeats}",
            f"{gate.stock.mean:.4f}",
            f"{gate.candidate.mean:.4f}",
            f"{gate.difference.mean:+.4f} ± {gate.difference.se:.4f}",
            f"{gate.one_se.se:.4f} {'holds' if gate.one_se.holds else 'violated'}",
            f"{gate.non_inferiority.lower:+.4f} > {-gate.policy.delta:g}",
            f"{gate.detectable_drop:.4f}",
            f"{p:.3g}",
            gate.status.value,
        )
    console.print(table)
    for reason in family.reasons:
        console.print(f"  {reason}", highlight=False)


if __name__ == "__main__":
    app(prog_name="python -m evals")
    sys.exit(0)
