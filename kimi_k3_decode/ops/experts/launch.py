"""Launch parameters of experts_up and experts_down."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.device.launcher import BLOCKS, PDL, RANK, ROWS, KernelSpec, boxes, no_scalars, operand
from kimi_k3_decode.device.skinny import SHARED_LIMIT_BYTES
from kimi_k3_decode.device.tilings import row_tile
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.experts.kernel import CHUNK, ExpertsDown, ExpertsUp

DEPTH = 3
MANY_ROWS = 32  # above, the pairs' sums leave room for one block a multiprocessor, which then takes twice the warps


def up(config: ModelConfig, contract: Contract) -> KernelSpec:
    inner, latent = contract["w1_EIJ"].shape[1], config.moe_latent_size
    warps = next(n for n in (7, 8, 4, 2, 1) if -(-latent // CHUNK) % n == 0)
    tokens = 2 if contract.parameters["rows"] <= 2 else 4
    kernel = ExpertsUp(
        config.n_experts, config.n_experts_per_token, latent, inner, config.situ_beta, config.situ_linear_beta, warps, tokens
    )
    names = ("latent_TL", "offsets_E", "pairs_N", "w1_EIJ", "w1_scale_EIG", "w3_EIJ", "w3_scale_EIG", "hidden_TZI")
    pairs = contract.parameters["rows"] * config.n_experts_per_token
    items = min(pairs, config.n_experts) * kernel.row_tiles

    def scalars(given):
        resident = max(1, SHARED_LIMIT_BYTES // (kernel.shared_bytes + 1024))
        return {"blocks": min(items, given["processors"] * resident)}

    return KernelSpec(
        op="experts_up",
        variant=f"e{config.n_experts}-z{config.n_experts_per_token}-l{latent}-i{inner}-w{warps}-n{tokens}",
        make=lambda: kernel,
        params=(*(operand(contract, name) for name in names), BLOCKS, PDL),
        scalars=scalars,
    )


def down(config: ModelConfig, contract: Contract) -> KernelSpec:
    inner, latent = contract.operands[0].shape[2], config.moe_latent_size
    tile = row_tile(contract.parameters["rows"])
    warps = 16 if tile > MANY_ROWS else 8
    kernel = ExpertsDown(config.n_experts, config.n_experts_per_token, latent, inner, tile, DEPTH, warps)
    names = ("hidden_TZI", "ids_TZ", "weights_TZ", "offsets_E", "pairs_N", "w2_ELJ", "w2_scale_ELG")
    return KernelSpec(
        op="experts_down",
        variant=f"t{tile}-e{config.n_experts}-z{config.n_experts_per_token}-l{latent}-i{inner}-d{DEPTH}-w{warps}-tp{contract.parameters['tp']}",
        make=lambda: kernel,
        params=(*(operand(contract, name) for name in names), boxes(contract, "latent_RTL"), RANK, ROWS, PDL),
        scalars=no_scalars,
    )
