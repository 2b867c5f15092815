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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"median_tpot_ms": -3}, "median_tpot_ms: got -3"),
        ({"median_tpot_ms": 0}, "median_tpot_ms: got 0"),
        ({"median_tpot_ms": 10**400}, "median_tpot_ms: got 1000"),
        ({"median_tpot_ms": True}, "median_tpot_ms: got True"),
        ({"output_throughput": -5, "duration": -1}, "2 problem(s)"),
        ({"completed": 0.5}, "needs a whole number of finished requests"),
        ({"spec_decode_acceptance_length": -2}, "spec_decode_acceptance_length: got -2"),
    ],
)
def test_numbers_that_no_server_can_have_measured_are_an_error(tmp_path: Path, changes: dict, words: str) -> None:
    got = read_cell(PLAIN, serve(tmp_path / "a.json", **changes))
    assert (got.outcome, got.step_us) == ("error", None)
    assert words in got.reasons[0]


def test_a_server_on_an_unknown_gpu_or_model_is_a_recorded_error(tmp_path: Path) -> None:
    path = serve(tmp_path / "a.json")
    for cell, words in ((PLAIN.replace("H200", "XYZ"), "got 'XYZ'"), (PLAIN.replace("kimi-k3", "other"), "got 'other'")):
        got = read_cell(cell, path)
        assert (got.outcome, got.step_us) == ("error", None)
        assert words in got.reasons[0]
    for cell in (
        PLAIN.replace("-b4-", "-b0-"), PLAIN.replace("-tp8-", "-tp0-"), PLAIN.replace("-al1-", "-al1.1.1-"), PLAIN.replace("-q1-", "-q0-"),
        PLAIN.replace("-b4-", "-b" + "9" * 5000 + "-"), PLAIN.replace("-b4-", "-b\u0661-"),
    ):  # fmt: skip
        with pytest.raises(HarnessError, match="cell: got"):
            read_cell(cell, path)


def test_a_bad_file_is_a_problem_of_the_matrix_and_a_bad_folder_stops_it_first(tmp_path: Path, monkeypatch, capsys) -> None:
    from perf import build as builder
    from perf import workloads
    from perf.__main__ import main

    monkeypatch.setattr(builder, "build", lambda gpus, servers, **_: build(gpus, published=NOTHING, servers=servers))
    torn = tmp_path / "torn.json"
    torn.write_text("{")
    asked = ["matrix", "--no-engine", "--gpu", "H200", "--out", str(tmp_path / "out"), "--server", PLAIN, str(torn)]
    assert main(asked) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["problems"] == [line for line in said.err.strip().splitlines() if line.startswith(PLAIN)]
    assert "bench JSON" in said.err
    measured = []
    monkeypatch.setattr(workloads, "measure", measured.append)
    for command in (["workload", str(torn)], ["matrix", "--out", str(torn)]):
        assert main(command) == 3
        assert "needs a writable folder" in capsys.readouterr().err
    assert measured == []


def test_a_fault_of_the_program_does_not_read_as_a_failed_comparison(monkeypatch, capsys, tmp_path: Path) -> None:
    from perf import compare
    from perf.__main__ import main

    def broken(*_, **__):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(compare, "compare_folders", broken)
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 3
    assert json.loads(capsys.readouterr().out) == {"verdict": "error", "error": "ZeroDivisionError: division by zero"}
