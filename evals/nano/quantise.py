"""Straight-through MXFP4: training sees exactly the values the checkpoint will hold.

Format (OCP Microscaling 1.0): E2M1 values, one E8M0 scale per 32 values along the input dimension. The scale is the smallest power of two
that does not clip the group's largest magnitude, so quantising twice changes nothing and `kimi_k3_decode.mxfp4` packs the result exactly.
"""

from __future__ import annotations

import torch

GROUP = 32
SMALLEST_EXPONENT, LARGEST_EXPONENT = -100, 100


def scale_exponents(x: torch.Tensor) -> torch.Tensor:
    """[..., in] -> int32 [..., in / 32]: e with 6 * 2^e >= the group's largest magnitude, as small as possible."""
    largest = x.detach().float().unflatten(-1, (-1, GROUP)).abs().amax(-1)
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [0.5, 1)
    fits = torch.where(mantissa > 0.75, exponent - 2, exponent - 3)  # 6 = 0.75 * 2^3
    return torch.where(largest > 0, fits, torch.full_like(fits, -100)).clamp(SMALLEST_EXPONENT, LARGEST_EXPONENT).to(torch.int32)


def _round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 magnitude of |x| <= 6, ties to the even code: steps of 1/2 below 2, of 1 below 4, of 2 above."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.round(magnitude / step) * step * torch.sign(x)


def quantise(x: torch.Tensor) -> torch.Tensor:
    """The nearest MXFP4 values of `x` [..., in] in `x`'s dtype, without a gradient."""
    grouped = x.detach().float().unflatten(-1, (-1, GROUP))
    scale = torch.exp2(scale_exponents(x).float()).unsqueeze(-1)
    return (_round_e2m1(grouped / scale) * scale).flatten(-2).to(x.dtype)


def straight_through(x: torch.Tensor) -> torch.Tensor:
    """Forward `quantise(x)`, backward the identity."""
    return x + (quantise(x) - x).detach()
