"""The whole of `fasttrack run`: plan, load, measure, close, judge and report."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from validation.core import environment, jsonio, kernels_here, progress, registry
from validation.core.judge import judge
from validation.core.registry import PlannedCase
from validation.core.runner import Runner, ask_fingerprints
from validation.core.settings import PROJECT_ROOT, Settings
from validation.core.store import (
    MANIFEST_FILE,
    PLAN_FILE,
    RUN_FILE,
    EvidenceStore,
    read_evidence,
    read_json,
    read_run,
    sha256_hex,
    write_atomically,
)
from validation.core.types import Claim, HarnessError, Run, Verdict

VERDICT_FILE = "verdict.json"
REPORT_FILE = "report.md"
FRESHNESS_FILE = "freshness.json"
REPORT_LIMIT_S = 600.0
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the command line prints: the run folder, its verdict, and the report's path ("" when no report program is installed)."""

    run_dir: Path
    verdict: Verdict
    report: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    cases: tuple[PlannedCase, ...]
    absent_lanes: tuple[str, ...]  # asked for, but not installed: their claims stay unproven


def make_plan(settings: Settings) -> Plan:
    """Every case of every lane asked for. Raises HarnessError when a lane is broken, or when none is installed."""
    cases: list[PlannedCase] = []
    absent = []
    for lane in settings.lanes:
        module = settings.module_of(lane)
        if registry.lane_exists(module):
            cases += registry.plan_lane(lane, module, settings.profile, settings.case_time_limit_s, settings)
        else:
            absent.append(lane)
    if not cases:
        raise HarnessError(f"plan: got no case for lanes {list(settings.lanes)} in profile {settings.profile}, needs at least one")
    return Plan(cases=tuple(cases), absent_lanes=tuple(absent))


def run_validation(settings: Settings, *, argv: Sequence[str], fresh: bool, quiet: bool) -> Result:
    """Measure, judge and report; continues an unfinished run of the same identity unless `fresh`. Raises HarnessError."""
    say: Say = (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr, flush=True))
    plan = make_plan(settings)
    for lane in plan.absent_lanes:
        say(f"{lane}: not installed, its claims stay unproven")
    scratch_root = PROJECT_ROOT / ".cache" / "work"
    run = _describe_run(settings, plan, argv, scratch_root, say)
    say(run.config["kernels"] or "kernels: in the servers")
    runs_dir = settings.path(settings.runs_dir)
    run_dir = None if fresh else _unfinished(runs_dir, environment.identity_digest(run))
    if run_dir is None or not (run_dir / MANIFEST_FILE).exists():
        run_dir = _measure(settings, run, plan, run_dir, scratch_root, quiet=quiet, say=say)
    result = judge_run(run_dir, policy=settings.path(settings.policy), claims=load_claims(settings.claims))
    return dataclasses.replace(result, report=render_report(run_dir, say))


def _describe_run(settings: Settings, plan: Plan, argv: Sequence[str], scratch_root: Path, say: Say) -> Run:
    roles = sorted({role for item in plan.cases for role in item.roles} | _asked_for(settings))
    scratch_root.mkdir(parents=True, exist_ok=True)
    # A folder of its own: another run of this checkout may be loading at the same time.
    with tempfile.TemporaryDirectory(prefix="loading-", dir=scratch_root, ignore_cleanup_errors=True) as folder:
        fingerprints, isolation = ask_fingerprints(settings, Path(folder), roles, say)
    commit, dirty = environment.commit_of()
    run = Run(
        id="",
        started_utc=environment.utc_now(),
        argv=tuple(argv),
        commit=commit,
        dirty=dirty,
        profile=settings.profile,
        config={
            **_digests(settings),
            "settings": jsonio.plain(settings),
            "plan_sha256": sha256_hex(jsonio.dumps(plan).encode()),
            "code_sha256": environment.code_digest(),
            "fingerprints": fingerprints,
            "isolation": list(isolation),
            "kernels": kernels_here.said(settings.profile, settings.lanes),
            "absent_lanes": list(plan.absent_lanes),
        },
        hardware=environment.hardware(),
        versions=environment.versions(),
    )
    stamp = run.started_utc.replace("-", "").replace(":", "")
    return dataclasses.replace(run, id=f"R-{stamp}-{environment.identity_digest(run)}")


def _asked_for(settings: Settings) -> set[str]:
    """The candidate, where somebody named it or its checkpoint: a wrong name is an error even if no case of the lanes asks for it."""
    untouched = Settings()
    named = settings.candidate not in (untouched.candidate, "stock") or settings.checkpoint != untouched.checkpoint
    return {"candidate"} if named else set()


def _unfinished(runs_dir: Path, identity: str) -> Path | None:
    """The newest run of this identity, if it was interrupted anywhere between its first file and its report."""
    folders = sorted(runs_dir.glob(f"R-*-{identity}")) if runs_dir.is_dir() else []
    if not folders or not (folders[-1] / RUN_FILE).exists():
        return None
    needed = [MANIFEST_FILE, VERDICT_FILE, *([REPORT_FILE] if _report_program() else [])]
    return folders[-1] if any(not (folders[-1] / name).exists() for name in needed) else None


def _measure(settings: Settings, run: Run, plan: Plan, run_dir: Path | None, scratch_root: Path, *, quiet: bool, say: Say) -> Path:
    if run_dir is None:
        store = EvidenceStore.create(settings.path(settings.runs_dir), run, plan)
    else:
        store = EvidenceStore.resume(run_dir)
        say(f"continuing {run_dir.name}: {store.n_records} of {len(plan.cases)} cases are there")
    scratch = scratch_root / store.run.id
    try:
        with profile_session(settings, scratch, say), progress.choose(quiet=quiet) as shown:
            Runner(settings, store, scratch, shown).run(plan.cases)
        store.close(environment.utc_now())
    finally:
        store.release()
    shutil.rmtree(scratch, ignore_errors=True)
    return store.run_dir


def profile_session(settings: Settings, scratch: Path, say: Say) -> AbstractContextManager[None]:
    """What the profile holds while its cases are measured, such as servers."""
    module = registry.PROFILE_SESSIONS.get(settings.profile)
    if module is None:
        return nullcontext()
    held: AbstractContextManager[None] = importlib.import_module(module).session(settings, scratch, say)
    return held


def _digests(settings: Settings) -> dict[str, dict[str, str]]:
    """What a run on a GPU must carry to be published: digests of kernels, contracts, configuration and toolchain."""
    if settings.profile == "embedded":
        return {}
    from validation.freshness import digests

    return {"digests": digests.current()}


def _note_freshness(run_dir: Path, policy: Path) -> None:
    """Write freshness.json: how the published evidence stood when this run was judged. The report lists it."""
    from validation.freshness import published
    from validation.policy import load_policy

    body = published.stored(published.freshness(policy=load_policy(policy)))
    write_atomically(run_dir / FRESHNESS_FILE, jsonio.dumps(body, indent=1).encode() + b"\n")


def load_claims(dotted: str) -> tuple[Claim, ...]:
    """`module:attribute` holding a sequence of Claim. Raises HarnessError."""
    module, _, attribute = dotted.partition(":")
    try:
        claims = tuple(getattr(importlib.import_module(module), attribute))
    except Exception as error:
        raise HarnessError(f"claims: got {type(error).__name__}: {error} for {dotted!r}, needs module:attribute") from error
    names = [claim.id for claim in claims]
    if len(set(names)) != len(names):
        raise HarnessError(f"claims: got {dotted} with a claim twice, needs unique ids")
    return claims


def load_policy_limits(path: Path) -> tuple[Mapping[str, Mapping[str, Any]], str]:
    """`[limits.<lane>]` of a policy file and the file's digest; without a file the limits of the plan stand. Raises HarnessError."""
    if not path.exists():
        return {}, "none"
    from validation.policy import load_policy

    policy = load_policy(path)
    return policy.limits, policy.digest


def verdict_of(run_dir: Path, *, policy: Path, claims: Sequence[Claim]) -> Verdict:
    """Judge stored evidence; nothing is written. Raises HarnessError."""
    run = read_run(run_dir)
    plan = jsonio.decode(Plan, read_json(run_dir / PLAN_FILE), PLAN_FILE)
    settings = jsonio.decode(Settings, run.config["settings"], "settings")
    limits, digest = load_policy_limits(policy)
    return judge(
        run=run.id,
        profile=run.profile,
        lanes=settings.lanes,
        records=read_evidence(run_dir),
        plan=plan.cases,
        claims=claims,
        policy_limits=limits,
        policy_digest=digest,
    )


def judge_run(run_dir: Path, *, policy: Path, claims: Sequence[Claim]) -> Result:
    """Judge stored evidence and write verdict.json; the records are only read. Raises HarnessError."""
    verdict = verdict_of(run_dir, policy=policy, claims=claims)
    body = {**jsonio.plain(verdict), "claim_texts": {c.id: jsonio.plain(c) for c in claims}}
    write_atomically(run_dir / VERDICT_FILE, json.dumps(body, indent=1, allow_nan=False).encode() + b"\n")
    if policy.exists():
        _note_freshness(run_dir, policy)
    report = run_dir / REPORT_FILE
    return Result(run_dir=run_dir, verdict=verdict, report=str(report) if report.exists() else "")


def _report_program() -> bool:
    return importlib.util.find_spec("reports.__main__") is not None


def render_report(run_dir: Path, say: Say) -> str:
    """Call the report program on the run folder, as a process of its own; returns the report's path. Raises HarnessError."""
    if not _report_program():
        say("report: no report program is installed")
        return ""
    say("report: rendering")
    command = [sys.executable, "-m", "reports", str(run_dir)]
    try:
        done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=REPORT_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HarnessError(f"report: got {error}, needs `python -m reports {run_dir}` to work") from error
    if done.returncode:
        last = " | ".join(done.stderr.strip().splitlines()[-5:])
        raise HarnessError(f"report: got exit code {done.returncode} ({last}), needs `python -m reports {run_dir}` to work")
    return str(run_dir / REPORT_FILE)
