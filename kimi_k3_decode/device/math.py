"""Arithmetic in FP32 and the BF16 conversions. Reductions over a warp are butterflies, so every lane gets the same bits."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kimi_k3_decode.device.asm import emit

LOG2_E = 1.4426950408889634


def exp(x: Float32) -> Float32:
    """exp(x) through ex2.approx (relative error about 2 ulp of FP32 for moderate x)."""
    return emit("ex2.approx.f32 $0, $1;", (Float32,), (x * Float32(LOG2_E),), memory=False)


def reciprocal(x: Float32) -> Float32:
    """1 / x to one ulp. The correctly rounded form has a branch, which keeps independent ones from overlapping."""
    return emit("rcp.approx.ftz.f32 $0, $1;", (Float32,), (x,), memory=False)


def rsqrt(x: Float32) -> Float32:
    return emit("rsqrt.approx.f32 $0, $1;", (Float32,), (x,), memory=False)


def sigmoid(x: Float32) -> Float32:
    return reciprocal(Float32(1.0) + exp(-x))


def silu(x: Float32) -> Float32:
    return x * sigmoid(x)


def select(condition: Any, a: Any, b: Any) -> Any:
    """a where `condition` else b, both evaluated."""
    kind = type(a)
    width = {Float32: "f32", Int32: "b32", Int64: "b64"}[kind]
    code = f"{{ .reg .pred p; setp.ne.s32 p, $1, 0; selp.{width} $0, $2, $3, p; }}"
    return emit(code, (kind,), (Int32(condition), a, b), memory=False)


def tanh(x: Float32) -> Float32:
    """Odd polynomial below 0.25 (no cancellation), 1 - 2/(exp(2|x|)+1) above."""
    square = x * x
    small = x * (Float32(1.0) + square * (Float32(-1.0 / 3) + square * (Float32(2.0 / 15) + square * Float32(-17.0 / 315))))
    large = Float32(1.0) - Float32(2.0) * reciprocal(exp(Float32(2.0) * absolute(x)) + Float32(1.0))
    return select(square < Float32(0.0625), small, copysign(large, x))


def absolute(x: Float32) -> Float32:
    return emit("abs.f32 $0, $1;", (Float32,), (x,), memory=False)


def copysign(magnitude: Float32, sign: Float32) -> Float32:
    return emit("copysign.f32 $0, $1, $2;", (Float32,), (sign, magnitude), memory=False)


def maximum(a: Float32, b: Float32) -> Float32:
    return emit("max.f32 $0, $1, $2;", (Float32,), (a, b), memory=False)


def situ(gate: Float32, up: Float32, beta: float, linear_beta: float) -> Float32:
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)."""
    left = Float32(beta) * tanh(gate * Float32(1.0 / beta)) * sigmoid(gate)
    return left * (Float32(linear_beta) * tanh(up * Float32(1.0 / linear_beta)))


# ---- BF16 ----
def low_bf16(word: Int32) -> Float32:
    return bits_f32(word << Int32(16))


def high_bf16(word: Int32) -> Float32:
    return bits_f32(word & Int32(-65536))


def bits_f32(word: Int32) -> Float32:
    return emit("mov.b32 $0, $1;", (Float32,), (word,), memory=False)


def f32_bits(value: Float32) -> Int32:
    return emit("mov.b32 $0, $1;", (Int32,), (value,), memory=False)


def pack_bf16(low: Float32, high: Float32) -> Int32:
    """Two floats rounded to nearest even into one word, `low` in bits 0..15."""
    return emit("cvt.rn.bf16x2.f32 $0, $2, $1;", (Int32,), (low, high), memory=False)


def round_bf16(value: Float32) -> Float32:
    return emit("{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; mov.b32 $0, {0, h}; }", (Float32,), (value,), memory=False)


def bf16_word_f32x2(word: Int32) -> tuple[Float32, Float32]:
    """Both BF16 of a word, in memory order."""
    return low_bf16(word), high_bf16(word)


def unpack_bf16x8(words: tuple[Any, ...]) -> list[Float32]:
    """Eight floats of a 16-byte vector in memory order."""
    return [f(word) for word in words for f in (low_bf16, high_bf16)]


# ---- warp reductions ----
def shuffle_xor(value: Any, mask: int) -> Any:
    kind = type(value)
    letter = "b32"
    return emit(f"shfl.sync.bfly.{letter} $0, $1, {mask}, 0x1f, 0xffffffff;", (kind,), (value,), memory=False)


def warp_sum(value: Float32, lanes: int = 32) -> Float32:
    """Sum over aligned groups of `lanes` lanes, the same bits in each lane."""
    step = lanes // 2
    while step:
        value = value + shuffle_xor(value, step)
        step //= 2
    return value


def warp_max(value: Float32, lanes: int = 32) -> Float32:
    step = lanes // 2
    while step:
        value = maximum(value, shuffle_xor(value, step))
        step //= 2
    return value


def lane() -> Int32:
    return cute.arch.lane_idx()
