"""experts_down: the routed experts' second half and the weighted sum over the chosen, MXFP4 weights times BF16 activations, FP32 sums.

One block per 16 latent rows walks over the same list of entries as experts_up (kernel.py), up to 8 pairs an entry; a warp takes every
`warps`-th, codes and scales in a ring of cp.async, the pairs' activations one chunk ahead in registers (a single row's in shared memory).
The products of all pairs lie in shared memory, are weighted and added per token in rank order of its choices, and the FP32 partial is
published to every rank.
A single row needs no lists: its choices are the entries. Before the wait: nothing, since even the addresses of the weights depend on the
routing. Rounding: none.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kimi_k3_decode.device import active
from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.math import bf16_word_f32x2, select
from kimi_k3_decode.device.mma import scale_factor
from kimi_k3_decode.device.sync import block_sync, grid_release, grid_wait, publish_f32x2, warp_sync
from kimi_k3_decode.ops.experts.kernel import CHUNK, ENTRY_TOKENS, GROUP, group_products, interleave


class ExpertsDown:
    """Fixed: experts, top_k, latent rows, intermediate size of this rank (k), the most rows (1: the step has a single row), ring depth in
    entries, warps."""

    def __init__(self, experts: int, top_k: int, latent: int, inner: int, row_tile: int, depth: int, warps: int) -> None:
        self.single = row_tile == 1
        self.warps, self.threads = warps, 32 * warps
        self.experts, self.top_k, self.latent, self.inner, self.depth = experts, top_k, latent, inner, depth
        self.chunks = -(-inner // CHUNK)
        self.groups = inner // GROUP
        if latent % 16 or inner % GROUP or self.groups > 32 or top_k % 2 or depth < 2:
            raise ValueError(
                f"ExpertsDown: got latent {latent}, inner {inner}, top {top_k}, depth {depth}, needs 16-row tiles, up to 32 whole groups, "
                "an even top_k, depth >= 2"
            )
        pairs = row_tile * top_k
        self.list_bytes = active.shared_bytes(experts, pairs, ENTRY_TOKENS, self.threads)
        self.entries = active.entries(experts, pairs, ENTRY_TOKENS)
        # Pairs in expert order, or a single row's activations.
        self.sorted_bytes = pairs * inner * 2 if self.single else -(-pairs * 4 // 16) * 16
        self.slot_bytes = self.chunks * 1024 + self.groups * 16
        self.ring_bytes = depth * warps * self.slot_bytes
        self.pair_bytes = pairs * 16 * 4
        self.shared_bytes = self.list_bytes + self.sorted_bytes + self.ring_bytes + self.pair_bytes

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
        weights = mem.Global("weights_TZ", weights_TZ, "input")
        offsets = mem.Global("offsets_E", offsets_E, "input")
        pairs = mem.Global("pairs_N", pairs_N, "input")
        self.codes = mem.Global("w2_ELJ", w2_ELJ, "weight")
        self.scales = mem.Global("w2_scale_ELG", w2_scale_ELG, "weight")
        partial = [mem.Global("latent_RTL", box, "mailbox") for box in boxes]
        self.tid, _, _ = cute.arch.thread_idx()
        self.row_tile, _, _ = cute.arch.block_idx()
        self.lane = self.tid % 32
        self.warp, self.quad, self.quad_lane = self.tid // 32, self.lane // 4, self.lane % 4
        self.list_at = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        self.sorted_at = self.list_at + self.list_bytes
        self.ring_at = self.sorted_at + self.sorted_bytes
        self.pair_at = self.ring_at + self.ring_bytes
        grid_wait()
        grid_release()
        count = Int32(0)
        given = [Int32(0)] * (self.top_k // 2)  # a single row's weights
        if cutlass.const_expr(self.single):
            entry, count = active.choices(ids, self.top_k, self.tid)
            given = [mem.load_b32(weights, z) for z in range(0, self.top_k, 2)]
            self.stage()
            count = active.listed(entry, count, self.top_k, self.list_at, self.tid)
        else:
            for i in cutlass.range(self.tid, rows * self.top_k, self.threads):
                mem.shared_store_b32(self.sorted_at + i * 4, mem.load_b32(pairs, i))
            sums = self.list_at + self.entries * 4
            count = active.compact(offsets, self.experts, ENTRY_TOKENS, self.threads, self.list_at, sums, self.tid)
        if self.warp < count:
            self.walk(count)
        mem.copy_wait(0)
        block_sync()
        for i in cutlass.range(self.tid, rows * 8, self.threads):
            token = i // 8
            row = i % 8 * 2
            total = Float32(0.0)
            second = Float32(0.0)
            chosen = count - 1 if self.single else mem.load_b32(ids, token * self.top_k)
            if chosen >= 0:
                words = given if self.single else [mem.load_b32(weights, token * self.top_k + z) for z in range(0, self.top_k, 2)]
                factors = [factor for word in words for factor in bf16_word_f32x2(word)]
                for z in cutlass.range_constexpr(self.top_k):
                    a, b = mem.shared_f32x2(self.pair_at + ((token * self.top_k + z) * 16 + row) * 4)
                    total = total + a * factors[z]
                    second = second + b * factors[z]
            publish_f32x2(partial, (rank * rows + token) * self.latent + self.row_tile * 16 + row, total, second)

    @cute.jit
    def stage(self):
        """A single row: the activations of this warp's pairs to shared memory, the first of its copy groups."""
        per_pair = self.inner // 8
        for pair in cutlass.range(self.warp, self.top_k, self.warps):
            for i in cutlass.range(self.lane, per_pair, 32):
                at = pair * self.inner + i * 8
                mem.copy_b128(self.sorted_at + at * 2, self.hidden, at)
        mem.copy_commit()

    @cute.jit
    def walk(self, count: Int32):
        """This warp's entries in order. The activations of the next chunk are always on their way."""
        for i in cutlass.range_constexpr(self.depth - 1):
            self.issue(self.warp + i * self.warps, count, Int32(i))
        slot = Int32(0)
        ahead = cute.make_rmem_tensor((16,), Int32)
        if cutlass.const_expr(not self.single):
            self.load_x(ahead, mem.shared_b32(self.list_at + self.warp * 4), 0)
        for item in cutlass.range(self.warp, count, self.warps):
            entry = mem.shared_b32(self.list_at + item * 4)
            following = mem.shared_b32(self.list_at + cutlass.min(item + self.warps, count - 1) * 4)
            mem.copy_wait(self.depth - 2)
            warp_sync()
            self.issue(item + (self.depth - 1) * self.warps, count, select(slot == 0, Int32(self.depth - 1), slot - 1))
            self.entry(entry, following, slot, ahead)
            slot = select(slot == self.depth - 1, Int32(0), slot + 1)

    @cute.jit
    def issue(self, item: Int32, count: Int32, slot: Int32):
        """Copy this warp's codes and scales of one entry: 16 rows, all of k. Past the end of the list nothing, past k zeros."""
        if item < count:
            expert = active.entry_expert(mem.shared_b32(self.list_at + item * 4))
            first = Int64(expert) * Int64(self.latent) + Int64(self.row_tile * 16)
            row_at = (first + Int64(self.quad)) * Int64(self.inner // 2)
            at = self.slot_at(slot)
            for c in cutlass.range_constexpr(self.chunks):
                k = c * CHUNK + self.quad_lane * GROUP
                partial = (c + 1) * CHUNK > self.inner
                valid = Int32(k < self.inner) if partial else None
                place = row_at + Int64(select(valid, k // 2, Int32(0)) if partial else k // 2)
                for half in cutlass.range_constexpr(2):
                    dst = at + (c * 2 + half) * 512 + self.lane * 16
                    mem.copy_weight_b128(dst, self.codes, place + Int64(half * 8 * (self.inner // 2)), valid)
            if self.lane < self.groups:
                dst = at + self.chunks * 1024 + self.lane * 16
                mem.copy_weight_b128(dst, self.scales, first * Int64(self.groups) + Int64(self.lane * 16))
        mem.copy_commit()

    def slot_at(self, slot: Any) -> Any:
        return self.ring_at + (slot * self.warps + self.warp) * self.slot_bytes

    def load_x(self, x: Any, entry: Any, c: int) -> None:
        """This lane's 32 activations of chunk c of its token, as loaded. Tokens past the entry's repeat its last."""
        place = active.entry_first(entry) + cutlass.min(self.quad, active.entry_count(entry) - 1)
        at = self.x_offset(mem.shared_b32(self.sorted_at + place * 4), c)
        for i in range(4):
            words = mem.load_b128(self.hidden, at + i * 8)
            for j in range(4):
                x[i * 4 + j] = words[j]

    def x_offset(self, pair: Any, c: int) -> Any:
        """Of this lane's activations of chunk c, in elements; past the end of k those before (their codes are zero)."""
        k = c * CHUNK + self.quad_lane * GROUP
        if (c + 1) * CHUNK > self.inner:
            k = cutlass.min(k, Int32(self.inner - GROUP))
        return pair * self.inner + k

    @cute.jit
    def entry(self, entry: Int32, following: Int32, slot: Int32, ahead: cutlass.Constexpr):
        """Products of one entry with its pairs; sums go to the pairs' places in shared memory, not yet weighted."""
        at = self.slot_at(slot)
        scales_at = at + self.chunks * 1024 + self.quad * self.groups
        acc = (Float32(0.0),) * 4
        for c in cutlass.range_constexpr(self.chunks):
            if cutlass.const_expr(self.single):
                x_at = self.sorted_at + self.x_offset(active.entry_first(entry), c) * 2
                x = [interleave(mem.shared_b128(x_at + i * 16)) for i in range(4)]
            else:
                x = [interleave(tuple(ahead[i * 4 + j] for j in range(4))) for i in range(4)]
                last = c + 1 == self.chunks
                self.load_x(ahead, following if last else entry, 0 if last else c + 1)
            group = cutlass.min(c * 4 + self.quad_lane, Int32(self.groups - 1))
            factors = [scale_factor(mem.shared_u8(scales_at + half * 8 * self.groups + group)) for half in range(2)]
            code_at = at + c * 1024 + self.lane * 16
            acc = group_products(acc, mem.shared_b128(code_at), mem.shared_b128(code_at + 512), factors[0], factors[1], x)
        n = active.entry_count(entry)
        for j in cutlass.range_constexpr(2):
            token = self.quad_lane * 2 + j
            if token < n:
                place = active.entry_first(entry) + token
                pair = place if self.single else mem.shared_b32(self.sorted_at + place * 4)
                place = self.pair_at + (pair * 16 + self.quad) * 4
                mem.shared_store_f32(place, acc[j])
                mem.shared_store_f32(place + 8 * 4, acc[2 + j])
