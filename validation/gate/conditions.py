"""What CI blocks on, one function a condition. Each reads stored results or the git history; none measures anything.

    rules       the change loosens none of the rules that judge it: policy, claims, limits beside the checks
    isolation   the change against the base keeps to the policy's folders, imports, default and interface
    integrity   no record of the runs that count was edited, dropped, reordered or added
    claims      no claim failed; the required ones passed
    ordering    no finding of the memory-ordering audit that the base does not have
    mutants     no required mutant survived
    perf        no cell slower than the published evidence of the base, beyond the policy's margin
    freshness   no published cell that the policy requires is stale

A condition is pass, fail or not_proven. Nothing measured is never a pass.
"""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from validation.core.settings import PROJECT_ROOT
from validation.core.store import read_evidence
from validation.core.types import Claim, ClaimResult, Finding, HarnessError, Holds, Status
from validation.core.validate import verdict_of
from validation.freshness import published
from validation.gate.rule_changes import rule_changes
from validation.gate.runs import Stored, newest_with
from validation.policy import Policy, load_policy
from validation.scope.change import EMPTY_TREE, WORKTREE, read_change
from validation.scope.isolation import judge_change

CONDITIONS = ("rules", "isolation", "integrity", "claims", "ordering", "mutants", "perf", "freshness")
# Needed on every push. The rest needs its own hardware or its own budget; it is listed, and required with --require or --pr-ready.
REQUIRED = ("rules", "isolation", "integrity", "claims", "ordering")
PERF_LIMIT_S = 300.0
SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Result:
    """One condition. `reasons` say what is wrong or missing, each with the evidence it rests on; `remedy` is a command."""

    name: str
    status: Status
    summary: str
    reasons: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What the conditions read. `runs` are newest first; `left_out` says why other runs do not count."""

    repository: Path
    base: str
    policy_file: Path
    claims: Sequence[Claim]
    runs: Sequence[Stored]
    left_out: Sequence[str]
    profile: str = "embedded"
    published: Path = published.PUBLISHED
    accepted: Mapping[str, str] = field(default_factory=dict)  # key of a changed rule -> who accepts it

    @property
    def policy(self) -> Policy:
        return load_policy(self.policy_file)


def rules(gate: Gate) -> Result:
    """A loosened rule blocks until somebody named accepts exactly that change; tighter and new ones are shown."""
    change = read_change(gate.repository, gate.base, WORKTREE)
    root, policy = gate.repository.resolve(), gate.policy_file.resolve()
    inside = policy.is_relative_to(root)
    changes = rule_changes(change, policy.relative_to(root).as_posix() if inside else None)
    unknown = sorted(set(gate.accepted) - {one.key for one in changes})
    if unknown:
        raise HarnessError(f"gate: got an acceptance of {unknown}, needs keys of rules that changed: {sorted(one.key for one in changes)}")
    blocking = [one for one in changes if one.loosens and not gate.accepted.get(one.key)]
    shown = [f"BLOCKS {one}" for one in blocking]
    shown += [f"accepted by {gate.accepted[one.key]}: {one}" for one in changes if gate.accepted.get(one.key)]
    shown += [f"not looser: {one}" for one in changes if not one.loosens and not gate.accepted.get(one.key)]
    if blocking:
        return Result(
            name="rules",
            status=Status.FAIL,
            summary=f"{len(blocking)} of {len(changes)} changed rule(s) may be looser than at {gate.base}",
            reasons=tuple(shown[:SHOWN]),
            remedy=f"restore it, or a maintainer runs: fasttrack gate --accept '{blocking[0].key}=NAME'",
        )
    summary = f"{len(changes)} rule(s) changed, none looser without a name" if changes else f"no rule differs from {gate.base}"
    summary += "" if inside else f"; judged by {policy.name} from outside the repository"
    return Result(name="rules", status=Status.PASS, summary=summary, reasons=tuple(shown[:SHOWN]))


def isolation(gate: Gate) -> Result:
    base = gate.base
    change = read_change(gate.repository, base, WORKTREE)
    if not change.files:  # on the base itself the whole tree is the change
        base, change = "the empty tree", read_change(gate.repository, EMPTY_TREE, WORKTREE)
    findings = [finding for group in judge_change(change, gate.policy).values() for finding in group]
    if findings:
        return Result(
            name="isolation",
            status=Status.FAIL,
            summary=f"{len(findings)} scope finding(s) in {len(change.files)} file(s) changed since {base}",
            reasons=tuple(str(finding) for finding in findings[:SHOWN]),
            remedy=f"fasttrack scope --base {gate.base}",
        )
    status = Status.PASS if change.files else Status.NOT_PROVEN
    return Result(name="isolation", status=status, summary=f"{len(change.files)} file(s) changed since {base}, no scope finding")


def integrity(gate: Gate) -> Result:
    problems = [f"{stored.run.id}: {problem}" for stored in gate.runs for problem in stored.problems]
    if problems:
        summary, remedy = f"{len(problems)} problem(s) in stored evidence", "fasttrack verify R-…, then measure again with --fresh"
        return Result(name="integrity", status=Status.FAIL, summary=summary, reasons=tuple(problems[:SHOWN]), remedy=remedy)
    if not gate.runs:
        return _nothing("integrity", gate, "make validate")
    return Result(name="integrity", status=Status.PASS, summary=f"{len(gate.runs)} run(s) of this code verify")


def _nothing(name: str, gate: Gate, remedy: str) -> Result:
    reasons = tuple(gate.left_out[:3])
    return Result(name=name, status=Status.NOT_PROVEN, summary="no finished run of this code", reasons=reasons, remedy=remedy)


def _results(gate: Gate, stored: Stored) -> dict[str, ClaimResult]:
    verdict = verdict_of(stored.folder, policy=gate.policy_file, claims=gate.claims)
    return {result.claim: result for result in verdict.claims}


def claims(gate: Gate) -> Result:
    """Each claim of the profile's lanes, judged on the newest run that had its lane."""
    lanes = gate.policy.lanes.get(gate.profile, ())
    wanted = [claim for claim in gate.claims if claim.lane in lanes and gate.profile in claim.required_in]
    if not wanted:
        return Result(name="claims", status=Status.NOT_PROVEN, summary=f"the policy names no lane with a claim in {gate.profile}")
    judged: dict[Path, dict[str, ClaimResult]] = {}
    failed, missing = [], []
    for claim in wanted:
        stored = newest_with(claim.lane, gate.runs)
        if stored is None:
            missing.append(f"{claim.id}: no finished run of this code with the lane {claim.lane}")
            continue
        if stored.folder not in judged:
            judged[stored.folder] = _results(gate, stored)
        result = judged[stored.folder][claim.id]
        if result.status is Status.FAIL:
            failed.append(f"{claim.id} ({stored.run.id}): {result.note}")
        elif result.status is Status.NOT_PROVEN:
            missing.append(f"{claim.id} ({stored.run.id}): {result.note}")
    status = Status.FAIL if failed else Status.NOT_PROVEN if missing else Status.PASS
    summary = f"{len(wanted) - len(failed) - len(missing)} of {len(wanted)} required claims pass, {len(failed)} fail"
    remedy = "" if status is Status.PASS else "make validate"
    return Result(
        name="claims",
        status=status,
        summary=summary,
        reasons=tuple([*failed, *missing, *(gate.left_out[:3] if missing else ())]),
        remedy=remedy,
    )


def _lane_findings(gate: Gate, stored: Stored, lane: str) -> list[Finding]:
    mine = {claim.id for claim in gate.claims if claim.lane == lane}
    return [
        finding
        for name, result in _results(gate, stored).items()
        if name in mine
        for finding in result.findings
        if finding.check.startswith(f"{lane}.")
    ]


def ordering(gate: Gate) -> Result:
    """Findings that the audit recorded in the newest run and that the base's published evidence does not hold."""
    stored = newest_with("ordering", gate.runs)
    if stored is None:
        return _nothing("ordering", gate, "make validate LANES=ordering")
    with _at_base(gate) as base:
        known = {key for folder in base for key in _audit_findings(folder)}
    new = {key: text for key, text in _audit_findings(stored.folder).items() if key not in known}
    judged = _lane_findings(gate, stored, "ordering")
    broken = [
        f"{f.check} {f.case}: {f.limit.measurement if f.limit else ''} = {f.value} ({f.evidence})"
        for f in judged
        if f.holds is Holds.VIOLATED
    ]
    if new or broken:
        summary = f"{len(new)} new finding(s), {len(broken)} limit(s) of the audit violated in {stored.run.id}"
        return Result(name="ordering", status=Status.FAIL, summary=summary, reasons=(*new.values(), *broken)[:SHOWN], remedy="make audit")
    open_ = [f"{f.check} {f.case}: {f.note}" for f in judged if f.holds is Holds.NO_EVIDENCE]
    if open_ or not judged:
        summary = f"{len(open_)} of {len(judged)} limits of the audit without evidence in {stored.run.id}"
        return Result(name="ordering", status=Status.NOT_PROVEN, summary=summary, reasons=tuple(open_[:SHOWN]), remedy="make audit")
    return Result(name="ordering", status=Status.PASS, summary=f"no new finding in {stored.run.id}, {len(judged)} limits hold")


def _audit_findings(folder: Path) -> dict[tuple[str, ...], str]:
    """Findings in the details of the ordering lane's records on the project's own code: key without line numbers -> text."""
    found = {}
    for record in read_evidence(folder):
        if not record.check.startswith("ordering.") or record.check == "ordering.corpus":
            continue
        listed = record.details.get("findings", ())
        for item in listed if isinstance(listed, list | tuple) else ():
            if isinstance(item, dict) and item.get("severity") not in ("note", "Note", "NOTE"):
                key = tuple(str(item.get(name, "")) for name in ("rule", "kernel", "arch", "parameter", "role"))
                found[key] = f"{item.get('rule')} in {item.get('kernel')}: {item.get('title') or item.get('message')} ({record.id})"
    return found


@contextmanager
def _at_base(gate: Gate) -> Iterator[list[Path]]:
    """The published runs as the base has them: a change that drops one is judged by it all the same."""
    command = ["git", "-C", str(gate.repository), "archive", "--format=tar", gate.base, "reports/published"]
    with tempfile.TemporaryDirectory(prefix="gate-base-") as folder:
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
        if done.returncode == 0:
            with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
                archive.extractall(folder, filter="data")
        yield published.published_runs(Path(folder))


def mutants(gate: Gate) -> Result:
    """The newest trial of each mutant the policy requires, from all kill tables of this code: a violated limit is a survivor, a mutant
    killed by another check than its own, or a control that died. A table of a few proves those few."""
    if newest_with("mutants", gate.runs) is None:
        return _nothing("mutants", gate, "make mutants")
    judged: dict[str, list[Finding]] = {}
    for stored in (stored for stored in gate.runs if "mutants" in stored.lanes):
        subjects = {record.case.id: record.case.subject for record in read_evidence(stored.folder)}
        newest: dict[str, list[Finding]] = {}
        for finding in _lane_findings(gate, stored, "mutants"):
            newest.setdefault(subjects.get(finding.case, finding.case), []).append(finding)
        judged = newest | judged
    findings = [finding for group in judged.values() for finding in group]
    bad = [
        f"{f.check} {f.case}: {f.limit.measurement if f.limit else ''} = {f.value} ({f.evidence})"
        for f in findings
        if f.holds is Holds.VIOLATED
    ]
    if bad:
        summary = f"{len(bad)} of {len(findings)} limits of the kill table violated"
        return Result(name="mutants", status=Status.FAIL, summary=summary, reasons=tuple(bad[:SHOWN]), remedy="make mutants")
    open_ = [f"{f.check} {f.case}: {f.note}" for f in findings if f.holds is Holds.NO_EVIDENCE]
    open_ += [f"{name}: not tried" for name in _required_mutants(gate.policy) if name not in judged]
    if open_ or not findings:
        summary = f"{len(open_)} required mutants or limits without evidence; {len(judged)} were tried"
        return Result(name="mutants", status=Status.NOT_PROVEN, summary=summary, reasons=tuple(open_[:SHOWN]), remedy="make mutants")
    return Result(name="mutants", status=Status.PASS, summary=f"{len(judged)} tried: the required are killed, every control survives")


def _required_mutants(policy: Policy) -> tuple[str, ...]:
    """Names in the policy, or all of the catalogue. Raises HarnessError for a name that the catalogue does not have."""
    named = policy.mutants.get("required", "all")
    if named == "all":
        from validation.mutants.catalogue import all_mutants

        return tuple(all_mutants())
    if isinstance(named, str) or not isinstance(named, Sequence):
        raise HarnessError(f'policy {policy.name}: got mutants.required = {named!r}, needs "all" or a list of mutants')
    return tuple(map(str, named))


def perf(gate: Gate) -> Result:
    """`python -m perf compare BASE CANDIDATE` on the newest perf records against those published at the base.

    What the change itself publishes comes first: a run on this machine may be one without a GPU, which has no cell of the base.
    """
    with _at_base(gate) as runs:
        return _perf_against([folder for folder in runs if _has_lane(folder, "perf")], {folder.name for folder in runs}, gate)


def _perf_against(base: list[Path], known: set[str], gate: Gate) -> Result:
    """`known`: names of all runs that the base publishes."""
    fresh = [f for f in published.published_runs(gate.published) if f.name not in known and _has_lane(f, "perf")]
    stored = newest_with("perf", gate.runs)
    new = fresh[-1] if fresh else stored.folder if stored is not None else None
    remedy = "make perf on the hardware of the published evidence"
    if not base or new is None:
        what = "no perf evidence is published at the base" if not base else "no perf run of this code"
        return Result(name="perf", status=Status.NOT_PROVEN, summary=what, remedy=remedy)
    if importlib.util.find_spec("perf") is None or importlib.util.find_spec("perf.__main__") is None:
        return Result(name="perf", status=Status.NOT_PROVEN, summary="no program to compare perf evidence is installed", remedy=remedy)
    command = [sys.executable, "-m", "perf", "compare", str(base[-1]), str(new)]
    try:
        done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=PERF_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HarnessError(f"gate: got {error} from `python -m perf compare`, needs it to finish") from error
    status = {0: Status.PASS, 1: Status.FAIL, 2: Status.NOT_PROVEN}.get(done.returncode)
    said = [line for line in (done.stderr.strip() or done.stdout.strip()).splitlines() if line.strip()][-SHOWN:]
    if status is None:
        raise HarnessError(
            f"gate: got exit code {done.returncode} from `python -m perf compare` ({' | '.join(said[-3:])}), needs 0, 1 or 2"
        )
    reasons = () if status is Status.PASS else tuple(said)
    return Result(
        name="perf", status=status, summary=f"{new.name} against {base[-1].name}", reasons=reasons, remedy=remedy if reasons else ""
    )


def _has_lane(folder: Path, lane: str) -> bool:
    # Layer timings imported from a GPU machine carry the name of their file.
    prefixes = (f"{lane}.", "published.kernel_layers") if lane == "perf" else (f"{lane}.",)
    return any(record.check.startswith(prefixes) for record in read_evidence(folder))


def freshness(gate: Gate) -> Result:
    found = published.freshness(gate.published, gate.policy)
    if found.problems:
        summary = found.problems[0]
        return Result(
            name="freshness",
            status=Status.NOT_PROVEN,
            summary=summary,
            reasons=found.problems[1:],
            remedy=" ; ".join(found.renew) or "fasttrack status",
        )
    return Result(name="freshness", status=Status.PASS, summary=f"{len(found.cells)} published cells, every required one fresh")


def decide(results: Sequence[Result], required: Sequence[str]) -> Status:
    """A failed condition fails the gate whether required or not; a missing one counts where it is required."""
    if any(result.status is Status.FAIL for result in results):
        return Status.FAIL
    if any(result.status is Status.NOT_PROVEN and result.name in required for result in results):
        return Status.NOT_PROVEN
    return Status.PASS if results else Status.NOT_PROVEN


def evaluate(gate: Gate) -> list[Result]:
    """Every condition, in order."""
    found: dict[str, Any] = {f.__name__: f for f in (rules, isolation, integrity, claims, ordering, mutants, perf, freshness)}
    return [found[name](gate) for name in CONDITIONS]
