"""Which stored runs speak for this checkout: closed, intact, of the same code, and of the candidate under judgement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from validation.core import environment
from validation.core.store import MANIFEST_FILE, RUN_FILE, read_run
from validation.core.types import HarnessError, Run
from validation.core.verify import Verification, verify


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One run folder that measured this code. `problems` are what `verify` found."""

    folder: Path
    run: Run
    lanes: tuple[str, ...]
    problems: tuple[str, ...]


def of_this_code(runs_dir: Path, candidate: str, code_sha256: str | None = None) -> tuple[list[Stored], list[str]]:
    """Runs of this code and candidate, newest first, and in words why the other ones do not count."""
    code = code_sha256 or environment.code_digest()
    found, left_out = [], []
    for folder in sorted(runs_dir.glob("R-*"), reverse=True) if runs_dir.is_dir() else ():
        if not (folder / RUN_FILE).exists():
            continue
        try:
            run = read_run(folder)
        except HarnessError as error:
            left_out.append(f"{folder.name}: {error}")
            continue
        settings = run.config.get("settings")
        settings = settings if isinstance(settings, dict) else {}
        if not (folder / MANIFEST_FILE).exists():
            left_out.append(f"{run.id}: unfinished")
        elif run.config.get("code_sha256") != code:
            left_out.append(f"{run.id}: measured other code (commit {run.commit[:12]}{', dirty' if run.dirty else ''})")
        elif settings.get("candidate") != candidate:
            left_out.append(f"{run.id}: measured the candidate {settings.get('candidate')!r}")
        else:
            lanes = tuple(str(lane) for lane in settings.get("lanes", ()))
            found.append(Stored(folder=folder, run=run, lanes=lanes, problems=_problems(verify(folder))))
    return found, left_out


def _problems(result: Verification) -> tuple[str, ...]:
    return tuple(f"{problem.kind} {problem.where}: {problem.message}" for problem in result.problems)


def newest_with(lane: str, runs: Sequence[Stored]) -> Stored | None:
    return next((stored for stored in runs if lane in stored.lanes), None)
