"""Figures are drawn from records, name them, and stay self-contained; with nothing to draw there is no figure."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np

from reports import figures
from validation.core.types import Case, Evidence, Measurement, Outcome


def numerics_record(n: int) -> Evidence:
    positions = list(range(1000 * n, 1000 * n + 16))
    table = {
        "position": positions,
        "forced_stock_rms_nats": list(np.linspace(0.01, 0.02, 16)),
        "forced_candidate_rms_nats": [*np.linspace(0.01, 0.02, 15), None],
        "forced_stock_agrees": [True] * 16,
        "forced_candidate_agrees": [True] * 15 + [False],
        "oracle_margin_nats": list(np.linspace(0.1, 1, 16)),
    }
    return Evidence(
        id=f"E-{n:012x}", run="R", check="numerics.x", case=Case(subject="m"), outcome=Outcome.MEASURED, details={"per_token": table}
    )


def evals_record(suite: str, difference: float) -> Evidence:
    values = {"difference": difference, "difference_se_adjusted": 0.01, "lower_bound": difference - 0.02}
    measured = tuple(Measurement(name=k, value=v, unit="share") for k, v in values.items())
    case = Case(subject=suite)
    return Evidence(
        id="E-abc", run="R", check="evals.x", case=case, outcome=Outcome.MEASURED, measurements=measured, details={"margin": 0.03}
    )


def test_each_figure_names_its_records_and_is_valid_svg() -> None:
    drawn = [
        figures.error_against_position([numerics_record(1), numerics_record(32)]),
        figures.flips([numerics_record(1)]),
        figures.paired_differences([evals_record("gsm8k_nano", -0.01), evals_record("mrcr_nano", 0.0)]),
    ]
    for figure in drawn:
        assert figure is not None
        assert "E-" in figure.caption
        assert figure.png.startswith(b"\x89PNG")
        root = ET.fromstring(figure.svg_inline)
        identifiers = {e.get("id") for e in root.iter() if e.get("id")}
        links = {v[1:] for e in root.iter() for k, v in e.attrib.items() if k.endswith("href") and v.startswith("#")}
        assert links <= identifiers
        assert all(i.startswith(figure.name) for i in identifiers)
    assert "gsm8k_nano" in drawn[2].svg


def test_the_same_records_give_the_same_bytes() -> None:
    one, two = (figures.flips([numerics_record(1)]) for _ in range(2))
    assert one is not None
    assert two is not None
    assert one.svg == two.svg


def test_nothing_to_draw_is_no_figure() -> None:
    nothing = Evidence(id="E-1", run="R", check="numerics.x", case=Case(subject="m"), outcome=Outcome.ERROR)
    assert figures.error_against_position([nothing]) is None
    assert figures.flips([nothing]) is None
    assert figures.paired_differences([nothing, evals_record("x", float("nan"))]) is None
