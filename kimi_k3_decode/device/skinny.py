"""The streaming product shared by every dense projection: y[T, P] = x[T, K] W[P, K]^T for T <= 64, bound by reading W once.

Work split: a cluster of `splits` blocks shares a tile of rows of W, each block owning a slice of K; inside a block `warps_m` groups of 16
rows times `warps_k` slices of K. Blocks are persistent: clusters walk over tiles with a fixed stride.

Weights travel through a ring in shared memory in which every thread copies (cp.async, 16 bytes) exactly the bytes it consumes itself, so
the ring needs no barrier, runs `depth` steps ahead, crosses tile boundaries, and is filled before the grid wait. x is staged once after the
wait. Sums of the slices are added in a fixed order (block rank, then warp), so results are bit-reproducible. Inside a cluster every block
owns a share of the tokens and receives the others' sums by asynchronous remote stores counted on an mbarrier; two buffers alternate, and
a block can only send tile i + 2 after every block has read tile i, because it waited for tile i + 1, which each sends after that read. No
fence is needed, so the weights in flight are never drained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.math import select
from kimi_k3_decode.device.mma import mma
from kimi_k3_decode.device.sync import (
    barrier_expect,
    barrier_init,
    barrier_init_done,
    barrier_wait,
    block_sync,
    cluster_arrive_relaxed,
    cluster_wait,
    grid_release,
    grid_wait,
    send_f32x2,
)

STEP_K = 32  # k consumed by one ring step
SHARED_LIMIT_BYTES = 227 * 1024


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Frozen schedule of one product. `row_tile` tokens (multiple of 8), `k` inputs, `m_tiles` 16-row tiles of W a warp holds at once."""

    row_tile: int
    x_rows: int  # token rows kept in shared memory: row_tile, or fewer when fewer are ever live
    k: int
    splits: int = 1
    warps_m: int = 1
    warps_k: int = 8
    m_tiles: int = 1
    depth: int = 8

    def __post_init__(self) -> None:
        reasons = []
        if self.row_tile % 8 or not 8 <= self.row_tile <= 64:
            reasons.append(f"row_tile: got {self.row_tile}, needs a multiple of 8 up to 64")
        if not 1 <= self.x_rows <= self.row_tile or (self.x_rows < self.row_tile and self.row_tile != 8):
            reasons.append(f"x_rows: got {self.x_rows}, needs row_tile, or less with a row_tile of 8")
        if self.k % (self.splits * self.warps_k * STEP_K):
            reasons.append(f"k: got {self.k}, needs a multiple of splits x warps_k x {STEP_K} = {self.splits * self.warps_k * STEP_K}")
        if self.splits > 1 and self.row_tile % (2 * self.splits):
            reasons.append(f"splits: got {self.splits}, needs two tokens or more a block; row_tile is {self.row_tile}")
        if self.shared_bytes > SHARED_LIMIT_BYTES:
            reasons.append(f"shared memory: got {self.shared_bytes} bytes, needs <= {SHARED_LIMIT_BYTES}; lower depth or raise splits")
        if reasons:
            raise ValueError("Tiling: " + "; ".join(reasons))

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_k

    @property
    def tile_m(self) -> int:
        """Rows of one m-tile over the warps; a tile is `m_tiles` of these."""
        return 16 * self.warps_m

    @property
    def k_slice(self) -> int:
        return self.k // self.splits

    @property
    def k_warp(self) -> int:
        return self.k_slice // self.warps_k

    @property
    def steps(self) -> int:
        return self.k_warp // STEP_K

    @property
    def x_pitch(self) -> int:
        """Elements between token rows of the staged x; 64 bytes past a multiple of 128, so that the eight-lane phases hit all banks."""
        return -(-self.k_slice // 64) * 64 + 32

    @property
    def sum_pitch(self) -> int:
        return self.row_tile + (8 if self.row_tile > 8 else 0)

    @property
    def ring_bytes(self) -> int:
        return self.depth * self.m_tiles * 2 * self.threads * 16

    @property
    def x_bytes(self) -> int:
        return self.x_rows * self.x_pitch * 2

    @property
    def owned_tokens(self) -> int:
        """Tokens whose sums one block of the cluster finishes."""
        return self.row_tile // self.splits

    @property
    def received_bytes(self) -> int:
        """Sums one block receives a tile: from every block and warp slice, its own included."""
        return self.splits * self.warps_k * self.m_tiles * self.tile_m * self.owned_tokens * 4

    @property
    def sum_bytes(self) -> int:
        if self.splits > 1:
            return 2 * self.received_bytes + 16
        return self.warps_k * self.m_tiles * self.tile_m * self.sum_pitch * 4

    @property
    def shared_bytes(self) -> int:
        return self.ring_bytes + self.x_bytes + self.sum_bytes


class Skinny:
    """Traces the product inside a kernel. `source(tile, m_tile)` gives (weight operand, first row, last valid row); `finish(tile, row,
    token, values)` receives the sums of rows (row, row + 1) of the tile for one token, a pair an m-tile, and stores them."""

    def __init__(self, tiling: Tiling) -> None:
        self.t = tiling

    def grid(self, n_tiles: int, processors: int) -> int:
        """Blocks to launch on a device of `processors` multiprocessors: whole clusters, equal rounds."""
        t = self.t
        resident = max(1, min(4, 2048 // t.threads, SHARED_LIMIT_BYTES // (t.shared_bytes + 1024)))
        clusters = max(1, processors * resident // t.splits)
        rounds = -(-n_tiles // clusters)
        return t.splits * -(-n_tiles // rounds)

    def launch_options(self, blocks: Any, pdl: Any, stream: Any) -> dict[str, Any]:
        t = self.t
        options: dict[str, Any] = {
            "grid": [blocks, 1, 1],
            "block": [t.threads, 1, 1],
            "smem": t.shared_bytes,
            "stream": stream,
            "use_pdl": pdl,
        }
        if t.row_tile >= 32:
            options["min_blocks_per_mp"] = 1  # many sums a thread: without this the assembler spills to fit more blocks than memory does
        if t.splits > 1:
            options["cluster"] = [t.splits, 1, 1]
        return options

    def _thread(self) -> None:
        t = self.t
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        self.tid = tid
        self.rank = block % t.splits
        self.group = block // t.splits
        self.groups = blocks // t.splits
        lane = tid % 32
        warp = tid // 32
        self.quad, self.quad_lane = lane // 4, lane % 4
        self.warp_m, self.warp_k = warp // t.warps_k, warp % t.warps_k
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=128)
        self.ring = Int32(base.toint())
        self.xs = self.ring + t.ring_bytes
        self.sums = self.xs + t.x_bytes
        self.barriers = self.sums + 2 * t.received_bytes

    def _issue(self, source: Callable[..., Any], n_tiles: Any, tile: Any, step: Any, slot: Any) -> None:
        """Copy one ring step of this thread: rows g and g + 8 of each m-tile. Past the last tile nothing is read."""
        t = self.t
        valid = Int32(tile < n_tiles)
        safe = cutlass.min(tile, Int32(n_tiles - 1))
        k = self.rank * t.k_slice + self.warp_k * t.k_warp + step * STEP_K + self.quad_lane * 8
        for m in range(t.m_tiles):
            weights, first, last = source(safe, m)
            for half in range(2):
                row = cutlass.min(first + self.warp_m * 16 + self.quad + 8 * half, last)
                dst = self.ring + ((slot * t.m_tiles + m) * 2 + half) * (t.threads * 16) + self.tid * 16
                offset = cutlass.Int64(row) * cutlass.Int64(t.k) + cutlass.Int64(k)
                mem.copy_weight_b128(dst, weights, offset, valid)
        mem.copy_commit()

    @cute.jit
    def stage_x(self, x: cutlass.Constexpr, rows: Int32):
        """x[rows, slice of K] into shared memory; rows past `rows` stay undefined and only feed columns that are never stored."""
        t = self.t
        per_row = t.k_slice // 8
        for i in cutlass.range(self.tid, rows * per_row, t.threads, unroll=4):
            token = i // per_row
            k = (i % per_row) * 8
            mem.copy_b128(self.xs + (token * t.x_pitch + k) * 2, x, token * t.k + self.rank * t.k_slice + k)
        mem.copy_commit()

    @cute.jit
    def run(
        self,
        x: cutlass.Constexpr,
        rows: Int32,
        n_tiles: cutlass.Constexpr,
        source: cutlass.Constexpr,
        finish: cutlass.Constexpr,
        after_wait: cutlass.Constexpr,
    ):
        """The whole kernel: weights first, grid wait, x, then tiles. `after_wait` (or None) runs once right after x is staged."""
        t = self.t
        self._thread()
        if cutlass.const_expr(t.splits > 1):
            if self.tid == 0:
                barrier_init(self.barriers, 1)
                barrier_init(self.barriers + 8, 1)
                barrier_init_done()
            cluster_arrive_relaxed()
        tile = self.group
        step = Int32(0)
        for i in cutlass.range_constexpr(t.depth - 1):
            self._issue(source, n_tiles, tile, step, Int32(i))
            step = step + 1
            tile = tile + self.groups * (step // t.steps)
            step = step % t.steps
        grid_wait()
        grid_release()
        self.stage_x(x, rows)
        if cutlass.const_expr(after_wait is not None):
            after_wait()
        mem.copy_wait(0)
        block_sync()
        if cutlass.const_expr(t.splits > 1):
            cluster_wait()
        slot = Int32(0)
        turn = Int32(0)
        acc = cute.make_rmem_tensor((t.m_tiles * t.row_tile // 8 * 4,), Float32)
        for current in cutlass.range(self.group, n_tiles, self.groups):
            acc.fill(0.0)
            for s in cutlass.range(t.steps):
                mem.copy_wait(t.depth - 2)
                self._multiply(acc, slot, s)
                free = slot + (t.depth - 1)
                free = select(free >= t.depth, free - t.depth, free)
                self._issue(source, n_tiles, tile, step, free)
                slot = slot + 1
                slot = select(slot == t.depth, Int32(0), slot)
                step = step + 1
                wrapped = Int32(step == t.steps)
                tile = tile + self.groups * wrapped
                step = step * (1 - wrapped)
            if cutlass.const_expr(t.splits > 1):
                buffer = turn % 2
                if self.tid == 0:
                    barrier_expect(self.barriers + buffer * 8, t.received_bytes)
                self._send_sums(acc, buffer)
                barrier_wait(self.barriers + buffer * 8, turn // 2 % 2)
                self._finish_owned(current, rows, buffer, finish)
                turn = turn + 1
            else:
                self._store_sums(acc)
                block_sync()
                self._finish_all(current, rows, finish)
                block_sync()

    def _multiply(self, acc: Any, slot: Any, step: Any) -> None:
        t = self.t
        weights = []
        for m in range(t.m_tiles):
            at = self.ring + (slot * t.m_tiles + m) * (2 * t.threads * 16) + self.tid * 16
            weights.append((mem.shared_b128(at), mem.shared_b128(at + t.threads * 16)))
        token = cutlass.min(self.quad, Int32(t.x_rows - 1)) if t.x_rows < t.row_tile else self.quad
        x_at = self.xs + (token * t.x_pitch + self.warp_k * t.k_warp + step * STEP_K + self.quad_lane * 8) * 2
        tiles = t.row_tile // 8
        xs = [mem.shared_b128(x_at + n * 8 * t.x_pitch * 2) for n in range(tiles)]
        for half in (0, 2):  # all sums once, then all again: a product never waits for the one before it
            for n in range(tiles):
                for m, (low, high) in enumerate(weights):
                    at = (m * tiles + n) * 4
                    a = (low[half], high[half], low[half + 1], high[half + 1])
                    result = mma(tuple(acc[at + i] for i in range(4)), a, (xs[n][half], xs[n][half + 1]))
                    for i in range(4):
                        acc[at + i] = result[i]

    # ---- one block alone: sums over its warps ----
    def _sum_at(self, warp_k: Any, m: int, row: Any, token: Any) -> Any:
        t = self.t
        return self.sums + (((warp_k * t.m_tiles + m) * t.tile_m + row) * t.sum_pitch + token) * 4

    def _store_sums(self, acc: Any) -> None:
        t = self.t
        for m in range(t.m_tiles):
            for n in range(t.row_tile // 8):
                at = (m * (t.row_tile // 8) + n) * 4
                row = self.warp_m * 16 + self.quad
                token = n * 8 + self.quad_lane * 2
                mem.shared_store_f32x2(self._sum_at(self.warp_k, m, row, token), acc[at], acc[at + 1])
                mem.shared_store_f32x2(self._sum_at(self.warp_k, m, row + 8, token), acc[at + 2], acc[at + 3])

    def _total(self, m: int, row: Any, token: Any) -> Any:
        total = mem.shared_f32(self._sum_at(0, m, row, token))
        for w in range(1, self.t.warps_k):
            total = total + mem.shared_f32(self._sum_at(w, m, row, token))
        return total

    @cute.jit
    def _finish_all(self, current: Int32, rows: Int32, finish: cutlass.Constexpr):
        """Rows of W are the fast index, for the stores."""
        t = self.t
        pairs_m = t.tile_m // 2
        for e in cutlass.range(self.tid, rows * pairs_m, t.threads):
            row = e % pairs_m * 2
            token = e // pairs_m
            values = []
            for m in cutlass.range_constexpr(t.m_tiles):
                values.append((self._total(m, row, token), self._total(m, row + 1, token)))
            finish(current, row, token, values)

    # ---- a cluster: every block owns some tokens ----
    def _received_at(self, buffer: Any, source: Any, m: int, row: Any, local: Any) -> Any:
        t = self.t
        return self.sums + buffer * t.received_bytes + (((source * t.m_tiles + m) * t.tile_m + row) * t.owned_tokens + local) * 4

    def _send_sums(self, acc: Any, buffer: Any) -> None:
        t = self.t
        barrier = self.barriers + buffer * 8
        source = self.rank * t.warps_k + self.warp_k
        for m in range(t.m_tiles):
            for n in range(t.row_tile // 8):
                at = (m * (t.row_tile // 8) + n) * 4
                row = self.warp_m * 16 + self.quad
                token = n * 8 + self.quad_lane * 2
                owner, local = token // t.owned_tokens, token % t.owned_tokens
                send_f32x2(self._received_at(buffer, source, m, row, local), barrier, owner, acc[at], acc[at + 1])
                send_f32x2(self._received_at(buffer, source, m, row + 8, local), barrier, owner, acc[at + 2], acc[at + 3])

    def _received_total(self, buffer: Any, m: int, row: Any, local: Any) -> Any:
        total = mem.shared_f32(self._received_at(buffer, 0, m, row, local))
        for source in range(1, self.t.splits * self.t.warps_k):
            total = total + mem.shared_f32(self._received_at(buffer, source, m, row, local))
        return total

    @cute.jit
    def _finish_owned(self, current: Int32, rows: Int32, buffer: Int32, finish: cutlass.Constexpr):
        t = self.t
        pairs_m = t.tile_m // 2
        first = self.rank * t.owned_tokens
        for e in cutlass.range(self.tid, pairs_m * t.owned_tokens, t.threads):
            row = e % pairs_m * 2
            local = e // pairs_m
            if first + local < rows:
                values = []
                for m in cutlass.range_constexpr(t.m_tiles):
                    values.append((self._received_total(buffer, m, row, local), self._received_total(buffer, m, row + 1, local)))
                finish(current, row, first + local, values)
