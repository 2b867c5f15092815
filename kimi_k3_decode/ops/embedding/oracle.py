"""The embedding gather in plain torch."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.ops.arithmetic import Arithmetic, Operands, Outputs
from kimi_k3_decode.ops.contract import Contract


def oracle(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """prefix_TD, exact."""
    return {"prefix_TD": arithmetic.wide(operands["embed_VD"][operands["tokens_T"].long()])}
