"""o_proj and dense_down: this rank's FP32 partial of a row-parallel product, published in slot `rank` of every rank's box.

Computes delta[rank, T, D] = a[T, C] weight[D, C]^T. Grid: clusters of `splits` blocks over tiles of 16 weight rows (device/skinny.py).
Before the wait: weights only. After: a is staged. Stores are relaxed at system scope; an element is its own flag.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.skinny import Skinny, Tiling
from kimi_k3_decode.device.sync import publish_f32x2


class PublishedProduct:
    """Fixed: the tiling and the weight's rows D. `boxes` holds one pointer a destination rank."""

    def __init__(self, tiling: Tiling, weight_rows: int) -> None:
        self.core = Skinny(tiling)
        self.weight_rows = weight_rows
        self.n_tiles = -(-weight_rows // (tiling.tile_m * tiling.m_tiles))

    @cute.jit
    def __call__(
        self,
        a_TC: cute.Pointer,
        weight_DC: cute.Pointer,
        boxes: tuple,
        rank: Int32,
        rows: Int32,
        blocks: Int32,
        pdl: Int32,
        stream: Any,
    ):
        self.kernel(a_TC, weight_DC, boxes, rank, rows).launch(**self.core.launch_options(blocks, pdl, stream))

    @cute.kernel
    def kernel(self, a_TC: cute.Pointer, weight_DC: cute.Pointer, boxes: tuple, rank: Int32, rows: Int32):
        a = mem.Global("a_TC", a_TC, "input")
        weight = mem.Global("weight_DC", weight_DC, "weight")
        delta = [mem.Global("delta_RTD", box, "mailbox") for box in boxes]
        t, width = self.core.t, self.weight_rows

        def source(tile, m):
            return weight, (tile * t.m_tiles + m) * t.tile_m, Int32(width - 1)

        @cute.jit
        def finish(tile, row, token, values):
            for m in cutlass.range_constexpr(t.m_tiles):
                column = (tile * t.m_tiles + m) * t.tile_m + row
                if column < width:
                    publish_f32x2(delta, (rank * rows + token) * width + column, *values[m])

        self.core.run(a, rows, self.n_tiles, source, finish, None)
