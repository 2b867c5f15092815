"""Faults through the whole profile: the run's verdict is not a pass, and the record that says so names what happened.

Both sides are started by the suite: proxies in front of one nano server, of which the candidate's has the fault. `make test-serving`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.nano_server import Served
from validation.core.settings import PROJECT_ROOT

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]

CONFIG = """
profile = "serving"
[servers]
poll_s = 0.2
together = true
[baseline]
{side}
command = {stock}
[candidate]
{side}
command = {candidate}
[evals]
suites = ["gpqa_diamond_nano"]
rows = 24
rows_at_one = 2
concurrency = [1, 8]
api = "completions"
request_timeout_s = 30
retries = 1
[numerics]
bins = [128, 256]
window_tokens = 24
windows = 1
text = "chat"
neighbours = 2
restart = false
[perf]
waves = 12
prompt_tokens = 64
new_tokens = 24
"""
SIDE = 'model = "nano-k3"\nrevision = "main"\nquantization = "none"\ntensor_parallel = 1\nstartup_timeout_s = 60\nstop_timeout_s = 5'


def proxy(upstream: str, fault: str, *options: str) -> str:
    return json.dumps(["{python}", "-m", "evals.serving.faults", "--upstream", upstream, "--port", "{port}", "--fault", fault, *options])


def run(server: Served, folder: Path, lane: str, fault: str, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and records."""
    text = CONFIG.format(side=SIDE, stock=proxy(server.url, "none"), candidate=proxy(server.url, fault, *options))
    (folder / "validate.toml").write_text(text)
    line = [sys.executable, "-m", "validation", "run", "--config", str(folder / "validate.toml"), "--lanes", lane]
    done = subprocess.run(
        [*line, "--runs-dir", str(folder / "runs")], cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    (found,) = (folder / "runs").glob("R-*/evidence.jsonl")
    records = [json.loads(record) for record in found.read_text().splitlines()]
    return done.returncode, [record for record in records if "check" in record]


def of(records: list[dict[str, Any]], check: str, **params: int) -> tuple[dict[str, float], str]:
    """Measurements of a check's record, and its whole text."""
    found = [r for r in records if r["check"] == check and all(r["case"]["params"].get(key) == value for key, value in params.items())]
    assert len(found) == 1, [record["check"] for record in records]
    return {measured["name"]: measured["value"] for measured in found[0]["measurements"]}, json.dumps(found[0])


def test_perturbed_logits_fail_the_numerics_lane(server: Served, tmp_path: Path) -> None:
    code, records = run(server, tmp_path, "numerics", "perturb", "--size", "0.5")
    values, text = of(records, "numerics.serving.decode", context_tokens=256)
    assert values["noise_ratio"] > 1.5, text
    assert code == 1


def test_a_server_that_forces_nothing_is_no_evidence(server: Served, tmp_path: Path) -> None:
    code, records = run(server, tmp_path, "numerics", "ignore_forcing")
    _, text = of(records, "numerics.serving.decode", context_tokens=256)
    assert "forced text" in text
    assert code == 2


def test_a_server_that_dies_is_named_and_the_rest_is_asked_again(server: Served, tmp_path: Path) -> None:
    code, records = run(server, tmp_path, "evals", "die", "--after", "12")
    values, text = of(records, "evals.serving.health")
    assert values["candidate_deaths"] >= 1, text
    assert values["stock_deaths"] == 0, text
    assert "the engine died" in text or "exit code 17" in text
    assert code == 1


def test_a_candidate_that_takes_half_as_long_again_fails_the_perf_lane(server: Served, tmp_path: Path) -> None:
    """No time-out is near; the same server behind a proxy without a fault is the control."""
    sound, slow = tmp_path / "sound", tmp_path / "slow"
    sound.mkdir()
    slow.mkdir()
    code, records = run(server, sound, "perf", "none")
    for concurrency in (1, 8):
        values, text = of(records, "perf.serving.request_times", concurrency=concurrency)
        assert values["slowdown_low"] <= 0.03, text
        assert values["lost_requests"] == 0
    assert code == 2  # no bench was asked for
    code, records = run(server, slow, "perf", "drag", "--factor", "1.5")
    for concurrency in (1, 8):
        values, text = of(records, "perf.serving.request_times", concurrency=concurrency)
        assert values["slowdown_low"] > 0.03, text
        assert 1.3 < values["request_time_ratio"] < 1.7, text
        assert "slower than stock" in text
    assert code == 1


def test_swapped_answers_fail_the_suite(server: Served, tmp_path: Path) -> None:
    code, records = run(server, tmp_path, "evals", "swap")
    values, text = of(records, "evals.serving.gpqa_diamond_nano", concurrency=8)
    assert values["swapped_replies"] > 0, text
    assert code == 1
