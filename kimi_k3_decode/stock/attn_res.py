"""Attention Residuals (block form): the saved blocks, the running prefix, and their mixture before each sublayer.

At a pre-attention boundary of a block-write layer the prefix becomes a block and restarts at the attention output, so the pre-MLP
boundary of such a layer adds no delta. At that pre-attention boundary the prefix is one source, not two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kimi_k3_decode.stock.basic import wide


def mix(sources: list[torch.Tensor], norm_D: torch.Tensor, proj_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Mixture of sources [T, D] in the wide dtype, unrounded.

    `logit_i = <norm * proj, x_i> rsqrt(mean(x_i^2) + eps)`, softmax over the sources, no 1/sqrt(D). One source is returned as it is.
    """
    dtype = wide(sources[0].dtype)
    if len(sources) == 1:
        return sources[0].to(dtype)
    stacked_STD = torch.stack(sources).to(dtype)
    scale_ST = torch.rsqrt(stacked_STD.square().mean(-1) + eps)
    logits_ST = (stacked_STD @ (norm_D.to(dtype) * proj_D.to(dtype))) * scale_ST
    return (logits_ST.softmax(0).unsqueeze(-1) * stacked_STD).sum(0)


@dataclass
class Residual:
    """The residual state of a pass over `T` rows: saved blocks and the running prefix, both in the activation dtype."""

    prefix_TD: torch.Tensor
    blocks: list[torch.Tensor] = field(default_factory=list)

    def add(self, delta_TD: torch.Tensor) -> None:
        """`p += delta`: added in the wide dtype and rounded once (torch's BF16 addition is exactly that)."""
        self.prefix_TD = self.prefix_TD + delta_TD

    def sources(self) -> list[torch.Tensor]:
        return [*self.blocks, self.prefix_TD]

    def write_block(self) -> None:
        """Save the prefix as the next block. The caller restarts the prefix with the attention output (`restart`)."""
        self.blocks.append(self.prefix_TD)

    def restart(self, attention_TD: torch.Tensor) -> None:
        self.prefix_TD = attention_TD
