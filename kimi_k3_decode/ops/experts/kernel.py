"""experts_up: the routed experts' first half, MXFP4 weights (decoded in registers) times BF16 activations, FP32 sums; see down_kernel.py.

Computes hidden[pair, I] = SiTU(w1 z, w3 z). Works through a list of entries (expert, up to a few of its pairs) that every block rebuilds in
shared memory (device/active.py); an expert with more pairs has more entries and its codes are read again, then from L2.
A persistent block takes a run of neighbouring (entry, tile of 16 rows of w1 and w3), so it stages an entry's latents once for many tiles;
warps split K and stream their codes through one ring of cp.async across all tiles. One block barrier a tile, before the sums over warps.
A single row needs no lists: its choices are the entries, and its latents, staged once, serve them all.
Before the wait: nothing, since even the addresses of the weights depend on the routing. Rounding: the result, once.
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
from kimi_k3_decode.device.sync import block_sync, grid_release, grid_wait, warp_sync

CHUNK = 128  # k of one step: a quad of lanes, one group of 32 each
GROUP = 32
ENTRY_TOKENS = 8  # tokens of one mma, and of one entry of down
MULTIPROCESSOR_BYTES, RESERVED_BYTES = 228 * 1024, 1024  # shared memory of a multiprocessor, and what each block takes beyond its own


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
    """Fixed: experts, top_k, latent size (k), intermediate size of this rank, betas, warps over k, tokens an entry (1: the step has a
    single row), most pairs of a step, steps of the ring."""

    def __init__(
        self,
        experts: int,
        top_k: int,
        latent: int,
        inner: int,
        beta: float,
        linear_beta: float,
        *,
        warps: int,
        tokens: int,
        pairs: int,
        depth: int,
    ) -> None:
        self.experts, self.top_k, self.latent, self.inner = experts, top_k, latent, inner
        self.beta, self.linear_beta = beta, linear_beta
        self.tokens, self.depth = tokens, depth
        self.single = tokens == 1
        self.warps, self.threads = warps, 32 * warps
        self.chunks = latent // CHUNK
        self.steps = self.chunks // warps
        # A warp's scales of one row are one copy.
        self.scale_bytes = self.steps * CHUNK // GROUP
        if latent % (CHUNK * warps) or inner % 16 or self.scale_bytes not in (4, 8, 16) or depth < 2:
            raise ValueError(
                f"ExpertsUp: got latent {latent}, inner {inner}, {warps} warps, depth {depth}, needs 1, 2 or 4 whole chunks a warp, "
                "16-row tiles, depth >= 2"
            )
        self.row_tiles = inner // 16
        self.x_pitch = self.chunks * CHUNK + 32
        self.slot_bytes = 4 * self.threads * 16
        self.scale_slots = 2 if depth == self.steps else -(-(depth - 1) // self.steps) + 2
        self.list_bytes = -(-top_k // 4) * 16 if self.single else active.shared_bytes(experts, pairs, tokens, self.threads)
        self.entries = top_k if self.single else active.entries(experts, pairs, tokens)
        self.ring_bytes = depth * self.slot_bytes
        self.scale_slot_bytes = self.warps * 32 * self.scale_bytes
        self.x_bytes = tokens * self.x_pitch * 2
        self.sum_bytes = warps * 2 * 16 * tokens * 4
        self.pair_bytes = 2 * ENTRY_TOKENS * 4
        scales = self.scale_slots * self.scale_slot_bytes
        self.shared_bytes = self.list_bytes + self.ring_bytes + scales + self.x_bytes + 2 * self.sum_bytes + self.pair_bytes

    @cute.jit
    def __call__(
        self,
        latent_TL: cute.Pointer,
        ids_TZ: cute.Pointer,
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
        self.kernel(latent_TL, ids_TZ, offsets_E, pairs_N, w1_EIJ, w1_scale_EIG, w3_EIJ, w3_scale_EIG, hidden_TZI).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], smem=self.shared_bytes, stream=stream, use_pdl=pdl
        )

    @cute.kernel
    def kernel(
        self,
        latent_TL: cute.Pointer,
        ids_TZ: cute.Pointer,
        offsets_E: cute.Pointer,
        pairs_N: cute.Pointer,
        w1_EIJ: cute.Pointer,
        w1_scale_EIG: cute.Pointer,
        w3_EIJ: cute.Pointer,
        w3_scale_EIG: cute.Pointer,
        hidden_TZI: cute.Pointer,
    ):
        self.z = mem.Global("latent_TL", latent_TL, "input")
        ids = mem.Global("ids_TZ", ids_TZ, "input")
        offsets = mem.Global("offsets_E", offsets_E, "input")
        self.pairs = mem.Global("pairs_N", pairs_N, "input")
        w1 = mem.Global("w1_EIJ", w1_EIJ, "weight")
        w3 = mem.Global("w3_EIJ", w3_EIJ, "weight")
        self.codes = (w1, w3)
        self.scales = (mem.Global("w1_scale_EIG", w1_scale_EIG, "weight"), mem.Global("w3_scale_EIG", w3_scale_EIG, "weight"))
        self.hidden = mem.Global("hidden_TZI", hidden_TZI, "output")
        self.tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        self.lane = self.tid % 32
        self.warp, self.quad, self.quad_lane = self.tid // 32, self.lane // 4, self.lane % 4
        self.list_at = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        self.ring_at = self.list_at + self.list_bytes
        self.scales_at = self.ring_at + self.ring_bytes
        self.x_at = self.scales_at + self.scale_slots * self.scale_slot_bytes
        self.sum_at = self.x_at + self.x_bytes
        self.pair_at = self.sum_at + 2 * self.sum_bytes
        grid_wait()
        grid_release()
        if cutlass.const_expr(self.single):
            entry, count = active.choices(ids, self.top_k, self.tid)
            self.stage([Int32(0)])
            count = active.listed(entry, count, self.top_k, self.list_at, self.tid)
        else:
            sums = self.list_at + self.entries * 4
            count = active.compact(offsets, self.experts, self.tokens, self.threads, self.list_at, sums, self.tid)
        items = count * self.row_tiles
        each = items // blocks
        extra = items - each * blocks
        begin = block * each + cutlass.min(block, extra)
        self.end = begin + each + Int32(block < extra)
        if begin < self.end:
            self.walk(begin)

    @cute.jit
    def walk(self, begin: Int32):
        """This block's tiles in order: the ring runs ahead over tile boundaries; one block barrier a tile."""
        steps, depth = self.steps, self.depth
        ahead, ahead_scale, place = begin, Int32(0), Int64(0)
        for i in cutlass.range_constexpr(depth - 1):
            place = self.issue(ahead, i % steps, ahead_scale, self.slot_at(i), place)
            if cutlass.const_expr((i + 1) % steps == 0):
                ahead = ahead + 1
                ahead_scale = self.next_of(ahead_scale, self.scale_slots)
        # A ring as long as a tile has its slots known while tracing.
        fixed = depth == steps
        slot, scale_slot, turn, staged = Int32(0), Int32(0), Int32(0), Int32(-1)
        for item in cutlass.range(begin, self.end):
            index = item // self.row_tiles
            entry = mem.shared_b32(self.list_at + index * 4)
            if cutlass.const_expr(not self.single):
                if index != staged:
                    self.stage_entry(entry, index % 2)
                    block_sync()
                staged = index
            acc = [(Float32(0.0),) * 4 for _ in range(2)]
            for s in cutlass.range_constexpr(steps):
                mem.copy_wait(depth - 2)
                if cutlass.const_expr(s == 0):
                    warp_sync()
                # The slot of the step before is free: refill it first, so that its copies travel during the products.
                before = (s - 1) % depth if fixed else select(slot == 0, Int32(depth - 1), slot - 1)
                place = self.issue(ahead, (s + depth - 1) % steps, ahead_scale, self.slot_at(before), place)
                if cutlass.const_expr((s + depth) % steps == 0):
                    ahead = ahead + 1
                    ahead_scale = self.next_of(ahead_scale, self.scale_slots)
                acc = self.products(acc, self.slot_at(s if fixed else slot), scale_slot, s)
                if cutlass.const_expr(not fixed):
                    slot = self.next_of(slot, depth)
            scale_slot = self.next_of(scale_slot, self.scale_slots)
            buffer = self.sum_at + turn * self.sum_bytes
            self.store_sums(acc, buffer)
            block_sync()
            self.finish(buffer, self.pair_at + index % 2 * (ENTRY_TOKENS * 4), entry, item - index * self.row_tiles)
            turn = 1 - turn

    def next_of(self, slot: Any, slots: int) -> Any:
        return select(slot == slots - 1, Int32(0), slot + 1)

    def slot_at(self, slot: Any) -> Any:
        """Shared address of this thread's first 16 bytes of a ring slot."""
        return self.ring_at + self.tid * 16 + slot * self.slot_bytes

    @cute.jit
    def issue(self, item: Int32, step: cutlass.Constexpr, scale_slot: Int32, dst: Int32, place: Int64):
        """Copy this thread's codes of one step and, with a tile's first step, its warp's scales of the whole tile. Past the end nothing.
        Returns the tile's place: the offset of this thread's codes of step 0, in bytes of either matrix."""
        if item < self.end:
            if cutlass.const_expr(step == 0):
                index = item // self.row_tiles
                expert = active.entry_expert(mem.shared_b32(self.list_at + index * 4))
                row = Int64(expert) * Int64(self.inner) + Int64((item - index * self.row_tiles) * 16)
                first_group = self.warp * (self.steps * 4)
                place = (row + Int64(self.quad)) * Int64(self.latent // 2) + Int64((first_group + self.quad_lane) * 16)
                scale_at = (row + Int64(self.lane % 16)) * Int64(self.latent // GROUP) + Int64(first_group)
                scale_dst = self.scales_at + scale_slot * self.scale_slot_bytes + self.tid * self.scale_bytes
                source = mem.Global.choose(Int32(self.lane >= 16), self.scales[1], self.scales[0])
                mem.copy_weight(scale_dst, source, scale_at, self.scale_bytes)
            for matrix in cutlass.range_constexpr(2):
                for half in cutlass.range_constexpr(2):
                    at = place + Int64(step * 64 + half * 8 * (self.latent // 2))
                    mem.copy_weight_b128(dst + (matrix * 2 + half) * (self.threads * 16), self.codes[matrix], at)
        mem.copy_commit()
        return place

    @property
    def resident(self) -> int:
        """Blocks to launch for each multiprocessor: two, or as many as it holds where a block then has a single tile."""
        return max(2, MULTIPROCESSOR_BYTES // (self.shared_bytes + RESERVED_BYTES)) if self.single else 2

    @cute.jit
    def stage_entry(self, entry: Int32, parity: Int32):
        """The latents of the entry's tokens, and its pairs. Tokens past the entry's repeat its last; their sums are dropped."""
        last = active.entry_first(entry) + active.entry_count(entry) - 1
        pairs = [mem.load_b32(self.pairs, cutlass.min(active.entry_first(entry) + t, last)) for t in range(self.tokens)]
        self.stage([pair // self.top_k for pair in pairs])
        if self.tid == 0:
            for t in cutlass.range_constexpr(self.tokens):
                mem.shared_store_b32(self.pair_at + (parity * ENTRY_TOKENS + t) * 4, pairs[t])

    @cute.jit
    def stage(self, rows: list):
        """Latents of `rows` into shared memory: granule i of lane t at 32 i + 8 t of its chunk, so that a quad reads 64 adjacent bytes."""
        per_row = self.latent // 8
        granules = [r * self.threads + self.tid for r in range(-(-per_row // self.threads))]
        words = []  # all loads before the first store, so that they travel together
        for granule in granules:
            k = cutlass.min(granule, Int32(per_row - 1)) * 8
            words.append([mem.load_b128(self.z, row * self.latent + k) for row in rows])
        for r in cutlass.range_constexpr(len(granules)):
            if granules[r] < per_row:
                k = granules[r] * 8
                inside = k % CHUNK
                place = k - inside + inside % GROUP // 8 * GROUP + inside // GROUP * 8
                for t in cutlass.range_constexpr(self.tokens):
                    mem.shared_store_b128(self.x_at + (t * self.x_pitch + place) * 2, interleave(words[r][t]))

    def products(self, acc: Any, code_at: Any, scale_slot: Any, s: int) -> Any:
        """Both matrices over one chunk of this warp."""
        token = cutlass.min(self.quad, Int32(self.tokens - 1)) if self.tokens < ENTRY_TOKENS else self.quad
        x_at = self.x_at + (token * self.x_pitch + (self.warp * self.steps + s) * CHUNK + self.quad_lane * 8) * 2
        x = [mem.shared_b128(x_at + i * GROUP * 2) for i in range(4)]
        scale_at = self.scales_at + scale_slot * self.scale_slot_bytes + self.warp * 32 * self.scale_bytes
        scale_at = scale_at + self.quad * self.scale_bytes + s * 4 + self.quad_lane
        found = []
        for matrix in range(2):
            codes = [mem.shared_b128(code_at + (matrix * 2 + half) * (self.threads * 16)) for half in range(2)]
            factors = [scale_factor(mem.shared_u8(scale_at + (matrix * 16 + half * 8) * self.scale_bytes)) for half in range(2)]
            found.append(group_products(acc[matrix], codes[0], codes[1], factors[0], factors[1], x))
        return found

    def store_sums(self, acc: Any, buffer: Any) -> None:
        """[warp, matrix, row, token] in FP32; the columns past the tokens of an entry are dropped."""

        @cute.jit
        def store(matrix: cutlass.Constexpr):
            at = buffer + (((self.warp * 2 + matrix) * 16 + self.quad) * self.tokens + self.quad_lane * 2) * 4
            if self.quad_lane * 2 < self.tokens:
                if cutlass.const_expr(self.single):
                    mem.shared_store_f32(at, acc[matrix][0])
                    mem.shared_store_f32(at + 8 * 4, acc[matrix][2])
                else:
                    mem.shared_store_f32x2(at, acc[matrix][0], acc[matrix][1])
                    mem.shared_store_f32x2(at + 8 * self.tokens * 4, acc[matrix][2], acc[matrix][3])

        for matrix in range(2):
            store(matrix)

    @cute.jit
    def finish(self, buffer: Int32, pair_at: Int32, entry: Int32, row_tile: Int32):
        """Sums over the warps, the activation, one rounding."""
        for i in cutlass.range(self.tid, 16 * active.entry_count(entry), self.threads):
            token = i // 16
            column = i % 16
            gate = Float32(0.0)
            up = Float32(0.0)
            for w in cutlass.range_constexpr(self.warps):
                at = buffer + ((w * 2 * 16 + column) * self.tokens + token) * 4
                gate = gate + mem.shared_f32(at)
                up = up + mem.shared_f32(at + 16 * self.tokens * 4)
            pair = active.entry_first(entry) if self.single else mem.shared_b32(pair_at + token * 4)
            mem.store_bf16(self.hidden, pair * self.inner + row_tile * 16 + column, situ(gate, up, self.beta, self.linear_beta))
