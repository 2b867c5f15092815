"""Fits of launches on planted times: what was planted is found again, memory alone gets faster on a faster memory, gaps are no fit."""

from __future__ import annotations

import dataclasses
import json

import pytest

from perf.build import build, projection_errors, speed_up_errors, write
from perf.hardware import gpu
from perf.launch_fit import LaunchPoint, fit_launch, fit_launches
from perf.matrix import Cell, Scope
from perf.model import project, step_traffic
from perf.published import OURS, LaunchTimes, launch_fits
from tests.perf.test_build import layers

RATE = gpu("H200").hbm_bytes_per_s
PLANTED = (3.0, 0.2, 1.25)  # fixed, a row, slowness
OVERLAP = 0.9


def time_us(hbm_bytes: float, rows: int) -> float:
    fixed, row, slowness = PLANTED
    return fixed + row * rows + slowness * 1e6 * hbm_bytes / RATE


def points(op: str = "in_proj") -> list[LaunchPoint]:
    return [
        LaunchPoint(op=op, hbm_bytes=size, rows=rows, us=time_us(size, rows), evidence="E-1")
        for size in (40e6, 90e6) for rows in (1, 8, 64)
    ]  # fmt: skip


def published():
    """Layers whose launches were timed alone, made from the planted costs; a layer takes OVERLAP of their sum."""
    cells, times = layers(), []
    results = []
    for tp in (8, 16):
        for rows in (1, 8):
            launches = step_traffic("kimi-k3", tp, rows, 1, 0, Scope.LAYER)
            named = tuple((t.op, (time_us(t.hbm_bytes, rows),) * 3) for t in launches)
            times.append(LaunchTimes(tp=tp, rows=rows, gpu="H200", launches=named, evidence=f"E-p{tp}-{rows}"))
    for point in cells.points[OURS]:
        launches = step_traffic("kimi-k3", 8, point.rows, 1, 0, Scope.LAYER)
        us = OVERLAP * sum(time_us(t.hbm_bytes, point.rows) for t in launches)
        results.append(dataclasses.replace(point, step_us=us, traffic=launches))
    return dataclasses.replace(cells, launches=tuple(times), points={**cells.points, OURS: tuple(results)})


def test_planted_costs_are_found_again() -> None:
    fit = fit_launch(points(), RATE)
    assert (fit.fixed_us, fit.row_us, fit.slowness) == pytest.approx(PLANTED, rel=1e-6)
    assert fit.error < 1e-6


def test_bytes_that_cannot_show_are_latency() -> None:
    few = [dataclasses.replace(p, hbm_bytes=1e4 * p.rows, us=5 + 0.1 * p.rows) for p in points()]
    fit = fit_launch(few, RATE)
    assert fit.slowness == 0
    assert fit.fixed_us == pytest.approx(5)
    hidden = [dataclasses.replace(p, us=40 + 0.1 * 1e6 * p.hbm_bytes / RATE) for p in points()]
    assert fit_launch(hidden, RATE).slowness == 0
    with pytest.raises(ValueError, match="no point"):
        fit_launch([], RATE)


def test_a_launch_that_was_timed_at_one_shape_only_is_no_fit() -> None:
    whole = step_traffic("kimi-k3", 8, 1, 1, 0, Scope.LAYER)
    everything = [dataclasses.replace(p, op=op) for op in {t.op for t in whole} for p in points()]
    assert fit_launches(everything, [(whole, 1, 100.0)], RATE) is not None
    assert fit_launches([p for p in everything if p.op != "kda"], [(whole, 1, 100.0)], RATE) is None
    assert fit_launches(everything, [], RATE) is None
    assert launch_fits(layers()) is None


def test_the_layers_tell_the_overlap_and_the_fit_its_error() -> None:
    found = launch_fits(published())
    assert found is not None
    assert set(found.overlap) == {1, 2, 4, 8}
    assert all(share == pytest.approx(OVERLAP, rel=0.02) for share in found.overlap.values())
    made = build(("H200",), published=published())
    assert made.assumptions[OURS].fit_error < 0.02
    assert {"E-p8-1", "E-p16-8"} <= set(made.assumptions[OURS].evidence)


def test_the_page_and_the_files_hold_the_fits(tmp_path) -> None:
    paths = write(build(("GB300",), published=published()), tmp_path)
    body = json.loads(paths["json"].read_text())
    assert set(body["assumptions"][OURS]["fits"]["by_op"]) == {t.op for t in step_traffic("kimi-k3", 8, 1, 1, 0, Scope.LAYER)}
    assert body["speed_up_against_published"]
    page = paths["md"].read_text()
    for words in ("Fraction of the memory rate by launch", "Projected speed-up against the published one", "issue 1940"):
        assert words in page


def test_a_faster_memory_shortens_memory_time_alone() -> None:
    rests_on = build(("H200",), published=published()).assumptions[OURS]
    cell = Cell(model="kimi-k3", gpu="H200", tp=16, requests=1, q=1, context_tokens=1024, acceptance_length=1.0, backend=OURS)
    here, there = project(cell, rests_on), project(dataclasses.replace(cell, gpu="GB300"), rests_on)
    faster = gpu("GB300").hbm_bytes_per_s / RATE
    assert there.memory_us == pytest.approx(here.memory_us / faster)
    assert (there.latency_us, there.exchange_us) == pytest.approx((here.latency_us, here.exchange_us))
    assert here.low_us == here.us
    assert there.low_us == pytest.approx(there.us - there.latency_us * (1 - 1 / faster))


def test_errors_against_published_numbers_name_their_parts_and_the_speed_up() -> None:
    made = build(("GB300",), published=published())
    rows = projection_errors(made.assumptions)
    for row in rows:
        assert row["projected_us"] == pytest.approx(row["memory_us"] + row["latency_us"] + row["exchange_us"])
        assert row["projected_low_us"] <= row["projected_us"]
    step, layer = speed_up_errors(rows)
    assert (step["published"], layer["published"]) == pytest.approx((7380 / 3900, 130 / 69))
    assert step["error"] == pytest.approx(step["projected"] / step["published"] - 1)
    shown = next(r for r in made.steps if r.step_us and r.cell.backend == OURS)
    assert shown.step_low_us <= shown.step_us == shown.step_high_us
