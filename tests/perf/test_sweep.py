"""A sweep goes on past crashes and hangs, continues where it stopped; server files become cells or recorded errors."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest

from perf.bench_json import SERVE_REQUIRED
from perf.build import build
from perf.markdown import tables
from perf.matrix import enumerate_cells
from perf.servers import parse_cell, read_cell
from perf.sweep import Part, run_parts
from tests.perf.test_build import NOTHING
from validation.core.types import HarnessError

HERE = "tests.perf.test_sweep"


def good(value: int, log: str) -> int:
    with open(log, "a") as file:
        file.write("x")
    return value + 1


def crash() -> None:
    raise RuntimeError("no such tensor")


def die() -> None:
    __import__("os")._exit(7)


def hang() -> None:
    time.sleep(600)


def test_a_crash_and_a_hang_are_outcomes_and_the_sweep_continues(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parts = [
        Part(name="a", function=f"{HERE}:good", arguments={"value": 1, "log": str(log)}),
        Part(name="b", function=f"{HERE}:crash"),
        Part(name="c", function=f"{HERE}:die"),
        Part(name="d", function=f"{HERE}:hang", limit_s=1.0),
        Part(name="e", function=f"{HERE}:good", arguments={"value": 5, "log": str(log)}),
    ]
    found = run_parts(parts, state=tmp_path / "state")
    assert [found[n].outcome for n in "abcde"] == ["measured", "error", "error", "error", "measured"]
    assert (found["a"].value, found["e"].value) == (2, 6)
    assert "no such tensor" in found["b"].reason
    assert "exit code 7" in found["c"].reason
    assert "time limit" in found["d"].reason
    again = run_parts([parts[0], parts[4]], state=tmp_path / "state")
    assert again["a"].value == 2
    assert log.read_text() == "xx"  # kept, not measured again
    changed = Part(name="a", function=f"{HERE}:good", arguments={"value": 8, "log": str(log)})
    assert run_parts([changed], state=tmp_path / "state")["a"].value == 9
    for file in (tmp_path / "state").glob("a-*.json"):
        file.write_text("{torn")
    assert run_parts([parts[0]], state=tmp_path / "state")["a"].value == 2


def test_one_name_twice_is_an_error_and_so_is_ray_without_ray() -> None:
    with pytest.raises(HarnessError, match="once"):
        run_parts([Part(name="a", function="x:y"), Part(name="a", function="x:z")])
    if importlib.util.find_spec("ray") is None:
        with pytest.raises(HarnessError, match="--ray-address"):
            run_parts([Part(name="a", function="x:y")], ray_address="auto")


def test_a_cell_id_reads_back() -> None:
    for cell in list(enumerate_cells(gpu="GB300"))[::97]:
        assert parse_cell(cell.id) == cell
    with pytest.raises(HarnessError, match="needs an id"):
        parse_cell("kimi-k3-H200")


SPECULATIVE = "kimi-k3-H200-tp8-b1-q8-c8192-al6-latency_specialized"
PLAIN = "kimi-k3-H200-tp8-b4-q1-c8192-al1-auto"


def serve(path: Path, **changes) -> Path:
    table = {**dict.fromkeys(SERVE_REQUIRED, 2.0), "spec_decode_acceptance_length": 6.05, **changes}
    path.write_text(json.dumps(table))
    return path


def test_server_results_become_cells(tmp_path: Path) -> None:
    got = read_cell(SPECULATIVE, serve(tmp_path / "a.json"))
    assert (got.outcome, got.source.value, got.acceptance.value) == ("measured", "server", "measured")
    assert got.step_us == pytest.approx(6 * 2000.0)
    assert got.tokens_per_s_per_user == pytest.approx(500.0)
    off = read_cell(SPECULATIVE, serve(tmp_path / "b.json", spec_decode_acceptance_length=5.8))
    assert off.outcome == "error"
    assert "within 2%" in off.reasons[0]
    assert read_cell(SPECULATIVE, serve(tmp_path / "c.json", spec_decode_acceptance_length=None)).outcome == "error"


def test_interactivity_of_a_server_comes_from_each_request_or_from_the_percentile(tmp_path: Path) -> None:
    lens, firsts = [10] * 11, [0.5] * 11
    gaps = [[0.1 * (n + 1)] * 5 for n in range(11)]
    detailed = read_cell(SPECULATIVE, serve(tmp_path / "a.json", output_lens=lens, ttfts=firsts, itls=gaps))
    rates = sorted(10 / (0.5 + 0.5 * (n + 1)) for n in range(11))
    assert detailed.conditions["p90_tokens_per_s_per_user"] == pytest.approx(rates[1])
    assert read_cell(SPECULATIVE, serve(tmp_path / "b.json", p90_tpot_ms=4.0)).conditions["p90_tokens_per_s_per_user"] == 250.0
    assert read_cell(SPECULATIVE, serve(tmp_path / "c.json")).conditions["p90_tokens_per_s_per_user"] is None
    for bad in (
        {"output_lens": [1], "ttfts": ["x"], "itls": [[1]]},
        {"output_lens": [0], "ttfts": [1.0], "itls": [[]]},
        {"p90_tpot_ms": "slow"},
    ):
        got = read_cell(SPECULATIVE, serve(tmp_path / "d.json", **bad))
        assert got.outcome == "error"
        assert "bench JSON" in got.reasons[0]
    page = "\n".join(str(table) for table in tables(build(("H200",), published=NOTHING, servers=[detailed])))
    assert "Servers" in page
    assert f"{rates[1]:.4g}" in page


def test_latency_files_and_malformed_ones(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    path.write_text(json.dumps({"avg_latency": 2.1, "percentiles": {"50": 2.0}, "output_len": 100}))
    assert read_cell(PLAIN, path).step_us == pytest.approx(20_000.0)
    assert read_cell(SPECULATIVE, path).outcome == "error"
    for text in (
        '{"avg_latency": 2.1}',
        "[",
        "[]",
        '{"completed": 0}',
        json.dumps({"avg_latency": 1, "percentiles": {"50": 0}, "output_len": 0}),
    ):
        path.write_text(text)
        got = read_cell(PLAIN, path)
        assert got.outcome == "error"
        assert got.step_us is None
        assert "bench JSON" in got.reasons[0]
