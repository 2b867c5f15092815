"""The dense MLP of the first layer computes what the shared experts compute, with its own weights."""

from __future__ import annotations

from kimi_k3_decode.ops.shared.oracle import down, up

__all__ = ["down", "up"]
