"""One token row spread over a cluster of blocks, four columns a thread: the shape of the norm and residual kernels.

Sums over the row go warp -> block -> cluster in a fixed order, so every thread of the row holds the same bits.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.math import warp_sum
from kimi_k3_decode.device.sync import block_sync, cluster_sync

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
        self.shared_bytes = ROUNDS * MAX_SUMS * (self.warps + 2) * 4

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
        active = self.tid * COLUMNS_PER_THREAD < self.per_block
        local = cutlass.min(self.tid * COLUMNS_PER_THREAD, Int32(self.per_block - COLUMNS_PER_THREAD))
        return block // self.blocks, block % self.blocks * self.per_block + local, active

    def sum(self, values: list[Float32], round_index: int) -> list[Float32]:
        """Row sums of each value (idle threads pass zero). Use each `round_index` below ROUNDS once a kernel, so no buffer is reused."""
        n = len(values)
        if n > MAX_SUMS or round_index >= ROUNDS:
            raise ValueError(f"RowCluster.sum: got {n} sums in round {round_index}, needs <= {MAX_SUMS} and < {ROUNDS}")
        warp_at = self.shared + round_index * MAX_SUMS * (self.warps + 2) * 4
        block_at = warp_at + MAX_SUMS * self.warps * 4
        for i, value in enumerate(values):
            mem.shared_store_f32(warp_at + (i * self.warps + self.tid // 32) * 4, warp_sum(value))
        block_sync()
        if self.blocks == 1:
            return [self._added([warp_at + (i * self.warps + w) * 4 for w in range(self.warps)]) for i in range(n)]
        self._exchange(n, warp_at, block_at)
        return [mem.shared_f32(block_at + (MAX_SUMS + i) * 4) for i in range(n)]

    def _added(self, addresses: list[Any]) -> Any:
        total = mem.shared_f32(addresses[0])
        for address in addresses[1:]:
            total = total + mem.shared_f32(address)
        return total

    @cute.jit
    def _exchange(self, n: cutlass.Constexpr, warp_at: Int32, block_at: Int32):
        """Thread i adds sum i, first over its block's warps and then over the blocks, so that a value crosses the cluster once a block."""
        if self.tid < n:
            total = self._added([warp_at + (self.tid * self.warps + w) * 4 for w in range(self.warps)])
            mem.shared_store_f32(block_at + self.tid * 4, total)
        cluster_sync()
        if self.tid < n:
            parts = [mem.remote_f32(block_at + self.tid * 4, rank) for rank in range(self.blocks)]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            mem.shared_store_f32(block_at + (MAX_SUMS + self.tid) * 4, total)
        block_sync()

    def finish(self) -> None:
        """No block may leave while a peer can still read its shared memory."""
        if self.blocks > 1:
            cluster_sync()
