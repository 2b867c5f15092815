"""mla_query and mla_value: the projections around the latent attention.

query: one cluster for a head and 16 tokens, sharing the rows of q_b and then the latent columns of W_UK; a last cluster writes the cache.
 Before the wait: the block's rows of q_b and columns of W_UK, each thread copying the bytes that it consumes itself, and norm weights.
 After: 1 RMSNorm of the q latent, staged in BF16; 2 q_b rows of this block, sums over warps, q rounded to BF16 into shared memory; cluster
 barrier; 3 the head's nope channels are gathered from the peers; 4 times W_UK.
value: one block per (head, 16 rows of W_UV, 16 tokens); warps split the latent; weights are copied to shared memory before the wait.
Rounding points: the normed latent, q, the absorbed q, cached values; value once, after the gate.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.asm import emit
from kimi_k3_decode.device.math import bf16_word_f32x2, pack_bf16, round_bf16, rsqrt, select, sigmoid, warp_sum
from kimi_k3_decode.device.mma import mma, mma_pair
from kimi_k3_decode.device.skinny import SHARED_LIMIT_BYTES
from kimi_k3_decode.device.sync import block_sync, cluster_sync, grid_release, grid_wait

ROUND = 16  # tokens of one block of query and value
WARPS = 8
THREADS = 32 * WARPS
STEP_K = 32
STRIP = 64  # latent columns of one transposed product


def transposed_pairs(low: Any, high: Any) -> list[Int32]:
    """Rows k and k + 1 of eight columns (16 bytes each) -> eight words (k, k + 1), one a column."""
    pairs = []
    for i in range(4):
        pairs.append(emit("prmt.b32 $0, $1, $2, 0x5410;", (Int32,), (low[i], high[i]), memory=False))
        pairs.append(emit("prmt.b32 $0, $1, $2, 0x7632;", (Int32,), (low[i], high[i]), memory=False))
    return pairs


def transposed_product(acc: list[Any], a: Any, rows: list[Any]) -> list[Any]:
    """16 tokens x 64 columns over 16 k. `rows` = this lane's 16 bytes of rows 2t, 2t+1, 2t+8, 2t+9 at columns 8g..8g+7; product j holds
    columns 8n + j for n = 0..7, so a lane's sums of product j belong to columns 16t + j and 16t + 8 + j."""
    first, second = transposed_pairs(rows[0], rows[1]), transposed_pairs(rows[2], rows[3])
    return [mma(acc[j], a, (first[j], second[j])) for j in range(8)]


class MlaQuery:
    """Fixed: heads, q latent rank, nope and pe channels, kv latent, columns of the projection, tokens a request, eps, page size, FP8
    cache."""

    def __init__(
        self, heads: int, q_rank: int, nope: int, pe: int, latent: int, proj_columns: int, q: int, eps: float, page_tokens: int, fp8: bool
    ) -> None:
        self.heads, self.q_rank, self.nope, self.pe, self.latent = heads, q_rank, nope, pe, latent
        self.proj_columns, self.q, self.eps, self.page_tokens, self.fp8 = proj_columns, q, eps, page_tokens, fp8
        tiles = (nope + pe) // 16
        self.cluster = next(n for n in (6, 4, 2, 1) if tiles % n == 0)
        self.m_tiles = tiles // self.cluster
        self.warps_k = next(n for n in (8, 4, 2, 1) if q_rank % (n * STEP_K) == 0)
        if (nope + pe) % 16 or nope % 16 or latent % STRIP or q_rank % STEP_K:
            raise ValueError(f"MlaQuery: got nope {nope}, pe {pe}, latent {latent}, q rank {q_rank}, needs multiples of 16, 16, 64, 32")
        self.own = 16 * self.m_tiles  # rows of q_b this block computes
        self.steps = q_rank // self.warps_k // STEP_K
        self.used = min(WARPS, nope // 16)  # warps that share the nope channels of one strip
        self.strip_steps = nope // 16 // self.used
        self.strips = -(-(latent // STRIP) // self.cluster)  # of one block, at most
        self.chunks = -(-q_rank // 256)  # of the q latent, 8 a lane
        self.x_pitch = -(-q_rank // 64) * 64 + 32
        self.nope_pitch = nope + 8
        self.x_bytes = ROUND * self.x_pitch * 2
        self.sum_bytes = max(self.warps_k * self.own * (ROUND + 8) * 4, WARPS * ROUND * (STRIP + 4) * 4)
        self.own_bytes = self.own * ROUND * 2
        self.nope_bytes = ROUND * self.nope_pitch * 2
        self.q_b_bytes = self.steps * self.m_tiles * 2 * THREADS * 16
        self.w_uk_bytes = self.strips * self.strip_steps * 4 * THREADS * 16
        self.shared_bytes = self.x_bytes + self.sum_bytes + self.own_bytes + self.nope_bytes + self.q_b_bytes + self.w_uk_bytes
        if self.shared_bytes > SHARED_LIMIT_BYTES:
            raise ValueError(f"MlaQuery: got {self.shared_bytes} bytes of shared memory, needs <= {SHARED_LIMIT_BYTES}; a smaller q rank")

    @cute.jit
    def __call__(
        self,
        proj_TP: cute.Pointer,
        q_norm_P: cute.Pointer,
        q_b_PC: cute.Pointer,
        kv_norm_L: cute.Pointer,
        w_uk_HKL: cute.Pointer,
        lengths_B: cute.Pointer,
        block_table_BN: cute.Pointer,
        pages_STM: cute.Pointer,
        q_THM: cute.Pointer,
        rows: Int32,
        table_width: Int32,
        inverse_scale: Float32,
        pdl: Int32,
        stream: Any,
    ):
        options = {"cluster": [self.cluster, 1, 1]} if self.cluster > 1 else {}
        self.kernel(
            proj_TP, q_norm_P, q_b_PC, kv_norm_L, w_uk_HKL, lengths_B, block_table_BN, pages_STM, q_THM, rows, table_width, inverse_scale
        ).launch(
            grid=[self.cluster, self.heads + 1, (rows + ROUND - 1) // ROUND],
            block=[THREADS, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            **options,
        )

    @cute.kernel
    def kernel(
        self,
        proj_TP: cute.Pointer,
        q_norm_P: cute.Pointer,
        q_b_PC: cute.Pointer,
        kv_norm_L: cute.Pointer,
        w_uk_HKL: cute.Pointer,
        lengths_B: cute.Pointer,
        block_table_BN: cute.Pointer,
        pages_STM: cute.Pointer,
        q_THM: cute.Pointer,
        rows: Int32,
        table_width: Int32,
        inverse_scale: Float32,
    ):
        self.proj = mem.Global("proj_TP", proj_TP, "input")
        self.q_norm = mem.Global("q_norm_P", q_norm_P, "weight")
        self.q_b = mem.Global("q_b_PC", q_b_PC, "weight")
        self.kv_norm = mem.Global("kv_norm_L", kv_norm_L, "weight")
        self.w_uk = mem.Global("w_uk_HKL", w_uk_HKL, "weight")
        self.lengths = mem.Global("lengths_B", lengths_B, "table")
        self.block_table = mem.Global("block_table_BN", block_table_BN, "table")
        self.pages = mem.Global("pages_STM", pages_STM, "state")
        self.out = mem.Global("q_THM", q_THM, "output")
        self.tid, _, _ = cute.arch.thread_idx()
        self.rank, self.head, group = cute.arch.block_idx()
        lane = self.tid % 32
        self.lane, self.warp, self.quad, self.quad_lane = lane, self.tid // 32, lane // 4, lane % 4
        self.x_at = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=16).toint())
        self.sum_at = self.x_at + self.x_bytes
        self.own_at = self.sum_at + self.sum_bytes
        self.nope_at = self.own_at + self.own_bytes
        self.q_b_at = self.nope_at + self.nope_bytes + self.tid * 16
        self.w_uk_at = self.q_b_at + self.q_b_bytes
        first = group * ROUND
        n = cutlass.min(rows - first, Int32(ROUND))
        if self.head == self.heads:
            norm = [mem.load_weight_early_b32(self.kv_norm, self.lane * 2 + 64 * i) for i in range(self.latent // 64)]
            grid_wait()
            grid_release()
            self.write_cache(first, n, norm, table_width, inverse_scale)
        else:
            self.copy_weights()
            scales = [mem.load_weight_early_b128(self.q_norm, self.latent_at(i)[0]) for i in range(self.chunks)]
            grid_wait()
            grid_release()
            self.stage(first, n, scales)
            mem.copy_wait(0)
            block_sync()
            self.project(first, n)
            self.everyone()
            self.gather()
            block_sync()
            self.absorb(first, n)
            self.everyone()

    @cute.jit
    def copy_weights(self):
        """This thread's own share of q_b and W_UK on its way to shared memory."""
        begin = self.head * (self.nope + self.pe) + self.rank * self.own
        if self.warp < self.warps_k:
            for s in cutlass.range_constexpr(self.steps):
                k = (self.warp * self.steps + s) * STEP_K + self.quad_lane * 8
                for i in cutlass.range_constexpr(2 * self.m_tiles):
                    row = Int64(begin + self.quad + 8 * i)
                    mem.copy_weight_b128(
                        self.q_b_at + (s * 2 * self.m_tiles + i) * THREADS * 16, self.q_b, row * Int64(self.q_rank) + Int64(k)
                    )
        if self.warp < self.used:
            for i in cutlass.range_constexpr(self.strips):
                strip = self.rank + i * self.cluster
                if strip < self.latent // STRIP:
                    for s in cutlass.range_constexpr(self.strip_steps):
                        k = (self.warp + s * self.used) * 16 + self.quad_lane * 2
                        for part in cutlass.range_constexpr(4):
                            at = self.w_uk_at + ((i * self.strip_steps + s) * 4 + part) * THREADS * 16
                            row = self.head * self.nope + k + (0, 1, 8, 9)[part]
                            mem.copy_weight_b128(at, self.w_uk, row * self.latent + strip * STRIP + self.quad * 8)
        mem.copy_commit()

    def latent_at(self, chunk: int) -> tuple[Any, Any]:
        """(first of the eight channels of the q latent that this lane holds in a chunk, whether they are its own); the last chunk may be
        partly empty, and its lanes without channels look at the last ones."""
        k = self.lane * 8 + chunk * 256
        return cutlass.min(k, Int32(self.q_rank - 8)), Int32(k < self.q_rank)

    def everyone(self) -> None:
        if self.cluster > 1:
            cluster_sync()
        else:
            block_sync()

    @cute.jit
    def stage(self, first: Int32, n: Int32, scales: cutlass.Constexpr):
        """A warp a token, all its loads on their way at once: RMSNorm of the q latent, rounded to BF16. Tokens past n are zeros."""
        tokens = [self.warp + i * WARPS for i in range(ROUND // WARPS)]
        words = [
            [
                mem.load_b128(self.proj, (first + cutlass.min(token, n - 1)) * self.proj_columns + self.latent_at(i)[0])
                for i in range(self.chunks)
            ]
            for token in tokens
        ]
        for t in cutlass.range_constexpr(ROUND // WARPS):
            total = Float32(0.0)
            for i in cutlass.range_constexpr(self.chunks):
                own = self.latent_at(i)[1]
                for word in words[t][i]:
                    a, b = bf16_word_f32x2(select(own, word, Int32(0)))
                    total = total + a * a + b * b
            factor = rsqrt(warp_sum(total) * Float32(1.0 / self.q_rank) + Float32(self.eps))
            for i in cutlass.range_constexpr(self.chunks):
                k, own = self.latent_at(i)
                out = []
                for w in cutlass.range_constexpr(4):
                    a, b = bf16_word_f32x2(words[t][i][w])
                    c, d = bf16_word_f32x2(scales[i][w])
                    out.append(select(tokens[t] < n, pack_bf16(a * factor * c, b * factor * d), Int32(0)))
                if own != 0:
                    mem.shared_store_b128(self.x_at + (tokens[t] * self.x_pitch + k) * 2, tuple(out))

    @cute.jit
    def project(self, first: Int32, n: Int32):
        """This block's rows of q_b; nope rows stay in shared memory (BF16), pe rows go to the output."""
        acc = cute.make_rmem_tensor((self.m_tiles * 8,), Float32)
        acc.fill(0.0)
        if self.warp < self.warps_k:
            for s in cutlass.range_constexpr(self.steps):
                k = (self.warp * self.steps + s) * STEP_K + self.quad_lane * 8
                x = [mem.shared_b128(self.x_at + ((self.quad + 8 * i) * self.x_pitch + k) * 2) for i in range(2)]
                for m in cutlass.range_constexpr(self.m_tiles):
                    low, high = [mem.shared_b128(self.q_b_at + ((s * self.m_tiles + m) * 2 + half) * THREADS * 16) for half in range(2)]
                    for i in cutlass.range_constexpr(2):
                        at = (m * 2 + i) * 4
                        result = mma_pair(tuple(acc[at + j] for j in range(4)), low, high, x[i])
                        for j in cutlass.range_constexpr(4):
                            acc[at + j] = result[j]
            for m in cutlass.range_constexpr(self.m_tiles):
                for i in cutlass.range_constexpr(2):
                    for half in cutlass.range_constexpr(2):
                        row = self.warp * self.own + m * 16 + self.quad + 8 * half
                        at = (m * 2 + i) * 4 + half * 2
                        place = self.sum_at + (row * (ROUND + 8) + i * 8 + self.quad_lane * 2) * 4
                        mem.shared_store_f32x2(place, acc[at], acc[at + 1])
        block_sync()
        for e in cutlass.range(self.tid, self.own * ROUND, THREADS):
            row = e % self.own
            token = e // self.own
            total = Float32(0.0)
            for w in cutlass.range_constexpr(self.warps_k):
                total = total + mem.shared_f32(self.sum_at + ((w * self.own + row) * (ROUND + 8) + token) * 4)
            channel = self.rank * self.own + row
            if channel < self.nope:
                mem.shared_store_bf16(self.own_at + (token * self.own + row) * 2, total)
            elif token < n:
                place = ((first + token) * self.heads + self.head) * (self.latent + self.pe) + self.latent + channel - self.nope
                mem.store_bf16(self.out, place, total)

    @cute.jit
    def gather(self):
        """All nope channels of the head for the block's tokens, two a word, from the blocks that computed them."""
        pairs = ROUND * self.nope // 2
        places, words = [], []
        for i in cutlass.range_constexpr(-(-pairs // THREADS)):
            e = cutlass.min(self.tid + i * THREADS, Int32(pairs - 1))  # the last threads of an odd share write the same word again
            channel = e % (self.nope // 2) * 2
            token = e // (self.nope // 2)
            at = self.own_at + (token * self.own + channel % self.own) * 2
            words.append(remote_b32(at, channel // self.own) if self.cluster > 1 else mem.shared_b32(at))
            places.append(self.nope_at + (token * self.nope_pitch + channel) * 2)
        for i in cutlass.range_constexpr(len(places)):
            mem.shared_store_b32(places[i], words[i])

    @cute.jit
    def absorb(self, first: Int32, n: Int32):
        """q_nope W_UK: strips of 64 latent columns over the cluster, 16 k a warp, sums over warps in shared memory."""
        for strip_index in cutlass.range_constexpr(self.strips):
            strip = self.rank + strip_index * self.cluster
            inside = strip < self.latent // STRIP
            if (Int32(inside) & Int32(self.warp < self.used)) != 0:
                acc: Any = [(Float32(0.0),) * 4 for _ in range(8)]
                for s in cutlass.range_constexpr(self.strip_steps):
                    k = (self.warp + s * self.used) * 16 + self.quad_lane * 2
                    a_at = self.nope_at + (self.quad * self.nope_pitch + k) * 2
                    high_at = a_at + 8 * self.nope_pitch * 2
                    a = (mem.shared_b32(a_at), mem.shared_b32(high_at), mem.shared_b32(a_at + 16), mem.shared_b32(high_at + 16))
                    at = self.w_uk_at + (strip_index * self.strip_steps + s) * 4 * THREADS * 16
                    acc = transposed_product(acc, a, [mem.shared_b128(at + part * THREADS * 16) for part in range(4)])
                for j in cutlass.range_constexpr(8):
                    for i in cutlass.range_constexpr(4):
                        token = self.quad + 8 * (i // 2)
                        column = self.quad_lane * 16 + (i % 2) * 8 + j
                        mem.shared_store_f32(self.sum_at + ((self.warp * ROUND + token) * (STRIP + 4) + column) * 4, acc[j][i])
            block_sync()
            for e in cutlass.range(self.tid, select(inside, n, Int32(0)) * STRIP // 2, THREADS):
                column = e % (STRIP // 2) * 2
                token = e // (STRIP // 2)
                a = Float32(0.0)
                b = Float32(0.0)
                for w in cutlass.range_constexpr(self.used):
                    x, y = mem.shared_f32x2(self.sum_at + ((w * ROUND + token) * (STRIP + 4) + column) * 4)
                    a = a + x
                    b = b + y
                place = ((first + token) * self.heads + self.head) * (self.latent + self.pe) + strip * STRIP + column
                mem.store_b32(self.out, place, pack_bf16(a, b))
            block_sync()

    @cute.jit
    def write_cache(self, first: Int32, n: Int32, norm: cutlass.Constexpr, table_width: Int32, inverse_scale: Float32):
        """A warp a token: the normed latent and the raw key channels into the token's page; page 0 is padding and never written."""
        for local in cutlass.range(self.rank * WARPS + self.warp, n, self.cluster * WARPS):
            row = first + local
            request = row // self.q
            position = mem.load_b32(self.lengths, request) + row % self.q
            base = row * self.proj_columns + self.q_rank
            words = [mem.load_b32(self.proj, base + self.lane * 2 + 64 * i) for i in range(self.latent // 64)]
            page = mem.load_b32(self.block_table, request * table_width + position // self.page_tokens)
            total = Float32(0.0)
            for i in cutlass.range_constexpr(self.latent // 64):
                a, b = bf16_word_f32x2(words[i])
                total = total + a * a + b * b
            factor = rsqrt(warp_sum(total) * Float32(1.0 / self.latent) + Float32(self.eps))
            if page > 0:
                place = (Int64(page) * Int64(self.page_tokens) + Int64(position % self.page_tokens)) * Int64(self.latent + self.pe)
                for i in cutlass.range_constexpr(self.latent // 64):
                    a, b = bf16_word_f32x2(words[i])
                    c, d = bf16_word_f32x2(norm[i])
                    k = self.lane * 2 + 64 * i
                    self.store_pair(place + Int64(k), round_bf16(a * factor * c), round_bf16(b * factor * d), inverse_scale)
                for k in cutlass.range(self.lane * 2, self.pe, 64):
                    a, b = bf16_word_f32x2(mem.load_b32(self.proj, base + self.latent + k))
                    self.store_pair(place + Int64(self.latent) + Int64(k), a, b, inverse_scale)

    def store_pair(self, place: Any, a: Any, b: Any, inverse_scale: Any) -> None:
        if self.fp8:
            code = "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $2, $1; st.global.b16 [$0], h; }"
            self.pages.require("state")
            emit(code, (), (self.pages.at(place), a * inverse_scale, b * inverse_scale), memory=True)
        else:
            mem.store_b32(self.pages, place, pack_bf16(a, b))


def remote_b32(address: Int32, rank: Any) -> Int32:
    code = "{ .reg .b32 a; mapa.shared::cluster.u32 a, $1, $2; ld.shared::cluster.b32 $0, [a]; }"
    return emit(code, (Int32,), (address, Int32(rank)), memory=True)


class MlaValue:
    """Fixed: heads, value channels a head, kv latent, columns of the projection (the gate is its last heads x value channels)."""

    def __init__(self, heads: int, value: int, latent: int, proj_columns: int) -> None:
        self.heads, self.value, self.latent, self.proj_columns = heads, value, latent, proj_columns
        self.warps_k = next(n for n in (8, 4, 2, 1) if latent % (n * STEP_K) == 0)
        self.threads = 32 * self.warps_k
        self.steps = latent // self.warps_k // STEP_K
        self.ring_bytes = self.steps * 2 * self.threads * 16
        self.shared_bytes = self.ring_bytes + self.warps_k * 16 * 8 * 4

    @cute.jit
    def __call__(
        self,
        latent_THL: cute.Pointer,
        proj_TP: cute.Pointer,
        w_uv_HVL: cute.Pointer,
        out_TC: cute.Pointer,
        rows: Int32,
        pdl: Int32,
        stream: Any,
    ):
        self.kernel(latent_THL, proj_TP, w_uv_HVL, out_TC, rows).launch(
            grid=[self.value // 16, self.heads, (rows + ROUND - 1) // ROUND],
            block=[self.threads, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
        )

    @cute.kernel
    def kernel(self, latent_THL: cute.Pointer, proj_TP: cute.Pointer, w_uv_HVL: cute.Pointer, out_TC: cute.Pointer, rows: Int32):
        latent = mem.Global("latent_THL", latent_THL, "input")
        proj = mem.Global("proj_TP", proj_TP, "input")
        w_uv = mem.Global("w_uv_HVL", w_uv_HVL, "weight")
        out = mem.Global("out_TC", out_TC, "output")
        tid, _, _ = cute.arch.thread_idx()
        tile, head, group = cute.arch.block_idx()
        warp = tid // 32
        quad = tid % 32 // 4
        quad_lane = tid % 4
        ring = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=16).toint())
        sums = ring + self.ring_bytes
        k_first = warp * (self.latent // self.warps_k) + quad_lane * 8
        for s in cutlass.range_constexpr(self.steps):
            for half in cutlass.range_constexpr(2):
                row = head * self.value + tile * 16 + quad + 8 * half
                at = ring + (s * 2 + half) * (self.threads * 16) + tid * 16
                mem.copy_weight_b128(at, w_uv, row * self.latent + k_first + s * STEP_K)
        mem.copy_commit()
        grid_wait()
        grid_release()
        mem.copy_wait(0)
        for first in cutlass.range(group * ROUND, cutlass.min(rows, group * ROUND + ROUND), 8):
            token = cutlass.min(first + quad, rows - 1)
            acc = (Float32(0.0),) * 4
            for s in cutlass.range_constexpr(self.steps):
                x = mem.load_b128(latent, (token * self.heads + head) * self.latent + k_first + s * STEP_K)
                at = ring + s * 2 * (self.threads * 16) + tid * 16
                acc = mma_pair(acc, mem.shared_b128(at), mem.shared_b128(at + self.threads * 16), x)
            for half in cutlass.range_constexpr(2):
                place = sums + ((warp * 16 + quad + 8 * half) * 8 + quad_lane * 2) * 4
                mem.shared_store_f32x2(place, acc[half * 2], acc[half * 2 + 1])
            block_sync()
            for e in cutlass.range(tid, 64, self.threads):
                row = e % 8 * 2
                local = e // 8
                if first + local < rows:
                    totals = []
                    for i in cutlass.range_constexpr(2):
                        total = Float32(0.0)
                        for w in cutlass.range_constexpr(self.warps_k):
                            total = total + mem.shared_f32(sums + ((w * 16 + row + i) * 8 + local) * 4)
                        totals.append(total)
                    column = head * self.value + tile * 16 + row
                    gate_column = self.proj_columns - self.heads * self.value + column
                    gates = bf16_word_f32x2(mem.load_b32(proj, (first + local) * self.proj_columns + gate_column))
                    word = pack_bf16(totals[0] * sigmoid(gates[0]), totals[1] * sigmoid(gates[1]))
                    mem.store_b32(out, (first + local) * self.heads * self.value + column, word)
            block_sync()
