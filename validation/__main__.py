"""The command line: `fasttrack` or `python -m validation`.

Exit codes: 0 pass, 1 fail, 2 not proven, 3 the suite itself could not work. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from validation.core import jsonio, registry
from validation.core.settings import PROJECT_ROOT, Settings, load_settings
from validation.core.types import EXIT_CODES, EXIT_HARNESS_ERROR, HarnessError

app = typer.Typer(help="Measure, judge and report a fast-path candidate against stock.", no_args_is_help=True, add_completion=False)

# Typer carries its own copy of click or uses the installed one, by version: this is the base of its usage errors in both.
_UsageProblem: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

_TYPER_INTERRUPTED = 130  # what typer turns Ctrl-C into before it gets here

# Commands that lanes own: each module has `main(arguments: list[str]) -> int`, or a typer `app`.
LANE_COMMANDS = {
    "audit": ("validation.ordering.cli", "Audit binaries and sources for memory-ordering faults (seconds to minutes, no GPU)."),
    "scope": ("validation.scope.cli", "Judge a change of a git repository against the policy (seconds, no GPU)."),
    "mutants": ("validation.mutants.cli", "Run wrong candidates and print the kill table (minutes, no GPU)."),
    "status": ("validation.freshness.cli", "Say which published evidence is stale and what renews it (seconds)."),
    "publish": ("validation.freshness.publish_cli", "Put evidence of a GPU machine below reports/published (seconds)."),
    "pr-body": ("reports.pr_body", "Write a pull-request body from a run (seconds)."),
    "policy": ("validation.policy_check", "Check that every rule and claim has its check and test (seconds)."),
    "serve": ("evals.serving.server.cli", "Serve a checkpoint behind OpenAI-compatible routes (starts in seconds, no GPU)."),
    "init": ("evals.serving.template", "Write a commented validate.toml for two servers (seconds)."),
    "gate": ("validation.gate.cli", "What CI blocks on, in one command."),
}

Config = Annotated[Path | None, typer.Option(help="TOML settings; default: validate.toml if it exists.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only problems and the result, for CI.")]
RunArgument = Annotated[Path | None, typer.Argument(help="Run folder or id; default: the newest.")]
RunsDir = Annotated[str | None, typer.Option(help="Where run folders are kept.")]


def _settings(config: Path | None, profile_here: Callable[[], str] | None = None, **overrides: Any) -> Settings:
    default = PROJECT_ROOT / "validate.toml"
    return load_settings(config or (default if default.exists() else None), overrides, profile_here)


def _finish(code: int, **fields: Any) -> None:
    """Print the closing JSON line and leave."""
    print(jsonio.dumps(fields), flush=True)
    raise SystemExit(code)


@app.command()
def run(
    config: Config = None,
    candidate: Annotated[str | None, typer.Option(help="specialized | stock | a mutant's id | module:factory")] = None,
    profile: Annotated[str | None, typer.Option(help="embedded | gpu | serving; default: gpu where the kernels can run.")] = None,
    lanes: Annotated[str | None, typer.Option(help="Comma-separated, e.g. numerics,evals.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Checkpoint folder.")] = None,
    seed: Annotated[int | None, typer.Option(help="Changes sampled inputs; stored in the run.")] = None,
    runs_dir: RunsDir = None,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Continue an interrupted run of the same code and settings.")] = True,
    quiet: Quiet = False,
) -> None:
    """Measure, judge and report (embedded profile: minutes on 2 cores, no GPU)."""
    from validation.core import kernels_here
    from validation.core.validate import run_validation

    chosen = None if lanes is None else tuple(part.strip() for part in lanes.split(",") if part.strip())
    named = {"candidate": candidate, "profile": profile, "lanes": chosen, "checkpoint": checkpoint, "seed": seed, "runs_dir": runs_dir}
    settings = _settings(config, kernels_here.profile_here, **named)
    result = run_validation(settings, argv=sys.argv, fresh=not resume, quiet=quiet)
    _show_verdict(result.verdict)
    _finish(EXIT_CODES[result.verdict.status], run=result.verdict.run, verdict=result.verdict.status, report=_shown(result.report))


@app.command()
def judge(
    run_dir: RunArgument = None,
    policy: Annotated[Path | None, typer.Option(help="Policy file; default: the run's setting.")] = None,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Render the report again.")] = True,
    config: Config = None,
) -> None:
    """Judge stored evidence again, with no GPU and without touching the records (seconds)."""
    from validation.core.validate import judge_run, load_claims, render_report

    settings = _settings(config)
    folder = _find_run(run_dir, settings)
    path = policy or settings.path(settings.policy)
    if policy is not None and not policy.exists():
        raise HarnessError(f"policy: got {policy}, needs a file")
    _refuse_changed(folder)
    result = judge_run(folder, policy=path, claims=load_claims(settings.claims))
    text = render_report(folder, lambda line: None) if report else result.report
    _show_verdict(result.verdict)
    _finish(EXIT_CODES[result.verdict.status], run=result.verdict.run, verdict=result.verdict.status, report=_shown(text))


@app.command("list")
def list_(config: Config = None, runs_dir: RunsDir = None) -> None:
    """List lanes, checks, claims and runs (seconds)."""
    from validation.core.validate import load_claims

    settings = _settings(config, runs_dir=runs_dir)
    out = Console(stderr=True, markup=False)
    checks = Table("lane", "check", "claim", "cases", title="Checks")
    modules = {**registry.LANE_MODULES, **settings.lane_modules}
    for lane, module in dict.fromkeys([*modules.items(), *registry.every_lane_module()]):
        if not registry.lane_exists(module):
            checks.add_row(lane, "(not installed)", "", "")
            continue
        for check in registry.load_checks(lane, module):
            checks.add_row(lane, check.id, check.claim, str(len(list(check.cases()))))
    claims = Table("claim", "lane", "required in", "sentence", title="Claims")
    for claim in load_claims(settings.claims):
        claims.add_row(claim.id, claim.lane, ", ".join(claim.required_in), claim.sentence)
    runs = Table("run", "verdict", title="Runs")
    found = _all_runs(settings)
    for folder in found:
        runs.add_row(folder.name, _verdict_word(folder))
    for table in (checks, claims, runs):
        out.print(table)
    _finish(0, lanes=sorted(modules), runs=[folder.name for folder in found])


@app.command()
def verify(
    run_dir: RunArgument = None,
    sign: Annotated[Path | None, typer.Option(help="PEM private key: sign the run's attestation when it verifies.")] = None,
    attest: Annotated[bool, typer.Option("--attest", help="Write the attestation, unsigned unless --sign is given.")] = False,
    key: Annotated[Path | None, typer.Option(help="PEM public key that must have signed the attestation.")] = None,
    config: Config = None,
) -> None:
    """Find edited, dropped, reordered or foreign records of a run, and check or make its attestation (seconds)."""
    from validation.core import attest as attestation
    from validation.core.verify import verify as verify_run

    folder = _find_run(run_dir, _settings(config))
    result = verify_run(folder)
    made = attestation.attest(folder, sign) if result.intact and (attest or sign is not None) else {}
    unattested = attestation.check(folder, key)
    for line in (*(f"{p.kind}: {p.where}: {p.message}" for p in result.problems), *unattested):
        print(line, file=sys.stderr)
    intact = result.intact and not unattested
    fields = dataclasses.asdict(result) | {"attestation_problems": unattested, **made}
    _finish(0 if intact else 1, **fields | {"intact": intact, "verdict": "intact" if intact else "changed"})


@app.command()
def repro(evidence: Annotated[str, typer.Argument(help="E-…, from any report.")], config: Config = None, quiet: Quiet = False) -> None:
    """Measure exactly one record again and compare (as long as that measurement took)."""
    from validation.core.repro import repro as repro_record

    settings = _settings(config)
    roots = [settings.path(settings.runs_dir), PROJECT_ROOT / "reports" / "published"]
    say: Callable[[str], None] = (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr, flush=True))
    record, repeated, rows, notes = repro_record(evidence, roots, say)
    table = Table("measurement", "unit", "recorded", "repeated", "same", title=f"{evidence}: {record.check} {record.case.id}")
    for row in rows:
        shown = "missing" if row.repeated is None else f"{row.repeated:.9g}"
        table.add_row(row.name, row.unit, f"{row.recorded:.9g}", shown, "yes" if row.same else "NO")
    err = Console(stderr=True, markup=False)
    err.print(table)
    for note in (*notes, *(f"now {repeated.outcome.value}: {reason}" for reason in repeated.reasons)):
        err.print(note, markup=False)
    same = record.outcome is repeated.outcome and all(row.same for row in rows)
    _finish(0 if same else 1, evidence=evidence, run=record.run, verdict="same" if same else "different", notes=notes, measurements=rows)


# ---- helpers ----
def _show_verdict(verdict: Any) -> None:
    table = Table("claim", "status", "required", "why", title=f"{verdict.run}: {verdict.status.value}")
    for result in verdict.claims:
        table.add_row(result.claim, result.status.value, "yes" if result.required else "no", result.note)
    Console(stderr=True, markup=False).print(table)


def _shown(path: str) -> str:
    """Paths inside the project are shown relative to it."""
    return str(Path(path).relative_to(PROJECT_ROOT)) if path and Path(path).is_relative_to(PROJECT_ROOT) else path


def _all_runs(settings: Settings) -> list[Path]:
    runs_dir = settings.path(settings.runs_dir)
    return sorted(folder for folder in runs_dir.glob("R-*") if folder.is_dir()) if runs_dir.is_dir() else []


def _verdict_word(folder: Path) -> str:
    try:
        return str(json.loads((folder / "verdict.json").read_text())["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unfinished"


def _find_run(named: Path | None, settings: Settings) -> Path:
    if named is None:
        runs = _all_runs(settings)
        if not runs:
            raise HarnessError(f"run: got none below {settings.runs_dir}, needs at least one; `make validate` makes one")
        return runs[-1]
    for folder in (named, settings.path(settings.runs_dir) / named, PROJECT_ROOT / "reports" / "published" / named):
        if folder.is_dir():
            return folder.resolve()
    raise HarnessError(f"run: got {named}, needs a run folder or id; `list` shows what there is")


def _refuse_changed(folder: Path) -> None:
    """A verdict on edited records would be a forged one. An interrupted run may end in half a line. Raises HarnessError."""
    from validation.core.verify import verify as verify_run

    checked = verify_run(folder)
    changed = [problem for problem in checked.problems if checked.closed or problem.kind != "torn"]
    if changed:
        first = f"{changed[0].kind}: {changed[0].where}: {changed[0].message}"
        remedy = "`fasttrack verify` lists each, a new run replaces them"
        raise HarnessError(f"run: got {len(changed)} problems in {folder}, first {first}; needs the records as measured; {remedy}")


def _add_lane_command(name: str, module: str, words: str) -> None:
    @app.command(name, help=words, add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def command(context: typer.Context) -> None:
        if not registry.lane_exists(module):
            raise HarnessError(f"{name}: got no module {module}, needs it installed; this checkout does not have that lane")
        found = importlib.import_module(module)
        if hasattr(found, "main"):
            raise SystemExit(found.main(list(context.args)))
        raise SystemExit(found.app(args=list(context.args), prog_name=f"fasttrack {name}", standalone_mode=False) or 0)


for _name, (_module, _words) in LANE_COMMANDS.items():
    _add_lane_command(_name, _module, _words)


def _harness_error(message: str, verdict: str = "error") -> int:
    print(f"fasttrack: {message}", file=sys.stderr, flush=True)
    print(json.dumps({"run": None, "verdict": verdict, "report": None, "error": message}), flush=True)
    return EXIT_HARNESS_ERROR


def _fault(error: Exception) -> str:
    """One line about a mistake of this program: what was raised and where, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f"{Path(f.filename).relative_to(PROJECT_ROOT)}:{f.lineno}" for f in frames if _is_own(f.filename)]
    words = " ".join(str(error).split())[:400]
    return (
        f"got {type(error).__name__}: {words} at {', '.join(own[:-4:-1])}, needs a correction of this program; report it with the command"
    )


def _is_own(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(PROJECT_ROOT) and ".venv" not in path.parts


def main() -> None:
    """Entry point; turns every way to fail into one line and exit code 3."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a CI job that is cancelled stops like Ctrl-C: resumable
    try:
        code = app(standalone_mode=False) or 0
        if code == _TYPER_INTERRUPTED:
            raise KeyboardInterrupt
    except HarnessError as error:
        code = _harness_error(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = _harness_error("interrupted; run the same command again, it continues where it stopped", "interrupted")
    except _UsageProblem as error:
        code = _harness_error(error.format_message())
    except OSError as error:
        code = _harness_error(f"got {error}, needs a working file system")
    except Exception as error:  # exit code 1 would say that the candidate failed
        code = _harness_error(_fault(error))
    sys.exit(code)


if __name__ == "__main__":
    main()
