"""Launch parameters of shared_up (and dense_up) and shared_down."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.device.launcher import BLOCKS, PDL, ROWS, KernelSpec, operand, tiling_name
from kimi_k3_decode.device.skinny import Tiling
from kimi_k3_decode.device.tilings import choose
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.shared.kernel import Down, GatedUp


def up(config: ModelConfig, contract: Contract, tiling: Tiling | None = None) -> KernelSpec:
    """shared_up and dense_up. `tiling` replaces the scheduled one (tuning)."""
    both, k = contract["gate_up_ID"].shape
    inner = both // 2
    t = tiling or choose(k=k, out_rows=inner, rows=contract.parameters["rows"], m_tiles=2)
    kernel = GatedUp(t, inner, config.situ_beta, config.situ_linear_beta)
    return KernelSpec(
        op=contract.op,
        variant=f"{tiling_name(t)}-i{inner}",
        make=lambda: kernel,
        params=(*(operand(contract, name) for name in ("x_TD", "gate_up_ID", "hidden_TI")), ROWS, BLOCKS, PDL),
        scalars=lambda given: {"blocks": kernel.core.grid(kernel.n_tiles, given["processors"])},
    )


def down(config: ModelConfig, contract: Contract, tiling: Tiling | None = None) -> KernelSpec:
    """shared_down. `tiling` replaces the scheduled one (tuning)."""
    width, k = contract["down_DI"].shape
    t = tiling or choose(k=k, out_rows=width, rows=contract.parameters["rows"])
    kernel = Down(t, width)
    return KernelSpec(
        op="shared_down",
        variant=f"{tiling_name(t)}-p{width}",
        make=lambda: kernel,
        params=(*(operand(contract, name) for name in ("hidden_TI", "down_DI", "shared_TD")), ROWS, BLOCKS, PDL),
        scalars=lambda given: {"blocks": kernel.core.grid(kernel.n_tiles, given["processors"])},
    )
