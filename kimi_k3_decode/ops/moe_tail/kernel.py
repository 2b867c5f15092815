"""latent_reduce: the latent's sum over ranks and its RMSNorm; moe_tail: up-projection rows plus the shared experts, published.

latent_reduce: one cluster a row. After the wait each thread polls its columns of every rank's slot, adds in rank order, rounds to BF16
once, re-arms the other parity, and the squares are summed over the cluster. moe_tail: device/skinny.py for this rank's rows; all other
columns of the partial are the shared experts' alone and are published beside it. Before the wait only weights are read.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.math import bf16_word_f32x2, bits_f32, pack_bf16, round_bf16, rsqrt, select
from kimi_k3_decode.device.row import RowCluster
from kimi_k3_decode.device.skinny import Skinny, Tiling
from kimi_k3_decode.device.sync import grid_release, grid_wait, poll_many, publish_f32x2, publish_f32x4, rearm_b128


class LatentReduce:
    """Fixed: ranks, latent size, eps."""

    def __init__(self, ranks: int, latent: int, eps: float) -> None:
        self.ranks, self.latent, self.eps = ranks, latent, eps
        self.row = RowCluster(latent)

    @cute.jit
    def __call__(
        self,
        latent_RTL: cute.Pointer,
        other_RTL: cute.Pointer,
        norm_L: cute.Pointer,
        latent_normed_TL: cute.Pointer,
        health_N: cute.Pointer,
        rows: Int32,
        pdl: Int32,
        stream: Any,
    ):
        self.kernel(latent_RTL, other_RTL, norm_L, latent_normed_TL, health_N, rows).launch(**self.row.launch_options(rows, pdl, stream))

    @cute.kernel
    def kernel(
        self,
        latent_RTL: cute.Pointer,
        other_RTL: cute.Pointer,
        norm_L: cute.Pointer,
        latent_normed_TL: cute.Pointer,
        health_N: cute.Pointer,
        rows: Int32,
    ):
        box = mem.Global("latent_RTL", latent_RTL, "mailbox")
        other = mem.Global("other_RTL", other_RTL, "mailbox")
        norm = mem.Global("norm_L", norm_L, "weight")
        normed = mem.Global("latent_normed_TL", latent_normed_TL, "output")
        health = mem.Global("health_N", health_N, "mailbox")
        row, column, active = self.row.start()
        scale = [value for word in mem.load_weight_early_b64(norm, column) for value in bf16_word_f32x2(word)]
        grid_wait()
        grid_release()
        total = sum_slots(box, other, health, self.ranks, rows * self.latent, row * self.latent + column)
        values = [round_bf16(value) for value in total]
        squares = values[0] * values[0] + values[1] * values[1] + values[2] * values[2] + values[3] * values[3]
        (mean,) = self.row.sum([select(active, squares, Float32(0.0))], 0)
        factor = rsqrt(mean * Float32(1.0 / self.latent) + Float32(self.eps))
        if active:
            out = [value * factor * weight for value, weight in zip(values, scale, strict=True)]
            mem.store_b64(normed, row * self.latent + column, (pack_bf16(out[0], out[1]), pack_bf16(out[2], out[3])))


def sum_slots(box: Any, other: Any, health: Any, ranks: int, stride: Any, offset: Any) -> list[Float32]:
    """Four columns summed over the slots of all ranks, in rank order; the same places of the other parity are re-armed."""
    places = [rank * stride + offset for rank in range(ranks)]
    words = poll_many(box, places, health)
    total = [bits_f32(word) for word in words[:4]]
    for rank in range(1, ranks):
        total = [total[i] + bits_f32(words[4 * rank + i]) for i in range(4)]
    for place in places:
        rearm_b128(other, place)
    return total


class MoeTail:
    """Fixed: the tiling, this rank's up-projection rows and the hidden size."""

    def __init__(self, tiling: Tiling, up_rows: int, hidden: int) -> None:
        self.core = Skinny(tiling)
        if up_rows % 4:
            raise ValueError(f"MoeTail up_rows: got {up_rows}, needs a multiple of 4")
        self.up_rows, self.hidden = up_rows, hidden
        self.n_tiles = -(-up_rows // (tiling.tile_m * tiling.m_tiles))

    def grid(self, processors: int) -> int:
        """Blocks to launch. With many tokens most bytes are the columns published for the shared experts alone, so every processor gets a
        block, also where the product has no tile for it."""
        t = self.core.t
        blocks = self.core.grid(self.n_tiles, processors)
        return max(blocks, processors // t.splits * t.splits) if t.row_tile > 8 else blocks

    @cute.jit
    def __call__(
        self,
        latent_normed_TL: cute.Pointer,
        shared_TD: cute.Pointer,
        latent_up_DL: cute.Pointer,
        boxes: tuple,
        rank: Int32,
        rows: Int32,
        blocks: Int32,
        pdl: Int32,
        stream: Any,
    ):
        self.kernel(latent_normed_TL, shared_TD, latent_up_DL, boxes, rank, rows).launch(**self.core.launch_options(blocks, pdl, stream))

    @cute.kernel
    def kernel(
        self, latent_normed_TL: cute.Pointer, shared_TD: cute.Pointer, latent_up_DL: cute.Pointer, boxes: tuple, rank: Int32, rows: Int32
    ):
        latent = mem.Global("latent_normed_TL", latent_normed_TL, "input")
        shared = mem.Global("shared_TD", shared_TD, "input")
        weight = mem.Global("latent_up_DL", latent_up_DL, "weight")
        delta = [mem.Global("delta_RTD", box, "mailbox") for box in boxes]
        t = self.core.t
        slot = rank * rows * self.hidden

        def source(tile, m):
            return weight, (tile * t.m_tiles + m) * t.tile_m, Int32(self.up_rows - 1)

        @cute.jit
        def finish(tile, row, token, values):
            for m in cutlass.range_constexpr(t.m_tiles):
                own = (tile * t.m_tiles + m) * t.tile_m + row
                if own < self.up_rows:
                    column = token * self.hidden + rank * self.up_rows + own
                    a, b = mem.load_f32x2(shared, column)
                    publish_f32x2(delta, slot + column, values[m][0] + a, values[m][1] + b)

        @cute.jit
        def others():
            block, _, _ = cute.arch.block_idx()
            blocks, _, _ = cute.arch.grid_dim()
            rest = (self.hidden - self.up_rows) // 4
            for i in cutlass.range(block * t.threads + self.core.tid, rows * rest, blocks * t.threads):
                token = i // rest
                column = i % rest * 4
                if column >= rank * self.up_rows:
                    column = column + self.up_rows
                at = token * self.hidden + column
                publish_f32x4(delta, slot + at, mem.load_f32x4(shared, at))

        self.core.run(latent, rows, self.n_tiles, source, finish, others if self.hidden > self.up_rows else None)
