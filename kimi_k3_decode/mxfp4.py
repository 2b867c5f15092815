"""MXFP4: E2M1 values in groups of 32 along the input dimension, one E8M0 scale a group (OCP Microscaling Formats v1.0, 5.3, 6.3).

Storage as in compressed-tensors `mxfp4-pack-quantized`: two codes a byte, low nibble first, `codes` [..., in / 2] uint8 and
`scales` [..., in / 32] uint8. A value is `E2M1[code] * 2**(scale - 127)`; scale 255 is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 32
SCALE_BIAS = 127
SCALE_NAN = 255
# Codes 0..15: sign bit, two exponent bits, one mantissa bit. Code 8 is the negative zero.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E2M1_MAX_EXPONENT = 2
# Midpoints between neighbouring magnitudes. A tie goes to the even mantissa, so midpoints below an odd code belong to the lower code.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_TIE_UP = (False, True, False, True, False, True, False)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes a byte, low nibble first: [..., n] integers 0..15 -> [..., n / 2] uint8."""
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: got {codes.shape[-1]} in the last dimension, needs an even number; pad the input dimension")
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_codes`: [..., n / 2] uint8 -> [..., n] uint8 codes 0..15."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def _nearest_code(magnitude: torch.Tensor) -> torch.Tensor:
    """Index of the nearest E2M1 magnitude, ties to even, values above 6 saturate."""
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for midpoint, tie_up in zip(_MIDPOINTS, _TIE_UP, strict=True):
        above = magnitude >= midpoint if tie_up else magnitude > midpoint
        code += above.to(torch.uint8)
    return code


def pack(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [..., in] floating point values to (codes [..., in / 2], scales [..., in / 32]), both uint8.

    The scale is the OCP rule `floor(log2(max |x|)) - 2`, clamped to the E8M0 range; an all-zero group gets scale 0 and a group that
    holds a NaN or an infinity gets the NaN scale. Values that MXFP4 represents survive exactly: `unpack(pack(unpack(c, s)))` equals
    `unpack(c, s)`. Raises ValueError when the last dimension is no multiple of 32.
    """
    if values.shape[-1] % GROUP:
        raise ValueError(f"MXFP4 input dimension: got {values.shape[-1]}, needs a multiple of {GROUP}; pad the input dimension")
    grouped = values.to(torch.float64).unflatten(-1, (-1, GROUP))
    largest = grouped.abs().amax(-1)
    finite = torch.isfinite(grouped).all(-1)
    _, exponent = torch.frexp(torch.where(finite & (largest > 0), largest, 1.0))  # largest = m * 2**exponent, m in [0.5, 1)
    shared = exponent - 1 - _E2M1_MAX_EXPONENT
    scales = (shared + SCALE_BIAS).clamp(0, SCALE_NAN - 1)
    scales = torch.where(largest > 0, scales, 0)
    scaled = torch.ldexp(grouped, (SCALE_BIAS - scales).unsqueeze(-1))
    codes = _nearest_code(scaled.abs().nan_to_num(0.0)) | (torch.signbit(grouped).to(torch.uint8) << 3)
    scales = torch.where(finite, scales, SCALE_NAN).to(torch.uint8)
    return pack_codes(codes.flatten(-2)), scales


def unpack(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """(codes [..., in / 2], scales [..., in / 32]) -> values [..., in] in `dtype`, exact wherever `dtype` represents the value."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    table = torch.tensor(E2M1_VALUES, dtype=wide, device=codes.device)
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - SCALE_BIAS)
    powers[SCALE_NAN] = torch.nan
    factors = powers.to(device=codes.device, dtype=wide)[scales.long()]
    values = table[unpack_codes(codes).long()].unflatten(-1, (-1, GROUP)) * factors.unsqueeze(-1)
    return values.flatten(-2).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Mxfp4:
    """A stack of expert matrices: `codes_EOI` [E, out, in / 2] uint8 and `scales_EOG` [E, out, in / 32] uint8."""

    codes_EOI: torch.Tensor
    scales_EOG: torch.Tensor

    @classmethod
    def quantize(cls, values_EOI: torch.Tensor) -> Mxfp4:
        """Quantise [E, out, in] floating point values (see `pack`)."""
        codes, scales = pack(values_EOI)
        return cls(codes_EOI=codes, scales_EOG=scales)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, out, in) of the values."""
        experts, rows, half = self.codes_EOI.shape
        return experts, rows, 2 * half

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Values [E, out, in] in `dtype`."""
        return unpack(self.codes_EOI, self.scales_EOG, dtype)

    def rows(self, begin: int, end: int) -> Mxfp4:
        """The output rows [begin, end) of every expert."""
        return Mxfp4(codes_EOI=self.codes_EOI[:, begin:end].contiguous(), scales_EOG=self.scales_EOG[:, begin:end].contiguous())

    def columns(self, begin: int, end: int) -> Mxfp4:
        """The input columns [begin, end); both must be multiples of the group, because a scale cannot be split."""
        if begin % GROUP or end % GROUP:
            raise ValueError(f"MXFP4 columns: got [{begin}, {end}), needs multiples of {GROUP}; choose a smaller tp")
        return Mxfp4(
            codes_EOI=self.codes_EOI[..., begin // 2 : end // 2].contiguous(),
            scales_EOG=self.scales_EOG[..., begin // GROUP : end // GROUP].contiguous(),
        )
