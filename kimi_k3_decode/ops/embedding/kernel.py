"""embedding: prefix[T, D] = embed[tokens[T]]. One block a row. Token ids come from a table, so they are read after the wait like an
input."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.sync import grid_release, grid_wait

THREADS = 256


class Embedding:
    """Fixed: vocabulary and hidden size (a multiple of 8). Ids outside the vocabulary are clamped; the host refuses them before."""

    def __init__(self, vocab: int, hidden: int) -> None:
        self.vocab, self.hidden = vocab, hidden

    @cute.jit
    def __call__(self, tokens_T: cute.Pointer, embed_VD: cute.Pointer, prefix_TD: cute.Pointer, rows: Int32, pdl: Int32, stream: Any):
        self.kernel(tokens_T, embed_VD, prefix_TD, rows).launch(grid=[rows, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=pdl)

    @cute.kernel
    def kernel(self, tokens_T: cute.Pointer, embed_VD: cute.Pointer, prefix_TD: cute.Pointer, rows: Int32):
        tokens = mem.Global("tokens_T", tokens_T, "table")
        embed = mem.Global("embed_VD", embed_VD, "weight")
        prefix = mem.Global("prefix_TD", prefix_TD, "output")
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        grid_wait()
        grid_release()
        token = cutlass.max(cutlass.min(mem.load_b32(tokens, row), Int32(self.vocab - 1)), Int32(0))
        for i in cutlass.range(tid, self.hidden // 8, THREADS):
            words = mem.load_weight_b128(embed, Int64(token) * Int64(self.hidden) + Int64(i * 8))
            mem.store_b128(prefix, row * self.hidden + i * 8, words)
