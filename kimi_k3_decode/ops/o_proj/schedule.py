"""How o_proj splits its sums, by row count."""

from __future__ import annotations

from kimi_k3_decode.ops.schedule import skinny_or_split

SPLIT_K = skinny_or_split("o_proj split-K", 4)
