"""Launch parameters of experts_up and experts_down."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.device.launcher import BLOCKS, PDL, RANK, ROWS, KernelSpec, boxes, no_scalars, operand
from kimi_k3_decode.device.skinny import SHARED_LIMIT_BYTES
from kimi_k3_decode.device.tilings import row_tile
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.experts.down_kernel import ExpertsDown
from kimi_k3_decode.ops.experts.kernel import CHUNK, ExpertsUp

HALF_BYTES = 228 * 1024 // 2 - 1024  # shared memory of a block when a multiprocessor holds two
MAX_DEPTH = 8
LONG_TILE = 4  # steps of a warp
FEW_ROWS = 2
MANY_ROWS = 32  # above, the pairs' sums leave room for one block a multiprocessor, which then takes twice the warps


Kernel = TypeVar("Kernel", ExpertsUp, ExpertsDown)


def _deepest(make: Callable[[int], Kernel], budget_bytes: int, longest: int = MAX_DEPTH) -> Kernel:
    """The kernel with the deepest ring, up to `longest`, that fits."""
    for depth in range(longest, 1, -1):
        kernel = make(depth)
        if kernel.shared_bytes <= budget_bytes:
            return kernel
    raise ValueError(f"experts: got {kernel.shared_bytes} bytes of shared memory at depth 2, needs <= {budget_bytes}; run stock")


def up(config: ModelConfig, contract: Contract) -> KernelSpec:
    inner, latent = contract["w1_EIJ"].shape[1], config.moe_latent_size
    chunks, tile = latent // CHUNK, row_tile(contract.parameters["rows"])
    warps = next(n for n in (7, 8, 4, 2, 1) if chunks % n == 0)
    rows = contract.parameters["rows"]
    tokens = 1 if rows == 1 else 2 if rows <= FEW_ROWS else 4
    # A ring as long as a tile has fixed slots, which saves more than a step ahead brings.
    longest = chunks // warps if chunks // warps >= LONG_TILE else MAX_DEPTH

    def make(depth: int) -> ExpertsUp:
        return ExpertsUp(
            config.n_experts,
            config.n_experts_per_token,
            latent,
            inner,
            config.situ_beta,
            config.situ_linear_beta,
            warps=warps,
            tokens=tokens,
            pairs=(1 if rows == 1 else tile) * config.n_experts_per_token,
            depth=depth,
        )

    kernel = _deepest(make, HALF_BYTES, longest)
    names = ("latent_TL", "ids_TZ", "offsets_E", "pairs_N", "w1_EIJ", "w1_scale_EIG", "w3_EIJ", "w3_scale_EIG", "hidden_TZI")
    items = kernel.entries * kernel.row_tiles
    return KernelSpec(
        op="experts_up",
        variant=f"t{tile}-e{config.n_experts}-z{config.n_experts_per_token}-l{latent}-i{inner}-w{warps}-n{tokens}-d{kernel.depth}",
        make=lambda: kernel,
        params=(*(operand(contract, name) for name in names), BLOCKS, PDL),
        scalars=lambda given: {"blocks": min(items, kernel.resident * given["processors"])},
    )


def down(config: ModelConfig, contract: Contract) -> KernelSpec:
    inner, latent = contract.operands[0].shape[2], config.moe_latent_size
    tile = 1 if contract.parameters["rows"] == 1 else row_tile(contract.parameters["rows"])
    warps = 16 if tile > MANY_ROWS else 8

    def make(depth: int) -> ExpertsDown:
        return ExpertsDown(config.n_experts, config.n_experts_per_token, latent, inner, tile, depth, warps)

    # A single row's entries are all on their way at once.
    longest = 1 + -(-config.n_experts_per_token // warps) if tile == 1 else MAX_DEPTH
    kernel = _deepest(make, SHARED_LIMIT_BYTES if tile > MANY_ROWS else HALF_BYTES, longest)
    names = ("hidden_TZI", "ids_TZ", "weights_TZ", "offsets_E", "pairs_N", "w2_ELJ", "w2_scale_ELG")
    return KernelSpec(
        op="experts_down",
        variant=f"t{tile}-e{config.n_experts}-z{config.n_experts_per_token}-l{latent}-i{inner}-d{kernel.depth}-w{warps}-tp{contract.parameters['tp']}",
        make=lambda: kernel,
        params=(*(operand(contract, name) for name in names), boxes(contract, "latent_RTL"), RANK, ROWS, PDL),
        scalars=no_scalars,
    )
