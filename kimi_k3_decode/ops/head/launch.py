"""Launch parameters of lm_head and sample."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.device.launcher import BLOCKS, PDL, RANK, ROWS, KernelSpec, boxes, health, no_scalars, operand, other, tiling_name
from kimi_k3_decode.device.skinny import Tiling
from kimi_k3_decode.device.tilings import choose
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.head.kernel import LmHead, Sample


def lm_head(config: ModelConfig, contract: Contract, tiling: Tiling | None = None) -> KernelSpec:
    """`tiling` replaces the scheduled one (tuning)."""
    width, k = contract["lm_head_VD"].shape
    t = tiling or choose(k=k, out_rows=width, rows=contract.parameters["rows"])
    kernel = LmHead(t, width, config.vocab_size)
    return KernelSpec(
        op="lm_head",
        variant=f"{tiling_name(t)}-v{width}-tp{contract.parameters['tp']}",
        make=lambda: kernel,
        params=(operand(contract, "x_TD"), operand(contract, "lm_head_VD"), boxes(contract, "logits_box_TV"), RANK, ROWS, BLOCKS, PDL),
        scalars=lambda given: {"blocks": kernel.core.grid(kernel.n_tiles, given["processors"])},
    )


def sample(config: ModelConfig, contract: Contract) -> KernelSpec:
    top_k = contract.parameters["top_k"]
    kernel = Sample(config.vocab_size, top_k)
    return KernelSpec(
        op="sample",
        variant=f"v{config.vocab_size}-z{top_k}",
        make=lambda: kernel,
        params=(
            operand(contract, "logits_box_TV"),
            other(contract, "logits_box_TV"),
            *(operand(contract, name) for name in ("logits_TV", "top_ids_TZ", "top_logits_TZ")),
            health(),
            ROWS,
            PDL,
        ),
        scalars=no_scalars,
    )
