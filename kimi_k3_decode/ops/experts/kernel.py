"""experts_up and experts_down: the routed experts, MXFP4 weights (decoded in registers) times BF16 activations, FP32 sums.

up: hidden[pair, I] = SiTU(w1 z, w3 z). Persistent blocks walk over (active expert, tile of 16 rows of w1 and w3); warps split K. All of a
tile's codes are in flight at once (cp.async, each thread its own bytes) while the tokens' latents are staged.
down: one block per 16 latent rows; a warp takes every `warps`-th active expert, its codes in a ring of cp.async; weighted results of all
pairs lie in shared memory, are added per token in rank order of its choices, and the FP32 partial is published to every rank.
A tile is decoded once for up to 8 tokens; experts with more tokens take more rounds over the codes held in shared memory.
Before the wait: nothing, since even the addresses of the weights depend on the routing. Rounding: up's result; down none.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kimi_k3_decode.device import active
from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.asm import emit
from kimi_k3_decode.device.math import select, situ
from kimi_k3_decode.device.mma import decode_word, mma, scale_factor
from kimi_k3_decode.device.sync import block_sync, grid_release, grid_wait, publish_f32x2

CHUNK = 128  # k of one step: a quad of lanes, one group of 32 each
GROUP = 32
ROUND_TOKENS = 8


def interleave(words: Any) -> tuple[Int32, Int32, Int32, Int32]:
    """Eight BF16 in order -> pairs (i, i + 4), the order in which `decode_word` yields weights."""
    a, b, c, d = words
    code = "prmt.b32 $0, $1, $2, {};"
    low = [emit(code.format("0x5410"), (Int32,), pair, memory=False) for pair in ((a, c), (b, d))]
    high = [emit(code.format("0x7632"), (Int32,), pair, memory=False) for pair in ((a, c), (b, d))]
    return low[0], high[0], low[1], high[1]


def group_products(acc: Any, low: Any, high: Any, low_scale: Any, high_scale: Any, x: Any) -> Any:
    """16 rows x 8 tokens over a chunk: `low`, `high` the 16 code bytes of rows g and g + 8, `x` four interleaved granules of the token."""
    for i in range(4):
        a, b = decode_word(low[i], low_scale), decode_word(high[i], high_scale)
        acc = mma(acc, (a[0], b[0], a[1], b[1]), (x[i][0], x[i][1]))
        acc = mma(acc, (a[2], b[2], a[3], b[3]), (x[i][2], x[i][3]))
    return acc


class ExpertsUp:
    """Fixed: experts, top_k, latent size (k), intermediate size of this rank, betas, warps over k, tokens staged a round (at most 8)."""

    def __init__(
        self, experts: int, top_k: int, latent: int, inner: int, beta: float, linear_beta: float, warps: int, round_tokens: int
    ) -> None:
        self.round = round_tokens
        self.experts, self.top_k, self.latent, self.inner = experts, top_k, latent, inner
        self.beta, self.linear_beta = beta, linear_beta
        self.warps, self.threads = warps, 32 * warps
        self.chunks = -(-latent // CHUNK)
        if self.chunks % warps or latent % GROUP or inner % 16:
            raise ValueError(
                f"ExpertsUp: got latent {latent}, inner {inner}, {warps} warps, needs whole groups, 16-row tiles, equal shares of k"
            )
        self.steps = self.chunks // warps
        self.row_tiles = inner // 16
        self.x_pitch = self.chunks * CHUNK + 32
        self.list_bytes = active.shared_bytes(experts, self.threads)
        self.ring_bytes = self.steps * 4 * self.threads * 16
        # The sums take the place of x once every warp has read it.
        self.x_bytes = max(round_tokens * self.x_pitch * 2, warps * 2 * 16 * ROUND_TOKENS * 4)
        self.shared_bytes = self.list_bytes + self.ring_bytes + self.x_bytes

    @cute.jit
    def __call__(
        self,
        latent_TL: cute.Pointer,
        offsets_E: cute.Pointer,
        pairs_N: cute.Pointer,
        w1_EIJ: cute.Pointer,
        w1_scale_EIG: cute.Pointer,
        w3_EIJ: cute.Pointer,
        w3_scale_EIG: cute.Pointer,
        hidden_TZI: cute.Pointer,
        blocks: Int32,
        pdl: Int32,
        stream: Any,
    ):
        self.kernel(latent_TL, offsets_E, pairs_N, w1_EIJ, w1_scale_EIG, w3_EIJ, w3_scale_EIG, hidden_TZI).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], smem=self.shared_bytes, stream=stream, use_pdl=pdl
        )

    @cute.kernel
    def kernel(
        self,
        latent_TL: cute.Pointer,
        offsets_E: cute.Pointer,
        pairs_N: cute.Pointer,
        w1_EIJ: cute.Pointer,
        w1_scale_EIG: cute.Pointer,
        w3_EIJ: cute.Pointer,
        w3_scale_EIG: cute.Pointer,
        hidden_TZI: cute.Pointer,
    ):
        self.z = mem.Global("latent_TL", latent_TL, "input")
        self.offsets = mem.Global("offsets_E", offsets_E, "input")
        self.pairs = mem.Global("pairs_N", pairs_N, "input")
        w1 = mem.Global("w1_EIJ", w1_EIJ, "weight")
        w3 = mem.Global("w3_EIJ", w3_EIJ, "weight")
        self.codes = (w1, w3)
        self.scales = (mem.Global("w1_scale_EIG", w1_scale_EIG, "weight"), mem.Global("w3_scale_EIG", w3_scale_EIG, "weight"))
        self.hidden = mem.Global("hidden_TZI", hidden_TZI, "output")
        self.tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane = self.tid % 32
        self.warp, self.quad, self.quad_lane = self.tid // 32, lane // 4, lane % 4
        self.list_at = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        self.ring_at = self.list_at + self.list_bytes
        self.x_at = self.ring_at + self.ring_bytes
        self.sum_at = self.x_at
        grid_wait()
        grid_release()
        count = active.compact(self.offsets, self.experts, self.threads, self.list_at, self.tid)
        for item in cutlass.range(block, count * self.row_tiles, blocks):
            expert = mem.shared_b32(self.list_at + item // self.row_tiles * 4)
            self.tile(expert, item % self.row_tiles)

    @cute.jit
    def tile(self, expert: Int32, row_tile: Int32):
        """One (expert, 16 rows): issue all codes, then for every 8 tokens stage, multiply, reduce over warps, activate, store."""
        scales: Any = []
        first_group = self.warp * self.steps * 4 + self.quad_lane
        row = Int64(expert) * Int64(self.inner) + Int64(row_tile * 16 + self.quad)
        codes_at = row * Int64(self.latent // 2) + Int64(first_group * 16)
        scales_at = row * Int64(self.latent // GROUP) + Int64(first_group)
        for s in cutlass.range_constexpr(self.steps):
            # Only a last, partial chunk has lanes past the end of k: they read nothing and take the scale of the row's first group.
            partial = self.latent % CHUNK > 0
            inside = Int32(first_group + 4 * s < self.latent // GROUP) if partial else None
            back = Int64(select(inside, Int32(0), first_group + 4 * s)) if partial else Int64(0)
            for matrix in cutlass.range_constexpr(2):
                for half in cutlass.range_constexpr(2):
                    slot = self.ring_at + ((s * 2 + matrix) * 2 + half) * (self.threads * 16) + self.tid * 16
                    code_offset = codes_at + Int64(half * 8 * (self.latent // 2) + s * 64) - back * Int64(16)
                    scale_offset = scales_at + Int64(half * 8 * (self.latent // GROUP) + s * 4) - back
                    mem.copy_weight_b128(slot, self.codes[matrix], code_offset, inside)
                    scales.append(mem.load_weight_u8(self.scales[matrix], scale_offset))
        mem.copy_commit()
        factors = [scale_factor(scale) for scale in scales]
        begin = mem.load_b32(self.offsets, expert)
        end = mem.load_b32(self.offsets, expert + 1)
        for first in cutlass.range(begin, end, self.round):
            n = cutlass.min(end - first, Int32(self.round))
            self.stage(first, n)
            mem.copy_wait(0)
            block_sync()
            acc = self.products(factors)
            block_sync()
            self.store_sums(acc)
            block_sync()
            for i in cutlass.range(self.tid, 16 * n, self.threads):
                token = i // 16
                column = i % 16
                gate = Float32(0.0)
                up = Float32(0.0)
                for w in cutlass.range_constexpr(self.warps):
                    at = self.sum_at + ((w * 2 * 16 + column) * ROUND_TOKENS + token) * 4
                    gate = gate + mem.shared_f32(at)
                    up = up + mem.shared_f32(at + 16 * ROUND_TOKENS * 4)
                pair = mem.load_b32(self.pairs, first + token)
                mem.store_bf16(self.hidden, pair * self.inner + row_tile * 16 + column, situ(gate, up, self.beta, self.linear_beta))
            block_sync()

    @cute.jit
    def stage(self, first: Int32, n: Int32):
        """Latents of n tokens into shared memory: granule i of lane t at 32 i + 8 t of its chunk, so that a quad reads 64 adjacent
        bytes."""
        per_row = self.latent // 8
        for i in cutlass.range(self.tid, n * per_row, self.threads, unroll=4):
            token = i // per_row
            k = i % per_row * 8
            row = mem.load_b32(self.pairs, first + token) // self.top_k
            words = interleave(mem.load_b128(self.z, row * self.latent + k))
            inner = k % CHUNK
            place = k - inner + inner % GROUP // 8 * GROUP + inner // GROUP * 8
            mem.shared_store_b128(self.x_at + (token * self.x_pitch + place) * 2, words)

    def products(self, factors: Any) -> None:
        """Both matrices over this warp's chunks. Lanes past the end of k hold zero codes, and finite x is not promised there, so their x
        is the token's first granules. Tokens past the round repeat the last: their sums are dropped."""
        token = cutlass.min(self.quad, Int32(self.round - 1))
        acc = [(Float32(0.0),) * 4 for _ in range(2)]
        for s in range(self.steps):
            chunk = self.warp * self.steps + s
            place = chunk * CHUNK + self.quad_lane * 8
            if self.latent % CHUNK:
                place = select(chunk * CHUNK + self.quad_lane * GROUP < self.latent, place, chunk * CHUNK)
            x = [mem.shared_b128(self.x_at + (token * self.x_pitch + place + i * GROUP) * 2) for i in range(4)]
            for matrix in range(2):
                slot = self.ring_at + (s * 2 + matrix) * 2 * (self.threads * 16) + self.tid * 16
                low, high = mem.shared_b128(slot), mem.shared_b128(slot + self.threads * 16)
                scale = (s * 2 + matrix) * 2
                acc[matrix] = group_products(acc[matrix], low, high, factors[scale], factors[scale + 1], x)
        return acc

    def store_sums(self, acc: Any) -> None:
        for matrix in range(2):
            at = self.sum_at + (((self.warp * 2 + matrix) * 16 + self.quad) * ROUND_TOKENS + self.quad_lane * 2) * 4
            mem.shared_store_f32x2(at, acc[matrix][0], acc[matrix][1])
            mem.shared_store_f32x2(at + 8 * ROUND_TOKENS * 4, acc[matrix][2], acc[matrix][3])


class ExpertsDown:
    """Fixed: experts, top_k, latent rows, intermediate size of this rank (k), the bucket of rows, ring depth in experts, warps."""

    def __init__(self, experts: int, top_k: int, latent: int, inner: int, row_tile: int, depth: int, warps: int) -> None:
        self.warps, self.threads = warps, 32 * warps
        self.experts, self.top_k, self.latent, self.inner, self.depth = experts, top_k, latent, inner, depth
        self.chunks = -(-inner // CHUNK)
        if latent % 16 or inner % GROUP or depth < 2:
            raise ValueError(
                f"ExpertsDown: got latent {latent}, inner {inner}, depth {depth}, needs 16-row tiles, whole groups, depth >= 2"
            )
        self.list_bytes = active.shared_bytes(experts, self.threads)
        self.ring_bytes = depth * self.chunks * 2 * self.threads * 16
        self.pair_bytes = row_tile * top_k * 16 * 4
        self.shared_bytes = self.list_bytes + self.ring_bytes + self.pair_bytes

    @cute.jit
    def __call__(
        self,
        hidden_TZI: cute.Pointer,
        ids_TZ: cute.Pointer,
        weights_TZ: cute.Pointer,
        offsets_E: cute.Pointer,
        pairs_N: cute.Pointer,
        w2_ELJ: cute.Pointer,
        w2_scale_ELG: cute.Pointer,
        boxes: tuple,
        rank: Int32,
        rows: Int32,
        pdl: Int32,
        stream: Any,
    ):
        self.kernel(hidden_TZI, ids_TZ, weights_TZ, offsets_E, pairs_N, w2_ELJ, w2_scale_ELG, boxes, rank, rows).launch(
            grid=[self.latent // 16, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        hidden_TZI: cute.Pointer,
        ids_TZ: cute.Pointer,
        weights_TZ: cute.Pointer,
        offsets_E: cute.Pointer,
        pairs_N: cute.Pointer,
        w2_ELJ: cute.Pointer,
        w2_scale_ELG: cute.Pointer,
        boxes: tuple,
        rank: Int32,
        rows: Int32,
    ):
        self.hidden = mem.Global("hidden_TZI", hidden_TZI, "input")
        ids = mem.Global("ids_TZ", ids_TZ, "input")
        self.weights = mem.Global("weights_TZ", weights_TZ, "input")
        self.offsets = mem.Global("offsets_E", offsets_E, "input")
        self.pairs = mem.Global("pairs_N", pairs_N, "input")
        self.codes = mem.Global("w2_ELJ", w2_ELJ, "weight")
        self.scales = mem.Global("w2_scale_ELG", w2_scale_ELG, "weight")
        partial = [mem.Global("latent_RTL", box, "mailbox") for box in boxes]
        self.tid, _, _ = cute.arch.thread_idx()
        self.row_tile, _, _ = cute.arch.block_idx()
        lane = self.tid % 32
        self.warp, self.quad, self.quad_lane = self.tid // 32, lane // 4, lane % 4
        self.list_at = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        self.ring_at = self.list_at + self.list_bytes
        self.pair_at = self.ring_at + self.ring_bytes
        grid_wait()
        grid_release()
        count = active.compact(self.offsets, self.experts, self.threads, self.list_at, self.tid)
        for i in cutlass.range_constexpr(self.depth - 1):
            self.issue(self.warp + i * self.warps, count, Int32(i))
        slot = Int32(0)
        for item in cutlass.range(self.warp, count, self.warps):
            mem.copy_wait(self.depth - 2)
            self.expert(mem.shared_b32(self.list_at + item * 4), slot)
            free = slot + (self.depth - 1)
            self.issue(item + (self.depth - 1) * self.warps, count, select(free >= self.depth, free - self.depth, free))
            slot = select(slot == self.depth - 1, Int32(0), slot + 1)
        mem.copy_wait(0)
        block_sync()
        for i in cutlass.range(self.tid, rows * 8, self.threads):
            token = i // 8
            row = i % 8 * 2
            total = Float32(0.0)
            second = Float32(0.0)
            if mem.load_b32(ids, token * self.top_k) >= 0:
                for z in cutlass.range_constexpr(self.top_k):
                    a, b = mem.shared_f32x2(self.pair_at + ((token * self.top_k + z) * 16 + row) * 4)
                    total = total + a
                    second = second + b
            publish_f32x2(partial, (rank * rows + token) * self.latent + self.row_tile * 16 + row, total, second)

    def issue(self, item: Any, count: Any, slot: Any) -> None:
        """Copy this warp's codes of one expert: 16 rows, all of k. Past the end of the list or of k nothing is read."""
        listed = Int32(item < count)
        expert = mem.shared_b32(self.list_at + select(listed, item, Int32(0)) * 4)
        row = Int64(select(listed, expert, Int32(0))) * Int64(self.latent) + Int64(self.row_tile * 16 + self.quad)
        row_at = row * Int64(self.inner // 2)
        at = self.ring_at + slot * (self.chunks * 2 * self.threads * 16) + self.tid * 16
        for c in range(self.chunks):
            k = c * CHUNK + self.quad_lane * GROUP
            partial = (c + 1) * CHUNK > self.inner
            valid = listed & Int32(k < self.inner) if partial else listed
            place = row_at + Int64(select(valid, k // 2, Int32(0)) if partial else k // 2)
            for half in range(2):
                dst = at + (c * 2 + half) * (self.threads * 16)
                mem.copy_weight_b128(dst, self.codes, place + Int64(half * 8 * (self.inner // 2)), valid)
        mem.copy_commit()

    @cute.jit
    def expert(self, expert: Int32, slot: Int32):
        """Products of one expert with all its pairs; weighted sums go to the pairs' places in shared memory."""
        begin = mem.load_b32(self.offsets, expert)
        end = mem.load_b32(self.offsets, expert + 1)
        factors: Any = []
        for c in cutlass.range_constexpr(self.chunks):
            group = cutlass.min(c * 4 + self.quad_lane, Int32(self.inner // GROUP - 1))
            for half in cutlass.range_constexpr(2):
                row = Int64(expert) * Int64(self.latent) + Int64(self.row_tile * 16 + self.quad + 8 * half)
                factors.append(scale_factor(mem.load_weight_u8(self.scales, row * Int64(self.inner // GROUP) + Int64(group))))
        for first in cutlass.range(begin, end, ROUND_TOKENS):
            n = cutlass.min(end - first, Int32(ROUND_TOKENS))
            x_pair = mem.load_b32(self.pairs, first + cutlass.min(self.quad, n - 1))
            acc = (Float32(0.0),) * 4
            for c in cutlass.range_constexpr(self.chunks):
                k = cutlass.min(c * CHUNK + self.quad_lane * GROUP, Int32(self.inner - GROUP))
                x = [interleave(mem.load_b128(self.hidden, x_pair * self.inner + k + i * 8)) for i in range(4)]
                at = self.ring_at + (slot * self.chunks + c) * 2 * (self.threads * 16) + self.tid * 16
                low, high = mem.shared_b128(at), mem.shared_b128(at + self.threads * 16)
                acc = group_products(acc, low, high, factors[2 * c], factors[2 * c + 1], x)
            for j in cutlass.range_constexpr(2):
                token = self.quad_lane * 2 + j
                if token < n:
                    pair = mem.load_b32(self.pairs, first + token)
                    weight = mem.load_bf16(self.weights, pair)
                    at = self.pair_at + (pair * 16 + self.quad) * 4
                    mem.shared_store_f32(at, acc[j] * weight)
                    mem.shared_store_f32(at + 8 * 4, acc[2 + j] * weight)
