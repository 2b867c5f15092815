"""Waits, barriers and the mailbox protocol.

A mailbox is read and written in 32-bit words (one FP32, two BF16) and a word carries its own readiness: anything but the sentinel is data.
Producers never store the sentinel (its bits are a NaN that arithmetic does not produce; stores canonicalise all the same). The consumer
polls with strong loads and meanwhile re-arms the buffer of the other parity, which it finished reading one message ago.

Waiting is bounded: after `BUDGET_NS` a waiter records the sticky health word and goes on, and every later waiter that sees the word stops
waiting at once, so a step ends instead of hanging. The host must check the word before it uses any result.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kimi_k3_decode.device.asm import emit
from kimi_k3_decode.device.math import f32_bits, pack_bf16, select
from kimi_k3_decode.device.memory import Global, store_b128
from kimi_k3_decode.ops.operands import SENTINEL_WORD

CANONICAL_NAN_WORD = 0x7FFFFFFF
BUDGET_NS = 2_000_000_000
SPINS_PER_CLOCK_READ = 256


def grid_wait() -> None:
    """Wait for the grids this launch depends on to finish and flush (PDL). A no-op when launched without the attribute."""
    cute.arch.griddepcontrol_wait()


def grid_release() -> None:
    """Let dependents start their pre-wait part. Their waits still wait for this grid to end, so this is a hint, never an ordering."""
    cute.arch.griddepcontrol_launch_dependents()


def block_sync() -> None:
    cute.arch.sync_threads()


def warp_sync() -> None:
    cute.arch.sync_warp()


def cluster_sync() -> None:
    """All threads of all blocks of the cluster; release/acquire, so distributed shared memory written before is readable after.

    The warp barrier comes first because the compiler knows it as convergent and inline PTX not: without it the aligned barrier may be
    copied into both arms of a divergent branch before it, and a warp would then arrive twice.
    """
    warp_sync()
    emit("barrier.cluster.arrive.release.aligned;", (), (), memory=True)
    emit("barrier.cluster.wait.acquire.aligned;", (), (), memory=True)


def cluster_arrive_relaxed() -> None:
    """First half of a cluster barrier that orders nothing but the barrier itself (and mbarrier initialisation, see `barrier_init`)."""
    warp_sync()
    emit("barrier.cluster.arrive.relaxed.aligned;", (), (), memory=True)


def cluster_wait() -> None:
    emit("barrier.cluster.wait.acquire.aligned;", (), (), memory=True)


# ---- mbarriers in shared memory, for sums sent between the blocks of a cluster ----
def barrier_init(address: Int32, arrivals: int) -> None:
    emit("mbarrier.init.shared::cta.b64 [$0], $1;", (), (address, Int32(arrivals)), memory=True)


def barrier_init_done() -> None:
    """Make initialised barriers visible to the cluster; follow with a cluster barrier."""
    emit("fence.mbarrier_init.release.cluster;", (), (), memory=True)


def barrier_expect(address: Int32, size_bytes: int) -> None:
    """Arrive and announce the bytes that remote stores will bring in this phase (they may already have come)."""
    emit("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", (), (address, Int32(size_bytes)), memory=True)


@cute.jit
def barrier_wait(address: Int32, phase: Int32):
    """Wait until the phase of parity `phase` is complete; what remote stores brought is then visible."""
    code = "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }"
    done = emit(code, (Int32,), (address, phase), memory=True)
    while done == 0:
        done = emit(code, (Int32,), (address, phase), memory=True)


def send_f32(address: Int32, barrier: Int32, rank: Any, value: Float32) -> None:
    """Store a float at the same shared address in cluster block `rank` and count 4 bytes on its barrier."""
    code = (
        "{ .reg .b32 d, m; mapa.shared::cluster.u32 d, $0, $2; mapa.shared::cluster.u32 m, $1, $2; "
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [d], $3, [m]; }"
    )
    emit(code, (), (address, barrier, Int32(rank), value), memory=True)


def send_f32x2(address: Int32, barrier: Int32, rank: Any, a: Float32, b: Float32) -> None:
    """Store two floats at the same shared address in cluster block `rank` and count 8 bytes on its barrier."""
    code = (
        "{ .reg .b32 d, m; mapa.shared::cluster.u32 d, $0, $2; mapa.shared::cluster.u32 m, $1, $2; "
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [d], {$3, $4}, [m]; }"
    )
    emit(code, (), (address, barrier, Int32(rank), a, b), memory=True)


def globaltimer_ns() -> Int64:
    return emit("mov.u64 $0, %globaltimer;", (Int64,), (), memory=True)


def mailbox_store_b32(x: Global, offset: Any, value: Int32) -> None:
    """Publish one word: relaxed at system scope, the word itself is the flag, so no fence is needed."""
    x.require("mailbox")
    emit("st.relaxed.sys.global.b32 [$0], $1;", (), (x.at(offset), value), memory=True)


def mailbox_load_b32(x: Global, offset: Any) -> Int32:
    x.require("mailbox")
    return emit("ld.relaxed.sys.global.b32 $0, [$1];", (Int32,), (x.at(offset),), memory=True)


def mailbox_load_b128(x: Global, offset: Any) -> tuple[Int32, Int32, Int32, Int32]:
    x.require("mailbox")
    return emit("ld.relaxed.sys.global.v4.b32 {$0,$1,$2,$3}, [$4];", (Int32,) * 4, (x.at(offset),), memory=True)


def canonical(word: Int32) -> Int32:
    """The word itself, or the canonical NaN where its bits are the sentinel's."""
    return select(word == SENTINEL_WORD, Int32(CANONICAL_NAN_WORD), word)


def publish_f32x2(boxes: Any, offset: Any, a: Float32, b: Float32) -> None:
    """Store two adjacent FP32 elements (8-byte aligned) in the box of every rank."""
    words = canonical(f32_bits(a)), canonical(f32_bits(b))
    for box in boxes:
        box.require("mailbox")
        emit("st.relaxed.sys.global.v2.b32 [$0], {$1,$2};", (), (box.at(offset), *words), memory=True)


def publish_f32x4(boxes: Any, offset: Any, values: Any) -> None:
    """Store four adjacent FP32 elements (16-byte aligned) in the box of every rank."""
    words = tuple(canonical(f32_bits(value)) for value in values)
    for box in boxes:
        box.require("mailbox")
        emit("st.relaxed.sys.global.v4.b32 [$0], {$1,$2,$3,$4};", (), (box.at(offset), *words), memory=True)


def publish_bf16x2(boxes: Any, offset: Any, a: Float32, b: Float32) -> None:
    """Round and store two adjacent BF16 elements as one word in the box of every rank."""
    word = canonical(pack_bf16(a, b))
    for box in boxes:
        mailbox_store_b32(box, offset, word)


def rearm_b128(box: Global, offset: Any) -> None:
    """Four sentinels; an ordinary store, because the next writer is ordered behind this launch by the exchanges in between."""
    box.require("mailbox")
    store_b128(box, offset, (Int32(SENTINEL_WORD),) * 4)


def _ready(words: Any) -> Int32:
    ready = Int32(1)
    for word in words:
        ready = ready & Int32(word != SENTINEL_WORD)
    return ready


def _load_all(box: Any, offsets: Any) -> list[Any]:
    return [word for offset in offsets for word in mailbox_load_b128(box, offset)]


@cute.jit
def poll_many(box: cutlass.Constexpr, offsets: cutlass.Constexpr, health: cutlass.Constexpr):
    """Four words at each of `offsets`, once none is the sentinel; after the budget whatever is there. All loads are in flight together."""
    words = _load_all(box, offsets)
    ready = _ready(words)
    spins = Int32(0)
    begin = Int64(0)
    while ready == 0:
        words = _load_all(box, offsets)
        ready = _ready(words)
        spins = spins + 1
        if spins % SPINS_PER_CLOCK_READ == 0:
            now = globaltimer_ns()
            if begin == 0:
                begin = now
            late = Int32(now - begin > BUDGET_NS)
            sick = mailbox_load_b32(health, 0)
            if late != 0:
                mailbox_store_b32(health, 0, Int32(1))
            if (late | Int32(sick != 0)) != 0:
                ready = Int32(1)
    return words


def poll_b128(box: Global, offset: Any, health: Global) -> tuple[Any, Any, Any, Any]:
    """Four words at one offset."""
    a, b, c, d = poll_many(box, (offset,), health)
    return a, b, c, d
