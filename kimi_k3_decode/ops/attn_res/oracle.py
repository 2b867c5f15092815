"""Attention Residuals boundary in plain torch. Source of the equations: "Attention Residuals" (Kimi team), and the published config."""

from __future__ import annotations

import torch

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.ops.arithmetic import Arithmetic, Operands, Outputs
from kimi_k3_decode.ops.contract import Contract


def mix(sources_NTD: torch.Tensor, score_D: torch.Tensor, eps: float) -> torch.Tensor:
    """softmax over the sources of ⟨score, x⟩ · rsqrt(mean(x²) + eps), then their weighted sum [T, D]. No 1/sqrt(D)."""
    scale_NT = torch.rsqrt(sources_NTD.square().mean(-1) + eps)
    share_NT = torch.softmax((sources_NTD @ score_D) * scale_NT, dim=0)
    return (share_NT.unsqueeze(-1) * sources_NTD).sum(0)


def oracle(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """Outputs by operand name; shapes as in the contract, carried in the arithmetic's dtype.

    Rounding points: the sum over ranks; prefix + delta (added unrounded, rounded once); the final boundary's mixture; the normed result.
    """
    modes = contract.parameters
    if modes["delta"] == "none":
        prefix_TD = arithmetic.wide(operands["prefix_TD"])
    else:
        delta_TD = arithmetic.sum_ranks(operands["delta_RTD"])
        prefix_TD = delta_TD if modes["restart"] else arithmetic.bf16(arithmetic.wide(operands["prefix_TD"]) + delta_TD)
    if modes["n_blocks"]:
        sources_NTD = torch.cat((arithmetic.wide(operands["blocks_NTD"]), prefix_TD.unsqueeze(0)))
        mixed_TD = mix(sources_NTD, arithmetic.wide(operands["res_score_D"]), config.rms_norm_eps)
    else:
        mixed_TD = prefix_TD
    if modes["final"]:
        mixed_TD = arithmetic.bf16(mixed_TD)
    found = {"x_TD": arithmetic.bf16(arithmetic.rms_norm(mixed_TD, operands["norm_D"], config.rms_norm_eps))}
    if modes["writes_block"]:
        found["block_out_TD"] = prefix_TD
    elif modes["delta"] == "mailbox":
        found["prefix_out_TD"] = prefix_TD
    return found
