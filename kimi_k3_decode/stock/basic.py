"""Norms, linear maps and the SiTU activation, with the rounding points of the BF16 model.

Everything is computed in the *wide* dtype (FP32; FP64 for FP64 inputs) and rounded once to the dtype of the activations. A linear map
of BF16 operands accumulates in FP32 and rounds its result, which is what `torch.nn.functional.linear` does.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

__all__ = ["l2_normalize", "linear", "linear_wide", "rms_norm", "situ", "wide"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of accumulators, norms and softmax: FP32, or FP64 in the oracle."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last axis, rounded once to `dtype`."""
    y = x.to(wide(dtype))
    return torch.nn.functional.rms_norm(y, weight.shape, weight.to(y.dtype), eps).to(dtype)


def l2_normalize(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`x * rsqrt(sum(x^2) + eps)` over the last axis, in the dtype of `x`. The eps is the KDA constant, not the model's."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """SiTU: `beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)`, rounded once to the dtype of `gate`."""
    g, u = gate.to(wide(gate.dtype)), up.to(wide(gate.dtype))
    bounded = torch.tanh(g / beta).mul_(beta).mul_(torch.sigmoid(g))
    return bounded.mul_(torch.tanh(u / linear_beta).mul_(linear_beta)).to(gate.dtype)


def linear_wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A linear map whose result is not rounded: router logits, LM head."""
    dtype = wide(x.dtype)
    return linear(x.to(dtype), weight.to(dtype))
