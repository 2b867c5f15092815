"""Launch parameters of the dense MLP: the kernels are those of the shared experts and of o_proj."""

from __future__ import annotations

from kimi_k3_decode.ops.o_proj.launch import spec as down
from kimi_k3_decode.ops.shared.launch import up

__all__ = ["down", "up"]
