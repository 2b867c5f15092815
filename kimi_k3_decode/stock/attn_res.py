"""Attention Residuals (block form): the saved blocks, the running prefix, and their mixture before each sublayer.

At a pre-attention boundary of a block-write layer the prefix becomes a block and restarts at the attention output, so the pre-MLP
boundary of such a layer adds no delta. At that pre-attention boundary the prefix is one source, not two.
"""

from __future__ import annotations

import torch

from kimi_k3_decode.stock.basic import wide


def source_scale(x_TD: torch.Tensor, eps: float) -> torch.Tensor:
    """`rsqrt(mean(x^2) + eps)` [T] of a wide source [T, D]; a saved block's never changes, so it is computed once."""
    return torch.rsqrt(x_TD.square().mean(-1) + eps)


def mix(sources: list[torch.Tensor], scales: list[torch.Tensor], weight_D: torch.Tensor) -> torch.Tensor:
    """Mixture [T, D] of wide sources [T, D] with their scales [T], unrounded.

    `logit_i = <weight, x_i> scale_i` with weight = norm * projection; softmax over the sources, no 1/sqrt(D).
    """
    logits_ST = torch.stack([source_TD @ weight_D for source_TD in sources]) * torch.stack(scales)
    shares_ST1 = logits_ST.softmax(0).unsqueeze(-1)
    mixed_TD = shares_ST1[0] * sources[0]
    for share_T1, source_TD in zip(shares_ST1[1:], sources[1:], strict=True):
        mixed_TD.addcmul_(share_T1, source_TD)
    return mixed_TD


class Residual:
    """Residual state of a pass over `T` rows: the running prefix in the activation dtype; the saved blocks, wide, with their scales."""

    def __init__(self, embedded_TD: torch.Tensor, eps: float) -> None:
        """The prefix starts as the embedding; the first boundary adds no delta."""
        self.prefix_TD = embedded_TD
        self.eps = eps
        self._blocks: list[torch.Tensor] = []
        self._scales: list[torch.Tensor] = []

    @property
    def n_blocks(self) -> int:
        return len(self._blocks)

    def add(self, delta_TD: torch.Tensor) -> None:
        """`p += delta`: added in the wide dtype and rounded once (torch's BF16 addition is exactly that)."""
        self.prefix_TD = self.prefix_TD + delta_TD

    def write_block(self, restart_TD: torch.Tensor) -> None:
        """Save the prefix as the next block and restart it at the attention output."""
        block_TD = self.prefix_TD.to(wide(self.prefix_TD.dtype))
        self._blocks.append(block_TD)
        self._scales.append(source_scale(block_TD, self.eps))
        self.prefix_TD = restart_TD

    def mixture(self, weight_D: torch.Tensor) -> torch.Tensor:
        """Mixture of the saved blocks and the prefix, wide and unrounded; with no block the prefix exactly."""
        prefix_TD = self.prefix_TD.to(wide(self.prefix_TD.dtype))
        if not self._blocks:
            return prefix_TD
        return mix([*self._blocks, prefix_TD], [*self._scales, source_scale(prefix_TD, self.eps)], weight_D)
