"""How moe_front splits its sums, by row count."""

from __future__ import annotations

from kimi_k3_decode.ops.schedule import skinny_or_split

SPLIT_K = skinny_or_split("moe_front split-K", 4)
