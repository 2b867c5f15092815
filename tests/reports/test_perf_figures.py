"""The speed figures: drawn from a record's data, labelled as what they are, absent where there is nothing to draw."""

from __future__ import annotations

from reports.perf_figures import perf_figures
from validation.core.types import Case, Evidence, Outcome

OURS, AUTO = "latency_specialized", "auto"


def record(perf: dict) -> Evidence:
    return Evidence(
        id="E-0123456789ab", run="R", check="perf.matrix", case=Case(subject="k3"), outcome=Outcome.MEASURED, details={"perf": perf}
    )


def data() -> dict:
    layers = [
        {"tp": 8, "rows": rows, "q": 1, "backend": backend, "gpu": "H200", "us": us * rows, "low_us": us, "high_us": us, "floor_us": 40.0,
         "evidence": f"E-{backend}", "launches": n, "conditions": "one H200, batch 1, 2026-11-01"}
        for backend, us, n in ((AUTO, 150.0, 22), (OURS, 75.0, 13))
        for rows in (1, 8)
    ]  # fmt: skip
    steps = [
        {"gpu": "GB300", "tp": 16, "requests": requests, "q": q, "rows": requests * q, "al": al, "backend": backend,
         "user": 50.0 / requests**0.5, "total": 50.0 * requests**0.5, "speed_up": 1.5 if backend == OURS else None, "source": "projection"}
        for requests in (1, 8)
        for q, al in ((1, 1.0), (8, 4.0), (8, 6.0))
        for backend in (AUTO, OURS)
    ]  # fmt: skip
    launches = [{"tp": 8, "rows": 1, "gpu": "H200", "evidence": "E-profile", "launches": [["in_proj", 20.0], ["kda", 7.0]]}]
    basis = {OURS: {"evidence": ["E-basis"], "measured_on": "H200"}}
    return {"layers": layers, "steps": steps, "launches": launches, "basis": basis, "context_tokens": 8192}


def test_every_figure_is_there_with_its_label_and_evidence() -> None:
    found = {figure.name: figure for figure in perf_figures([record(data())])}
    assert set(found) == {"perf-speed-up-GB300-tp16", "perf-pareto-GB300-tp16", "perf-layer-tp8-r1", "perf-fraction-of-floor"}
    for name, figure in found.items():
        assert figure.png.startswith(b"\x89PNG")
        assert ("PROJECTED" in figure.svg) == ("GB300" in name)
        assert ("not a measurement" in figure.caption) == ("GB300" in name)
        assert "E-0123456789ab" in figure.caption
    assert "E-basis" in found["perf-speed-up-GB300-tp16"].caption
    assert "1.50" in found["perf-speed-up-GB300-tp16"].svg
    layer = found["perf-layer-tp8-r1"]
    assert "22 launches" in layer.svg
    assert "2.00x" in layer.svg
    assert "one H200, batch 1, 2026-11-01" in layer.caption  # a multiplier with its conditions


def test_stock_is_drawn_launch_by_launch_above_ours_where_it_was_timed_so() -> None:
    name = "a_kernel_of_a_library_with_a_very_long_name"
    stock = {"tp": 8, "rows": 1, "gpu": "H200", "backend": AUTO, "evidence": "E-stock", "launches": [["conv", 30.0], [name, 110.0]]}
    given = data()
    given["launches"].append(stock)
    (figure,) = [figure for figure in perf_figures([record(given)]) if figure.name.startswith("perf-layer")]
    assert "E-stock" in figure.caption
    assert "timed together only" not in figure.caption
    for words in ("conv", name[:28], "140.0 us alone", "27.0 us alone"):
        assert words in figure.svg
    assert name not in figure.svg
    (before,) = [figure for figure in perf_figures([record(data())]) if figure.name.startswith("perf-layer")]
    assert "timed together only" in before.caption


def test_nothing_to_draw_is_no_figure() -> None:
    assert perf_figures([]) == ()
    assert perf_figures([record({})]) == ()
    only_ours = {**data(), "layers": [e for e in data()["layers"] if e["backend"] == OURS], "steps": []}
    assert [figure.name for figure in perf_figures([record(only_ours)])] == ["perf-fraction-of-floor"]


def test_a_figure_repeats_bit_for_bit() -> None:
    one, two = (perf_figures([record(data())]) for _ in range(2))
    assert [figure.svg for figure in one] == [figure.svg for figure in two]
