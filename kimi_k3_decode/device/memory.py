"""Global and shared memory access by operand role.

Rule (see `Role` in ops/contract.py): what a step writes is read with plain, side-effecting, non-`.nc` loads, after the grid wait; mailboxes
with strong polled loads. The streaming form and what may run before the wait (early loads, copies) exist for `weight` operands and refuse
any other role while the kernel is being traced, so a wrong use cannot be compiled.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kimi_k3_decode.device.asm import emit
from kimi_k3_decode.device.math import select

WEIGHT = "weight"
ROLES = ("weight", "input", "state", "output", "scratch", "mailbox", "table")


class RoleError(ValueError):
    """A kernel uses an operand in a way its role forbids. Raised at trace time."""


class Global:
    """A kernel operand on the device: its base address, element size in bytes and role. Addresses are 64-bit, offsets in elements."""

    def __init__(self, name: str, pointer: cute.Pointer, role: str) -> None:
        if role not in ROLES:
            raise RoleError(f"operand {name}: got role {role!r}, needs one of {ROLES}; take it from the contract")
        self.name = name
        self.role = role
        self.bytes = pointer.dtype.width // 8
        self.base = Int64(pointer.toint())

    def at(self, offset: Any) -> Int64:
        """Byte address of element `offset` (a Python int, Int32 or Int64; 64-bit arithmetic throughout)."""
        if isinstance(offset, int):
            return self.base + Int64(offset * self.bytes)
        return self.base + Int64(offset) * Int64(self.bytes)

    @classmethod
    def choose(cls, condition: Any, a: Global, b: Global) -> Global:
        """`a` where `condition` else `b`, decided at run time; both must have the same role and element size."""
        if a.role != b.role or a.bytes != b.bytes:
            raise RoleError(f"operands {a.name} and {b.name}: got roles {a.role}, {b.role}, needs one role and element size for both")
        chosen = cls.__new__(cls)
        chosen.name, chosen.role, chosen.bytes = f"{a.name}|{b.name}", a.role, a.bytes
        chosen.base = select(condition, a.base, b.base)
        return chosen

    def require(self, *roles: str) -> None:
        if self.role not in roles:
            raise RoleError(f"operand {self.name}: got role {self.role!r}, needs one of {roles} for this access; use the plain load")


# ---- plain loads: any role; the only form for what the step writes ----
def load_b128(x: Global, offset: Any) -> tuple[Int32, Int32, Int32, Int32]:
    """16 bytes at element `offset` (16-byte aligned)."""
    return emit("ld.global.v4.b32 {$0,$1,$2,$3}, [$4];", (Int32,) * 4, (x.at(offset),), memory=True)


def load_b64(x: Global, offset: Any) -> tuple[Int32, Int32]:
    return emit("ld.global.v2.b32 {$0,$1}, [$2];", (Int32,) * 2, (x.at(offset),), memory=True)


def load_b32(x: Global, offset: Any) -> Int32:
    return emit("ld.global.b32 $0, [$1];", (Int32,), (x.at(offset),), memory=True)


def load_f32(x: Global, offset: Any) -> Float32:
    return emit("ld.global.f32 $0, [$1];", (Float32,), (x.at(offset),), memory=True)


def load_f32x2(x: Global, offset: Any) -> tuple[Float32, Float32]:
    return emit("ld.global.v2.f32 {$0,$1}, [$2];", (Float32,) * 2, (x.at(offset),), memory=True)


def load_f32x4(x: Global, offset: Any) -> tuple[Float32, Float32, Float32, Float32]:
    return emit("ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", (Float32,) * 4, (x.at(offset),), memory=True)


def load_bf16(x: Global, offset: Any) -> Float32:
    """One BF16 element, widened."""
    code = "{ .reg .b16 h; ld.global.b16 h, [$1]; mov.b32 $0, {0, h}; }"
    return emit(code, (Float32,), (x.at(offset),), memory=True)


# ---- the fast form: weights only ----
def load_weight_b128(x: Global, offset: Any) -> tuple[Int32, Int32, Int32, Int32]:
    x.require(WEIGHT)
    return emit("ld.global.nc.L1::no_allocate.v4.b32 {$0,$1,$2,$3}, [$4];", (Int32,) * 4, (x.at(offset),), memory=False)


def load_weight_b32(x: Global, offset: Any) -> Int32:
    x.require(WEIGHT)
    return emit("ld.global.nc.b32 $0, [$1];", (Int32,), (x.at(offset),), memory=False)


# ---- weights before the grid wait: not `.nc`, which the assembler sinks below the wait, where nothing hides its latency any more ----
def load_weight_early_f32(x: Global, offset: Any) -> Float32:
    x.require(WEIGHT)
    return load_f32(x, offset)


def load_weight_early_f32x4(x: Global, offset: Any) -> tuple[Float32, Float32, Float32, Float32]:
    x.require(WEIGHT)
    return load_f32x4(x, offset)


def load_weight_early_b64(x: Global, offset: Any) -> tuple[Int32, Int32]:
    x.require(WEIGHT)
    return load_b64(x, offset)


def load_weight_early_b128(x: Global, offset: Any) -> tuple[Int32, Int32, Int32, Int32]:
    x.require(WEIGHT)
    return load_b128(x, offset)


def load_weight_early_b32(x: Global, offset: Any) -> Int32:
    x.require(WEIGHT)
    return load_b32(x, offset)


# ---- asynchronous copies to shared memory (never moved across a wait by the assembler) ----
def copy_weight_b128(dst: Int32, x: Global, offset: Any, valid: Any = None) -> None:
    """cp.async of 16 weight bytes into shared address `dst`; where `valid` (0 or 1) is 0 the destination is zero-filled, nothing is
    read."""
    x.require(WEIGHT)
    _copy(dst, x, offset, valid)


def copy_weight(dst: Int32, x: Global, offset: Any, size_bytes: int) -> None:
    """cp.async of 4, 8 or 16 weight bytes."""
    x.require(WEIGHT)
    if size_bytes == 16:
        _copy(dst, x, offset, None)
    else:
        emit(f"cp.async.ca.shared.global [$0], [$1], {size_bytes};", (), (dst, x.at(offset)), memory=True)


def copy_b128(dst: Int32, x: Global, offset: Any, valid: Any = None) -> None:
    """cp.async of 16 bytes of any operand; call it after the grid wait."""
    _copy(dst, x, offset, valid)


def _copy(dst: Int32, x: Global, offset: Any, valid: Any) -> None:
    if valid is None:
        emit("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", (), (dst, x.at(offset)), memory=True)
    else:
        emit("cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", (), (dst, x.at(offset), Int32(valid) * Int32(16)), memory=True)


def copy_commit() -> None:
    emit("cp.async.commit_group;", (), (), memory=True)


def copy_wait(pending: int) -> None:
    """Wait until at most `pending` of this thread's newest copy groups are still in flight."""
    emit(f"cp.async.wait_group {pending};", (), (), memory=True)


# ---- stores ----
def store_b128(x: Global, offset: Any, values: tuple[Any, Any, Any, Any]) -> None:
    x.require("output", "state", "scratch", "mailbox")
    emit("st.global.v4.b32 [$0], {$1,$2,$3,$4};", (), (x.at(offset), *values), memory=True)


def store_b64(x: Global, offset: Any, values: tuple[Any, Any]) -> None:
    x.require("output", "state", "scratch", "mailbox")
    emit("st.global.v2.b32 [$0], {$1,$2};", (), (x.at(offset), *values), memory=True)


def store_b32(x: Global, offset: Any, value: Any) -> None:
    x.require("output", "state", "scratch", "mailbox")
    emit("st.global.b32 [$0], $1;", (), (x.at(offset), value), memory=True)


def store_f32(x: Global, offset: Any, value: Float32) -> None:
    x.require("output", "state", "scratch", "mailbox")
    emit("st.global.f32 [$0], $1;", (), (x.at(offset), value), memory=True)


def store_f32x2(x: Global, offset: Any, a: Float32, b: Float32) -> None:
    x.require("output", "state", "scratch", "mailbox")
    emit("st.global.v2.f32 [$0], {$1,$2};", (), (x.at(offset), a, b), memory=True)


def store_f32x4(x: Global, offset: Any, values: tuple[Any, Any, Any, Any]) -> None:
    x.require("output", "state", "scratch", "mailbox")
    emit("st.global.v4.f32 [$0], {$1,$2,$3,$4};", (), (x.at(offset), *values), memory=True)


def store_bf16(x: Global, offset: Any, value: Float32) -> None:
    """Round to nearest even and store one BF16."""
    x.require("output", "state", "scratch", "mailbox")
    emit("{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; st.global.b16 [$0], h; }", (), (x.at(offset), value), memory=True)


# ---- shared memory: 32-bit byte addresses ----
def shared_b128(address: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    return emit("ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", (Int32,) * 4, (address,), memory=True)


def shared_b32(address: Int32) -> Int32:
    return emit("ld.shared.b32 $0, [$1];", (Int32,), (address,), memory=True)


def shared_f32(address: Int32) -> Float32:
    return emit("ld.shared.f32 $0, [$1];", (Float32,), (address,), memory=True)


def shared_f32x4(address: Int32) -> tuple[Float32, Float32, Float32, Float32]:
    return emit("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", (Float32,) * 4, (address,), memory=True)


def shared_f32x2(address: Int32) -> tuple[Float32, Float32]:
    return emit("ld.shared.v2.f32 {$0,$1}, [$2];", (Float32,) * 2, (address,), memory=True)


def shared_u8(address: Int32) -> Int32:
    return emit("ld.shared.u8 $0, [$1];", (Int32,), (address,), memory=True)


def shared_store_b32(address: Int32, value: Any) -> None:
    emit("st.shared.b32 [$0], $1;", (), (address, value), memory=True)


def shared_store_b128(address: Int32, values: tuple[Any, Any, Any, Any]) -> None:
    emit("st.shared.v4.b32 [$0], {$1,$2,$3,$4};", (), (address, *values), memory=True)


def shared_store_f32(address: Int32, value: Float32) -> None:
    emit("st.shared.f32 [$0], $1;", (), (address, value), memory=True)


def shared_store_f32x2(address: Int32, a: Float32, b: Float32) -> None:
    emit("st.shared.v2.f32 [$0], {$1,$2};", (), (address, a, b), memory=True)


def shared_store_bf16(address: Int32, value: Float32) -> None:
    emit("{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; st.shared.b16 [$0], h; }", (), (address, value), memory=True)
