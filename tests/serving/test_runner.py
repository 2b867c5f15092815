"""`python -m tests.serving`: what it gives to pytest, and when a run is no success."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving import __main__ as runner


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Arguments of each pytest run, which is not made."""
    seen: list[list[str]] = []
    monkeypatch.setattr(runner, "ready", lambda options: None)
    monkeypatch.setattr(runner.pytest, "main", lambda arguments, plugins: seen.append(arguments) or 1)
    return seen


def paths(arguments: list[str]) -> list[str]:
    return [word for word in arguments if word.startswith("tests/") or word == str(runner.FOLDER)]


def test_the_folder_runs_when_nothing_is_named(handed: list[list[str]]) -> None:
    runner.main(["-k", "nano", "-x"])
    assert paths(handed[0]) == [str(runner.FOLDER)]
    assert handed[0][-3:] == ["-k", "nano", "-x"]


@pytest.mark.parametrize("named", ["test_vllm_nano.py", "test_vllm_nano.py::test_forcing_works_on_it_too", "test_misspelt.py"])
def test_a_file_that_is_named_runs_alone(handed: list[list[str]], monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    runner.main([f"tests/serving/{named}"])
    assert paths(handed[0]) == [f"tests/serving/{named}"]


def test_a_run_in_which_nothing_ran_is_no_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(runner, "ready", lambda options: None)
    monkeypatch.setattr(runner.pytest, "main", lambda arguments, plugins: 0)
    assert runner.main([]) == 3
    assert "nothing is proven" in capsys.readouterr().err
