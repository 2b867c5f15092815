"""Choices made by row count, as typed tables: every row range says its value and the evidence for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from kimi_k3_decode.ops.contract import ContractError

Value = TypeVar("Value")

MAX_ROWS = 64  # token rows of a specialised step: the bound of its scope
MIN_SPLIT_COLUMNS = 64


@dataclass(frozen=True, kw_only=True)
class Row(Generic[Value]):
    """For these row counts use `value`. `evidence` is the id of the record that chose it; empty means chosen without measurement."""

    rows: range
    value: Value
    evidence: str = ""


@dataclass(frozen=True)
class Schedule(Generic[Value]):
    """Covers 1..MAX_ROWS exactly once. Raises ContractError naming every empty range, gap, overlap and step other than 1."""

    decides: str
    table: tuple[Row[Value], ...]

    def __post_init__(self) -> None:
        reasons = []
        for row in self.table:
            if len(row.rows) == 0:
                reasons.append(f"{row.rows}: got an empty range, needs at least one row count; delete it")
            if row.rows.step != 1:
                reasons.append(f"{row.rows}: got step {row.rows.step}, needs 1")
        owners: dict[int, int] = {}
        for row in self.table:
            for count in row.rows:
                owners[count] = owners.get(count, 0) + 1
        reasons += _spans("overlap", [n for n, times in owners.items() if times > 1], "one range each")
        reasons += _spans("gap", [n for n in range(1, MAX_ROWS + 1) if n not in owners], "a range that covers them")
        reasons += _spans("out of scope", [n for n in owners if not 1 <= n <= MAX_ROWS], f"row counts in 1..{MAX_ROWS}")
        if reasons:
            raise ContractError(f"Schedule of {self.decides}", reasons)

    def at(self, rows: int) -> Value:
        for row in self.table:
            if rows in row.rows:
                return row.value
        raise ContractError(f"Schedule of {self.decides}", [f"rows: got {rows}, needs 1..{MAX_ROWS}; larger steps run stock"])


def _spans(what: str, counts: list[int], rule: str) -> list[str]:
    """One sentence for each run of consecutive row counts."""
    found, start = [], 0
    counts = sorted(counts)
    for i, count in enumerate(counts):
        if i + 1 == len(counts) or counts[i + 1] != count + 1:
            found.append(f"{what}: got row counts {counts[start]}..{count}, needs {rule}")
            start = i + 1
    return found


@dataclass(frozen=True, kw_only=True)
class SplitK:
    """Into how many partial sums a product's input columns are split, at most; narrow products are split less."""

    splits: int

    def of(self, columns: int) -> int:
        return max(1, min(self.splits, columns // MIN_SPLIT_COLUMNS))


def skinny_or_split(decides: str, splits: int) -> Schedule[SplitK]:
    """One sum at 1 and 2 rows, where a block streams whole weight rows; `splits` partial sums above."""
    return Schedule(decides, (Row(rows=range(1, 3), value=SplitK(splits=1)), Row(rows=range(3, MAX_ROWS + 1), value=SplitK(splits=splits))))
