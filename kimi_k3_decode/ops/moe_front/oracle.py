"""Router logits and the latent's down-projection in plain torch."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.ops.arithmetic import Arithmetic, Operands, Outputs
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.moe_front.schedule import SPLIT_K


def oracle(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """This rank's column blocks of logits_TE (FP32) and latent_box_TL (rounding point)."""
    splits = SPLIT_K.at(contract.parameters["rows"]).of(config.hidden_size)
    return {
        "logits_TE": arithmetic.linear(operands["x_TD"], operands["router_ED"], splits),
        "latent_box_TL": arithmetic.bf16(arithmetic.linear(operands["x_TD"], operands["latent_down_LD"], splits)),
    }
