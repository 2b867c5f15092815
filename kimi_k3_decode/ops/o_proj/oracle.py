"""The row-parallel output projection in plain torch."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.ops.arithmetic import Arithmetic, Operands, Outputs
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.o_proj.schedule import SPLIT_K


def oracle(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """This rank's slot [T, D] of delta_RTD, in FP32: no rounding point."""
    splits = SPLIT_K.at(contract.parameters["rows"]).of(operands["weight_DC"].shape[1])
    return {"delta_RTD": arithmetic.linear(operands["a_TC"], operands["weight_DC"], splits)}
