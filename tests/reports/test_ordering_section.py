"""Timelines of kernels in a report: which column a row stands in, what marks it, and the example without a finding."""

from __future__ import annotations

from reports.ordering_section import COLUMNS
from reports.sections import section_of
from reports.view import Lane
from validation.core.types import Case, Evidence, Measurement, Outcome
from validation.ordering.findings import TimelineRow, excerpt

ROWS = [
    {"pc": 0x20, "zone": "before", "text": "/*0020*/ LDG.E R1,[R2]", "bases": "x_TD (input)", "rules": ["MO001"]},
    {"pc": 0x40, "zone": "wait", "text": "/*0040*/ ACQBULK", "bases": "", "rules": []},
    {"pc": 0x50, "zone": "release", "text": "/*0050*/ PREEXIT", "bases": "", "rules": []},
    {"pc": 0x60, "zone": "after", "text": "/*0060*/ STG.E [R4],R1", "bases": "y_TD (output)", "rules": []},
]


def record(**details) -> Evidence:
    measured = (Measurement(name="findings", value=1.0, unit="count"),)
    return Evidence(
        id="E-1", run="R", check="ordering.kernels", case=Case(subject="kernels"), outcome=Outcome.MEASURED, measurements=measured,
        details=details,
    )  # fmt: skip


def tables(*records: Evidence):
    return section_of(Lane(name="ordering", claims=(), groups=(), open_findings=(), outcomes={}, records=records)).tables


def test_rows_stand_before_at_or_after_the_wait_and_name_the_rule():
    example = {"kernel": "clean", "arch": "sm_90a", "left_out": 0, "rows": ROWS[1:]}
    broken, clean = tables(record(timelines=[{"kernel": "k", "arch": "sm_90a", "left_out": 7, "rows": ROWS}], timeline_example=example))
    assert broken.columns == COLUMNS
    assert broken.rows == (
        ("0x0020", "LDG.E R1,[R2]", "", "", "x_TD (input)", "MO001"),
        ("0x0040", "", "ACQBULK", "", "", ""),
        ("0x0050", "", "release: PREEXIT", "", "", ""),
        ("0x0060", "", "", "STG.E [R4],R1", "y_TD (output)", ""),
    )
    assert "7 rows" in broken.note
    assert "E-1" in broken.note
    assert "without a finding" in clean.title
    assert not any(row[-1] for row in clean.rows)


def test_records_without_timelines_add_nothing():
    assert tables(record(), record(timelines=[], timeline_example=None)) == ()


def test_an_excerpt_keeps_what_breaks_a_rule_and_the_waits():
    rows = tuple(
        TimelineRow(pc=16 * n, zone="wait" if n == 5 else "after", text="x", rules=("MO001",) if n == 90 else ()) for n in range(100)
    )
    kept = excerpt(rows, 10)
    assert len(kept) == 10
    assert {5, 89, 90, 91} <= {row.pc // 16 for row in kept}
    assert [row.pc for row in kept] == sorted(row.pc for row in kept)
    assert excerpt(rows[:8], 10) == rows[:8]
