"""Cells, refusals, comparisons and statistics of the matrix."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.bench_json import SERVE_REQUIRED, read_serve
from perf.matrix import (
    AcceptanceKind,
    Cell,
    CellResult,
    Source,
    comparison_refusals,
    enumerate_cells,
    realised_acceptance_problem,
    tokens_per_s,
)
from perf.stats import holm, median_interval, paired_ratio, slowdown_p_value
from validation.core.types import HarnessError


def cell(**changes) -> Cell:
    base = {"model": "kimi-k3", "gpu": "H200", "tp": 8, "requests": 1, "q": 1, "context_tokens": 1024, "acceptance_length": 1.0}
    return Cell(**{**base, "backend": "latency_specialized", **changes})


def test_the_whole_matrix_is_listed_and_q8_ends_at_8_requests() -> None:
    cells = list(enumerate_cells(gpu="H200"))
    assert len(cells) == len({c.id for c in cells}) == 2 * 7 * 16 * 4 * 2
    refused = {(c.requests, c.q) for c in cells if c.backend == "latency_specialized" and any("rows" in r for r in c.refusals())}
    assert refused == {(16, 8), (32, 8), (64, 8)}
    assert not any(c.refusals() for c in cells if c.backend == "auto")


def test_every_reason_is_given_at_once() -> None:
    assert len(cell(q=3, requests=40, acceptance_length=9.0, tp=4).refusals()) == 4


def test_padded_rows_are_the_prepared_graphs() -> None:
    assert [cell(requests=r).padded_rows for r in (1, 8, 9, 17, 33, 64, 65)] == [1, 8, 16, 32, 64, 64, None]


def test_tokens_per_second_by_hand() -> None:
    assert tokens_per_s(1, 6.0, 5000.0, 2000.0) == pytest.approx(6 / 0.007)
    assert tokens_per_s(1, 6.0, None) is None


@pytest.mark.parametrize(("realised", "bad"), [(6.0, False), (6.11, False), (6.13, True), (5.87, True), (float("nan"), True)])
def test_realised_acceptance(realised: float, bad: bool) -> None:
    assert bool(realised_acceptance_problem(6.0, realised, 0.02)) is bad


CONDITIONS = {"hardware": "H200", "date": "2026-11-01", "versions": {"torch": "2.11"}, "gpus": 1}


def result(**changes) -> CellResult:
    made = {"cell": cell(), "source": Source.GPU_TIMER, "outcome": "measured", "step_us": 10.0, "conditions": CONDITIONS}
    return CellResult(**{**made, **changes})


def test_like_against_like_is_allowed_and_anything_else_is_refused() -> None:
    assert comparison_refusals(result(), result()) == ()
    assert "hardware" in comparison_refusals(result(), result(cell=cell(gpu="B300")))[0]
    assert comparison_refusals(result(), result(cell=cell(gpu="B300")), allow=("hardware",)) == ()
    fast = result(cell=cell(q=8, acceptance_length=6.0), acceptance=AcceptanceKind.APPLIED)
    assert any("acceptance" in r for r in comparison_refusals(result(), fast))
    assert any("prefill" in r for r in comparison_refusals(result(), result(cell=cell(mixed_prefill=True))))
    assert any("source" in r for r in comparison_refusals(result(), result(source=Source.SERVER)))
    assert any("error" in r for r in comparison_refusals(result(), result(outcome="error", step_us=None)))
    assert any("versions" in r for r in comparison_refusals(result(), result(conditions={**CONDITIONS, "versions": {}})))


def test_stock_against_stock_is_one_in_fifty_runs() -> None:
    """The interval of the paired ratio covers 1 about as often as it says, with drift that both sides share."""
    missed = 0
    for seed in range(50):
        rng = np.random.default_rng(seed)
        drift = 1 + 0.1 * np.sin(np.arange(100) / 15)
        sides = drift * 50 * rng.lognormal(0, 0.01, size=(2, 100))
        missed += not paired_ratio(sides[0], sides[1], seed=seed).contains(1.0)
    assert missed <= 6  # 2.5 expected; P(more than 6) < 0.02 for a true 5 %


def test_a_five_percent_slowdown_is_found() -> None:
    rng = np.random.default_rng(1)
    base, slow = 50 * rng.lognormal(0, 0.01, 60), 52.5 * rng.lognormal(0, 0.01, 60)
    assert slowdown_p_value(base, slow, 0.03) < 1e-3
    assert slowdown_p_value(base, 50 * rng.lognormal(0, 0.01, 60), 0.03) > 0.5


@given(st.lists(st.floats(1, 100), min_size=6, max_size=60), st.floats(0.5, 20))
def test_the_median_interval_holds_the_median_and_scales(samples: list[float], factor: float) -> None:
    one, two = median_interval(samples), median_interval([s * factor for s in samples])
    assert one.low <= one.value <= one.high
    assert two.value == pytest.approx(one.value * factor)


def test_the_median_interval_covers() -> None:
    rng = np.random.default_rng(5)
    hits = sum(median_interval(rng.exponential(size=41)).contains(np.log(2)) for _ in range(400))
    assert hits >= 370


def test_bad_samples_are_refused() -> None:
    for bad in ([1.0, 2.0], [1.0, float("nan"), 2.0], [1.0, 0.0, 2.0]):
        with pytest.raises(ValueError, match="needs at least 3 finite positive"):
            median_interval(bad)
    with pytest.raises(ValueError, match="as many of each"):
        paired_ratio([1.0] * 4, [1.0] * 5)


def test_holm_by_hand() -> None:
    rejected, adjusted = holm([0.01, 0.04, 0.03])
    assert rejected == (True, False, False)
    assert adjusted == pytest.approx((0.03, 0.06, 0.06))


def test_bench_json_reads_and_refuses(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(dict.fromkeys(SERVE_REQUIRED, 2) | {"spec_decode_acceptance_length": 3.7}))
    assert read_serve(path).acceptance_length == 3.7
    path.write_text(json.dumps({"completed": 0, "duration": "x"}))
    with pytest.raises(HarnessError) as error:
        read_serve(path)
    assert "completed: got 0" in str(error.value)
    assert "median_tpot_ms" in str(error.value)
    for text in ("[]", "{", "nonsense"):
        path.write_text(text)
        with pytest.raises(HarnessError, match="bench JSON"):
            read_serve(path)
