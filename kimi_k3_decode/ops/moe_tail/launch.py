"""Launch parameters of latent_reduce and moe_tail."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.device.launcher import BLOCKS, PDL, RANK, ROWS, KernelSpec, boxes, health, no_scalars, operand, other, tiling_name
from kimi_k3_decode.device.skinny import Tiling
from kimi_k3_decode.device.tilings import choose
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.moe_tail.kernel import LatentReduce, MoeTail


def latent_reduce(config: ModelConfig, contract: Contract) -> KernelSpec:
    ranks = contract.parameters["tp"]
    kernel = LatentReduce(ranks, config.moe_latent_size, config.rms_norm_eps)
    return KernelSpec(
        op="latent_reduce",
        variant=f"l{config.moe_latent_size}-tp{ranks}",
        make=lambda: kernel,
        params=(
            operand(contract, "latent_RTL"),
            other(contract, "latent_RTL"),
            operand(contract, "norm_L"),
            operand(contract, "latent_normed_TL"),
            health(),
            ROWS,
            PDL,
        ),
        scalars=no_scalars,
    )


def spec(config: ModelConfig, contract: Contract, tiling: Tiling | None = None) -> KernelSpec:
    """`tiling` replaces the scheduled one (tuning)."""
    width, k = contract["latent_up_DL"].shape
    t = tiling or choose(k=k, out_rows=width, rows=contract.parameters["rows"])
    kernel = MoeTail(t, width, config.hidden_size)
    return KernelSpec(
        op="moe_tail",
        variant=f"{tiling_name(t)}-p{width}-tp{contract.parameters['tp']}",
        make=lambda: kernel,
        params=(
            *(operand(contract, name) for name in ("latent_normed_TL", "shared_TD", "latent_up_DL")),
            boxes(contract, "delta_RTD"),
            RANK,
            ROWS,
            BLOCKS,
            PDL,
        ),
        scalars=lambda given: {"blocks": kernel.grid(given["processors"])},
    )
