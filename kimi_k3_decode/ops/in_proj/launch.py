"""Launch parameters of in_proj."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.device.launcher import BLOCKS, PDL, ROWS, KernelSpec, operand, tiling_name
from kimi_k3_decode.device.skinny import Tiling
from kimi_k3_decode.device.tilings import choose
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.in_proj.kernel import InProj


def spec(config: ModelConfig, contract: Contract, tiling: Tiling | None = None) -> KernelSpec:
    """`tiling` replaces the scheduled one (tuning)."""
    width, k = contract["weight_PD"].shape
    t = tiling or choose(k=k, out_rows=width, rows=contract.parameters["rows"])
    kernel = InProj(t, width)
    return KernelSpec(
        op="in_proj",
        variant=f"{tiling_name(t)}-p{width}",
        make=lambda: kernel,
        params=(*(operand(contract, name) for name in ("x_TD", "weight_PD", "proj_TP")), ROWS, BLOCKS, PDL),
        scalars=lambda given: {"blocks": kernel.core.grid(kernel.n_tiles, given["processors"])},
    )
