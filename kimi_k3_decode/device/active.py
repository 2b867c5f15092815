"""The work list of the routed experts in shared memory: (expert, up to `tokens` of its pairs). Every block builds it from the offsets or,
for a single row, from the row's choices."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.asm import emit
from kimi_k3_decode.device.math import select
from kimi_k3_decode.device.sync import block_sync

# A word of the list: expert number, pairs in this entry, place of the first of them in the sorted pairs.
EXPERT_BITS, COUNT_BITS = 12, 4
MAX_PAIRS = 1 << 15


def entries(experts: int, pairs: int, tokens: int) -> int:
    """The most entries that `pairs` pairs over `experts` experts can make, `tokens` pairs an entry."""
    if experts > 1 << EXPERT_BITS or tokens not in (1, 2, 4, 8) or pairs > MAX_PAIRS:
        raise ValueError(
            f"work list: got {experts} experts, {pairs} pairs, {tokens} tokens an entry, needs fields of one word, 1 to 8 tokens"
        )
    return min(experts, pairs) + pairs // tokens


def shared_bytes(experts: int, pairs: int, tokens: int, threads: int) -> int:
    """Bytes `compact` needs: the list and one count a warp, 16-byte aligned."""
    return -(-(entries(experts, pairs, tokens) + threads // 32) * 4 // 16) * 16


def entry_expert(entry: Int32) -> Int32:
    return entry & Int32((1 << EXPERT_BITS) - 1)


def entry_count(entry: Int32) -> Int32:
    return (entry >> Int32(EXPERT_BITS)) & Int32((1 << COUNT_BITS) - 1)


def entry_first(entry: Int32) -> Int32:
    return entry >> Int32(EXPERT_BITS + COUNT_BITS)


def shuffle_up(value: Int32, delta: int) -> Int32:
    return emit(f"shfl.sync.up.b32 $0, $1, {delta}, 0, 0xffffffff;", (Int32,), (value,), memory=False)


@cute.jit
def compact(
    offsets: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    tokens: cutlass.Constexpr,
    threads: cutlass.Constexpr,
    at: Int32,
    sums: Int32,
    tid: Int32,
):
    """Write the entries, experts in rising order, to shared address `at` (`sums`: one word a warp); returns how many. Ends with a block
    barrier."""
    run = -(-experts // threads)
    lane = tid % 32
    bounds = [mem.load_b32(offsets, cutlass.min(tid * run + j, Int32(experts))) for j in range(run + 1)]
    needs = [(bounds[j + 1] - bounds[j] + Int32(tokens - 1)) >> Int32(tokens.bit_length() - 1) for j in range(run)]
    total = needs[0]
    for need in needs[1:]:
        total = total + need
    inclusive = total
    for step in cutlass.range_constexpr(5):
        other = shuffle_up(inclusive, 1 << step)
        inclusive = select(lane >= (1 << step), inclusive + other, inclusive)
    if lane == 31:
        mem.shared_store_b32(sums + tid // 32 * 4, inclusive)
    block_sync()
    place = inclusive - total
    count = Int32(0)
    for w in cutlass.range_constexpr(threads // 32):
        value = mem.shared_b32(sums + w * 4)
        place = select(tid // 32 > w, place + value, place)
        count = count + value
    for j in cutlass.range_constexpr(run):
        expert = tid * run + j
        for first in cutlass.range(bounds[j], bounds[j + 1], tokens):
            n = cutlass.min(bounds[j + 1] - first, Int32(tokens))
            word = expert | (n << Int32(EXPERT_BITS)) | (first << Int32(EXPERT_BITS + COUNT_BITS))
            mem.shared_store_b32(at + place * 4, word)
            place = place + 1
    block_sync()
    return count


def choices(ids: mem.Global, top_k: int, tid: Int32) -> tuple[Int32, Int32]:
    """A single row: (this thread's entry, how many entries there are). Choice z is the entry of expert ids[z] with pair z; a padding row
    has none."""
    first = mem.load_b32(ids, 0)
    chosen = mem.load_b32(ids, cutlass.min(tid, Int32(top_k - 1)))
    mask = Int32((1 << EXPERT_BITS) - 1)
    entry = (chosen & mask) | Int32(1 << EXPERT_BITS) | (tid << Int32(EXPERT_BITS + COUNT_BITS))
    return entry, select(first >= 0, Int32(top_k), Int32(0))


@cute.jit
def listed(entry: Int32, count: Int32, top_k: cutlass.Constexpr, at: Int32, tid: Int32):
    """Write the entries of `choices` to shared address `at`; returns their count. Ends with a block barrier."""
    if tid < top_k:
        mem.shared_store_b32(at + tid * 4, entry)
    block_sync()
    return count
