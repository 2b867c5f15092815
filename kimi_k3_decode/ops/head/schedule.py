"""How head splits its sums, by row count."""

from __future__ import annotations

from kimi_k3_decode.ops.schedule import skinny_or_split

SPLIT_K = skinny_or_split("head split-K", 4)
