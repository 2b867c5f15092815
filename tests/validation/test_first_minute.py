"""A reviewer's first minute: a report, any number in it, `repro` with its id, and the same number. On a small run of a fake lane."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from validation.core.settings import PROJECT_ROOT

FAKES = Path(__file__).resolve().parent / "core"


@pytest.fixture
def cli(tmp_path, monkeypatch):
    """`cli(*arguments)`: the command line over the fake lane, as a process of its own; returns exit code, closing JSON and stderr."""
    config = tmp_path / "validate.toml"
    runs = tmp_path / "runs"
    config.write_text(
        f'lanes = ["fake"]\nclaims = "fake_lane:CLAIMS"\nruns_dir = "{runs}"\npolicy = "none"\nmemory_gib = 1.0\n'
        '[lane_modules]\nfake = "fake_lane"\n'
    )
    cases = json.dumps({"fake.a": [{"do": "ok"}, {"do": "ok", "at_most": 2.0}]})
    environment = {**os.environ, "FAKE_CASES": cases, "PYTHONPATH": os.pathsep.join([str(FAKES), os.environ.get("PYTHONPATH", "")])}

    def call(*arguments: str) -> tuple[int, dict, str]:
        command = [sys.executable, "-m", "validation", arguments[0], "--config", str(config), *arguments[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=PROJECT_ROOT, env=environment)
        return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr

    return call


def test_any_number_of_a_report_can_be_measured_again(cli):
    code, body, stderr = cli("run", "--quiet")
    assert code == 0, stderr
    report = Path(body["report"])
    stored = {
        record["id"]: record["measurements"][0]["value"]
        for record in map(json.loads, (report.parent / "evidence.jsonl").read_text().splitlines())
    }
    html = (report.parent / "report.html").read_text()
    shown = set(re.findall(r"E-[0-9a-f]{12}", report.read_text() + html))
    assert shown
    assert shown <= stored.keys()  # no id that leads nowhere
    chosen = sorted(shown)[0]
    code, repeated, stderr = cli("repro", chosen)
    assert code == 0, stderr
    assert repeated["verdict"] == "same"
    assert [row["repeated"] for row in repeated["measurements"]] == [stored[chosen]]


def test_a_number_that_was_changed_is_not_reproduced(cli):
    _, body, _ = cli("run", "--quiet")
    path = Path(body["report"]).parent / "evidence.jsonl"
    path.write_text(path.read_text().replace('"value":1.0', '"value":0.5'))
    identity = json.loads(path.read_text().splitlines()[0])["id"]
    code, repeated, _ = cli("repro", identity)
    assert code == 1
    assert repeated["verdict"] == "different"
    assert cli("verify", str(path.parent))[0] == 1


def test_make_repro_is_that_command():
    done = subprocess.run(
        ["make", "-n", "-o", "setup", "repro", "E=E-0123456789ab"], capture_output=True, text=True, timeout=60, cwd=PROJECT_ROOT
    )
    assert "-m validation repro E-0123456789ab" in done.stdout
