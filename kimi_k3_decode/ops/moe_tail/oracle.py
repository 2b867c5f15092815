"""The end of the MoE in plain torch: reduce and normalise the latent, project it up, add the shared experts."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.ops.arithmetic import Arithmetic, Operands, Outputs
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.moe_tail.schedule import SPLIT_K


def latent_reduce(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """latent_normed_TL. Rounding points: the sum over ranks, and the normed latent."""
    latent_TL = arithmetic.sum_ranks(operands["latent_RTL"])
    return {"latent_normed_TL": arithmetic.bf16(arithmetic.rms_norm(latent_TL, operands["norm_L"], config.rms_norm_eps))}


def oracle(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """This rank's slot of delta_RTD: its shared partial, plus the up-projection in this rank's columns. FP32, no rounding point."""
    weight_DL = operands["latent_up_DL"]
    splits = SPLIT_K.at(contract.parameters["rows"]).of(weight_DL.shape[1])
    rows_TD = arithmetic.linear(operands["latent_normed_TL"], weight_DL, splits)
    begin = contract.parameters["rank"] * weight_DL.shape[0]
    delta_TD = arithmetic.wide(operands["shared_TD"]).clone()
    delta_TD[:, begin : begin + weight_DL.shape[0]] += rows_TD
    return {"delta_RTD": delta_TD}
