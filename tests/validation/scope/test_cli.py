"""`fasttrack scope` as a user runs it: exit codes, the closing JSON line, and one clear error for bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.validation.scope.test_isolation import BASE, CLEAN, git, write

POLICY = """
schema = 1
name = "test"
[isolation]
paths = ["engine/fast/**"]
free = ["docs/**"]
packages = ["engine.fast"]
hooks = [{ file = "engine/model.py", max_added_lines = 3 }]
[opt_in]
name = "decode_backend"
file = "engine/fast/__init__.py"
default = "auto"
"""


def make_repository(folder: Path, policy: str = POLICY) -> Path:
    """A repository at its base, with the branch of the change checked out, and a policy beside it."""
    repo = folder / "repo"
    repo.mkdir()
    git(repo, "init", "-q", "-b", "main")
    write(repo, BASE)
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "base")
    git(repo, "checkout", "-qb", "change")
    (folder / "policy.toml").write_text(policy)
    return repo


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path)


def run(repo: Path, *more: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "validation", "scope", "--repo", str(repo), "--policy", str(repo.parent / "policy.toml"), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("files", "code", "verdict"),
    [(CLEAN, 0, "pass"), ({"engine/server.py": "x = 1\n"}, 1, "fail"), ({}, 2, "not_proven")],
)
def test_exit_codes(repository: Path, files: dict, code: int, verdict: str) -> None:
    write(repository, files)
    got, out, _ = run(repository)
    assert (got, json.loads(out.splitlines()[-1])["verdict"]) == (code, verdict)


@pytest.mark.parametrize("more", [("--base", "nowhere"), ("--policy", "missing.toml"), ("--head", "-x")])
def test_bad_input_is_one_error(repository: Path, more: tuple[str, ...]) -> None:
    code, _, err = run(repository, *more)
    assert code == 3
    assert "Traceback" not in err


def test_findings_are_written_as_json(repository: Path) -> None:
    write(repository, {"engine/server.py": "x = 1\n"})
    target = repository.parent / "findings.json"
    run(repository, "--json", str(target))
    assert [f["rule"] for f in json.loads(target.read_text())["findings"]] == ["P-ISO-1"]


def test_a_path_that_looks_like_markup_is_shown_as_it_is(repository):
    write(repository, {**CLEAN, "outside/[/bold] [red].py": "x = 1\n"})
    command = [sys.executable, "-m", "validation", "scope", "--repo", str(repository), "--policy", str(repository.parent / "policy.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "COLUMNS": "300"})
    assert done.returncode == 1, done.stderr
    assert "[/bold] [red].py" in done.stderr
    assert "Traceback" not in done.stderr
