"""Warp-level matrix products (mma.sync m16n8k16, BF16 in, FP32 out), valid on sm_90a, sm_100a and sm_103a.

Weights are the M operand (16 rows), tokens the N operand (8). The order of k inside a product is free as long as both operands agree, so a
thread takes eight consecutive k of a row with one 16-byte access and feeds two products: elements 0..3 to the first, 4..7 to the second.
With lane = 4 * g + t, a thread holds rows g and g + 8 of the weights, token g of x, and the sums (row g, tokens 2t, 2t+1), (row g + 8,
...).
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32

from kimi_k3_decode.device.asm import emit

MMA_CODE = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"


def mma(acc: tuple[Any, Any, Any, Any], a: tuple[Any, Any, Any, Any], b: tuple[Any, Any]) -> tuple[Float32, Float32, Float32, Float32]:
    """acc + A B. `a` = (row g k0 pair, row g+8 k0 pair, row g k1 pair, row g+8 k1 pair), `b` = (k0 pair, k1 pair), two BF16 a word."""
    return emit(MMA_CODE, (Float32,) * 4, (*a, *b, *acc), memory=False)


def mma_pair(acc: Any, low: tuple[Any, ...], high: tuple[Any, ...], x: tuple[Any, ...]) -> Any:
    """Two products over the 32 k that a quad of lanes holds: `low` and `high` are the 16 bytes of rows g and g + 8, `x` those of token
    g."""
    acc = mma(acc, (low[0], high[0], low[1], high[1]), (x[0], x[1]))
    return mma(acc, (low[2], high[2], low[3], high[3]), (x[2], x[3]))


# ---- MXFP4: E2M1 codes to BF16 pairs ----
def scale_factor(code: Int32) -> Int32:
    """E8M0 code s to a BF16 pair of 2^(s-1); E2M1 bits placed in a BF16 read as value * 2^-126, so the product is exact.

    Valid for s <= 128 (scales up to 2.0); the launch refuses larger ones, 255 (NaN) among them.
    """
    return (code + Int32(126)) * Int32(0x00800080)


def decode_word(word: Int32, factor: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """Eight codes of a 32-bit word to four BF16 pairs: (code i, code i + 4) for i = 0..3. x must be staged in the same order.

    One multiplication copies an isolated code to both places a BF16 needs it (exponent and mantissa at bit 6, sign at bit 15): the two
    copies do not overlap, so the product is their OR, and multiplications leave the integer pipe to the masks. The last code has its sign
    in place already, and one shift serves it and the code before.
    """
    code = (
        "{ .reg .b32 a, h, s; shr.u32 h, $4, 6; "
        "and.b32 a, $4, 0x000F000F; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81C081C0; mul.rn.bf16x2 $0, a, $5; "
        "and.b32 a, $4, 0x00F000F0; mul.lo.u32 a, a, 0x104; and.b32 a, a, 0x81C081C0; mul.rn.bf16x2 $1, a, $5; "
        "and.b32 a, h, 0x003C003C; mul.lo.u32 a, a, 0x410; and.b32 a, a, 0x81C081C0; mul.rn.bf16x2 $2, a, $5; "
        "and.b32 s, $4, 0x80008000; and.b32 a, h, 0x01C001C0; or.b32 a, a, s; mul.rn.bf16x2 $3, a, $5; }"
    )
    return emit(code, (Int32,) * 4, (word, factor), memory=False)
