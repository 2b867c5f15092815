"""The fused input projection in plain torch."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.ops.arithmetic import Arithmetic, Operands, Outputs
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.in_proj.schedule import SPLIT_K


def oracle(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """proj_TP, rounded to BF16 once after the last split."""
    splits = SPLIT_K.at(contract.parameters["rows"]).of(config.hidden_size)
    return {"proj_TP": arithmetic.bf16(arithmetic.linear(operands["x_TD"], operands["weight_PD"], splits))}
