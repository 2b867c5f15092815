"""Published evidence: run folders committed below `reports/published/`, and whether each record still describes this checkout.

A cell is the newest record of one check, case, rank and GPU. It is `fresh`, or `stale` with every reason: a digest it was measured on has
changed, it is older than the policy allows, its run does not verify, or it names no digests at all.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from validation.core import jsonio
from validation.core.attest import ATTESTATION_FILE
from validation.core.settings import PROJECT_ROOT
from validation.core.store import EVIDENCE_FILE, MANIFEST_FILE, PLAN_FILE, RUN_FILE, read_evidence, read_run
from validation.core.types import Evidence, HarnessError, Run
from validation.core.verify import verify
from validation.freshness import digests
from validation.policy import DEFAULT_POLICY, Policy, load_policy

PUBLISHED = PROJECT_ROOT / "reports" / "published"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One published record and what is wrong with it now. `renew` is the command that measures it again, on hardware like `gpu`."""

    run: str
    evidence: str
    check: str
    case: str
    rank: int
    gpu: str
    measured_utc: str
    outcome: str
    reasons: tuple[str, ...]  # why it is stale; empty: fresh
    required: bool
    renew: str

    @property
    def state(self) -> str:
        return "stale" if self.reasons else "fresh"


@dataclass(frozen=True, kw_only=True)
class Freshness:
    cells: tuple[Cell, ...]
    missing: tuple[str, ...]  # patterns of the policy that no published check matches

    @property
    def stale(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.reasons)

    @property
    def problems(self) -> tuple[str, ...]:
        """What refuses PR-ready, in words; empty when every required cell is there and fresh."""
        if not self.cells:
            return ("nothing published",)
        stale = [cell for cell in self.stale if cell.required]
        found = (
            [f"{len(stale)} of {len(self.cells)} published cells are stale, first {stale[0].evidence} ({stale[0].check})"] if stale else []
        )
        return (*found, *(f"no published evidence of {pattern}" for pattern in self.missing))

    @property
    def renew(self) -> tuple[str, ...]:
        """The commands that renew the stale cells, each once."""
        return tuple(dict.fromkeys(cell.renew for cell in self.stale))


def published_runs(root: Path = PUBLISHED) -> list[Path]:
    """Run folders below `root`, at any depth, oldest first by name."""
    return sorted((path.parent for path in root.rglob(RUN_FILE)), key=lambda folder: folder.name) if root.is_dir() else []


def freshness(
    root: Path = PUBLISHED, policy: Policy | None = None, *, now: datetime.datetime | None = None, checkout: Path = PROJECT_ROOT
) -> Freshness:
    """Judge everything published against this checkout. Raises HarnessError when a run cannot be read at all."""
    policy = policy or load_policy(DEFAULT_POLICY)
    now = now or datetime.datetime.now(datetime.UTC)
    runs = published_runs(root)
    today = digests.current(checkout) if runs else {}
    required = tuple(str(pattern) for pattern in policy.evidence.get("required", ("*",)))
    newest: dict[tuple[str, str, int, str], Cell] = {}
    for folder in runs:
        for cell in _cells(folder, policy, today, now, required):
            key = (cell.check, cell.case, cell.rank, cell.gpu)
            if key not in newest or cell.measured_utc >= newest[key].measured_utc:
                newest[key] = cell
    checks = {cell.check for cell in newest.values()}
    missing = tuple(pattern for pattern in required if not any(fnmatchcase(check, pattern) for check in checks))
    return Freshness(cells=tuple(newest[key] for key in sorted(newest)), missing=missing if newest else ())


def _cells(folder: Path, policy: Policy, today: Mapping[str, str], now: datetime.datetime, required: Sequence[str]) -> list[Cell]:
    run = read_run(folder)
    shared = _run_reasons(folder, run, policy, now)
    bound_to = tuple(str(kind) for kind in policy.evidence.get("bound_to", ()))
    return [
        Cell(
            run=run.id,
            evidence=record.id,
            check=record.check,
            case=record.case.id,
            rank=record.rank,
            gpu=_gpu(run),
            measured_utc=run.started_utc,
            outcome=record.outcome.value,
            reasons=(*shared, *digests.changed({**_bound_by_run(run), **record.fingerprints}, today, bound_to)),
            required=any(fnmatchcase(record.check, pattern) for pattern in required),
            renew=renewal(run, record),
        )
        for record in read_evidence(folder)
    ]


def _bound_by_run(run: Run) -> dict[str, str]:
    """Digests that hold for the whole run, where it recorded them; a record's own fingerprints are finer and win."""
    found = run.config.get("digests")
    return {str(k): str(v) for k, v in found.items() if "/" not in str(k)} if isinstance(found, Mapping) else {}


def _run_reasons(folder: Path, run: Run, policy: Policy, now: datetime.datetime) -> tuple[str, ...]:
    found = []
    result = verify(folder)
    if not result.intact:
        first = result.problems[0]
        found.append(f"the run does not verify: {first.kind} {first.where}: {first.message}")
    elif not result.closed:
        found.append("the run was never closed")
    age = _age_days(run.started_utc, now)
    allowed = policy.evidence.get("max_age_days")
    if age is None:
        found.append(f"the run says no date: {run.started_utc!r}")
    elif isinstance(allowed, int | float) and not age <= allowed:
        found.append(f"measured {age:.0f} days ago, the policy allows {allowed:g}")
    return tuple(found)


def _age_days(stamp: str, now: datetime.datetime) -> float | None:
    try:
        when = datetime.datetime.fromisoformat(stamp)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=datetime.UTC)
    return (now - when).total_seconds() / 86400


def _gpu(run: Run) -> str:
    gpus = run.hardware.get("gpus") or [{}]
    first = gpus[0] if isinstance(gpus, Sequence) and not isinstance(gpus, str) else {}
    return str(run.hardware.get("gpu") or (first.get("name") if isinstance(first, Mapping) else None) or "unknown")


def renewal(run: Run, record: Evidence) -> str:
    """The command that measures a record again: what its run says, else the profile's run of its lane, followed by publishing."""
    stated = record.details.get("renew") or run.config.get("renew")
    if isinstance(stated, str) and stated:
        return stated
    lane = record.check.split(".")[0]
    return f"make validate PROFILE={run.profile} LANES={lane} && fasttrack publish"


def publish(run_dir: Path, root: Path = PUBLISHED) -> Path:
    """Copy a closed, intact run below `root`: its sealed files only. Returns the new folder.

    Raises:
        HarnessError: the run is open, changed, made with uncommitted changes, without digests, or published before.
    """
    result, run = verify(run_dir), read_run(run_dir)
    problems = [f"{p.kind} {p.where}: {p.message}" for p in result.problems[:5]]
    if not result.closed:
        problems.append("the run is not closed; finish it first")
    if run.dirty and digests.changed(_bound_by_run(run), digests.current(), ("kernels", "contracts", "config", "toolchain")):
        problems.append("it was measured with uncommitted changes that this checkout does not have; commit and measure again")
    bound = _bound_by_run(run)
    records = list(read_evidence(run_dir)) if result.intact else []
    unbound = [record.id for record in records if not {*bound, *record.fingerprints} & {"config", "toolchain"}]
    if unbound:
        problems.append(f"{len(unbound)} record(s) carry no digests of what they measured, first {unbound[0]}")
    target = root / run.id
    if target.exists():
        problems.append(f"{target} exists")
    if problems:
        raise HarnessError(f"publish: got {run.id}, needs a run that can be relied on: " + "; ".join(problems))
    building = root / f".{run.id}.part"
    shutil.rmtree(building, ignore_errors=True)
    try:
        for source in sealed_files(run_dir):
            place = building / source.relative_to(run_dir)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)
        building.rename(target)
    except OSError as error:
        raise HarnessError(f"publish: got {error}, needs a writable folder {root} with space") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def sealed_files(run_dir: Path) -> list[Path]:
    """The files that the manifest of a run covers, the manifest, and the attestation where there is one."""
    names = (RUN_FILE, PLAN_FILE, EVIDENCE_FILE, MANIFEST_FILE, ATTESTATION_FILE)
    top = [run_dir / name for name in names if (run_dir / name).exists()]
    artifacts = [path for path in sorted((run_dir / "artifacts").rglob("*")) if path.is_file() and not path.is_symlink()]
    return [*top, *artifacts]


def summary(found: Freshness) -> dict[str, Any]:
    """Counts, problems and commands: the closing line of `fasttrack status`."""
    return {
        "published": len(found.cells),
        "fresh": len(found.cells) - len(found.stale),
        "stale": len(found.stale),
        "problems": list(found.problems),
        "renew": list(found.renew),
    }


def stored(found: Freshness) -> dict[str, Any]:
    """The form kept in a run folder (`freshness.json`): the summary and every stale cell."""
    return {**summary(found), "cells": [jsonio.plain(cell) for cell in found.stale]}
