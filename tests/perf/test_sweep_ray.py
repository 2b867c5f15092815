"""The sweep on a real Ray, started here; skipped where Ray is not installed (`pip install ray`, extra `serving`)."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from perf.sweep import Part, run_parts
from validation.core.types import HarnessError

pytest.importorskip("ray", reason="Ray is not installed")

HERE = "tests.perf.test_sweep_ray"


def good(value: int) -> int:
    return value + 1


def crash() -> None:
    raise RuntimeError("no such tensor")


def lose_the_worker() -> None:
    """Kill the Ray worker that started this process, as a lost node would."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def hang(log: str) -> None:
    Path(log).write_text(str(os.getpid()))
    time.sleep(600)


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path])))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


def test_a_lost_worker_costs_its_part_only(tmp_path: Path) -> None:
    log, state = tmp_path / "pid", tmp_path / "state"
    parts = [
        Part(name="a", function=f"{HERE}:good", arguments={"value": 1}),
        Part(name="lost", function=f"{HERE}:lose_the_worker", limit_s=30.0),
        Part(name="crashed", function=f"{HERE}:crash"),
        Part(name="hung", function=f"{HERE}:hang", arguments={"log": str(log)}, limit_s=3.0),
        Part(name="z", function=f"{HERE}:good", arguments={"value": 8}),
    ]
    found = run_parts(parts, state=state, ray_address="local")
    assert list(found) == ["a", "lost", "crashed", "hung", "z"]
    assert {name: outcome.outcome for name, outcome in found.items()} == {
        "a": "measured", "lost": "error", "crashed": "error", "hung": "error", "z": "measured",
    }  # fmt: skip
    assert (found["a"].value, found["z"].value) == (2, 9)
    assert "Crashed" in found["lost"].reason
    assert "no such tensor" in found["crashed"].reason
    assert "time limit" in found["hung"].reason
    assert not Path(f"/proc/{log.read_text()}").exists()  # its process group was stopped
    again = run_parts(parts[:1], state=state, ray_address="nowhere:1")  # kept: no cluster is asked for
    assert again["a"].value == 2


def test_no_cluster_is_one_clear_error() -> None:
    for address in ("127.0.0.1:1", "127.0.0.1:port"):
        with pytest.raises(HarnessError, match="running cluster"):
            run_parts([Part(name="a", function=f"{HERE}:good", arguments={"value": 1})], ray_address=address)


def test_a_part_that_needs_a_gpu_the_cluster_lacks_is_not_run() -> None:
    part = Part(name="g", function=f"{HERE}:good", arguments={"value": 1}, gpus=1.0, limit_s=2.0)
    found = run_parts([part], ray_address="local")
    assert found["g"].outcome == "error"
    assert "Timeout" in found["g"].reason
