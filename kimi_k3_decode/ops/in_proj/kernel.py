"""in_proj: proj[T, P] = x[T, D] weight[P, D]^T, BF16 in and out, FP32 sums.

Grid: clusters of `splits` blocks over 16-row tiles of the weight (device/skinny.py).
Before the wait: the ring of weights is filled. After: x is staged, products run, one rounding at the store.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.math import pack_bf16
from kimi_k3_decode.device.skinny import Skinny, Tiling


class InProj:
    """Fixed: the tiling and the weight's rows P."""

    def __init__(self, tiling: Tiling, weight_rows: int) -> None:
        self.core = Skinny(tiling)
        self.weight_rows = weight_rows
        self.n_tiles = -(-weight_rows // (tiling.tile_m * tiling.m_tiles))

    @cute.jit
    def __call__(
        self, x_TD: cute.Pointer, weight_PD: cute.Pointer, proj_TP: cute.Pointer, rows: Int32, blocks: Int32, pdl: Int32, stream: Any
    ):
        self.kernel(x_TD, weight_PD, proj_TP, rows).launch(**self.core.launch_options(blocks, pdl, stream))

    @cute.kernel
    def kernel(self, x_TD: cute.Pointer, weight_PD: cute.Pointer, proj_TP: cute.Pointer, rows: Int32):
        x = mem.Global("x_TD", x_TD, "input")
        weight = mem.Global("weight_PD", weight_PD, "weight")
        proj = mem.Global("proj_TP", proj_TP, "output")
        t, width = self.core.t, self.weight_rows

        def source(tile, m):
            return weight, (tile * t.m_tiles + m) * t.tile_m, Int32(width - 1)

        @cute.jit
        def finish(tile, row, token, values):
            for m in cutlass.range_constexpr(t.m_tiles):
                column = (tile * t.m_tiles + m) * t.tile_m + row
                if column < width:
                    mem.store_b32(proj, token * width + column, pack_bf16(*values[m]))

        self.core.run(x, rows, self.n_tiles, source, finish, None)
