"""The whole matrix: every cell once, refused with reasons, projected with assumptions; written as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from kimi_k3_decode.config import K3, NANO, Shard, Unsupported
from kimi_k3_decode.launches import launch_graph
from perf.build import build, figures_data, projection_errors, rows_of, speed_ups, write
from perf.hardware import gpu
from perf.matrix import Cell, CellResult, Scope, Source
from perf.model import LayerPoint, cell_floor, memory_bytes, step_traffic
from perf.published import OURS, STOCK, PublishedCells
from perf.roofline import traffic

CONDITIONS = {
    "hardware": "NVIDIA H200",
    "gpus": 1,
    "date": "2026-11-01",
    "versions": {"torch": "2.11"},
    "launches": 13,
    "prefill": "none",
    "what": "x",
    "stock_excludes": "y",
}


def layers() -> PublishedCells:
    """Published layers made by hand: stock takes twice as long."""
    results, points = [], {OURS: [], STOCK: []}
    for backend, factor in ((OURS, 1.0), (STOCK, 2.0)):
        for rows in (1, 2, 4, 8):
            cell = Cell(
                model="kimi-k3", gpu="H200", tp=8, requests=rows, q=1, context_tokens=0, acceptance_length=1.0, backend=backend,
                scope=Scope.LAYER,
            )  # fmt: skip
            floor = cell_floor(cell)
            us = factor * (2 * floor.hbm_us + 13)
            results.append(
                CellResult(
                    cell=cell,
                    source=Source.GPU_TIMER,
                    outcome="measured",
                    step_us=us,
                    step_low_us=us,
                    step_high_us=us,
                    floor_us=floor.hbm_us,
                    evidence=f"E-{backend}-{rows}",
                    correctness="E-c" if backend == OURS else "",
                    conditions=CONDITIONS,
                )
            )
            points[backend].append(
                LayerPoint(hbm_bytes=floor.hbm_bytes, launches=13, step_us=us, rows=rows, evidence=f"E-{backend}-{rows}")
            )
    return PublishedCells(results=tuple(results), launches=(), points={b: tuple(p) for b, p in points.items()}, gpu="H200")


NOTHING = PublishedCells(results=(), launches=(), points={OURS: (), STOCK: ()}, gpu=None)


def test_a_layer_kind_stands_for_all_of_its_layers() -> None:
    """The quick sum over kinds equals the sum over every launch of the plan."""
    for config, tp, rows, q in ((NANO, 1, 3, 1), (K3, 8, 8, 8)):
        shard = Shard(config=config, tp=tp)
        all_of_them = [
            traffic(launch.contract, shard, rows=rows, q=q, context_tokens=500) for launch in launch_graph(config, shard, rows, q)
        ]
        quick = step_traffic(config.name, tp, rows, q, 500)
        assert len(quick) == len(all_of_them)
        for name in ("hbm_bytes", "link_bytes", "flops"):
            assert sum(getattr(t, name) for t in quick) == pytest.approx(sum(getattr(t, name) for t in all_of_them))


def test_every_cell_is_there_once_with_a_source_or_a_reason(tmp_path: Path) -> None:
    made = build(("GB300",), published=layers())
    assert len(made.steps) == len({r.cell.id for r in made.steps}) == 1792
    for r in made.steps:
        if r.outcome == "refused":
            assert r.reasons
            assert r.step_us is None
        else:
            assert r.source is Source.PROJECTION
            assert r.conditions["assumptions"] == r.cell.backend
            assert (r.step_us or 0) > (r.floor_us or 1e9)
            assert r.evidence == ""
    by_rows = {r.cell.requests for r in made.steps if r.outcome == "refused" and any("rows" in reason for reason in r.reasons)}
    assert by_rows == {16, 32, 64}
    paths = write(made, tmp_path)
    body = json.loads(paths["json"].read_text())
    table = list(csv.DictReader(paths["csv"].open()))
    assert len(table) == len(body["cells"]) == 1792 + 8
    assert {row["source"] for row in table} == {"projection", "model", "gpu_timer"}
    page = paths["md"].read_text()
    assert "PROJECTION" in page
    assert "2.00x" in page
    assert "E-latency_specialized-1" in page
    assert "Refused" in page


def test_acceptance_is_applied_and_the_draft_is_paid() -> None:
    made = build(("GB300",), published=layers())
    by_id = {r.cell.id: r for r in made.steps}
    one = by_id["kimi-k3-GB300-tp16-b1-q8-c1024-al6-latency_specialized"]
    assert one.acceptance.value == "applied"
    assert one.draft_us > 0
    assert one.tokens_per_s == pytest.approx(6 / (1e-6 * ((one.step_us or 0) + one.draft_us)))
    assert by_id["kimi-k3-GB300-tp16-b1-q1-c1024-al1-latency_specialized"].draft_us == 0


def test_the_projection_states_its_error_against_published_numbers() -> None:
    made = build(("H200",), published=layers())
    errors = projection_errors(made.assumptions)
    assert {e["published_us"] for e in errors} == {7380.0, 3900.0, 130.0, 69.0}  # steps and layers
    assert all(e["error"] == pytest.approx(e["projected_us"] / e["published_us"] - 1) and e["evidence"] for e in errors)


def test_a_model_that_does_not_fit_is_refused_whatever_runs_it() -> None:
    """Weights of a rank at TP8 are an eighth of 2.72 T expert parameters at 4.25 bits and of 55 G others at 16, or somewhat more."""
    made = build(("H200",), published=layers())
    assert all(any("memory" in reason for reason in r.reasons) for r in made.steps if r.cell.tp == 8)
    fits = [r for r in made.steps if r.cell.tp == 16 and r.cell.context_tokens == 1024 and r.cell.q == 1]
    assert all(r.outcome == "modelled" for r in fits)
    one = Cell(model="kimi-k3", gpu="H200", tp=8, requests=1, q=1, context_tokens=0, acceptance_length=1.0, backend=STOCK)
    assert 1.0 <= memory_bytes(one) / ((2.72e12 * 4.25 / 8 + 55e9 * 2) / 8) <= 1.1


def test_without_published_layers_there_are_floors_and_no_times() -> None:
    made = build(("GB300",), published=NOTHING)
    shown = [r for r in made.steps if r.outcome != "refused"]
    assert all(r.source is Source.MODEL and r.step_us is None and r.floor_us and r.reasons for r in shown)
    assert projection_errors(made.assumptions) == []
    assert figures_data(made)["steps"] == []


def test_a_multiplier_without_its_conditions_is_not_printed() -> None:
    whole = layers()
    bare = tuple(CellResult(**{**vars(r), "conditions": {**CONDITIONS, "date": ""}}) for r in whole.results)
    made = build(("H200",), published=PublishedCells(results=bare, launches=(), points=whole.points, gpu="H200"))
    assert all(refused for cell, (_, refused) in speed_ups(made.results).items() if cell.endswith("layer"))
    assert not any(row["speed_up"] for row in rows_of(made) if row["source"] == "gpu_timer")


def test_an_unknown_gpu_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="H900"):
        build(("H900",), published=NOTHING)
    from perf.__main__ import main

    assert main(["matrix", "--gpu", "H900", "--no-engine"]) == 3


def test_memory_grows_with_rows_context_and_shrinks_with_ranks() -> None:
    def floor(**changes) -> float:
        base = {"model": "kimi-k3", "gpu": "H200", "tp": 8, "requests": 1, "q": 1, "context_tokens": 1024, "acceptance_length": 1.0}
        return cell_floor(Cell(**{**base, "backend": STOCK, **changes})).hbm_us

    assert floor() < floor(requests=8) < floor(requests=64) < floor(requests=64, q=8)
    assert floor() < floor(context_tokens=131072)
    assert floor(tp=16) < floor()
    assert floor(gpu="GB300") == pytest.approx(floor() * gpu("H200").hbm_bytes_per_s / gpu("GB300").hbm_bytes_per_s)
