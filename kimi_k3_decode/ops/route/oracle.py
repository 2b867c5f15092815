"""Routing in plain torch: choose by sigmoid + bias, weigh by the unbiased sigmoid, renormalise."""

from __future__ import annotations

import torch

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.ops.arithmetic import Arithmetic, Operands, Outputs
from kimi_k3_decode.ops.contract import Contract

NO_EXPERT = -1


def oracle(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """ids_TZ, weights_TZ (rounding point), offsets_E, pairs_N and the latent copied out of its mailbox."""
    top_k, live = config.n_experts_per_token, int(operands["live_rows_N"])
    scores_TE = torch.sigmoid(arithmetic.wide(operands["logits_TE"]))
    if contract.parameters["forced"]:
        ids_TZ = operands["forced_TZ"].long()
    else:
        # A stable falling sort keeps equal scores in rising id order, which is the tie rule.
        biased_TE = scores_TE + arithmetic.wide(operands["bias_E"])
        ids_TZ = biased_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    live_TZ = scores_TE.gather(1, ids_TZ.clamp(min=0))
    weights_TZ = arithmetic.bf16(live_TZ / live_TZ.sum(-1, keepdim=True) * config.routed_scaling_factor)
    if live < ids_TZ.shape[0]:
        ids_TZ = ids_TZ.clone()
        ids_TZ[live:], weights_TZ[live:] = NO_EXPERT, 0
    offsets_E, pairs_N = expert_lists(ids_TZ, live, config.n_experts)
    return {
        "ids_TZ": ids_TZ.to(torch.int32),
        "weights_TZ": weights_TZ,
        "offsets_E": offsets_E,
        "pairs_N": pairs_N,
        "latent_TL": arithmetic.wide(operands["latent_box_TL"]).clone(),
    }


def expert_lists(ids_TZ: torch.Tensor, live: int, n_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(offsets_E [E + 1], pairs_N [T · top_k]) int32; entries behind the last group are -1."""
    flat = ids_TZ[:live].flatten()
    offsets_E = torch.zeros(n_experts + 1, dtype=torch.int32)
    offsets_E[1:] = torch.bincount(flat, minlength=n_experts).cumsum(0)
    pairs_N = torch.full((ids_TZ.numel(),), NO_EXPERT, dtype=torch.int32)
    pairs_N[: flat.numel()] = flat.argsort(stable=True)
    return offsets_E, pairs_N
