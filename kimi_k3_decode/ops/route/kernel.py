"""route: sigmoid + bias top-k with exact ties by lowest id, routing weights, and the lists of pairs by expert.

Grid: one cluster of `list_blocks` blocks that routes, then one block a row that copies the latent box out. In the cluster a warp owns a row
at a time. The lists are exact integers: bit t of an expert's mask says that row t chose it, so the place of a pair is the expert's offset
plus the rows below it, whatever the order of arrival.
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
from kimi_k3_decode.device.math import bits_f32, reciprocal, select, shuffle_xor, sigmoid
from kimi_k3_decode.device.sync import block_sync, cluster_sync, grid_release, grid_wait, poll_b128, rearm_b128

THREADS = 256
WARPS = THREADS // 32
LOWEST = -3.4028234663852886e38


class Route:
    """Fixed: experts (a multiple of 4), top_k <= 32, latent size, scaling, whether ids are forced, blocks of the routing cluster."""

    def __init__(self, experts: int, top_k: int, latent: int, scaling: float, *, forced: bool, list_blocks: int) -> None:
        self.experts, self.top_k, self.latent, self.scaling = experts, top_k, latent, scaling
        self.forced, self.list_blocks = forced, list_blocks
        self.groups = -(-experts // 128)  # four experts a lane and group
        self.mask_bytes = experts * 8
        self.offset_bytes = (experts + 1) * 4
        self.shared_bytes = self.mask_bytes + self.offset_bytes + 64 + WARPS * 4

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
        for row in cutlass.range(rank * WARPS + warp, rows, self.list_blocks * WARPS):
            chosen = self.choose(row, live, lane)
            if (Int32(lane < self.top_k) & Int32(chosen >= 0)) != 0:
                set_bit(masks + (chosen * 2 + row // 32) * 4, row % 32)
        self.exchange()
        if rank == 0:
            self.scan(masks, offsets)
        self.exchange()
        for i in cutlass.range(remote_b32(offsets + self.experts * 4) + self.tid, rows * self.top_k, THREADS):
            if rank == 0:
                mem.store_b32(self.pairs, i, Int32(-1))
        for row in cutlass.range(rank * WARPS + warp, rows, self.list_blocks * WARPS):
            if (Int32(lane < self.top_k) & Int32(row < live)) != 0:
                pair = row * self.top_k + lane
                expert = mem.load_b32(self.ids, pair)
                low = remote_b32(masks + expert * 8)
                high = remote_b32(masks + expert * 8 + 4)
                below = (Int32(1) << (row % 32)) - 1
                before = select(row < 32, popcount(low & below), popcount(low) + popcount(high & below))
                mem.store_b32(self.pairs, remote_b32(offsets + expert * 4) + before, pair)
        self.exchange()

    def exchange(self) -> None:
        """A barrier over everything that routes."""
        if self.list_blocks > 1:
            cluster_sync()
        else:
            block_sync()

    @cute.jit
    def choose(self, row: Int32, live: Int32, lane: Int32):
        """This warp's row: polls and re-arms its logits, picks top_k, stores ids and weights. Lane z returns the z-th id, -1 past the end."""
        n = self.groups * 4
        biased = cute.make_rmem_tensor((n,), Float32)
        scores = cute.make_rmem_tensor((n,), Float32)
        for group in cutlass.range_constexpr(self.groups):
            first = group * 128 + lane * 4
            for j in cutlass.range_constexpr(4):
                biased[group * 4 + j] = Float32(LOWEST)
                scores[group * 4 + j] = Float32(0.0)
            if first < self.experts:
                at = row * self.experts + first
                words = poll_b128(self.logits, at, self.health)
                rearm_b128(self.other_logits, at)
                bias = mem.load_weight_f32x4(self.bias, first)
                for j in cutlass.range_constexpr(4):
                    score = sigmoid(bits_f32(words[j]))
                    scores[group * 4 + j] = score
                    biased[group * 4 + j] = score + bias[j]
        mine_id = Int32(-1)
        mine_score = Float32(0.0)
        total = Float32(0.0)
        for z in cutlass.range(self.top_k):
            best = Float32(LOWEST)
            best_id = Int32(self.experts)
            best_score = Float32(0.0)
            if cutlass.const_expr(self.forced):
                best_id = mem.load_b32(self.forced_ids, row * self.top_k + z)
                for i in cutlass.range_constexpr(n):
                    hit = best_id == i // 4 * 128 + lane * 4 + i % 4
                    best_score = select(hit, scores[i], best_score)
                for step in (16, 8, 4, 2, 1):
                    best_score = best_score + shuffle_xor(best_score, step)
            else:
                for i in cutlass.range_constexpr(n):
                    better = biased[i] > best
                    best = select(better, biased[i], best)
                    best_score = select(better, scores[i], best_score)
                    best_id = select(better, i // 4 * 128 + lane * 4 + i % 4, best_id)
                for step in (16, 8, 4, 2, 1):
                    other, other_id, other_score = shuffle_xor(best, step), shuffle_xor(best_id, step), shuffle_xor(best_score, step)
                    take = Int32(other > best) | (Int32(other == best) & Int32(other_id < best_id))
                    best, best_id = select(take, other, best), select(take, other_id, best_id)
                    best_score = select(take, other_score, best_score)
                for i in cutlass.range_constexpr(n):
                    taken = best_id == i // 4 * 128 + lane * 4 + i % 4
                    biased[i] = select(taken, Float32(LOWEST), biased[i])
            total = total + best_score
            mine_id = select(lane == z, best_id, mine_id)
            mine_score = select(lane == z, best_score, mine_score)
        padding = row >= live
        weight = mine_score * reciprocal(total) * Float32(self.scaling)
        weight = select(padding, Float32(0.0), weight)
        mine_id = select(padding, Int32(-1), mine_id)
        if lane < self.top_k:
            mem.store_b32(self.ids, row * self.top_k + lane, mine_id)
            mem.store_bf16(self.weights, row * self.top_k + lane, weight)
        return mine_id

    @cute.jit
    def scan(self, masks: Int32, offsets: Int32):
        """Exclusive prefix sum of the experts' counts: each thread a run of experts, then warps, then the block."""
        run = -(-self.experts // THREADS)
        warp_sums = self.shared + self.mask_bytes + (self.offset_bytes + 63) // 64 * 64
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


def remote_b32(address: Int32) -> Int32:
    """A word of block 0's shared memory."""
    code = "{ .reg .b32 a; mapa.shared::cluster.u32 a, $1, 0; ld.shared::cluster.b32 $0, [a]; }"
    return emit(code, (Int32,), (address,), memory=True)


def popcount(word: Int32) -> Int32:
    return emit("popc.b32 $0, $1;", (Int32,), (word,), memory=False)


def shuffle_up(value: Int32, delta: int) -> Int32:
    return emit(f"shfl.sync.up.b32 $0, $1, {delta}, 0, 0xffffffff;", (Int32,), (value,), memory=False)
