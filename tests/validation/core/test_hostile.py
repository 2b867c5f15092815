"""A real run with a hostile candidate `module:factory`: each attack is stopped or becomes an error, and the next case still runs."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from kimi_k3_decode.config import NANO
from validation.core import sandbox
from validation.core.settings import PROJECT_ROOT, Settings
from validation.core.store import read_evidence, read_run
from validation.core.types import Outcome, Status
from validation.core.validate import run_validation
from validation.core.verify import verify

pytestmark = pytest.mark.timeout(600)  # every case of a lie starts a worker, which loads torch

HERE = Path(__file__).resolve().parent
QUIET = {"do": "nothing"}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """The smallest folder the worker loads; the attacks never step it."""
    from kimi_k3_decode.checkpoint import save_checkpoint
    from kimi_k3_decode.weights import random_weights

    shipped = PROJECT_ROOT / "kimi_k3_decode" / "checkpoints" / "nano"
    if (shipped / "model.safetensors").exists():
        return shipped
    folder = tmp_path_factory.mktemp("nano")
    save_checkpoint(random_weights(NANO, seed=0), folder)
    return folder


@pytest.fixture
def measured(monkeypatch, tmp_path, checkpoint):
    """`measured(attacks)`: the run and its records, in the order of the attacks."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("SECRET_TOKEN", "x")

    def go(attacks, **more):
        monkeypatch.setenv("HOSTILE_CASES", json.dumps(attacks))
        settings = {
            "candidate": "hostile:candidate",
            "lanes": ("fake",),
            "lane_modules": {"fake": "hostile"},
            "claims": "hostile:CLAIMS",
            "checkpoint": str(checkpoint),
            "runs_dir": str(tmp_path / "runs"),
            "policy": str(tmp_path / "none.toml"),
            "memory_gib": 2.0,
            "case_time_limit_s": 100.0,
        }
        result = run_validation(Settings(**{**settings, **more}), argv=("test",), fresh=True, quiet=True)
        assert verify(result.run_dir).intact
        return result, list(read_evidence(result.run_dir)), read_run(result.run_dir).config["isolation"]

    return go


def test_what_a_candidate_must_not_reach(measured, tmp_path):
    """One worker, many attacks: none gets what it wants."""
    victim = tmp_path / "evidence.jsonl"
    victim.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as server:
        attacks = [
            {"do": "secrets"},
            {"do": "write", "path": str(victim)},
            {"do": "link", "path": str(victim)},
            {"do": "hardlink", "path": str(victim)},
            {"do": "socket", "port": server.getsockname()[1]},
            {"do": "signal", "pid": os.getpid()},
            QUIET,
        ]
        result, records, isolation = measured(attacks)
    allowed = {
        "writes only to its scratch folder": {"write", "link", "hardlink"},
        "no network": {"socket"},
        "its children end with it": {"signal", "secrets"},
    }
    for record in records:
        name = record.case.params["do"]
        missing = [words for words, names in allowed.items() if name in names and words not in isolation]
        if not missing:  # what this kernel does not offer, the run says it did not have
            assert record.outcome is Outcome.MEASURED
            assert record.measurements[0].value == 0.0, name
    if "writes only to its scratch folder" in isolation:
        assert victim.read_text() == ""
        assert result.verdict.status is Status.PASS
    assert all(not record.artifacts for record in records if record.case.params["do"] == "link")


def test_a_lie_is_an_error_and_the_next_case_runs_in_a_clean_process(measured):
    lies = {
        "clock": "replaced time.perf_counter, torch.isfinite",
        "suite": "replaced validation.core.registry.find_check",
        "forge": "nobody asked for",
    }
    attacks = [case for name in lies for case in ({"do": name}, {**QUIET, "after": name})]
    result, records, _ = measured(attacks)
    assert len(records) == len(attacks)
    for lie, after in zip(records[::2], records[1::2], strict=True):
        assert lie.outcome is Outcome.ERROR
        assert lies[lie.case.params["do"]] in "; ".join(lie.reasons)
        assert lie.measurements == ()
        assert after.outcome is Outcome.MEASURED, after
    assert result.verdict.status is Status.NOT_PROVEN


def test_a_daemon_does_not_survive_its_worker(measured):
    _, records, isolation = measured([{"do": "daemon", "seconds": 20}])
    if "its children end with it" not in isolation:
        pytest.skip("this kernel gives no process namespace; the run record says so")
    assert records[0].outcome is Outcome.MEASURED
    alive = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/environ")
        if _text(path).find(b"FASTTRACK_SCRATCH") >= 0 and b"hostile" in _text(path.parent / "cmdline")
    ]
    assert alive == []
    assert "own process group" in isolation
    assert any("memory limit" in words for words in isolation)


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_an_environment_holds_only_what_is_listed(tmp_path):
    made = sandbox.worker_environment(tmp_path, "", {"PATH": "/bin", "AWS_SECRET": "x", "GITHUB_TOKEN": "x", "SSH_AUTH_SOCK": "x"})
    assert not {"AWS_SECRET", "GITHUB_TOKEN", "SSH_AUTH_SOCK"} & made.keys()
