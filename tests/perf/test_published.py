"""A speed is shown with its correctness and not without: synthetic published runs, and whatever this checkout publishes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perf import workloads
from perf.hardware import gpu
from perf.markdown import workload_table
from perf.matrix import Cell, Scope
from perf.model import LayerPoint, fit_assumptions, launches_of, project, step_traffic
from perf.published import (
    OURS,
    STOCK,
    PublishedCells,
    kernels_of_layer,
    launch_fits,
    passes,
    published_workloads,
    read_published,
    read_store,
)
from perf.roofline import expert_bytes
from validation.core import environment
from validation.core.store import EvidenceStore
from validation.core.types import Case, Evidence, HarnessError, Outcome, Run
from validation.freshness import digests
from validation.freshness.imports import folder_of_launch, import_raw

RUN_ID = "R-20261101T000000Z-000000000000"
GOOD = {"x": {"kernel": 0.002, "reference": 0.002}}


def evidence(check: str, subject: str, fingerprints: dict[str, str], details: dict) -> Evidence:
    return Evidence(
        id="",
        run="",
        check=check,
        case=Case(subject=subject, params={}),
        outcome=Outcome.MEASURED,
        fingerprints=fingerprints,
        details=details,
    )


def publish(
    root: Path,
    *,
    rows: tuple[int, ...] = (1,),
    errors=GOOD,
    checked_rows: tuple[int, ...] = (1,),
    spoil: str = "",
    layer=None,
    hardware=None,
) -> PublishedCells:
    """One run: correctness records of the kernels of `checked_rows`, and a layer record for each of `rows`. `spoil` names an op whose
    record carries another digest."""
    now = digests.current()
    folders = folder_of_launch()
    records, seen = [], set()
    for n in checked_rows:
        for op, kernel in kernels_of_layer(8, n, 1):
            if kernel in seen:
                continue
            seen.add(kernel)
            folder = folders["attn_res" if op == "mlp_res" else op]
            parts = {f"kernels/{folder}": now[f"kernels/{folder}"] if op != spoil else "0" * 64, "config": now["config"]}
            records.append(evidence("published.kernel_checks", f"k3-{kernel}", parts, {"kernel": kernel, "op": op, "errors": errors}))
    for n in rows:
        details = {"case": f"k3-tp8-r{n}-q1", "waits_that_ran_out_count": 0, "stock_launches": ["a"] * 22}
        for side, us in (("fused", 90.0 + n), ("stock", 150.0 + n)):
            details |= {f"{side}_us": us, f"{side}_low_us": us - 1, f"{side}_high_us": us + 1}
        whole = {name: now[name] for name in ("kernels", "contracts", "config", "toolchain")}
        records.append(evidence("published.kernel_layers", details["case"], whole, {**details, **(layer or {})}))
    run = Run(
        id=RUN_ID, started_utc=environment.utc_now(), argv=(), commit="c", dirty=False, profile="gpu", config={"digests": now},
        hardware=hardware or {"gpu": "NVIDIA H200", "torch": "2.11"}, versions={},
    )  # fmt: skip
    store = EvidenceStore.create(root, run, {"cases": [], "absent_lanes": []}, durable=False)
    for record in records:
        store.append(record)
    store.close(environment.utc_now())
    return read_published(root)


def test_a_speed_is_shown_with_its_correctness(tmp_path: Path) -> None:
    found = publish(tmp_path)
    assert [(r.cell.backend, r.outcome, r.step_us) for r in found.results] == [(OURS, "measured", 91.0), (STOCK, "measured", 151.0)]
    ours = found.results[0]
    assert len(ours.correctness.split(", ")) == len({kernel for _, kernel in kernels_of_layer(8, 1, 1)})
    assert ours.evidence.startswith("E-")
    assert ours.tokens_per_s is None  # a layer is no step
    assert 0 < (ours.fraction_of_floor or 0) < 1
    assert found.gpu == "H200"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"errors": {"x": {"kernel": 0.5, "reference": 0.002}}}, "fails in E-"),
        ({"errors": {"x": {"kernel": float("nan"), "reference": 0.002}}}, "fails in E-"),
        ({"errors": {}}, "no passing record"),
        ({"spoil": "kda"}, "no passing record under the timed digest of 1 kernel(s): kda["),
        ({"checked_rows": (64,)}, "no passing record"),
        ({"layer": {"waits_that_ran_out_count": 1}}, "waits that ran out"),
    ],
)
def test_a_speed_without_it_is_not(tmp_path: Path, changes: dict, words: str) -> None:
    found = publish(tmp_path, **changes)
    assert {r.outcome for r in found.results} == {"unpublishable"}
    assert all(r.step_us is r.step_low_us is r.fraction_of_floor is None for r in found.results)
    assert any(words in reason for reason in found.results[0].reasons), found.results[0].reasons
    assert found.gpu is None
    assert found.points[OURS] == ()


def test_an_unknown_gpu_is_a_recorded_outcome(tmp_path: Path) -> None:
    found = publish(tmp_path, hardware={"gpu": "Unheard Of 9000"})
    assert [r.outcome for r in found.results] == ["error"]
    assert "Unheard Of" in found.results[0].reasons[0]


def test_nothing_published_is_nothing_shown(tmp_path: Path) -> None:
    assert read_published(tmp_path) == PublishedCells(results=(), launches=(), points={OURS: (), STOCK: ()}, gpu=None)


def test_whatever_this_checkout_publishes_keeps_the_rule() -> None:
    found = read_published()
    for result in found.results:
        if result.step_us is None:
            assert result.reasons
        else:
            assert result.evidence
            assert result.correctness or result.cell.backend == STOCK
            assert not result.reasons


def test_errors_are_judged_and_flags_are_not_believed() -> None:
    assert passes({"errors": GOOD}, 1.5)
    assert not passes({"errors": {"x": {"kernel": 0.0031, "reference": 0.002}}, "holds": True}, 1.5)
    assert not passes({"errors": GOOD, "broken": ["an output was not written"]}, 1.5)
    assert not passes({"holds": True}, 1.5)


def test_the_fit_recovers_what_layers_were_made_with() -> None:
    h200 = gpu("H200")
    points = [
        LayerPoint(hbm_bytes=size, launches=13, step_us=1e6 * size / h200.hbm_bytes_per_s / 0.6 + 13 * 2.0, rows=n, evidence=f"E-{n}")
        for n, size in enumerate((5e7, 1e8, 2e8, 4e8), start=1)
    ]
    fitted = fit_assumptions(points, h200, OURS)
    assert fitted.fraction_of_floor == pytest.approx(0.6)
    assert fitted.launch_us == pytest.approx(2.0)
    assert fitted.fit_error < 1e-9
    assert fitted.evidence == ("E-1", "E-2", "E-3", "E-4")
    with pytest.raises(HarnessError, match="at least 3"):
        fit_assumptions(points[:2], h200, OURS)


def planted_layers(costs: tuple[float, float, float, float]) -> list[LayerPoint]:
    """Layers of both shares made from (slowness of experts, slowness of the rest, us a launch, us a launch and row)."""
    experts, others, launch_us, row_us = costs
    made = []
    for tp in (8, 16):
        for rows in (1, 4, 16, 64):
            launches = step_traffic("kimi-k3", tp, rows, 1, 0, Scope.LAYER)
            of_experts, size = expert_bytes(launches), sum(t.hbm_bytes for t in launches)
            us = 1e6 * (experts * of_experts + others * (size - of_experts)) / gpu("H200").hbm_bytes_per_s
            us += 13 * (launch_us + rows * row_us)
            made.append(LayerPoint(hbm_bytes=size, launches=13, step_us=us, rows=rows, evidence=f"E-{tp}-{rows}", traffic=launches))
    return made


def test_experts_other_bytes_launches_and_rows_are_told_apart() -> None:
    fitted = fit_assumptions(planted_layers((3.5, 1.25, 4.0, 0.05)), gpu("H200"), STOCK)
    assert (1 / fitted.fraction_of_experts, 1 / fitted.fraction_of_floor) == pytest.approx((3.5, 1.25), rel=1e-4)
    assert (fitted.launch_us, fitted.row_us) == pytest.approx((4.0, 0.05), rel=1e-3)
    assert fitted.fit_error < 1e-4


def test_no_fit_says_that_bytes_move_faster_than_the_memory() -> None:
    fitted = fit_assumptions(planted_layers((1.3, 0.4, 4.0, 0.05)), gpu("H200"), OURS)
    assert fitted.fraction_of_floor <= 1 + 1e-9
    assert fitted.fraction_of_experts <= 1 + 1e-9
    assert fitted.fit_error > 0.005  # which is told
    with pytest.raises(HarnessError, match="move the same bytes"):
        fit_assumptions([p for p in planted_layers((1.3, 1.2, 4.0, 0.0)) if p.rows == 1][:1] * 3, gpu("H200"), OURS)


def test_a_projected_layer_of_the_measured_gpu_is_the_fitted_one() -> None:
    points = planted_layers((3.5, 1.25, 4.0, 0.05))
    fitted = fit_assumptions(points, gpu("H200"), STOCK)
    cell = Cell(
        model="kimi-k3", gpu="H200", tp=8, requests=4, q=1, context_tokens=0, acceptance_length=1.0, backend=STOCK, scope=Scope.LAYER
    )
    assert project(cell, fitted).alone_us == pytest.approx(points[1].step_us, rel=1e-3)
    whole = replace(cell, scope=Scope.STEP)
    assert launches_of(whole, fitted) == 13 * 93 + 6 * 24 - 11 + 4
    assert launches_of(replace(whole, backend=OURS), fitted) == len(step_traffic("kimi-k3", 8, 4, 1, 0))


# ---- workloads of the nano engine that are published ----
def workload_record(**changes) -> dict:
    side = {"decode_alone_tokens_per_s": 10.0, "end_to_end_tokens_per_s": 1.0}
    row = {
        "users": 2, "prompt_tokens": 32768, "decoded_tokens": 68, "sides": {"stock": side, "candidate": side}, "reasons": [], "pairs": 3,
        "worst_error": 0.3, "speed_up": 0.9, "speed_up_low": 0.8, "speed_up_high": 1.0, "decode_speed_up": 0.7, "decode_speed_up_low": 0.6,
        "decode_speed_up_high": 0.8, **changes,
    }  # fmt: skip
    row = {name: value for name, value in row.items() if not (row["reasons"] and "speed_up" in name)}
    conditions = {"hardware": "CPU", "date": "2026-11-30", "versions": {"torch": "2"}}
    return workloads.record({"source": "cpu_engine", "candidate": "specialized", "conditions": conditions, "mixed_prefill": row})


def publish_workload(tmp_path: Path, record: dict, known: dict[str, str]) -> tuple[dict, ...]:
    raw, root = tmp_path / "raw", tmp_path / "published"
    raw.mkdir()
    (raw / "digests.json").write_text(json.dumps(known))
    (raw / "cpu_workloads.jsonl").write_text(json.dumps(record) + "\n")
    import_raw(raw, root, "python -m perf workload OUT")
    return published_workloads(read_store(root))


def test_a_long_workload_is_shown_with_its_record(tmp_path: Path) -> None:
    (found,) = publish_workload(tmp_path, workload_record(), digests.current())
    row = workload_table(found)["rows"][1]
    assert row[2] == "10"
    assert row[5] == "0.90 (0.80–1.00) end to end; 0.70 (0.60–0.80) decode alone"
    assert row[-1].startswith("E-")
    assert published_workloads(read_store(tmp_path / "nothing")) == ()


def test_a_stale_long_workload_shows_its_reason_and_no_number(tmp_path: Path) -> None:
    (found,) = publish_workload(tmp_path, workload_record(), {**digests.current(), "contracts/kda": "0" * 64})
    row = workload_table(found)["rows"][1]
    assert row[2:5] == ["–"] * 3
    assert row[5] == "–"
    assert "stale: contracts/kda changed" in row[7]


def test_a_long_workload_that_was_objected_to_is_an_error_record(tmp_path: Path) -> None:
    record = workload_record(reasons=["candidate: off by 9"], sides={})
    assert record["reasons"] == ["candidate: off by 9"]
    (found,) = publish_workload(tmp_path, record, digests.current())
    assert workload_table(found)["rows"][1][7] == "candidate: off by 9"


def test_stock_launches_are_read_and_no_fit_takes_them_for_ours(tmp_path: Path) -> None:
    table = [["conv", [3.0, 3.1, 2.9]], ["add", [2.0, 2.0, 2.0]]]
    known = digests.binding(["kda"])
    run = Run(
        id=RUN_ID, started_utc="2026-11-30T00:00:00Z", argv=(), commit="c", dirty=False, profile="gpu",
        config={"digests": digests.current()}, hardware={"gpu": "NVIDIA H200"}, versions={},
    )  # fmt: skip
    kept = EvidenceStore.create(tmp_path, run, {"cases": [], "absent_lanes": []}, durable=False)
    details = {"case": "k3-tp16-r1-stock", "launches_in_order": table}
    kept.append(evidence("published.kernel_profile", "k3-tp16-r1-stock", known, details))
    kept.append(evidence("published.kernel_profile", "k3-tp8-r1-stock", known, {"case": "k3-tp8-r1-stock", "error": "did not repeat"}))
    kept.close("2026-11-30T00:00:01Z")
    (found,) = read_published(tmp_path).launches
    assert (found.tp, found.rows, found.backend) == (16, 1, STOCK)
    assert found.launches == (("conv", (3.0, 3.1, 2.9)), ("add", (2.0, 2.0, 2.0)))
    assert launch_fits(replace(read_published(tmp_path), gpu="H200")) is None
