"""Launch parameters of o_proj; dense_down is the same kernel."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.device.launcher import BLOCKS, PDL, RANK, ROWS, KernelSpec, boxes, operand, tiling_name
from kimi_k3_decode.device.skinny import Tiling
from kimi_k3_decode.device.tilings import choose
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.o_proj.kernel import PublishedProduct


def spec(config: ModelConfig, contract: Contract, tiling: Tiling | None = None) -> KernelSpec:
    """o_proj and dense_down: the first two operands are the activations and the weight. `tiling` replaces the scheduled one (tuning)."""
    x, weight = contract.operands[0].name, contract.operands[1].name
    width, k = contract[weight].shape
    t = tiling or choose(k=k, out_rows=width, rows=contract.parameters["rows"])
    kernel = PublishedProduct(t, width)
    return KernelSpec(
        op=contract.op,
        variant=f"{tiling_name(t)}-p{width}-tp{contract.parameters['tp']}",
        make=lambda: kernel,
        params=(operand(contract, x), operand(contract, weight), boxes(contract, "delta_RTD"), RANK, ROWS, BLOCKS, PDL),
        scalars=lambda given: {"blocks": kernel.core.grid(kernel.n_tiles, given["processors"])},
    )
