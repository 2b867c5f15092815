"""route: sigmoid + bias top-k with exact ties by lowest id, routing weights, and the lists of pairs by expert.

Grid: one cluster of `list_blocks` blocks that routes, then one block a row that copies the latent box out. A row belongs to one warp, or
to a whole block when there are few. The lists are exact integers: bit t of an expert's mask says that row t chose it, so the place of a
pair is the expert's offset plus the rows below it, whatever the order of arrival.
Before the wait: nothing. After: polls, selection (phase 1), masks in block 0 (phase 2), offsets (phase 3), pairs (phase 4); a cluster
barrier between phases. Only the routing weights are rounded (BF16).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.asm import emit
from kimi_k3_decode.device.math import bits_f32, f32_bits, reciprocal, select, sigmoid
from kimi_k3_decode.device.sync import block_sync, cluster_sync, grid_release, grid_wait, poll_b128, poll_many, rearm_b128, warp_sync

THREADS = 256
WARPS = THREADS // 32


class Route:
    """Fixed: experts (a multiple of 4), top_k <= 32, latent size, scaling, whether ids are forced, blocks of the routing cluster."""

    def __init__(self, experts: int, top_k: int, latent: int, scaling: float, *, forced: bool, list_blocks: int, parts: int) -> None:
        self.experts, self.top_k, self.latent, self.scaling = experts, top_k, latent, scaling
        self.forced, self.list_blocks = forced, list_blocks
        # Warps that share a row, experts of one warp (whole fours), groups of 128 of them (four a lane), rows a block takes at once.
        self.parts = parts
        self.share = -(-experts // parts // 4) * 4
        self.groups = -(-self.share // 128)
        self.rows_at_once = WARPS // parts
        if parts not in (1, WARPS) or (parts > 1 and self.share < top_k):
            raise ValueError(
                f"Route: got {parts} warps a row for top {top_k} of {experts}, needs 1, or {WARPS} with at least top_k experts each"
            )
        self.mask_bytes = experts * 8
        self.offset_bytes = (experts + 1) * 4
        self.sums_offset = self.mask_bytes + -(-self.offset_bytes // 64) * 64
        self.chosen_offset = -(-(self.sums_offset + WARPS * 4) // 16) * 16
        self.shared_bytes = self.chosen_offset + WARPS * top_k * 16

    @cute.jit
    def __call__(
        self,
        logits_TE: cute.Pointer,
        latent_box_TL: cute.Pointer,
        other_logits_TE: cute.Pointer,
        other_latent_TL: cute.Pointer,
        bias_E: cute.Pointer,
        live_rows_N: cute.Pointer,
        forced_TZ: cute.Pointer,
        ids_TZ: cute.Pointer,
        weights_TZ: cute.Pointer,
        offsets_E: cute.Pointer,
        pairs_N: cute.Pointer,
        latent_TL: cute.Pointer,
        health_N: cute.Pointer,
        rows: Int32,
        pdl: Int32,
        stream: Any,
    ):
        copies = (rows + self.list_blocks - 1) // self.list_blocks * self.list_blocks
        options = {"cluster": [self.list_blocks, 1, 1]} if self.list_blocks > 1 else {}
        self.kernel(
            logits_TE,
            latent_box_TL,
            other_logits_TE,
            other_latent_TL,
            bias_E,
            live_rows_N,
            forced_TZ,
            ids_TZ,
            weights_TZ,
            offsets_E,
            pairs_N,
            latent_TL,
            health_N,
            rows,
        ).launch(
            grid=[copies + self.list_blocks, 1, 1], block=[THREADS, 1, 1], smem=self.shared_bytes, stream=stream, use_pdl=pdl, **options
        )

    @cute.kernel
    def kernel(
        self,
        logits_TE: cute.Pointer,
        latent_box_TL: cute.Pointer,
        other_logits_TE: cute.Pointer,
        other_latent_TL: cute.Pointer,
        bias_E: cute.Pointer,
        live_rows_N: cute.Pointer,
        forced_TZ: cute.Pointer,
        ids_TZ: cute.Pointer,
        weights_TZ: cute.Pointer,
        offsets_E: cute.Pointer,
        pairs_N: cute.Pointer,
        latent_TL: cute.Pointer,
        health_N: cute.Pointer,
        rows: Int32,
    ):
        self.logits = mem.Global("logits_TE", logits_TE, "mailbox")
        self.latent_box = mem.Global("latent_box_TL", latent_box_TL, "mailbox")
        self.other_logits = mem.Global("other_logits_TE", other_logits_TE, "mailbox")
        self.other_latent = mem.Global("other_latent_TL", other_latent_TL, "mailbox")
        self.bias = mem.Global("bias_E", bias_E, "weight")
        live_rows = mem.Global("live_rows_N", live_rows_N, "table")
        self.forced_ids = mem.Global("forced_TZ", forced_TZ, "table")
        self.ids = mem.Global("ids_TZ", ids_TZ, "output")
        self.weights = mem.Global("weights_TZ", weights_TZ, "output")
        self.offsets = mem.Global("offsets_E", offsets_E, "output")
        self.pairs = mem.Global("pairs_N", pairs_N, "output")
        self.latents = mem.Global("latent_TL", latent_TL, "output")
        self.health = mem.Global("health_N", health_N, "mailbox")
        self.tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        self.shared = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=16).toint())
        self.chosen_at = self.shared + self.chosen_offset
        grid_wait()
        grid_release()
        if block < self.list_blocks:
            self.route(block, mem.load_b32(live_rows, 0), rows)
        elif block - self.list_blocks < rows:
            self.copy_latent(block - self.list_blocks)

    @cute.jit
    def copy_latent(self, row: Int32):
        """One row of the latent box to plain memory; the other parity is re-armed."""
        for i in cutlass.range(self.tid, self.latent // 8, THREADS):
            at = row * self.latent + i * 8
            mem.store_b128(self.latents, at, poll_b128(self.latent_box, at, self.health))
            rearm_b128(self.other_latent, at)

    @cute.jit
    def route(self, rank: Int32, live: Int32, rows: Int32):
        masks = self.shared
        offsets = self.shared + self.mask_bytes
        for e in cutlass.range(self.tid, self.experts * 2, THREADS):
            mem.shared_store_b32(masks + e * 4, Int32(0))
        self.exchange()
        warp = self.tid // 32
        lane = self.tid % 32
        owner = rank * self.rows_at_once + (warp if self.parts == 1 else 0)
        for row in cutlass.range(owner, rows, self.list_blocks * self.rows_at_once):
            self.choose(row, warp, lane)
            if (Int32(lane < self.top_k) & self.speaks(warp)) != 0:
                chosen = self.store_choice(row, live, warp, lane)
                if chosen >= 0:
                    set_bit(masks + (chosen * 2 + row // 32) * 4, row % 32)
            if cutlass.const_expr(self.parts > 1):
                block_sync()
        self.exchange()
        if rank == 0:
            self.scan(masks, offsets)
        self.exchange()
        for i in cutlass.range(remote_b32(offsets + self.experts * 4) + self.tid, rows * self.top_k, THREADS):
            if rank == 0:
                mem.store_b32(self.pairs, i, Int32(-1))
        for row in cutlass.range(owner, rows, self.list_blocks * self.rows_at_once):
            if (Int32(lane < self.top_k) & Int32(row < live) & self.speaks(warp)) != 0:
                pair = row * self.top_k + lane
                expert = mem.load_b32(self.ids, pair)
                low = remote_b32(masks + expert * 8)
                high = remote_b32(masks + expert * 8 + 4)
                below = (Int32(1) << (row % 32)) - 1
                before = select(row < 32, popcount(low & below), popcount(low) + popcount(high & below))
                mem.store_b32(self.pairs, remote_b32(offsets + expert * 4) + before, pair)
        self.exchange()

    def speaks(self, warp: Any) -> Any:
        """1 in the warp that stores a row's choice."""
        return Int32(1) if self.parts == 1 else Int32(warp == 0)

    def exchange(self) -> None:
        """A barrier over everything that routes."""
        if self.list_blocks > 1:
            cluster_sync()
        else:
            block_sync()

    @cute.jit
    def choose(self, row: Int32, warp: Int32, lane: Int32):
        """Polls and re-arms this warp's logits of the row and leaves (id, score) of the z-th choice at `chosen_at(warp) + 8 z`; with
        several warps a row, each finds the best of its part and warp 0 the best of those."""
        share = self.share
        begin = warp * share if self.parts > 1 else Int32(0)
        end = cutlass.min(begin + share, Int32(self.experts))
        n = self.groups * 4
        firsts = [begin + group * 128 + lane * 4 for group in range(self.groups)]
        places = [row * self.experts + cutlass.max(cutlass.min(first, end - 4), Int32(0)) for first in firsts]
        words = poll_many(self.logits, places, self.health)
        for place in places:
            rearm_b128(self.other_logits, place)
        keys = []
        scores = []
        ids = [firsts[i // 4] + i % 4 for i in range(n)]
        for group in cutlass.range_constexpr(self.groups):
            bias = mem.load_weight_f32x4(self.bias, places[group] - row * self.experts)
            for j in cutlass.range_constexpr(4):
                score = sigmoid(bits_f32(words[group * 4 + j]))
                scores.append(score)
                keys.append(select(firsts[group] < end, ordered_key(score + bias[j]), Int32(0)))
        if cutlass.const_expr(self.forced):
            for z in cutlass.range(self.top_k):
                wanted = mem.load_b32(self.forced_ids, row * self.top_k + z)
                for i in cutlass.range_constexpr(n):
                    if (Int32(ids[i] == wanted) & Int32(firsts[i // 4] < end)) != 0:
                        self.store_chosen(0 if self.parts > 1 else warp, z, wanted, Int32(1), scores[i])
        else:
            self.take_best(keys, scores, ids, n, warp)
        if cutlass.const_expr(self.parts > 1):
            block_sync()
            if cutlass.const_expr(not self.forced):  # noqa: SIM102 - one is decided while tracing, the other on the device
                if warp == 0:
                    self.merge(lane)
        else:
            warp_sync()

    def store_chosen(self, warp: Any, z: Any, expert: Any, key: Any, score: Any) -> None:
        at = self.chosen_at + (warp * self.top_k + z) * 16
        mem.shared_store_b128(at, (expert, key, f32_bits(score), Int32(0)))

    @cute.jit
    def take_best(self, keys: list, scores: cutlass.Constexpr, ids: cutlass.Constexpr, n: cutlass.Constexpr, warp: Int32):
        """top_k times: the largest key of the warp, the lowest id among equals; its owner stores it and drops it."""
        for z in cutlass.range(self.top_k):
            best = keys[0]
            for i in cutlass.range_constexpr(1, n):
                best = unsigned_max(best, keys[i])
            best = warp_max_u32(best)
            best_id = Int32(0x7FFFFFFF)
            for i in cutlass.range_constexpr(n):
                best_id = cutlass.min(best_id, select(keys[i] == best, ids[i], Int32(0x7FFFFFFF)))
            best_id = warp_min_u32(best_id)
            hits = [Int32(keys[i] == best) & Int32(ids[i] == best_id) for i in range(n)]
            for i in cutlass.range_constexpr(n):
                if hits[i] != 0:
                    self.store_chosen(warp, z, best_id, best, scores[i])
            keys = [select(hits[i], Int32(0), keys[i]) for i in range(n)]

    @cute.jit
    def merge(self, lane: Int32):
        """Warp 0: the best of all warps' choices, left in warp 0's place."""
        n = -(-WARPS * self.top_k // 32)
        keys = []
        scores = []
        ids = []
        for i in cutlass.range_constexpr(n):
            c = i * 32 + lane
            words = mem.shared_b128(self.chosen_at + cutlass.min(c, Int32(WARPS * self.top_k - 1)) * 16)
            keys.append(select(c < WARPS * self.top_k, words[1], Int32(0)))
            scores.append(bits_f32(words[2]))
            ids.append(words[0])
        warp_sync()
        self.take_best(keys, scores, ids, n, Int32(0))
        warp_sync()

    @cute.jit
    def store_choice(self, row: Int32, live: Int32, warp: Int32, lane: Int32):
        """Lane z < top_k: stores the z-th id and weight; returns the id, -1 in a padding row."""
        base = self.chosen_at + (Int32(0) if self.parts > 1 else warp * self.top_k) * 16
        words = mem.shared_b128(base + lane * 16)
        total = Float32(0.0)
        for z in cutlass.range_constexpr(self.top_k):
            total = total + mem.shared_f32(base + z * 16 + 8)
        weight = bits_f32(words[2]) * reciprocal(total) * Float32(self.scaling)
        padding = row >= live
        expert = select(padding, Int32(-1), words[0])
        mem.store_b32(self.ids, row * self.top_k + lane, expert)
        mem.store_bf16(self.weights, row * self.top_k + lane, select(padding, Float32(0.0), weight))
        return expert

    @cute.jit
    def scan(self, masks: Int32, offsets: Int32):
        """Exclusive prefix sum of the experts' counts: each thread a run of experts, then warps, then the block."""
        run = -(-self.experts // THREADS)
        warp_sums = self.shared + self.sums_offset
        lane = self.tid % 32
        counts = []
        total = Int32(0)
        for j in cutlass.range_constexpr(run):
            e = self.tid * run + j
            safe = cutlass.min(e, Int32(self.experts - 1))
            count = popcount(mem.shared_b32(masks + safe * 8)) + popcount(mem.shared_b32(masks + safe * 8 + 4))
            count = select(e < self.experts, count, Int32(0))
            counts.append(count)
            total = total + count
        inclusive = total
        for step in cutlass.range_constexpr(5):
            other = shuffle_up(inclusive, 1 << step)
            inclusive = select(lane >= (1 << step), inclusive + other, inclusive)
        if lane == 31:
            mem.shared_store_b32(warp_sums + self.tid // 32 * 4, inclusive)
        block_sync()
        before = inclusive - total
        for w in cutlass.range_constexpr(WARPS):
            value = mem.shared_b32(warp_sums + w * 4)
            before = select(self.tid // 32 > w, before + value, before)
        for j in cutlass.range_constexpr(run):
            e = self.tid * run + j
            if e < self.experts:
                mem.shared_store_b32(offsets + e * 4, before)
                mem.store_b32(self.offsets, e, before)
                if e == self.experts - 1:
                    mem.store_b32(self.offsets, self.experts, before + counts[j])
                    mem.shared_store_b32(offsets + self.experts * 4, before + counts[j])
            before = before + counts[j]


def set_bit(address: Int32, bit: Int32) -> None:
    """Atomically set a bit of a word in block 0's shared memory. The result does not depend on the order."""
    code = "{ .reg .b32 a; mapa.shared::cluster.u32 a, $0, 0; red.relaxed.cluster.shared::cluster.or.b32 [a], $1; }"
    emit(code, (), (address, Int32(1) << bit), memory=True)


def ordered_key(value: Float32) -> Int32:
    """A 32-bit key that orders as unsigned exactly as the floats do (both zeros alike); 0 is below every number."""
    bits = f32_bits(value + Float32(0.0))
    return bits ^ ((bits >> 31) | Int32(-(1 << 31)))


def unsigned_max(a: Int32, b: Int32) -> Int32:
    return emit("max.u32 $0, $1, $2;", (Int32,), (a, b), memory=False)


def warp_max_u32(value: Int32) -> Int32:
    return emit("redux.sync.max.u32 $0, $1, 0xffffffff;", (Int32,), (value,), memory=False)


def warp_min_u32(value: Int32) -> Int32:
    return emit("redux.sync.min.u32 $0, $1, 0xffffffff;", (Int32,), (value,), memory=False)


def remote_b32(address: Int32) -> Int32:
    """A word of block 0's shared memory."""
    code = "{ .reg .b32 a; mapa.shared::cluster.u32 a, $1, 0; ld.shared::cluster.b32 $0, [a]; }"
    return emit(code, (Int32,), (address,), memory=True)


def popcount(word: Int32) -> Int32:
    return emit("popc.b32 $0, $1;", (Int32,), (word,), memory=False)


def shuffle_up(value: Int32, delta: int) -> Int32:
    return emit(f"shfl.sync.up.b32 $0, $1, {delta}, 0, 0xffffffff;", (Int32,), (value,), memory=False)
