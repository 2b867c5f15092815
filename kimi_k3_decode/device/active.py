"""The list of experts that a step uses, rebuilt by every block from the offsets: expert numbers in rising order, in shared memory."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.asm import emit
from kimi_k3_decode.device.math import select
from kimi_k3_decode.device.sync import block_sync


def shared_bytes(experts: int, threads: int) -> int:
    """Bytes `compact` needs: the list and one count a warp, 16-byte aligned."""
    return -(-(experts + threads // 32) * 4 // 16) * 16


def shuffle_up(value: Int32, delta: int) -> Int32:
    return emit(f"shfl.sync.up.b32 $0, $1, {delta}, 0, 0xffffffff;", (Int32,), (value,), memory=False)


@cute.jit
def compact(offsets: cutlass.Constexpr, experts: cutlass.Constexpr, threads: cutlass.Constexpr, at: Int32, tid: Int32):
    """Write the experts with at least one pair to shared address `at`; returns how many. Ends with a block barrier."""
    run = -(-experts // threads)
    lane = tid % 32
    sums = at + experts * 4
    used: Any = []
    total = Int32(0)
    for j in cutlass.range_constexpr(run):
        e = tid * run + j
        safe = cutlass.min(e, Int32(experts - 1))
        has = Int32(mem.load_b32(offsets, safe + 1) > mem.load_b32(offsets, safe)) & Int32(e < experts)
        used.append(has)
        total = total + has
    inclusive = total
    for step in cutlass.range_constexpr(5):
        other = shuffle_up(inclusive, 1 << step)
        inclusive = select(lane >= (1 << step), inclusive + other, inclusive)
    if lane == 31:
        mem.shared_store_b32(sums + tid // 32 * 4, inclusive)
    block_sync()
    before = inclusive - total
    count = Int32(0)
    for w in cutlass.range_constexpr(threads // 32):
        value = mem.shared_b32(sums + w * 4)
        before = select(tid // 32 > w, before + value, before)
        count = count + value
    for j in cutlass.range_constexpr(run):
        if used[j] != 0:
            mem.shared_store_b32(at + before * 4, tid * run + j)
        before = before + used[j]
    block_sync()
    return count
