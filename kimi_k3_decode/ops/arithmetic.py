"""In which precision an oracle runs, and where it rounds.

EXACT is the oracle: FP64 and no rounding points. CONTRACT is contract execution: tensors carried in FP32, products of BF16 values exact,
sums in FP32 in the order of the kernel's splits, and `bf16()` rounds where the kernel stores BF16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

Operands = Mapping[str, torch.Tensor]  # by operand name
Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """dtype: what everything is computed in. rounds: whether rounding points and split sums are applied."""

    dtype: torch.dtype
    rounds: bool

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.dtype is self.dtype else x.to(self.dtype)

    def bf16(self, x: torch.Tensor) -> torch.Tensor:
        """A rounding point: nearest BF16, ties to even, still carried in `dtype`."""
        return x.to(torch.bfloat16).to(self.dtype) if self.rounds else x

    def linear(self, x_TK: torch.Tensor, weight_NK: torch.Tensor, splits: int = 1) -> torch.Tensor:
        """x [T, K] times weight [N, K] transposed; with `splits` > 1 the partial sums over K are added in split order."""
        x_TK = self.wide(x_TK)
        weight_NK = self.wide(weight_NK)
        if splits == 1 or not self.rounds:
            return x_TK @ weight_NK.T
        width = -(-x_TK.shape[1] // splits)
        total = x_TK[:, :width] @ weight_NK[:, :width].T
        for begin in range(width, x_TK.shape[1], width):
            total = total + x_TK[:, begin : begin + width] @ weight_NK[:, begin : begin + width].T
        return total

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last axis, not rounded."""
        x = self.wide(x)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.wide(weight)

    def sum_ranks(self, parts_RTD: torch.Tensor) -> torch.Tensor:
        """Sum over ranks in rank order, rounded to BF16 once (kimi-k3 rounding points)."""
        total = self.wide(parts_RTD[0]).clone()
        for part_TD in parts_RTD[1:]:
            total += part_TD
        return self.bf16(total)


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """SiTU, the activation of every MLP here: beta tanh(g / beta) sigmoid(g) · linear_beta tanh(u / linear_beta)."""
    return (torch.tanh(gate / beta) * torch.sigmoid(gate)).mul_(beta * linear_beta) * torch.tanh(up / linear_beta)


EXACT = Arithmetic(dtype=torch.float64, rounds=False)
CONTRACT = Arithmetic(dtype=torch.float32, rounds=True)
