"""What makes GPU records, as far as it can be tried without a GPU."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest

from perf.kernels import __main__ as commands
from perf.kernels import binaries, sanitize, timing
from perf.kernels.__main__ import CHECKED, SHAPES, arguments, check_jobs
from perf.kernels.conditions import Card
from perf.kernels.timing import measured, timed

CLEAN = "checked: 62 cases, 0 failed\n========= ERROR SUMMARY: 0 errors\n"


def test_without_a_gpu_one_sentence_says_so(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(commands.shutil, "which", lambda name: None)
    assert commands.main([str(tmp_path / "out"), "matrix"]) == 3
    assert "needs a machine with a Hopper or Blackwell GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_workers_of_check_cover_every_shape_once() -> None:
    jobs = [arguments(["out", *job.split()]) for job in check_jobs(CHECKED, SHAPES)]
    made = [(job.models, pair) for job in jobs for pair in job.shapes.split(",")]
    assert sorted(made) == sorted((m, f"{r}x{q}") for m, (r, q) in itertools.product(CHECKED, SHAPES))
    assert all(job.in_process for job in jobs)


@pytest.mark.parametrize(
    ("text", "holds", "errors"),
    [
        (CLEAN, True, 0),
        ("checked: 62 cases, 0 failed\n========= RACECHECK SUMMARY: 3 hazards displayed (0 errors, 3 warnings)\n", True, 0),
        ("checked: 62 cases, 0 failed\n========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n", False, 2),
        ("checked: 62 cases, 1 failed\n========= ERROR SUMMARY: 0 errors\n", False, 0),
        ("checked: 62 cases, 0 failed\n========= ERROR SUMMARY: 34 errors\n", False, 34),
        ("checked: 0 cases, 0 failed\n========= ERROR SUMMARY: 0 errors\n", False, 0),
    ],
)
def test_a_sanitizer_is_clean_only_with_a_summary_and_cases(text, holds, errors) -> None:
    record = sanitize.record_of("memcheck", 0, text, 1.0)
    assert (record["holds"], record["errors_count"]) == (holds, errors)
    assert not sanitize.record_of("memcheck", 1, text, 1.0)["holds"]  # it did not end well, whatever it printed before


@pytest.mark.parametrize("text", ["", "checked: 62 cases, 0 failed\n", "========= ERROR SUMMARY: 0 errors\n", "Device not supported\n"])
def test_a_sanitizer_that_did_not_finish_is_an_error(text) -> None:
    record = sanitize.record_of("initcheck", 1, text, 1.0)
    assert not record["holds"]
    assert "no summary" in record["error"]


class Nvml:
    """Answers like NVML; throttled for the first `slow` questions."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVMLError = RuntimeError

    def __init__(self, slow: int) -> None:
        self.slow = slow

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle) -> int:
        self.slow -= 1
        return 0x40 if self.slow >= 0 else 0x1

    def __getattr__(self, name: str):
        return lambda *arguments: 7


def card(slow: int) -> Card:
    made = Card.__new__(Card)
    made.nvml, made.handle, made.driver = Nvml(slow), None, "1"
    return made


@pytest.mark.parametrize(("slow", "discarded", "throttled"), [(0, 0, ()), (2, 1, ()), (99, 2, ("thermal, hardware",))])
def test_a_throttled_measurement_is_taken_again_and_said_so(monkeypatch, slow, discarded, throttled) -> None:
    monkeypatch.setattr(timing, "interleaved", lambda graphs, *_: {name: timed([1.0, 2.0, 3.0]) for name in graphs})
    found = measured({"a": SimpleNamespace()}, 1, card(slow))
    assert (found.discarded_count, found.throttled) == (discarded, throttled)
    assert found.times["a"].samples_us == (1.0, 2.0, 3.0)


def test_conditions_tell_extremes_and_memory_errors() -> None:
    with card(0).watching() as watch:
        pass
    told = watch.summary()
    assert told["power_w"] == {"median": 0.007, "low": 0.007, "high": 0.007}
    assert told["ecc_uncorrected_count"] == 7
    assert told["samples_count"] == 2


def test_a_binary_counts_as_known_by_its_own_row_of_the_one_table(tmp_path, monkeypatch) -> None:
    """What ran is what was audited: the digest must stand in the committed table, beside that kernel."""
    rows = [{"kernel": f"k[{name}]", "arch": "sm_90a", "sass_sha256": digest} for name, digest in (("a", "1"), ("b", "2"))]
    (tmp_path / "table.json").write_text(json.dumps({"kernels": rows}))
    monkeypatch.setattr(binaries, "TABLE", tmp_path / "table.json")
    monkeypatch.setattr(binaries, "sass_digest", lambda spec: spec.digest)
    binaries._table.cache_clear()
    found = [binaries.in_table(SimpleNamespace(id=f"k[{name}]", digest=digest)) for name, digest in ("a1", "a2", "b2", "c1")]
    binaries._table.cache_clear()
    assert found == [True, False, True, False]
