"""One token row spread over a cluster of blocks, four columns a thread: the shape of the norm and residual kernels.

Sums over the row go warp -> block -> cluster in a fixed order, so every thread of the row holds the same bits. A block sends its sums to
all blocks of the cluster by remote stores counted on an mbarrier, one for each exchange: a block has everything it will ever receive when
its last exchange is over, so it may leave without another barrier.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.asm import emit
from kimi_k3_decode.device.math import warp_sum
from kimi_k3_decode.device.sync import (
    barrier_expect,
    barrier_init,
    barrier_init_done,
    barrier_wait,
    block_sync,
    cluster_arrive_relaxed,
    cluster_wait,
    send_f32,
)

COLUMNS_PER_THREAD = 4
WIDE_ROW = 2048
MAX_SUMS = 24
ROUNDS = 2  # independent uses of `sum` in one kernel


class RowCluster:
    """Fixed: row length (a multiple of 4). Rows of `WIDE_ROW` and more use 8 blocks, shorter ones a single block."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.blocks = 8 if columns >= WIDE_ROW and columns % (8 * COLUMNS_PER_THREAD) == 0 else 1
        self.per_block = columns // self.blocks
        self.threads = -(-self.per_block // COLUMNS_PER_THREAD // 32) * 32
        if columns % COLUMNS_PER_THREAD or self.threads > 1024:
            raise ValueError(f"RowCluster columns: got {columns}, needs a multiple of 4 that fits 1024 threads a block")
        self.warps = self.threads // 32
        self.round_bytes = MAX_SUMS * (self.warps + self.blocks) * 4
        self.shared_bytes = ROUNDS * (self.round_bytes + 8)

    def launch_options(self, rows: Any, pdl: Any, stream: Any) -> dict[str, Any]:
        options: dict[str, Any] = {
            "grid": [rows * self.blocks, 1, 1],
            "block": [self.threads, 1, 1],
            "smem": self.shared_bytes,
            "stream": stream,
            "use_pdl": pdl,
        }
        if self.blocks > 1:
            options["cluster"] = [self.blocks, 1, 1]
        return options

    def start(self) -> tuple[Any, Any, Any]:
        """(row, first of this thread's four columns, whether the thread has columns); idle threads get column 0."""
        self.tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        self.shared = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=16).toint())
        self.rank = block % self.blocks
        self.joined = self.blocks == 1
        if not self.joined:
            self._open()
        active = self.tid * COLUMNS_PER_THREAD < self.per_block
        local = cutlass.min(self.tid * COLUMNS_PER_THREAD, Int32(self.per_block - COLUMNS_PER_THREAD))
        return block // self.blocks, block % self.blocks * self.per_block + local, active

    @cute.jit
    def _open(self):
        """Barriers for the cluster's exchanges; the cluster has them once `cluster_wait` is over."""
        if self.tid == 0:
            for i in cutlass.range_constexpr(ROUNDS):
                barrier_init(self._barrier(i), 1)
            barrier_init_done()
        cluster_arrive_relaxed()

    def _barrier(self, round_index: int) -> Any:
        return self.shared + ROUNDS * self.round_bytes + round_index * 8

    def sum(self, values: list[Float32], round_index: int) -> list[Float32]:
        """Row sums of each value (idle threads pass zero). Use each `round_index` below ROUNDS once a kernel, so no buffer is reused."""
        n = len(values)
        if n > MAX_SUMS or round_index >= ROUNDS:
            raise ValueError(f"RowCluster.sum: got {n} sums in round {round_index}, needs <= {MAX_SUMS} and < {ROUNDS}")
        warp_at = self.shared + round_index * self.round_bytes
        for i, value in enumerate(values):
            mem.shared_store_f32(warp_at + (i * self.warps + self.tid // 32) * 4, warp_sum(value))
        block_sync()
        if self.blocks == 1:
            return [self._added([warp_at + (i * self.warps + w) * 4 for w in range(self.warps)]) for i in range(n)]
        if not self.joined:
            cluster_wait()
            self.joined = True
        received = warp_at + MAX_SUMS * self.warps * 4
        self._send(n, warp_at, received, self._barrier(round_index))
        barrier_wait(self._barrier(round_index), Int32(0))
        # Lane i adds sum i over the blocks and gives it to its warp.
        at = received + cutlass.min(self.tid % 32, Int32(n - 1)) * (self.blocks * 4)
        total = self._added([at + rank * 4 for rank in range(self.blocks)])
        return [_lane(total, i) for i in range(n)]

    def _added(self, addresses: list[Any]) -> Any:
        total = mem.shared_f32(addresses[0])
        for address in addresses[1:]:
            total = total + mem.shared_f32(address)
        return total

    @cute.jit
    def _send(self, n: cutlass.Constexpr, warp_at: Int32, received: Int32, barrier: Int32):
        """Thread i adds sum i over its block's warps and sends it to every block."""
        if self.tid < n:
            total = self._added([warp_at + (self.tid * self.warps + w) * 4 for w in range(self.warps)])
            for rank in cutlass.range_constexpr(self.blocks):
                send_f32(received + (self.tid * self.blocks + self.rank) * 4, barrier, rank, total)
        if self.tid == 0:
            barrier_expect(barrier, self.blocks * n * 4)


def _lane(value: Float32, lane: int) -> Float32:
    """The value of one lane in all lanes of the warp."""
    return emit(f"shfl.sync.idx.b32 $0, $1, {lane}, 0x1f, 0xffffffff;", (Float32,), (value,), memory=False)
