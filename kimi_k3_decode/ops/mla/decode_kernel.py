"""mla_decode and mla_merge: flash decode over the paged latent cache, the context split over blocks, and the merge of the splits.

decode: grid (split, 16 (token, head) rows, request). After the wait, tiles of 64 cached tokens are double-buffered in shared memory
(cp.async from the pages; FP8 is widened on the way). Per tile: 1 scores, eight tokens a warp, to shared memory; 2 every warp forms the
tile's probabilities of its 16 rows (so maxima and sums are the same bits in each) and 3 multiplies them with its 64 latent columns.
merge: one block per (token, head); the splits are combined by their log-sum-exp in split order.
Rounding points: exp(score - running maximum) before it meets the latents; merge once.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.asm import emit
from kimi_k3_decode.device.math import exp, maximum, pack_bf16, reciprocal, select, shuffle_xor
from kimi_k3_decode.device.mma import mma_pair
from kimi_k3_decode.device.sync import block_sync, grid_release, grid_wait
from kimi_k3_decode.ops.mla.kernel import STRIP, transposed_product

TILE = 64
WARPS = 8
THREADS = 32 * WARPS
MASKED = -1.0e30


class MlaDecode:
    """Fixed: heads, kv latent (a multiple of 64, at most 512), pe channels, tokens a request, splits, page size, score scale, FP8 cache."""

    def __init__(self, heads: int, latent: int, pe: int, q: int, splits: int, page_tokens: int, scale: float, fp8: bool) -> None:
        self.heads, self.latent, self.pe, self.q, self.splits = heads, latent, pe, q, splits
        self.page_tokens, self.scale, self.fp8 = page_tokens, scale, fp8
        self.width = latent + pe
        if latent % STRIP or latent > STRIP * WARPS or self.width % 32 or page_tokens % 8:
            raise ValueError(
                f"MlaDecode: got latent {latent}, pe {pe}, page {page_tokens}, needs latent % 64 == 0 <= 512, width % 32, page % 8"
            )
        self.row_groups = -(-q * heads // 16)
        self.pitch = -(-self.width // 64) * 64 + 8
        self.q_pitch = -(-self.width // 64) * 64 + 32
        self.tile_bytes = TILE * self.pitch * 2
        self.buffers = 1 if fp8 else 2
        self.score_pitch = TILE + 8
        self.shared_bytes = self.buffers * self.tile_bytes + 16 * self.q_pitch * 2 + 16 * self.score_pitch * 4

    @cute.jit
    def __call__(
        self,
        q_THM: cute.Pointer,
        lengths_B: cute.Pointer,
        block_table_BN: cute.Pointer,
        pages_STM: cute.Pointer,
        partial_XTHL: cute.Pointer,
        lse_XTH: cute.Pointer,
        rows: Int32,
        table_width: Int32,
        cache_scale: Float32,
        pdl: Int32,
        stream: Any,
    ):
        self.kernel(q_THM, lengths_B, block_table_BN, pages_STM, partial_XTHL, lse_XTH, rows, table_width, cache_scale).launch(
            grid=[self.splits, self.row_groups, rows // self.q],
            block=[THREADS, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
        )

    @cute.kernel
    def kernel(
        self,
        q_THM: cute.Pointer,
        lengths_B: cute.Pointer,
        block_table_BN: cute.Pointer,
        pages_STM: cute.Pointer,
        partial_XTHL: cute.Pointer,
        lse_XTH: cute.Pointer,
        rows: Int32,
        table_width: Int32,
        cache_scale: Float32,
    ):
        self.queries = mem.Global("q_THM", q_THM, "input")
        lengths = mem.Global("lengths_B", lengths_B, "table")
        self.block_table = mem.Global("block_table_BN", block_table_BN, "table")
        self.pages = mem.Global("pages_STM", pages_STM, "state")
        self.partial = mem.Global("partial_XTHL", partial_XTHL, "output")
        self.lse = mem.Global("lse_XTH", lse_XTH, "output")
        self.tid, _, _ = cute.arch.thread_idx()
        self.split, self.row_group, self.request = cute.arch.block_idx()
        lane = self.tid % 32
        self.warp, self.quad, self.quad_lane = self.tid // 32, lane // 4, lane % 4
        self.rows, self.table_width, self.cache_scale = rows, table_width, cache_scale
        self.tiles_at = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        self.q_at = self.tiles_at + self.buffers * self.tile_bytes
        self.score_at = self.q_at + 16 * self.q_pitch * 2
        grid_wait()
        grid_release()
        length = mem.load_b32(lengths, self.request)
        seen = length + self.q
        chunk = (seen + self.splits - 1) // self.splits
        chunk = (chunk + self.page_tokens - 1) // self.page_tokens * self.page_tokens
        begin = self.split * chunk
        end = cutlass.min(begin + chunk, seen)
        if begin < end:
            self.attend(begin, end, length)
        else:
            self.empty()

    def row_of(self, local: Any) -> Any:
        """(row of q_THM flattened over heads, token of the request) of a local row; rows past the end repeat the last."""
        flat = cutlass.min(self.row_group * 16 + local, Int32(self.q * self.heads - 1))
        return self.request * self.q * self.heads + flat, flat // self.heads

    @cute.jit
    def stage_queries(self):
        """Sixteen queries on their way to shared memory; they arrive with the next group of copies."""
        per_row = self.width // 8
        for i in cutlass.range(self.tid, 16 * per_row, THREADS):
            row, _ = self.row_of(i // per_row)
            k = i % per_row * 8
            mem.copy_b128(self.q_at + (i // per_row * self.q_pitch + k) * 2, self.queries, row * self.width + k)

    @cute.jit
    def load_tile(self, first: Int32, end: Int32, buffer: Int32):
        """Cached tokens first..first + 63 below `end`; the rest become zeros, so that no stale value meets a zero probability."""
        per_row = self.width // 8
        one_page = self.page_tokens % TILE == 0  # chunks begin at pages, so a tile then lies in one: its number is read once
        last = self.table_width - 1
        shared_page = mem.load_b32(self.block_table, self.request * self.table_width + cutlass.min(first // self.page_tokens, last))
        for i in cutlass.range(self.tid, TILE * per_row, THREADS, unroll=2):
            token = i // per_row
            k = i % per_row * 8
            position = first + token
            inside = Int32(position < end)
            safe = select(inside, position, first)
            page = shared_page
            if cutlass.const_expr(not one_page):
                page = mem.load_b32(self.block_table, self.request * self.table_width + safe // self.page_tokens)
            place = (Int64(page) * Int64(self.page_tokens) + Int64(safe % self.page_tokens)) * Int64(self.width) + Int64(k)
            at = self.tiles_at + buffer * self.tile_bytes + (token * self.pitch + k) * 2
            if cutlass.const_expr(self.fp8):
                words = widen_fp8(mem.load_b64(self.pages, place), self.cache_scale)
                mem.shared_store_b128(at, tuple(select(inside, word, Int32(0)) for word in words))
            else:
                mem.copy_b128(at, self.pages, place, inside)
        mem.copy_commit()

    @cute.jit
    def attend(self, begin: Int32, end: Int32, length: Int32):
        acc = cute.make_rmem_tensor((32,), Float32)
        acc.fill(0.0)
        peaks = [Float32(MASKED), Float32(MASKED)]
        totals = [Float32(0.0), Float32(0.0)]
        _, token_low = self.row_of(self.quad)
        _, token_high = self.row_of(self.quad + 8)
        limits = (length + 1 + token_low, length + 1 + token_high)
        buffer = Int32(0)
        self.stage_queries()
        if cutlass.const_expr(self.buffers == 2):
            self.load_tile(begin, end, buffer)
        for first in cutlass.range(begin, end, TILE):
            if cutlass.const_expr(self.buffers == 2):
                self.load_tile(first + TILE, end, 1 - buffer)
                mem.copy_wait(1)
            else:
                self.load_tile(first, end, buffer)
                mem.copy_wait(0)
            block_sync()
            tile_at = self.tiles_at + buffer * self.tile_bytes
            self.scores(tile_at)
            block_sync()
            peaks, totals = self.mix(tile_at, first, end, limits, acc, peaks, totals)
            block_sync()
            if cutlass.const_expr(self.buffers == 2):
                buffer = 1 - buffer
        mem.copy_wait(0)
        self.store(acc, peaks, totals)

    @cute.jit
    def scores(self, tile_at: Int32):
        """This warp's eight tokens against 16 queries, scaled, to shared memory [row][token]."""
        acc = cute.make_rmem_tensor((4,), Float32)
        acc.fill(0.0)
        for s in cutlass.range(self.width // 32, unroll=3):
            k = s * 32 + self.quad_lane * 8
            low = mem.shared_b128(self.q_at + (self.quad * self.q_pitch + k) * 2)
            high = mem.shared_b128(self.q_at + ((self.quad + 8) * self.q_pitch + k) * 2)
            x = mem.shared_b128(tile_at + ((self.warp * 8 + self.quad) * self.pitch + k) * 2)
            result = mma_pair(tuple(acc[i] for i in range(4)), low, high, x)
            for i in cutlass.range_constexpr(4):
                acc[i] = result[i]
        scale = Float32(self.scale)
        at = self.score_at + (self.quad * self.score_pitch + self.warp * 8 + self.quad_lane * 2) * 4
        mem.shared_store_f32x2(at, acc[0] * scale, acc[1] * scale)
        mem.shared_store_f32x2(at + 8 * self.score_pitch * 4, acc[2] * scale, acc[3] * scale)

    def mix(self, tile_at: Any, first: Any, end: Any, limits: Any, acc: Any, peaks: Any, totals: Any) -> Any:
        """Online softmax of rows g and g + 8, then probabilities times this warp's latent columns."""
        words: list[list[Any]] = [[], []]
        new_peaks, new_totals, scales = [], [], []
        for half in range(2):
            limit = cutlass.min(end, limits[half])
            values = []
            peak = peaks[half]
            for s in range(TILE // 16):
                for part in range(2):
                    column = s * 16 + part * 8 + self.quad_lane * 2
                    at = self.score_at + ((self.quad + 8 * half) * self.score_pitch + column) * 4
                    a, b = mem.shared_f32x2(at)
                    a = select(first + column < limit, a, Float32(MASKED))
                    b = select(first + column + 1 < limit, b, Float32(MASKED))
                    values += [a, b]
                    peak = maximum(peak, maximum(a, b))
            peak = maximum(peak, shuffle_xor(peak, 1))
            peak = maximum(peak, shuffle_xor(peak, 2))
            total = Float32(0.0)
            for i in range(0, len(values), 2):
                a = select(values[i] > Float32(0.5 * MASKED), exp(values[i] - peak), Float32(0.0))
                b = select(values[i + 1] > Float32(0.5 * MASKED), exp(values[i + 1] - peak), Float32(0.0))
                total = total + (a + b)
                words[half].append(pack_bf16(a, b))
            total = total + shuffle_xor(total, 1)
            total = total + shuffle_xor(total, 2)
            scale = exp(peaks[half] - peak)
            new_peaks.append(peak)
            new_totals.append(totals[half] * scale + total)
            scales.append(scale)
        for i in range(32):
            acc[i] = acc[i] * scales[i % 4 // 2]
        self.multiply(tile_at, words, acc)
        return new_peaks, new_totals

    @cute.jit
    def multiply(self, tile_at: Int32, words: cutlass.Constexpr, acc: cutlass.Constexpr):
        if self.warp < self.latent // STRIP:
            column = self.warp * STRIP + self.quad * 8
            for s in cutlass.range_constexpr(TILE // 16):
                token = s * 16 + self.quad_lane * 2
                rows = [mem.shared_b128(tile_at + ((token + offset) * self.pitch + column) * 2) for offset in (0, 1, 8, 9)]
                a = (words[0][2 * s], words[1][2 * s], words[0][2 * s + 1], words[1][2 * s + 1])
                result = transposed_product([tuple(acc[j * 4 + i] for i in range(4)) for j in range(8)], a, rows)
                for j in cutlass.range_constexpr(8):
                    for i in cutlass.range_constexpr(4):
                        acc[j * 4 + i] = result[j][i]

    @cute.jit
    def store(self, acc: cutlass.Constexpr, peaks: cutlass.Constexpr, totals: cutlass.Constexpr):
        for half in cutlass.range_constexpr(2):
            local = self.quad + 8 * half
            row, _ = self.row_of(local)
            place = self.split * self.rows * self.heads + row
            if self.row_group * 16 + local < self.q * self.heads:
                inverse = reciprocal(maximum(totals[half], Float32(1e-37)))
                if self.warp < self.latent // STRIP:
                    for j in cutlass.range_constexpr(8):
                        for i in cutlass.range_constexpr(2):
                            column = self.warp * STRIP + self.quad_lane * 16 + i * 8 + j
                            mem.store_f32(self.partial, place * self.latent + column, acc[j * 4 + half * 2 + i] * inverse)
                if (Int32(self.warp == 0) & Int32(self.quad_lane == 0)) != 0:
                    value = peaks[half] + log(totals[half])
                    mem.store_f32(self.lse, place, select(totals[half] > Float32(0.0), value, Float32(float("-inf"))))

    @cute.jit
    def empty(self):
        """A split beyond the context: zeros and a log-sum-exp of minus infinity."""
        for i in cutlass.range(self.tid, 16 * self.latent, THREADS):
            local = i // self.latent
            if self.row_group * 16 + local < self.q * self.heads:
                row, _ = self.row_of(local)
                place = self.split * self.rows * self.heads + row
                mem.store_f32(self.partial, place * self.latent + i % self.latent, Float32(0.0))
                if i % self.latent == 0:
                    mem.store_f32(self.lse, place, Float32(float("-inf")))


def log(x: Float32) -> Float32:
    """Natural logarithm through lg2.approx."""
    return emit("lg2.approx.f32 $0, $1;", (Float32,), (x,), memory=False) * Float32(0.6931471805599453)


def widen_fp8(words: Any, scale: Float32) -> list[Int32]:
    """Eight E4M3 values (two words) times `scale`, rounded to BF16, four words."""
    code = (
        "{ .reg .b16 lo, hi, x, y; .reg .b32 p; .reg .f32 f, g; mov.b32 {lo, hi}, $2; "
        "cvt.rn.f16x2.e4m3x2 p, lo; mov.b32 {x, y}, p; cvt.f32.f16 f, x; cvt.f32.f16 g, y; mul.f32 f, f, $3; mul.f32 g, g, $3; "
        "cvt.rn.bf16x2.f32 $0, g, f; "
        "cvt.rn.f16x2.e4m3x2 p, hi; mov.b32 {x, y}, p; cvt.f32.f16 f, x; cvt.f32.f16 g, y; mul.f32 f, f, $3; mul.f32 g, g, $3; "
        "cvt.rn.bf16x2.f32 $1, g, f; }"
    )
    out: list[Int32] = []
    for word in words:
        out += emit(code, (Int32, Int32), (word, scale), memory=False)
    return out


class MlaMerge:
    """Fixed: splits and kv latent."""

    def __init__(self, splits: int, latent: int) -> None:
        self.splits, self.latent = splits, latent
        self.threads = max(32, latent // 4)

    @cute.jit
    def __call__(
        self, partial_XTHL: cute.Pointer, lse_XTH: cute.Pointer, latent_THL: cute.Pointer, row_heads: Int32, pdl: Int32, stream: Any
    ):
        self.kernel(partial_XTHL, lse_XTH, latent_THL, row_heads).launch(
            grid=[row_heads, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=pdl
        )

    @cute.kernel
    def kernel(self, partial_XTHL: cute.Pointer, lse_XTH: cute.Pointer, latent_THL: cute.Pointer, row_heads: Int32):
        partial = mem.Global("partial_XTHL", partial_XTHL, "input")
        lse = mem.Global("lse_XTH", lse_XTH, "input")
        latent = mem.Global("latent_THL", latent_THL, "output")
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        grid_wait()
        grid_release()
        logs = [mem.load_f32(lse, x * row_heads + row) for x in range(self.splits)]
        peak = logs[0]
        for value in logs[1:]:
            peak = maximum(peak, value)
        shares = [exp(value - peak) for value in logs]
        total = shares[0]
        for share in shares[1:]:
            total = total + share
        inverse = reciprocal(total)
        if tid * 4 < self.latent:
            out = [Float32(0.0) for _ in range(4)]
            for x in cutlass.range_constexpr(self.splits):
                values = mem.load_f32x4(partial, (x * row_heads + row) * self.latent + tid * 4)
                for i in cutlass.range_constexpr(4):
                    out[i] = out[i] + values[i] * (shares[x] * inverse)
            mem.store_b64(latent, row * self.latent + tid * 4, (pack_bf16(out[0], out[1]), pack_bf16(out[2], out[3])))
