"""Launch parameters of moe_front."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.device.launcher import BLOCKS, PDL, RANK, ROWS, KernelSpec, boxes, operand, tiling_name
from kimi_k3_decode.device.skinny import Tiling
from kimi_k3_decode.device.tilings import choose
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.moe_front.kernel import MoeFront


def spec(config: ModelConfig, contract: Contract, tiling: Tiling | None = None) -> KernelSpec:
    """`tiling` replaces the scheduled one (tuning)."""
    router_rows, k = contract["router_ED"].shape
    latent_rows = contract["latent_down_LD"].shape[0]
    t = tiling or choose(k=k, out_rows=router_rows + latent_rows, rows=contract.parameters["rows"])
    kernel = MoeFront(t, router_rows, latent_rows, config.n_experts, config.moe_latent_size)
    return KernelSpec(
        op="moe_front",
        variant=f"{tiling_name(t)}-e{router_rows}-l{latent_rows}-tp{contract.parameters['tp']}",
        make=lambda: kernel,
        params=(
            *(operand(contract, name) for name in ("x_TD", "router_ED", "latent_down_LD")),
            boxes(contract, "logits_TE"),
            boxes(contract, "latent_box_TL"),
            RANK,
            ROWS,
            BLOCKS,
            PDL,
        ),
        scalars=lambda given: {"blocks": kernel.core.grid(kernel.n_tiles, given["processors"])},
    )
