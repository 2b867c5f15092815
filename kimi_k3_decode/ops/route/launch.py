"""Launch parameters of route."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.device.launcher import PDL, ROWS, KernelSpec, health, no_scalars, operand, other
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.route.kernel import SORTED, WARPS, Route


def spec(config: ModelConfig, contract: Contract) -> KernelSpec:
    """Up to 8 rows a block shares a row (where its warps all get enough experts), above a warp has one; one block for a single row."""
    forced, rows = contract.parameters["forced"], contract.parameters["rows"]
    sorts = config.n_experts_per_token == SORTED and config.n_experts >= WARPS * 4 * SORTED
    parts = WARPS if rows <= WARPS and sorts else 1
    list_blocks = 1 if rows == 1 or (parts == 1 and rows <= WARPS) else 8
    kernel = Route(
        config.n_experts,
        config.n_experts_per_token,
        config.moe_latent_size,
        config.routed_scaling_factor,
        forced=forced,
        list_blocks=list_blocks,
        parts=parts,
    )
    suffix = "-forced" if forced else ""
    return KernelSpec(
        op="route",
        variant=f"e{config.n_experts}-z{config.n_experts_per_token}-l{config.moe_latent_size}-b{list_blocks}x{parts}{suffix}",
        make=lambda: kernel,
        params=(
            operand(contract, "logits_TE"),
            operand(contract, "latent_box_TL"),
            other(contract, "logits_TE"),
            other(contract, "latent_box_TL"),
            *(
                operand(contract, name)
                for name in ("bias_E", "live_rows_N", "forced_TZ", "ids_TZ", "weights_TZ", "offsets_E", "pairs_N", "latent_TL")
            ),
            health(),
            ROWS,
            PDL,
        ),
        scalars=no_scalars,
    )
