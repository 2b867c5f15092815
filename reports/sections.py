"""The tables and figures of one lane, built from the details of its records.

Every lane may put `details["tables"] = [{"title", "columns", "rows", "note"?}]` in a record; they are shown as they are with the record's
id. Lanes with figures have a module of their own, found in `BUILDERS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reports.escape import is_number
from reports.view import Lane, format_value
from validation.core.types import Evidence


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @property
    def numeric(self) -> tuple[bool, ...]:
        """By column: whether every cell is a number, so that all of them stand to the right."""
        return tuple(bool(self.rows) and all(is_number(row[place]) for row in self.rows) for place in range(len(self.columns)))


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One picture, as SVG text and as PNG bytes; `caption` says what it shows and which records it was drawn from."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes

    @property
    def svg_inline(self) -> str:
        """The SVG element alone, with ids made unique so that several figures can share one page."""
        text = self.svg[self.svg.index("<svg") :]
        text = re.sub(r'\bid="', f'id="{self.name}-', text)
        text = re.sub(r"url\(#", f"url(#{self.name}-", text)
        return re.sub(r'(xlink:href|href)="#', rf'\1="#{self.name}-', text)


@dataclass(frozen=True, kw_only=True)
class Section:
    tables: tuple[Table, ...] = field(default_factory=tuple)
    figures: tuple[Figure, ...] = field(default_factory=tuple)


def text_of(item: Any) -> str:
    """A cell: numbers shortened, the rest as text."""
    if isinstance(item, bool) or item is None:
        return {True: "yes", False: "no", None: "–"}[item]
    return format_value(float(item)) if isinstance(item, int | float) else str(item)


def declared_tables(record: Evidence) -> list[Table]:
    """The tables a record declares; a malformed one is shown as such instead of being dropped."""
    declared = record.details.get("tables", ())
    made = []
    for table in declared if isinstance(declared, Sequence) and not isinstance(declared, str) else ():
        try:
            columns = tuple(str(c) for c in table["columns"])
            rows = tuple(tuple(text_of(item) for item in row) for row in table["rows"])
            if any(len(row) != len(columns) for row in rows):
                raise ValueError("rows and columns differ in length")
            note = f"{table.get('note', '')} Evidence {record.id}, {record.case.id}.".strip()
            made.append(Table(title=str(table["title"]), columns=columns, rows=rows, note=note))
        except (KeyError, TypeError, ValueError) as error:
            made.append(Table(title=f"Malformed table of {record.check}", columns=("problem", "evidence"), rows=((str(error), record.id),)))
    return made


def numerics(lane: Lane) -> Section:
    from reports import figures

    made = (figures.error_against_position(lane.records), figures.flips(lane.records))
    return Section(figures=tuple(figure for figure in made if figure is not None))


def evals(lane: Lane) -> Section:
    from reports import figures

    made = figures.paired_differences(lane.records)
    return Section(figures=(made,) if made is not None else ())


def perf(lane: Lane) -> Section:
    from reports import perf_figures

    return Section(figures=perf_figures.perf_figures(lane.records))


def ordering(lane: Lane) -> Section:
    from reports import ordering_section

    return Section(tables=tuple(table for record in lane.records for table in ordering_section.timelines(record)))


KILL_LANES = ("scope", "ordering", "numerics", "schedule", "evals", "perf")
KILL_SIGNS = {"killed": "X", "alive": "·"}


def mutants(lane: Lane) -> Section:
    """The kill table: X killed, · shown and let through, blank not run. Survivors come first."""
    rows = []
    for record in lane.records:
        values = {m.name: m.value for m in record.measurements}
        details = record.details
        if "named" not in details or not isinstance(details.get("lanes"), Mapping):
            continue
        if details.get("control"):
            state = "DEAD CONTROL" if values.get("breaches") else "alive, as it must be"
        elif values.get("killed_by_named"):
            state = str(details["named"])
        else:
            state = "SURVIVED" if not values.get("killed") else f"ONLY BY {', '.join(map(str, details.get('killed_by', ())))}"
        marks = [KILL_SIGNS.get(str(details["lanes"].get(name)), "") for name in KILL_LANES]
        rows.append((record.case.subject, str(details.get("fault", "")), *marks, state, format_value(record.seconds), record.id))
    rows.sort(key=lambda row: not row[-3].startswith(("SURVIVED", "DEAD", "ONLY")))
    if not rows:
        return Section()
    columns = ("mutant", "class", *KILL_LANES, "killed by", "s", "evidence")
    note = (
        "X: killed; ·: shown to this lane and let through; blank: not run there. Survivors and controls that died stand first, in capitals."
    )
    return Section(tables=(Table(title="Kill table", columns=columns, rows=tuple(rows), note=note),))


Builder = Callable[[Lane], Section]
BUILDERS: Mapping[str, Builder] = {"ordering": ordering, "numerics": numerics, "evals": evals, "perf": perf, "mutants": mutants}


def section_of(lane: Lane) -> Section:
    declared = tuple(table for record in lane.records for table in declared_tables(record))
    built = BUILDERS[lane.name](lane) if lane.name in BUILDERS else Section()
    return Section(tables=built.tables + declared, figures=built.figures)
