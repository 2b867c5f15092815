"""route: sigmoid + bias top-k with exact ties by lowest id, routing weights, and the lists of pairs by expert.

Grid: one cluster of `list_blocks` blocks that routes, then one block a row that copies the latent box out. A row belongs to one warp,
which takes the best top_k times, or to a whole block when there are few, whose warps sort. The lists are exact integers: bit t of an
expert's mask says that row t chose it, so the place of a pair is the expert's offset plus the rows below it, whatever the order of arrival.
Before the wait: the bias is loaded and the masks cleared. After: polls, selection (phase 1), masks in block 0 (phase 2), offsets (phase 3),
pairs (phase 4); a cluster barrier between phases. A single row needs no masks: every thread places its experts among the sorted choices.
Only the routing weights are rounded (BF16).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.asm import emit
from kimi_k3_decode.device.math import bits_f32, f32_bits, reciprocal, select, shuffle_xor, sigmoid, warp_sum
from kimi_k3_decode.device.sync import block_sync, cluster_sync, grid_release, grid_wait, poll_b128, poll_many, rearm_b128, warp_sync

THREADS = 256
WARPS = THREADS // 32
SORTED = 16  # lanes that sort together: top_k where warps share a row


class Route:
    """Fixed: experts (a multiple of 4), top_k <= 32, latent size, scaling, whether ids are forced, blocks of the routing cluster, warps
    that share a row. A launch has at most one row for each of these shares."""

    def __init__(self, experts: int, top_k: int, latent: int, scaling: float, *, forced: bool, list_blocks: int, parts: int) -> None:
        self.experts, self.top_k, self.latent, self.scaling = experts, top_k, latent, scaling
        self.forced, self.list_blocks = forced, list_blocks
        # Warps that share a row, experts of one warp (whole fours), groups of 128 of them (four a lane), rows a block takes.
        self.parts = parts
        self.share = -(-experts // parts // 4) * 4
        self.groups = -(-self.share // 128)
        self.rows_at_once = WARPS // parts
        self.single = parts > 1 and list_blocks == 1
        if parts not in (1, WARPS) or (parts > 1 and (self.share < top_k or top_k != SORTED or experts > 4 * THREADS)):
            raise ValueError(
                f"Route: got {parts} warps a row for top {top_k} of {experts}, needs 1, or {WARPS} with at least top_k experts each, top_k "
                f"{SORTED} and at most {4 * THREADS} experts"
            )
        self.mask_bytes = experts * 8
        self.offset_bytes = (experts + 1) * 4
        self.sums_offset = self.mask_bytes + -(-self.offset_bytes // 64) * 64
        # Of a shared row: the best of each warp, and every expert's score. Else the choices of each warp's row.
        self.chosen_offset = -(-(self.sums_offset + WARPS * 4) // 16) * 16
        self.scores_offset = self.chosen_offset + WARPS * top_k * 8
        self.shared_bytes = self.scores_offset + (experts * 4 if parts > 1 else 0)

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
        bias = mem.Global("bias_E", bias_E, "weight")
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
        self.warp, self.lane = self.tid // 32, self.tid % 32
        self.shared = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=16).toint())
        self.chosen_at = self.shared + self.chosen_offset
        self.scores_at = self.shared + self.scores_offset
        begin = self.warp * self.share if self.parts > 1 else Int32(0)
        self.end = cutlass.min(begin + self.share, Int32(self.experts))
        self.firsts = [begin + group * 128 + self.lane * 4 for group in range(self.groups)]
        self.places = [cutlass.max(cutlass.min(first, self.end - 4), Int32(0)) for first in self.firsts]
        biases = [mem.load_weight_early_f32x4(bias, place) for place in self.places]
        if block < self.list_blocks:
            self.clear()
        grid_wait()
        grid_release()
        if block < self.list_blocks:
            live = mem.load_b32(live_rows, 0)
            if cutlass.const_expr(self.single):
                self.route_single(live, biases)
            else:
                self.route(block, live, rows, biases)
        elif block - self.list_blocks < rows:
            self.copy_latent(block - self.list_blocks)

    @cute.jit
    def clear(self):
        """No row has chosen any expert."""
        if cutlass.const_expr(not self.single):
            for e in cutlass.range(self.tid, self.experts * 2, THREADS):
                mem.shared_store_b32(self.shared + e * 4, Int32(0))
            self.exchange()

    @cute.jit
    def copy_latent(self, row: Int32):
        """One row of the latent box to plain memory; the other parity is re-armed."""
        for i in cutlass.range(self.tid, self.latent // 8, THREADS):
            at = row * self.latent + i * 8
            mem.store_b128(self.latents, at, poll_b128(self.latent_box, at, self.health))
            rearm_b128(self.other_latent, at)

    @cute.jit
    def route(self, rank: Int32, live: Int32, rows: Int32, biases: cutlass.Constexpr):
        masks = self.shared
        offsets = self.shared + self.mask_bytes
        row = rank * self.rows_at_once + (self.warp if self.parts == 1 else 0)
        chosen = Int32(-1)
        if row < rows:
            expert, score = self.choose(row, biases)
            weight = self.weigh(score)
            if (Int32(self.lane < self.top_k) & self.speaks()) != 0:
                chosen = select(row < live, expert, Int32(-1))
                self.store_choice(row, chosen, weight)
                if chosen >= 0:
                    set_bit(masks + (chosen * 2 + row // 32) * 4, row % 32)
        self.exchange()
        if rank == 0:
            self.scan(masks, offsets)
        self.exchange()
        for i in cutlass.range(remote_b32(offsets + self.experts * 4) + self.tid, rows * self.top_k, THREADS):
            if rank == 0:
                mem.store_b32(self.pairs, i, Int32(-1))
        if chosen >= 0:
            low = remote_b32(masks + chosen * 8)
            high = remote_b32(masks + chosen * 8 + 4)
            below = (Int32(1) << (row % 32)) - 1
            before = select(row < 32, popcount(low & below), popcount(low) + popcount(high & below))
            mem.store_b32(self.pairs, remote_b32(offsets + chosen * 4) + before, row * self.top_k + self.lane)
        self.exchange()

    @cute.jit
    def route_single(self, live: Int32, biases: cutlass.Constexpr):
        """The only row: every warp holds all choices; thread i writes the offsets of experts 4 i to 4 i + 3, warp 0 the rest."""
        expert, score = self.choose(Int32(0), biases)
        weight = self.weigh(score)
        alive = Int32(live > 0)
        chosen = select(alive, expert, Int32(-1))
        first = self.tid * 4
        below, rank, bits = Int32(0), Int32(0), Int32(0)
        for z in cutlass.range_constexpr(self.top_k):
            other = shuffle_from(expert, z)
            below = below + Int32(other < first)
            rank = rank + Int32(other < expert)
            bits = bits | select(other // 4 == self.tid, Int32(1) << (other % 4), Int32(0))
        if first < self.experts:
            places = [(below + popcount(bits & Int32((1 << j) - 1))) * alive for j in range(5)]
            mem.store_b128(self.offsets, first, tuple(places[:4]))
            if first == self.experts - 4:
                mem.store_b32(self.offsets, self.experts, places[4])
        if self.tid < self.top_k:
            self.store_choice(Int32(0), chosen, weight)
            mem.store_b32(self.pairs, select(alive, rank, self.lane), select(alive, self.lane, Int32(-1)))

    def speaks(self) -> Any:
        """1 in the warp that stores a row's choice."""
        return Int32(1) if self.parts == 1 else Int32(self.warp == 0)

    def exchange(self) -> None:
        """A barrier over everything that routes."""
        if self.list_blocks > 1:
            cluster_sync()
        else:
            block_sync()

    @cute.jit
    def choose(self, row: Int32, biases: cutlass.Constexpr):
        """Polls and re-arms this warp's logits of the row; returns in lane z (id, score) of the z-th choice, past top_k those of others."""
        places = [row * self.experts + place for place in self.places]
        words = poll_many(self.logits, places, self.health)
        for place in places:
            rearm_b128(self.other_logits, place)
        scores = [sigmoid(bits_f32(word)) for word in words]
        ids = [self.firsts[i // 4] + i % 4 for i in range(self.groups * 4)]
        keys = [
            select(self.firsts[i // 4] < self.end, ordered_key(scores[i] + biases[i // 4][i % 4]), Int32(0)) for i in range(self.groups * 4)
        ]
        if cutlass.const_expr(self.parts > 1):
            expert, score = self.best_of_block(row, keys, scores, ids)
        else:
            if cutlass.const_expr(self.forced):
                for z in cutlass.range(self.top_k):
                    wanted = mem.load_b32(self.forced_ids, row * self.top_k + z)
                    for i in cutlass.range_constexpr(self.groups * 4):
                        if (Int32(ids[i] == wanted) & Int32(self.firsts[i // 4] < self.end)) != 0:
                            self.store_chosen(z, wanted, scores[i])
            else:
                self.take_best(keys, scores, ids)
            warp_sync()
            at = self.chosen_at + (self.warp * self.top_k + cutlass.min(self.lane, Int32(self.top_k - 1))) * 8
            expert, score = mem.shared_b32(at), mem.shared_f32(at + 4)
        return expert, score

    def store_chosen(self, z: Any, expert: Any, score: Any) -> None:
        at = self.chosen_at + (self.warp * self.top_k + z) * 8
        mem.shared_store_b32(at, expert)
        mem.shared_store_f32(at + 4, score)

    @cute.jit
    def take_best(self, keys: list, scores: cutlass.Constexpr, ids: cutlass.Constexpr):
        """top_k times: the largest key of the warp, the lowest id among equals; its owner stores it, and it is dropped. Ids rise with i."""
        n = self.groups * 4
        none = Int32(0x7FFFFFFF)
        for z in cutlass.range(self.top_k):
            mine = keys[0]
            for i in cutlass.range_constexpr(1, n):
                mine = unsigned_max(mine, keys[i])
            best = warp_max_u32(mine)
            best_id = none
            for i in cutlass.range_constexpr(n - 1, -1, -1):
                best_id = select(keys[i] == best, ids[i], best_id)
            owned = best_id
            best_id = warp_min_u32(best_id)
            score = scores[0]
            for i in cutlass.range_constexpr(n):
                score = select(ids[i] == best_id, scores[i], score)
            keys = [select(ids[i] == best_id, Int32(0), keys[i]) for i in range(n)]
            if owned == best_id:
                self.store_chosen(z, best_id, score)

    @cute.jit
    def best_of_block(self, row: Int32, keys: cutlass.Constexpr, scores: cutlass.Constexpr, ids: cutlass.Constexpr):
        """Every warp sorts its part and shares its best; every warp then merges all of them, so each holds the block's choices."""
        for group in cutlass.range_constexpr(self.groups):
            if self.firsts[group] < self.end:
                at = self.scores_at + self.firsts[group] * 4
                mem.shared_store_b128(at, tuple(f32_bits(scores[group * 4 + j]) for j in range(4)))
        expert = Int32(0)
        if cutlass.const_expr(self.forced):
            block_sync()
            expert = mem.load_b32(self.forced_ids, row * self.top_k + self.lane % self.top_k)
        else:
            key, found = merged([sorted_halves((keys[i], ids[i]), self.lane) for i in range(len(keys))], self.lane)
            if self.lane < SORTED:
                at = self.chosen_at + (self.warp * SORTED + self.lane) * 8
                mem.shared_store_b32(at, key)
                mem.shared_store_b32(at + 4, found)
            block_sync()
            lists = []
            for i in cutlass.range_constexpr(WARPS * SORTED // 32):
                at = self.chosen_at + (i * 32 + self.lane) * 8
                lists.append((mem.shared_b32(at), mem.shared_b32(at + 4)))
            key, expert = merged(lists, self.lane)
        safe = cutlass.max(cutlass.min(expert, Int32(self.experts - 1)), Int32(0))
        return expert, mem.shared_f32(self.scores_at + safe * 4)

    def weigh(self, score: Any) -> Any:
        """Lane z's routing weight, from the scores of lanes below top_k."""
        total = warp_sum(select(self.lane < self.top_k, score, Float32(0.0)))
        return score * reciprocal(total) * Float32(self.scaling)

    def store_choice(self, row: Any, chosen: Any, weight: Any) -> None:
        """Lane z < top_k: the z-th id and weight; -1 and 0 in a padding row."""
        mem.store_b32(self.ids, row * self.top_k + self.lane, chosen)
        mem.store_bf16(self.weights, row * self.top_k + self.lane, select(chosen >= 0, weight, Float32(0.0)))

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


def exchanged(mine: tuple[Int32, Int32], other: tuple[Int32, Int32], keep_best: Any) -> tuple[Int32, Int32]:
    """The better of two (key, id) where `keep_best` is 1, else the worse: larger keys first, lower ids among equals."""
    code = (
        "{ .reg .pred p, q, r; setp.eq.u32 q, $4, $2; setp.lt.and.u32 q, $5, $3, q; setp.gt.or.u32 p, $4, $2, q; "
        "setp.eq.s32 r, $6, 0; xor.pred p, p, r; selp.b32 $0, $4, $2, p; selp.b32 $1, $5, $3, p; }"
    )
    return emit(code, (Int32, Int32), (*mine, *other, keep_best), memory=False)


def _compared(mine: tuple[Int32, Int32], mask: int, keep_best: Any) -> tuple[Int32, Int32]:
    return exchanged(mine, (shuffle_xor(mine[0], mask), shuffle_xor(mine[1], mask)), keep_best)


def sorted_halves(mine: tuple[Int32, Int32], lane: Int32) -> tuple[Int32, Int32]:
    """Each half of the warp sorted, the best in its first lane (a bitonic network)."""
    size = 2
    while size <= SORTED:
        stride = size // 2
        while stride:
            up = Int32((lane & stride) == 0)
            mine = _compared(mine, stride, up if size == SORTED else up ^ Int32((lane & size) != 0))
            stride //= 2
        size *= 2
    return mine


def merged(lists: list[tuple[Int32, Int32]], lane: Int32) -> tuple[Int32, Int32]:
    """The best of all sorted lists, two a register (a half of the warp each), sorted; both halves hold the same."""
    while len(lists) > 1:
        pairs = [_bitonic(exchanged(a, _reversed(b, SORTED - 1), Int32(1)), lane) for a, b in zip(lists[::2], lists[1::2], strict=False)]
        lists = pairs + lists[2 * len(pairs) :]
    return _bitonic(_compared(lists[0], 31, Int32(1)), lane)


def _reversed(mine: tuple[Int32, Int32], mask: int) -> tuple[Int32, Int32]:
    return shuffle_xor(mine[0], mask), shuffle_xor(mine[1], mask)


def _bitonic(mine: tuple[Int32, Int32], lane: Int32) -> tuple[Int32, Int32]:
    stride = SORTED // 2
    while stride:
        mine = _compared(mine, stride, Int32((lane & stride) == 0))
        stride //= 2
    return mine


def shuffle_from(value: Int32, lane: int) -> Int32:
    return emit(f"shfl.sync.idx.b32 $0, $1, {lane}, 0x1f, 0xffffffff;", (Int32,), (value,), memory=False)


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
