"""A SiTU MLP in two launches, in plain torch: the shared experts and, with other weights, the dense first layer."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.ops.arithmetic import Arithmetic, Operands, Outputs, situ
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.shared.schedule import SPLIT_K


def up(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """hidden_TI = SiTU(gate, up): both sums stay FP32 until the one rounding point."""
    splits = SPLIT_K.at(contract.parameters["rows"]).of(config.hidden_size)
    both_TI = arithmetic.linear(operands["x_TD"], operands["gate_up_ID"], splits)
    gate_TI, up_TI = both_TI.chunk(2, dim=-1)
    return {"hidden_TI": arithmetic.bf16(situ(gate_TI, up_TI, config.situ_beta, config.situ_linear_beta))}


def down(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """This rank's partial [T, D] in FP32: no rounding point. Named shared_TD, or delta_RTD where it is published at once (dense layer)."""
    weight_DI = operands["down_DI"]
    splits = SPLIT_K.at(contract.parameters["rows"]).of(weight_DI.shape[1])
    name = "shared_TD" if "shared_TD" in contract else "delta_RTD"
    return {name: arithmetic.linear(operands["hidden_TI"], weight_DI, splits)}
