"""The dense MLP runs the gated product of the shared experts (dense_up) and the published product of o_proj (dense_down)."""

from __future__ import annotations

from kimi_k3_decode.ops.o_proj.kernel import PublishedProduct as DenseDown
from kimi_k3_decode.ops.shared.kernel import GatedUp as DenseUp

__all__ = ["DenseDown", "DenseUp"]
