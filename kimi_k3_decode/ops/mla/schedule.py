"""How the MLA decode splits the context, by row count: few rows need many splits to fill the machine."""

from __future__ import annotations

from kimi_k3_decode.ops.schedule import MAX_ROWS, Row, Schedule

CONTEXT_SPLITS: Schedule[int] = Schedule(
    "mla_decode context splits",
    (Row(rows=range(1, 9), value=16), Row(rows=range(9, 33), value=4), Row(rows=range(33, MAX_ROWS + 1), value=2)),
)
