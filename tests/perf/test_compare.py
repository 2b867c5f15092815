"""Comparisons of two sets of evidence: planted slow-downs found where they are, equal sets left alone, absence never a pass."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from perf.compare import Times, compare_folders, compare_times, lines, read_times, times_of
from perf.decision import decide
from validation.core.store import EvidenceStore
from validation.core.types import Case, Evidence, HarnessError, Measurement, Outcome, Run, Status

LAUNCHES = {"attn_res": 5.0, "in_proj": 23.0, "kda": 7.0, "o_proj": 8.0, "experts_up": 15.0, "experts_down": 10.0}


def layer(rows: int, seed: int, slow: str = "", factor: float = 1.05, n: int = 40) -> Evidence:
    """A synthetic layer record: times of each launch and of the layer, with a scatter of one in a hundred."""
    rng = np.random.default_rng([seed, rows])
    times = {name: us * (factor if name == slow else 1) * rng.lognormal(0, 0.01, n) for name, us in LAUNCHES.items()}
    whole = np.sum(list(times.values()), axis=0)
    return Evidence(
        id="",
        run="",
        check="perf.layer",
        case=Case(subject=f"k3-tp8-r{rows}"),
        outcome=Outcome.MEASURED,
        measurements=(Measurement(name="fused_us", value=float(np.median(whole)), unit="us", samples=tuple(whole)),),
        details={"launches": {name: list(samples) for name, samples in times.items()}},
    )


def times(seed: int, **slow: str) -> dict[str, Times]:
    """Layers at 1, 8 and 64 rows; `r8="in_proj"` slows that launch in that layer."""
    return times_of([layer(rows, seed, slow.get(f"r{rows}", "")) for rows in (1, 8, 64)], "H200")


def test_a_five_percent_slowdown_of_one_launch_is_found_in_the_layer_that_holds_it() -> None:
    for launch in LAUNCHES:
        found = compare_times(times(1), times(2, r8=launch), 0.03)
        assert found.status is Status.FAIL
        assert [cell.cell for cell in found.slower] == [f"perf.layer k3-tp8-r8 rank0 H200 launch {launch}"]
        assert launch in lines(found)[0]
        assert "k3-tp8-r8" in lines(found)[0]


def test_equal_sets_are_never_called_slower_in_fifty_runs() -> None:
    for seed in range(50):
        found = compare_times(times(seed), times(1000 + seed), 0.03)
        assert found.slower == ()
    assert found.status is Status.PASS


def test_a_faster_candidate_passes() -> None:
    faster = times_of([layer(rows, 2, "kda", 0.5) for rows in (1, 8, 64)], "H200")
    assert compare_times(times(1), faster, 0.03).status is Status.PASS


def test_missing_cells_are_not_a_pass() -> None:
    some = {name: value for name, value in times(2).items() if "r64" not in name}
    found = compare_times(times(1), some, 0.03)
    assert found.status is Status.NOT_PROVEN
    assert len(found.missing) == len(LAUNCHES) + 1
    assert compare_times(times(1), {}, 0.03).status is Status.NOT_PROVEN
    with pytest.raises(HarnessError, match="no timed cell in the base"):
        compare_times({}, times(1), 0.03)
    for margin in (float("nan"), float("inf"), -0.01, 1.0):
        with pytest.raises(HarnessError, match="margin"):
            compare_times(times(1), times(2), margin)


def test_another_gpu_is_another_cell() -> None:
    other = times_of([layer(1, 2)], "B200")
    assert compare_times(times_of([layer(1, 1)], "H200"), other, 0.03).missing


def test_times_too_scattered_to_tell_are_not_a_pass() -> None:
    rng = np.random.default_rng(0)
    wild = {"x": Times(samples=tuple(10 * rng.lognormal(0, 0.5, 8)))}
    assert compare_times(wild, {"x": Times(samples=wild["x"].samples[::-1])}, 0.03).status is Status.NOT_PROVEN
    assert compare_times(wild, dict(wild), 0.03).status is Status.PASS  # one record twice
    unknown = {"x": Times(median=10.0)}
    assert compare_times(unknown, unknown, 0.03).status is Status.NOT_PROVEN
    bad = {"x": Times(samples=(1.0, float("nan"), 1.0))}
    assert compare_times({"x": Times(samples=(1.0, 1.01, 0.99))}, bad, 0.03).status is Status.NOT_PROVEN


def test_quartiles_stand_in_for_samples_when_the_record_says_how_many() -> None:
    def quartiles(median: float) -> dict[str, Times]:
        return {"x": Times(median=median, low=0.995 * median, high=1.005 * median, n=50)}

    assert compare_times(quartiles(100.0), quartiles(100.4), 0.03).status is Status.PASS
    assert compare_times(quartiles(100.0), quartiles(106.0), 0.03).status is Status.FAIL


def store(folder: Path, records: list[Evidence]) -> Path:
    run = Run(
        id=f"R-{folder.name}", started_utc="2026-11-01T00:00:00Z", argv=(), commit="c", dirty=False, profile="gpu", config={},
        hardware={"gpu": "NVIDIA H200"}, versions={},
    )  # fmt: skip
    kept = EvidenceStore.create(folder.parent, run, {"cases": [], "absent_lanes": []}, durable=False)
    for record in records:
        kept.append(record)
    kept.close("2026-11-01T00:00:01Z")
    return kept.run_dir


def test_folders_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from perf.__main__ import main

    base = store(tmp_path / "a", [layer(1, 1), layer(8, 1)])
    same = store(tmp_path / "b", [layer(1, 2), layer(8, 2)])
    slow = store(tmp_path / "c", [layer(1, 2), layer(8, 2, "kda")])
    part = store(tmp_path / "d", [layer(1, 2), dataclasses.replace(layer(8, 2), outcome=Outcome.ERROR, measurements=(), reasons=("x",))])
    assert [main(["compare", str(base), str(other)]) for other in (same, slow, part)] == [0, 1, 2]
    assert "launch kda" in capsys.readouterr().err
    assert main(["compare", str(base), str(tmp_path / "nothing")]) == 3
    assert compare_folders(base, slow).slower[0].cell.endswith("launch kda")
    assert len(read_times(base)) == 2 * (len(LAUNCHES) + 1)
    edited = slow / "evidence.jsonl"
    edited.write_text(edited.read_text().replace('"unit":"us"', '"unit":"ms"', 1))
    assert main(["compare", str(base), str(slow)]) == 3
    assert "as measured" in capsys.readouterr().err


def raw(case: str, seed: int, factor: float = 1.0, check: str = "published.kernel_launches", **more) -> Evidence:
    """A record as `perf.kernels` writes and `fasttrack publish` keeps it: medians as measurements, samples in the details."""
    name = "launch" if check.endswith("launches") else "fused"
    samples = factor * 10 * np.random.default_rng([seed, len(case)]).lognormal(0, 0.01, 64)
    low, middle, high = np.percentile(samples, [25, 50, 75])
    values = {f"{name}_us": middle, f"{name}_low_us": low, f"{name}_high_us": high, "floor_us": 4.0}
    return Evidence(
        id="", run="", check=check, case=Case(subject=case, params={"n": seed}), outcome=Outcome.MEASURED,
        measurements=tuple(Measurement(name=k, value=float(v), unit="us") for k, v in values.items()),
        details={f"{name}_samples": samples.tolist(), **more},
    )  # fmt: skip


def test_published_records_of_launches_layers_and_steps_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from perf.__main__ import main

    def records(seed: int, slow: str = "") -> list[Evidence]:
        launches = [raw(f"k3-tp16-r8-{op}", seed, 1.05 if op == slow else 1.0) for op in LAUNCHES]
        wide = [
            raw("k3-tp16-r8-q1", seed, check="published.kernel_layers"),
            raw("k3-step-tp16-r8-q1", seed, check="published.kernel_steps"),
        ]
        return [*launches, *wide]

    base, same = store(tmp_path / "a", records(1)), store(tmp_path / "b", records(1))
    assert main(["compare", str(base), str(same)]) == 0
    assert len(read_times(base)) == len(LAUNCHES) + 2
    for op in LAUNCHES:
        capsys.readouterr()
        assert main(["compare", str(base), str(store(tmp_path / f"slow-{op}", records(2, op)))]) == 1
        said = capsys.readouterr().err.splitlines()
        assert said[0].startswith(f"slower: published.kernel_launches k3-tp16-r8-{op} rank0 NVIDIA H200 launch: 1.0")


def test_profiles_and_ablations_are_no_cells() -> None:
    profile = raw("k3-tp8-r1-alone", 1, check="published.kernel_profile", kernels={"a": [1.0] * 6})
    ablated = dataclasses.replace(raw("k3-tp8-r1-q1", 1, check="published.kernel_layers"), measurements=tuple(
        Measurement(name=f"without_pdl{part}_us", value=10.0, unit="us") for part in ("", "_low", "_high")))  # fmt: skip
    assert times_of([profile, ablated], "H200") == {}


def test_what_stock_takes_is_no_speed_of_the_candidate() -> None:
    """Between two runs stock may stand on another level; that fails nobody, and a slower candidate beside it still does."""

    def layer_beside_stock(seed: int, ours: float, stock: float) -> dict[str, Times]:
        samples = {name: us * np.random.default_rng([seed, n]).lognormal(0, 0.01, 64) for n, (name, us) in
                   enumerate((("fused", ours), ("stock", stock), ("stock_again", stock)))}  # fmt: skip
        measured = tuple(Measurement(name=f"{k}_us", value=float(np.median(v)), unit="us", samples=tuple(v)) for k, v in samples.items())
        return times_of([dataclasses.replace(raw("k3-tp8-r1-q1", seed, check="published.kernel_layers"), measurements=measured)], "H200")

    base = layer_beside_stock(1, 84.0, 142.0)
    assert [name.split()[-1] for name in base] == ["fused"]
    assert compare_times(base, layer_beside_stock(2, 84.0, 152.0), 0.03).status is Status.PASS
    assert compare_times(base, layer_beside_stock(2, 92.0, 152.0), 0.03).status is Status.FAIL


@pytest.mark.parametrize("samples", [["1", "2", "3"], [1.0, None, 2.0], [1.0, 2.0], "1.0 2.0", [True] * 5, {"a": 1}])
def test_what_is_no_list_of_numbers_is_no_sample(samples) -> None:
    record = raw("k3-tp8-r1-kda", 1, launch_samples=samples, launches={"kda": samples})
    assert [(one.samples, one.median > 9) for one in times_of([record], "H200").values()] == [((), True)]


@pytest.mark.parametrize(
    "words", [[], ["nonsense"], ["matrix", "--prompt-tokens", "x"], ["matrix", "--prompt-tokens", "0"], ["compare", "a"]]
)
def test_wrong_use_is_exit_3_with_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 means "not proven" here, and wrong use proves nothing of the kind."""
    from perf.__main__ import main

    assert main(words) == 3
    said = capsys.readouterr()
    assert len(said.err.strip().splitlines()) == 1
    assert json.loads(said.out)["verdict"] == "error"


def test_stock_against_stock_is_never_called_different_in_fifty_runs() -> None:
    """The word at the end of the pipeline, with drift that both sides share and a tail of interrupted samples."""
    words = []
    for seed in range(50):
        rng = np.random.default_rng(seed)
        drift = 1 + 0.1 * np.sin(np.arange(36) / 5)
        sides = drift * 50 * rng.lognormal(0, 0.03, size=(2, 36)) * (1 + 2.0 * (rng.random((2, 36)) < 0.05))
        words.append(decide(sides[0].tolist(), sides[1].tolist(), seed=seed))
    assert set(words) == {"no difference"}


def test_a_real_difference_gets_its_word_and_too_few_pairs_get_none() -> None:
    rng = np.random.default_rng(3)
    base = 50 * rng.lognormal(0, 0.01, 30)
    assert decide(base.tolist(), (base * 1.05).tolist()) == "slower"
    assert decide(base.tolist(), (base / 1.05).tolist()) == "faster"
    assert decide(base[:6].tolist(), (2 * base[:6]).tolist()) == "too few pairs"
