"""Launch parameters of embedding."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.device.launcher import PDL, ROWS, KernelSpec, no_scalars, operand
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.embedding.kernel import Embedding


def spec(config: ModelConfig, contract: Contract) -> KernelSpec:
    kernel = Embedding(config.vocab_size, config.hidden_size)
    return KernelSpec(
        op="embedding",
        variant=f"v{config.vocab_size}-d{config.hidden_size}",
        make=lambda: kernel,
        params=(*(operand(contract, name) for name in ("tokens_T", "embed_VD", "prefix_TD")), ROWS, PDL),
        scalars=no_scalars,
    )
