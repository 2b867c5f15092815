"""The gate on stored runs built here: each blocking condition blocks, what is missing is not proven, and nothing is measured."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.validation.scope.test_cli import POLICY, make_repository
from tests.validation.scope.test_isolation import CLEAN, git, write
from validation.core import environment
from validation.core.registry import PlannedCase
from validation.core.settings import Settings
from validation.core.store import EvidenceStore
from validation.core.types import Case, Claim, Evidence, HarnessError, Limit, Measurement, Outcome, Run, Status
from validation.core.validate import Plan
from validation.gate import conditions
from validation.gate.runs import of_this_code

CODE = "c" * 64
LANES = ("scope", "ordering", "mutants")
CLAIMS = (
    Claim(id="C-SCO-1", sentence="s", lane="scope", checks=("scope.*",), required_in=("embedded",), proven_by="p"),
    Claim(id="C-ORD-1", sentence="s", lane="ordering", checks=("ordering.*",), required_in=("embedded",), proven_by="p"),
    Claim(id="C-MUT-1", sentence="s", lane="mutants", checks=("mutants.*",), required_in=("embedded",), proven_by="p"),
)
LIMIT = Limit(measurement="wrong", op="==", bound=0, unit="count", why="w")
LANES_OF_POLICY = '\n[lanes]\nembedded = ["scope", "ordering"]\n[mutants]\nrequired = ["x"]\n'


def record(check: str, value: float = 0.0, **more) -> Evidence:
    measured = (Measurement(name="wrong", value=value, unit="count"),)
    return Evidence(id="", run="", check=check, case=Case(subject="x"), outcome=Outcome.MEASURED, measurements=measured, **more)


def make_run(
    runs_dir: Path, records: list[Evidence], *, number: int = 1, code: str = CODE, candidate: str = "specialized", lanes=LANES, close=True
) -> Path:
    settings = dataclasses.asdict(Settings(candidate=candidate, lanes=lanes, lane_modules={}))
    run = Run(
        id=f"R-2026010{number}T000000Z-abcdefabcdef",
        started_utc=f"2026-01-0{number}T00:00:00Z",
        argv=(),
        commit="f" * 40,
        dirty=False,
        profile="embedded",
        config={"settings": settings, "code_sha256": code},
        hardware={},
        versions={},
    )
    cases = tuple(
        PlannedCase(
            lane=r.check.split(".")[0], module="m", check=r.check, claim="C", roles=(), case=r.case, limits=(LIMIT,), time_limit_s=1
        )
        for r in records
    )
    store = EvidenceStore.create(runs_dir, run, Plan(cases=cases, absent_lanes=()), durable=False)
    for item in records:
        store.append(item)
    store.close("t") if close else store.release()
    return store.run_dir


GOOD = [record("scope.a"), record("ordering.kernels"), record("mutants.kill")]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    repo = make_repository(tmp_path, POLICY + LANES_OF_POLICY)
    write(repo, CLEAN)
    return repo


def judged(repository: Path) -> dict[str, conditions.Result]:
    runs, left_out = of_this_code(repository.parent / "runs", "specialized", CODE)
    gate = conditions.Gate(
        repository=repository,
        base="main",
        policy_file=repository.parent / "policy.toml",
        claims=CLAIMS,
        runs=runs,
        left_out=left_out,
        published=repository.parent / "published",
    )
    return {result.name: result for result in conditions.evaluate(gate)}


def statuses(repository: Path) -> dict[str, str]:
    return {name: result.status.value for name, result in judged(repository).items()}


PASSING = {
    "rules": "pass",
    "isolation": "pass",
    "integrity": "pass",
    "claims": "pass",
    "ordering": "pass",
    "mutants": "pass",
    "perf": "not_proven",
    "freshness": "not_proven",
}


def test_a_clean_change_with_a_good_run_passes_and_is_not_ready(repository):
    make_run(repository.parent / "runs", GOOD)
    assert statuses(repository) == PASSING
    results = list(judged(repository).values())
    assert conditions.decide(results, conditions.REQUIRED) is Status.PASS
    assert conditions.decide(results, conditions.CONDITIONS) is Status.NOT_PROVEN


@pytest.mark.parametrize(
    ("records", "changed"),
    [
        ([record("scope.a", 1), *GOOD[1:]], {"claims": "fail"}),
        ([record("scope.a", float("nan")), *GOOD[1:]], {"claims": "fail"}),
        ([GOOD[0], record("ordering.kernels", 2), GOOD[2]], {"claims": "fail", "ordering": "fail"}),
        ([*GOOD[:2], record("mutants.kill", 1)], {"mutants": "fail"}),
        (GOOD[1:], {"claims": "not_proven"}),
        ([GOOD[0], GOOD[2]], {"claims": "not_proven", "ordering": "not_proven"}),
        (GOOD[:2], {"mutants": "not_proven"}),
        (
            [GOOD[0], record("ordering.kernels", details={"findings": [{"rule": "MO001", "kernel": "kda", "severity": "error"}]}), GOOD[2]],
            {"ordering": "fail"},
        ),
    ],
    ids=["claim", "nan", "ordering-limit", "mutant", "no-scope", "no-ordering", "no-mutants", "ordering-finding"],
)
def test_each_condition_blocks_by_itself(repository, records, changed):
    make_run(repository.parent / "runs", records)
    assert statuses(repository) == {**PASSING, **changed}
    for name, status in changed.items():
        result = judged(repository)[name]
        assert result.reasons or result.summary
        assert result.remedy or status == "pass"


def test_a_known_ordering_finding_of_the_base_is_not_new(repository):
    finding = record("ordering.kernels", details={"findings": [{"rule": "MO001", "kernel": "kda", "severity": "error"}]})
    make_run(repository.parent / "runs", [GOOD[0], finding, GOOD[2]], number=2)
    old = make_run(repository / "reports" / "published", [finding])
    git(repository, "checkout", "-q", "main")
    git(repository, "add", "reports")
    git(repository, "commit", "-qm", "published")
    runs, left_out = of_this_code(repository.parent / "runs", "specialized", CODE)
    policy = repository.parent / "policy.toml"
    gate = conditions.Gate(
        repository=repository, base="main", policy_file=policy, claims=CLAIMS, runs=runs, left_out=left_out, published=old.parent
    )
    assert conditions.ordering(gate).status is Status.PASS


def test_a_leak_outside_the_isolated_folder_blocks(repository):
    make_run(repository.parent / "runs", GOOD)
    write(repository, {"engine/server.py": "x = 1\n"})
    assert statuses(repository)["isolation"] == "fail"


def test_an_edited_record_blocks(repository):
    path = make_run(repository.parent / "runs", GOOD) / "evidence.jsonl"
    path.write_text(path.read_text().replace('"seconds":0.0', '"seconds":1.0', 1))
    assert statuses(repository)["integrity"] == "fail"


@pytest.mark.parametrize("change", [{"code": "d" * 64}, {"candidate": "stock"}, {"close": False}], ids=["other-code", "stock", "open"])
def test_runs_that_do_not_speak_for_this_code_do_not_count(repository, change):
    make_run(repository.parent / "runs", GOOD, **change)
    found = judged(repository)
    assert {name: found[name].status.value for name in ("integrity", "claims", "ordering", "mutants")} == dict.fromkeys(
        ("integrity", "claims", "ordering", "mutants"), "not_proven"
    )
    assert found["integrity"].reasons


def test_the_newest_run_of_a_lane_counts(repository):
    make_run(repository.parent / "runs", GOOD, number=1)
    make_run(repository.parent / "runs", [record("ordering.kernels", 1)], number=2, lanes=("ordering",))
    assert statuses(repository) == {**PASSING, "claims": "fail", "ordering": "fail"}
    make_run(repository.parent / "runs", [record("ordering.kernels", 0)], number=3, lanes=("ordering",))
    assert statuses(repository) == PASSING


def test_a_kill_table_of_a_few_proves_those_few(repository):
    """The policy requires all of the catalogue; the table holds one mutant, and its survivors block all the same."""
    policy = repository.parent / "policy.toml"
    policy.write_text(policy.read_text().replace('required = ["x"]', 'required = "all"'))
    make_run(repository.parent / "runs", GOOD)
    result = judged(repository)["mutants"]
    assert result.status is Status.NOT_PROVEN
    assert any("not tried" in reason for reason in result.reasons)
    make_run(repository.parent / "runs", [record("mutants.kill", 1)], number=2, lanes=("mutants",))
    assert judged(repository)["mutants"].status is Status.FAIL


def test_an_older_whole_table_and_a_newer_narrow_one_count_together(repository):
    other = dataclasses.replace(record("mutants.kill"), case=Case(subject="y"))
    policy = repository.parent / "policy.toml"
    policy.write_text(policy.read_text().replace('["x"]', '["x", "y"]'))
    make_run(repository.parent / "runs", [*GOOD, other], number=1)
    make_run(repository.parent / "runs", [record("mutants.kill")], number=2, lanes=("mutants",))
    assert judged(repository)["mutants"].status is Status.PASS


def test_nothing_at_all_is_not_a_pass():
    assert conditions.decide([], conditions.REQUIRED) is Status.NOT_PROVEN


def test_an_unknown_base_is_an_error(repository):
    runs, left_out = of_this_code(repository.parent / "runs", "specialized", CODE)
    policy = repository.parent / "policy.toml"
    gate = conditions.Gate(repository=repository, base="no-such", policy_file=policy, claims=CLAIMS, runs=runs, left_out=left_out)
    with pytest.raises(HarnessError, match="no-such"):
        conditions.isolation(gate)


@pytest.mark.parametrize(("more", "code"), [((), 0), (("--pr-ready",), 2), (("--require", "perf"), 2), (("--require", "x"), 3)])
def test_exit_codes_of_the_command(repository, tmp_path, more, code):
    make_run(tmp_path / "runs", GOOD, code=environment.code_digest())
    (tmp_path / "published").mkdir()
    config = tmp_path / "validate.toml"
    config.write_text('claims = "tests.validation.gate.test_gate:CLAIMS"\n')
    command = [sys.executable, "-m", "validation", "gate", "--repo", str(repository), "--policy", str(tmp_path / "policy.toml"), *more]
    command += ["--runs-dir", str(tmp_path / "runs"), "--published", str(tmp_path / "published"), "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == code, done.stderr
    body = json.loads(done.stdout.splitlines()[-1])
    if code != 3:
        assert body["conditions"] == PASSING
        assert body["pr_ready"] is False


@pytest.mark.parametrize(
    ("command", "word"),
    [
        (("gate", "--candidate", "no-such"), "no-such"),
        (("gate", "--runs-dir", "no-such"), "--runs-dir"),
        (("gate", "--published", "pyproject.toml"), "--published"),
        (("status", "--published", "no-such"), "--published"),
    ],
)
def test_a_misspelt_name_is_an_error_and_no_missing_proof(command, word):
    done = subprocess.run([sys.executable, "-m", "validation", *command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stdout
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def layers(folder: Path, number: int, factor: float) -> Path:
    """A published run with one layer's times."""
    rng = np.random.default_rng(number)
    samples = tuple(90 * factor * rng.lognormal(0, 0.01, 60))
    time = Measurement(name="fused_us", value=float(np.median(samples)), unit="us", samples=samples)
    one = Evidence(
        id="", run="", check="published.kernel_layers", case=Case(subject="k3-tp8-r1-q1"), outcome=Outcome.MEASURED, measurements=(time,)
    )
    return make_run(folder, [one], number=number)


@pytest.mark.parametrize(("factor", "status"), [(1.0, Status.PASS), (0.9, Status.PASS), (1.05, Status.FAIL)])
@pytest.mark.parametrize("drops_the_old", [True, False])
def test_published_times_are_compared_with_those_that_the_base_published(repository, factor, status, drops_the_old):
    git(repository, "checkout", "-q", "main")
    old = layers(repository / "reports" / "published", 1, 1.0)
    git(repository, "add", "--all", "--force")
    git(repository, "commit", "-qm", "published")
    new = layers(repository.parent / "published", 2, factor)
    if drops_the_old:
        shutil.rmtree(old)
    else:
        shutil.copytree(old, repository.parent / "published" / old.name)
    # A run of this machine without a cell of the base does not stand in the way of what the change publishes.
    make_run(repository.parent / "runs", [record("perf.engine")], number=3, lanes=("perf",))
    result = judged(repository)["perf"]
    assert result.status is status, result.reasons
    assert result.summary == f"{new.name} against {old.name}"
    assert (status is Status.FAIL) == any("k3-tp8-r1-q1" in reason for reason in result.reasons)
