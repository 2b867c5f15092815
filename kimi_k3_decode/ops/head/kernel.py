"""lm_head: FP32 logits of this rank's vocabulary rows, published as a column block; sample: logits copied out and the largest per row.

lm_head: grid, waits and sums as in device/skinny.py; before the wait only weights are read.
sample: one block a row. After the wait it polls its row of the box, re-arms the other parity, copies the row out and takes
the maximum `top_k` times; ties go to the lower id. No rounding.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.math import bits_f32, select, shuffle_xor
from kimi_k3_decode.device.skinny import Skinny, Tiling
from kimi_k3_decode.device.sync import block_sync, grid_release, grid_wait, poll_b128, publish_f32x2, rearm_b128

THREADS = 512
LOWEST = -3.4028234663852886e38


class LmHead:
    """Fixed: the tiling, this rank's vocabulary rows and the whole vocabulary."""

    def __init__(self, tiling: Tiling, vocab_rows: int, vocab: int) -> None:
        self.core = Skinny(tiling)
        self.vocab_rows, self.vocab = vocab_rows, vocab
        self.n_tiles = -(-vocab_rows // (tiling.tile_m * tiling.m_tiles))

    @cute.jit
    def __call__(
        self, x_TD: cute.Pointer, lm_head_VD: cute.Pointer, boxes: tuple, rank: Int32, rows: Int32, blocks: Int32, pdl: Int32, stream: Any
    ):
        self.kernel(x_TD, lm_head_VD, boxes, rank, rows).launch(**self.core.launch_options(blocks, pdl, stream))

    @cute.kernel
    def kernel(self, x_TD: cute.Pointer, lm_head_VD: cute.Pointer, boxes: tuple, rank: Int32, rows: Int32):
        x = mem.Global("x_TD", x_TD, "input")
        weight = mem.Global("lm_head_VD", lm_head_VD, "weight")
        logits = [mem.Global("logits_box_TV", box, "mailbox") for box in boxes]
        t = self.core.t

        def source(tile, m):
            return weight, (tile * t.m_tiles + m) * t.tile_m, Int32(self.vocab_rows - 1)

        @cute.jit
        def finish(tile, row, token, values):
            for m in cutlass.range_constexpr(t.m_tiles):
                column = (tile * t.m_tiles + m) * t.tile_m + row
                if column < self.vocab_rows:
                    publish_f32x2(logits, token * self.vocab + rank * self.vocab_rows + column, *values[m])

        self.core.run(x, rows, self.n_tiles, source, finish, None)


class Sample:
    """Fixed: vocabulary (a multiple of 4) and top_k. Each round takes the largest (logit, -id) below the one taken before."""

    def __init__(self, vocab: int, top_k: int) -> None:
        self.vocab, self.top_k = vocab, top_k
        self.shared_bytes = (THREADS // 32) * 8

    @cute.jit
    def __call__(
        self,
        logits_box_TV: cute.Pointer,
        other_box_TV: cute.Pointer,
        logits_TV: cute.Pointer,
        top_ids_TZ: cute.Pointer,
        top_logits_TZ: cute.Pointer,
        health_N: cute.Pointer,
        rows: Int32,
        pdl: Int32,
        stream: Any,
    ):
        self.kernel(logits_box_TV, other_box_TV, logits_TV, top_ids_TZ, top_logits_TZ, health_N, rows).launch(
            grid=[rows, 1, 1], block=[THREADS, 1, 1], smem=self.shared_bytes, stream=stream, use_pdl=pdl
        )

    @cute.kernel
    def kernel(
        self,
        logits_box_TV: cute.Pointer,
        other_box_TV: cute.Pointer,
        logits_TV: cute.Pointer,
        top_ids_TZ: cute.Pointer,
        top_logits_TZ: cute.Pointer,
        health_N: cute.Pointer,
        rows: Int32,
    ):
        box = mem.Global("logits_box_TV", logits_box_TV, "mailbox")
        other = mem.Global("other_box_TV", other_box_TV, "mailbox")
        logits = mem.Global("logits_TV", logits_TV, "output")
        top_ids = mem.Global("top_ids_TZ", top_ids_TZ, "output")
        top_logits = mem.Global("top_logits_TZ", top_logits_TZ, "output")
        health = mem.Global("health_N", health_N, "mailbox")
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        shared = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=16).toint())
        base = row * self.vocab
        grid_wait()
        grid_release()
        for i in cutlass.range(tid, self.vocab // 4, THREADS):
            words = poll_b128(box, base + i * 4, health)
            mem.store_b128(logits, base + i * 4, words)
            rearm_b128(other, base + i * 4)
        block_sync()
        last = Float32(-LOWEST)
        last_id = Int32(-1)
        for z in cutlass.range(self.top_k):
            best = Float32(LOWEST)
            best_id = Int32(self.vocab)
            for i in cutlass.range(tid, self.vocab // 4, THREADS):
                words = mem.load_b128(logits, base + i * 4)
                for j in cutlass.range_constexpr(4):
                    value = bits_f32(words[j])
                    index = i * 4 + j
                    below = Int32(value < last) | (Int32(value == last) & Int32(index > last_id))
                    if (below & Int32(value > best)) != 0:
                        best = value
                        best_id = index
            best, best_id = self.block_best(shared, tid, best, best_id)
            if tid == 0:
                mem.store_b32(top_ids, row * self.top_k + z, best_id)
                mem.store_f32(top_logits, row * self.top_k + z, best)
            last = best
            last_id = best_id

    def block_best(self, shared: Any, tid: Any, best: Any, best_id: Any) -> Any:
        """The largest value of the block and the lowest id that has it, in every thread."""
        best, best_id = better_of_warp(best, best_id)
        block_sync()
        mem.shared_store_f32(shared + tid // 32 * 8, best)
        mem.shared_store_b32(shared + tid // 32 * 8 + 4, best_id)
        block_sync()
        lane = tid % (THREADS // 32)
        return better_of_warp(mem.shared_f32(shared + lane * 8), mem.shared_b32(shared + lane * 8 + 4))


def better_of_warp(best: Any, best_id: Any) -> Any:
    """Butterfly over the warp: larger value first, then lower id."""
    for step in (16, 8, 4, 2, 1):
        other, other_id = shuffle_xor(best, step), shuffle_xor(best_id, step)
        take = Int32(other > best) | (Int32(other == best) & Int32(other_id < best_id))
        best, best_id = select(take, other, best), select(take, other_id, best_id)
    return best, best_id
