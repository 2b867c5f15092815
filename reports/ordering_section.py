"""The ordering lane's part of a report: what each offending kernel touches before and after its wait, and one clean kernel beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reports.sections import Table
from validation.core.types import Evidence

COLUMNS = ("pc", "before the wait", "wait", "after", "memory (role)", "breaks")
WAITS = ("wait", "release", "fence")
EARLY = ("before", "no wait")


def timelines(record: Evidence) -> list[Table]:
    """One table a kernel that the record found something in, then its example of a clean one."""
    broken = record.details.get("timelines", ())
    made = [_table(record, entry, "Timeline") for entry in broken if isinstance(entry, Mapping)]
    example = record.details.get("timeline_example")
    if isinstance(example, Mapping):
        made.append(_table(record, example, "Timeline of a kernel without a finding"))
    return made


def _table(record: Evidence, entry: Mapping[str, Any], title: str) -> Table:
    left_out = int(entry.get("left_out", 0))
    kept = f" {left_out} rows that break nothing are left out." if left_out else ""
    return Table(
        title=f"{title}: {entry.get('kernel', '?')}, {entry.get('arch', '?')}",
        columns=COLUMNS,
        rows=tuple(_row(row) for row in entry.get("rows", ()) if isinstance(row, Mapping)),
        note=f"In program order; a row stands left when some path reaches it before the grid wait.{kept} Evidence {record.id}.",
    )


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    text, zone = str(row.get("text", "")), str(row.get("zone", ""))
    text = text.partition("*/")[2].strip() or text  # the program counter has a column of its own
    if zone in ("release", "fence"):
        text = f"{zone}: {text}"
    cells = (text if zone in EARLY else "", text if zone in WAITS else "", text if zone not in (*EARLY, *WAITS) else "")
    return (f"{int(row.get('pc', 0)):#06x}", *cells, str(row.get("bases", "")), ", ".join(map(str, row.get("rules", ()))))
