"""A machine with a card that the kernels are made for runs them by itself; another one says that they were not run, and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from validation.core import kernels_here
from validation.core.settings import load_settings


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that makes `nvidia-smi` print a line and end with a code."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    kernels_here.here.cache_clear()

    def make(line: str, code: int = 0, cuda: bool = True) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{line}'\nexit {code}\n")
        program.chmod(0o755)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        kernels_here.here.cache_clear()

    yield make
    kernels_here.here.cache_clear()


@pytest.mark.parametrize(
    ("line", "code", "cuda", "profile", "words"),
    [
        ("NVIDIA H200, 9.0", 0, True, "gpu", "run on NVIDIA H200"),
        ("NVIDIA GB300, 10.3", 0, True, "gpu", "run on NVIDIA GB300"),
        ("NVIDIA A100, 8.0", 0, True, "embedded", "compiled and audited, not run (NVIDIA A100 has compute capability 8.0"),
        ("NVIDIA H200, 9.0", 0, False, "embedded", "needs a CUDA build of torch"),
        ("NVIDIA-SMI has failed because it could not talk to the driver, sorry", 9, True, "embedded", "not run (no GPU here)"),
        ("", 0, True, "embedded", "not run (no GPU here)"),
    ],
)
def test_the_profile_of_a_run_that_names_none(machine, line, code, cuda, profile, words):
    machine(line, code, cuda)
    settings = load_settings(None, {}, kernels_here.profile_here)
    assert settings.profile == profile
    assert words in kernels_here.said(profile, settings.lanes)


def test_a_named_profile_stays(machine, tmp_path: Path):
    machine("NVIDIA H200, 9.0")
    assert load_settings(None, {"profile": "embedded"}, kernels_here.profile_here).profile == "embedded"
    (tmp_path / "own.toml").write_text('profile = "embedded"\n')
    assert load_settings(tmp_path / "own.toml", {}, kernels_here.profile_here).profile == "embedded"
    assert "a GPU is here" in kernels_here.said("embedded", ("ordering",))


def test_what_was_not_audited_is_not_called_audited(machine):
    machine("")
    assert "audited" not in kernels_here.said("embedded", ("scope",))
    assert kernels_here.said("serving", ("evals",)) == ""


def test_the_run_and_its_report_say_it(tmp_path):
    command = [sys.executable, "-m", "validation", "run", "--profile", "embedded", "--lanes", "scope", "--runs-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    (run,) = tmp_path.glob("R-*")
    sentence = json.loads((run / "run.json").read_text())["config"]["kernels"]
    assert sentence.startswith("kernels: not run (")
    assert sentence in done.stderr
    assert "kernels: not run (" in (run / "report.md").read_text()
    assert "kernels: not run (" in (run / "report.html").read_text()
