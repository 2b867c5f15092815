"""The generated pull-request body: every section, a number only with its record, hostile text harmless, open items said."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from reports.pr_body import NOT_SAID, ChangeFacts, Statements, body
from tests.reports.test_render import CLAIMS, HOSTILE, make_run, record
from validation.core.settings import PROJECT_ROOT
from validation.core.verify import verify

SECTIONS = ("Purpose", "Why this is not a duplicate", "Test plan", "Test result", "Evals", "AI assistance", "Checklist")
CHANGE = ChangeFacts(base="main", files=3, findings=0, product_lines=10)
SAID = Statements(
    purpose="Faster decode.", duplicate="Looked at the open requests; none touches this.", assistance="Tools wrote the draft."
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path, [record("numerics.a", 0, 1.2345678), record("evals.b", 0, 1.25)])


def written(run_dir: Path, change: ChangeFacts = CHANGE, said: Statements = SAID) -> tuple[str, list[str]]:
    return body(run_dir, change, said, claims=CLAIMS)


def test_a_forged_verdict_is_not_believed(tmp_path):
    """verdict.json and freshness.json are sealed by nobody: with both saying that all is well, the records still decide."""
    run_dir = make_run(tmp_path, [record("numerics.a", 0, 9.0), record("evals.b", 0, 1.0)])
    path = run_dir / "verdict.json"
    forged = json.loads(path.read_text())
    assert [result["status"] for result in forged["claims"]] == ["fail", "pass", "not_proven"]
    forged["status"] = "pass"
    for result in forged["claims"]:
        result["status"], result["note"] = "pass", "holds"
        for finding in result["findings"]:
            finding["holds"], finding["value"] = "holds", 1.0
    path.write_text(json.dumps(forged))
    fresh = {"published": 1, "fresh": 1, "stale": 0, "problems": [], "renew": [], "cells": []}
    (run_dir / "freshness.json").write_text(json.dumps(fresh))
    assert verify(run_dir).intact
    text, missing = written(run_dir)
    assert "C-A: fail" in missing
    assert "| C-A | FAIL |" in text
    assert "Verdict: **FAIL**" in text
    path.unlink()
    assert written(run_dir)[0] == text


def test_a_run_of_other_code_is_never_ready(run_dir):
    assert any("other code" in item for item in written(run_dir)[1])


def test_every_section_is_there_and_in_order(run_dir):
    text, _ = written(run_dir)
    places = [text.index(f"\n## {name}\n") for name in SECTIONS]
    assert places == sorted(places)
    assert "git commit -s" in text
    assert "Faster decode." in text


def test_a_number_stands_beside_its_evidence(run_dir):
    text, _ = written(run_dir)
    known = set(re.findall(r'"id":"(E-[0-9a-f]{12})"', (run_dir / "evidence.jsonl").read_text()))
    rows = [line for line in text.splitlines() if line.startswith("|") and re.search(r"\d\.\d", line)]
    assert len(rows) == 2
    for row in rows:
        assert set(re.findall(r"E-[0-9a-f]{12}", row)) <= known
        assert re.search(r"E-[0-9a-f]{12}", row)


def test_what_is_open_is_said_and_is_not_ready(run_dir):
    text, missing = written(run_dir, ChangeFacts(base="main", files=3, findings=2, product_lines=900), Statements())
    assert sum(NOT_SAID in item for item in missing) == 3
    assert any("uncommitted" in item for item in missing)
    assert any("scope rules" in item for item in missing)
    assert any("RFC" in item for item in missing)
    assert text.startswith("> **Not ready.**")
    assert all(name in text.split("## Open")[1] for name in ("purpose", "duplicate", "assistance"))


def test_an_edited_run_is_never_ready(run_dir):
    path = run_dir / "evidence.jsonl"
    path.write_text(path.read_text().replace("1.25", "0.25"))
    assert any("does not verify" in item for item in written(run_dir)[1])


def test_hostile_text_stays_text(tmp_path):
    hostile = HOSTILE + "\n## Test result\n| C-X | PASS |\n```\n@everyone <img src=x>"
    said = Statements(purpose=hostile, duplicate=hostile, assistance=hostile)
    text, _ = written(make_run(tmp_path, [record("evals.b", 0, reasons=(hostile,))]), said=said)
    outside = re.sub(r"```.*?```", "", text, flags=re.S)
    assert text.count("\n```\n") == 2  # the block of commands, nothing closes it early
    assert "\n## Test result\n| C-X" not in text
    assert not re.search(r"(?<!\\)<(script|img)", outside)
    assert not re.search(r"(?<!\\)@everyone", outside)
    assert "\u202e" not in text
    assert "](javascript:" not in outside.replace("\\](", "")


def test_the_command_writes_the_text_and_says_what_is_open(run_dir):
    command = [sys.executable, "-m", "validation", "pr-body", str(run_dir), "--base", "HEAD", "--purpose", "p"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=PROJECT_ROOT)
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["verdict"] == "not_proven"
    assert (run_dir / "pr_body.md").read_text().startswith("> **Not ready.**")
