"""The LM head and the choice of the largest logits, in plain torch."""

from __future__ import annotations

import torch

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.ops.arithmetic import Arithmetic, Operands, Outputs
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.head.schedule import SPLIT_K


def lm_head(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """This rank's column block of logits_box_TV in FP32: no rounding point."""
    splits = SPLIT_K.at(contract.parameters["rows"]).of(config.hidden_size)
    return {"logits_box_TV": arithmetic.linear(operands["x_TD"], operands["lm_head_VD"], splits)}


def sample(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """logits_TV copied out, and the largest of each row; ties go to the lower id."""
    logits_TV, top_k = arithmetic.wide(operands["logits_box_TV"]).clone(), contract.parameters["top_k"]
    if top_k == 1:
        top_logits_TZ, top_ids_TZ = logits_TV.max(dim=-1, keepdim=True)
        # max() promises no order among equals; the first equal position is the lowest id.
        top_ids_TZ = (logits_TV == top_logits_TZ).int().argmax(-1, keepdim=True)
    else:
        ordered = logits_TV.sort(dim=-1, descending=True, stable=True)
        top_logits_TZ, top_ids_TZ = ordered.values[:, :top_k], ordered.indices[:, :top_k]
    return {"logits_TV": logits_TV, "top_ids_TZ": top_ids_TZ.to(torch.int32), "top_logits_TZ": top_logits_TZ}
