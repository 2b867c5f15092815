"""shared_up, dense_up: SiTU of a fused gate|up product; shared_down: this rank's FP32 partial of the down product.

up: hidden[T, I] = SiTU(x gate^T, x up^T); a tile pairs 16 gate rows with the 16 up rows of the same columns, so the activation is applied
where the sums end. down: shared[T, D] = hidden[T, I] down[D, I]^T in FP32.
Grid, waits and sums: device/skinny.py. Before the wait only weights are read. Rounding: up rounds once, after the activation; down never.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.math import pack_bf16, situ
from kimi_k3_decode.device.skinny import Skinny, Tiling


class GatedUp:
    """Fixed: a tiling with two m-tiles (gate, up), the intermediate size I and the activation's two betas."""

    def __init__(self, tiling: Tiling, inner: int, beta: float, linear_beta: float) -> None:
        if tiling.m_tiles != 2:
            raise ValueError(f"GatedUp tiling: got {tiling.m_tiles} m-tiles, needs 2 (gate and up)")
        self.core = Skinny(tiling)
        self.inner, self.beta, self.linear_beta = inner, beta, linear_beta
        self.n_tiles = -(-inner // tiling.tile_m)

    @cute.jit
    def __call__(
        self, x_TD: cute.Pointer, gate_up_ID: cute.Pointer, hidden_TI: cute.Pointer, rows: Int32, blocks: Int32, pdl: Int32, stream: Any
    ):
        self.kernel(x_TD, gate_up_ID, hidden_TI, rows).launch(**self.core.launch_options(blocks, pdl, stream))

    @cute.kernel
    def kernel(self, x_TD: cute.Pointer, gate_up_ID: cute.Pointer, hidden_TI: cute.Pointer, rows: Int32):
        x = mem.Global("x_TD", x_TD, "input")
        weight = mem.Global("gate_up_ID", gate_up_ID, "weight")
        hidden = mem.Global("hidden_TI", hidden_TI, "output")
        t, inner = self.core.t, self.inner

        def source(tile, m):
            return weight, tile * t.tile_m + m * inner, Int32((m + 1) * inner - 1)

        @cute.jit
        def finish(tile, row, token, values):
            column = tile * t.tile_m + row
            if column < inner:
                (gate_a, gate_b), (up_a, up_b) = values
                a = situ(gate_a, up_a, self.beta, self.linear_beta)
                b = situ(gate_b, up_b, self.beta, self.linear_beta)
                mem.store_b32(hidden, token * inner + column, pack_bf16(a, b))

        self.core.run(x, rows, self.n_tiles, source, finish, None)


class Down:
    """Fixed: the tiling and the weight's rows D."""

    def __init__(self, tiling: Tiling, weight_rows: int) -> None:
        self.core = Skinny(tiling)
        self.weight_rows = weight_rows
        self.n_tiles = -(-weight_rows // (tiling.tile_m * tiling.m_tiles))

    @cute.jit
    def __call__(
        self, hidden_TI: cute.Pointer, down_DI: cute.Pointer, shared_TD: cute.Pointer, rows: Int32, blocks: Int32, pdl: Int32, stream: Any
    ):
        self.kernel(hidden_TI, down_DI, shared_TD, rows).launch(**self.core.launch_options(blocks, pdl, stream))

    @cute.kernel
    def kernel(self, hidden_TI: cute.Pointer, down_DI: cute.Pointer, shared_TD: cute.Pointer, rows: Int32):
        hidden = mem.Global("hidden_TI", hidden_TI, "input")
        weight = mem.Global("down_DI", down_DI, "weight")
        shared = mem.Global("shared_TD", shared_TD, "output")
        t, width = self.core.t, self.weight_rows

        def source(tile, m):
            return weight, (tile * t.m_tiles + m) * t.tile_m, Int32(width - 1)

        @cute.jit
        def finish(tile, row, token, values):
            for m in cutlass.range_constexpr(t.m_tiles):
                column = (tile * t.m_tiles + m) * t.tile_m + row
                if column < width:
                    mem.store_f32x2(shared, token * width + column, *values[m])

        self.core.run(hidden, rows, self.n_tiles, source, finish, None)
