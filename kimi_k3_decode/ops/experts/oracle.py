"""The routed experts in plain torch, grouped by expert as the kernel groups them."""

from __future__ import annotations

import itertools

import torch

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.mxfp4 import unpack
from kimi_k3_decode.ops.arithmetic import Arithmetic, Operands, Outputs, situ
from kimi_k3_decode.ops.contract import Contract

# Up to this many pairs, gathered weights and one batched product cost less than a loop over experts.
GATHER_PAIRS = 16


def matrices(operands: Operands, name: str, arithmetic: Arithmetic) -> torch.Tensor:
    """Expert matrices [E, out, in] in the arithmetic's dtype: unpacked beforehand under `name`, or from codes and scales."""
    if name in operands:
        return operands[name]
    codes = next(value for key, value in operands.items() if key.startswith(f"{name}_E"))
    scales = next(value for key, value in operands.items() if key.startswith(f"{name}_scale_E"))
    return unpack(codes, scales, arithmetic.dtype)


def grouped(x_NK: torch.Tensor, weights_EOK: torch.Tensor, offsets: list[int], experts_N: torch.Tensor) -> torch.Tensor:
    """Row n of x (sorted by expert) times its expert's matrix transposed: [N, O]. `offsets` holds each expert's first row."""
    if x_NK.shape[0] <= GATHER_PAIRS:
        return torch.bmm(weights_EOK[experts_N], x_NK.unsqueeze(-1)).squeeze(-1)
    out_NO = x_NK.new_empty(x_NK.shape[0], weights_EOK.shape[1])
    for expert, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if end > begin:
            torch.mm(x_NK[begin:end], weights_EOK[expert].T, out=out_NO[begin:end])
    return out_NO


def _groups(operands: Operands) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """(offsets, pairs in expert order, expert of each pair)."""
    offsets_E = operands["offsets_E"]
    offsets = offsets_E.tolist()
    pairs_N = operands["pairs_N"][: offsets[-1]].long()
    experts_N = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets_E.diff().long())
    return offsets, pairs_N, experts_N


def up(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """hidden_TZI = SiTU(w1 z, w3 z), rounded to BF16; zero for padding rows."""
    offsets, pairs_N, experts_N = _groups(operands)
    top_k = config.n_experts_per_token
    latent_TL = arithmetic.wide(operands["latent_TL"])
    z_NL = latent_TL[pairs_N // top_k]
    gate_NI = grouped(z_NL, matrices(operands, "w1", arithmetic), offsets, experts_N)
    up_NI = grouped(z_NL, matrices(operands, "w3", arithmetic), offsets, experts_N)
    hidden = latent_TL.new_zeros(latent_TL.shape[0] * top_k, gate_NI.shape[1])
    hidden[pairs_N] = arithmetic.bf16(situ(gate_NI, up_NI, config.situ_beta, config.situ_linear_beta))
    return {"hidden_TZI": hidden.unflatten(0, (-1, top_k))}


def down(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """This rank's slot of latent_RTL: w2 times the routing weight, added over the chosen experts in rank order; no rounding point."""
    offsets, pairs_N, experts_N = _groups(operands)
    top_k = config.n_experts_per_token
    hidden_NI = arithmetic.wide(operands["hidden_TZI"]).flatten(0, 1)[pairs_N]
    out_NL = grouped(hidden_NI, matrices(operands, "w2", arithmetic), offsets, experts_N)
    weights_N = arithmetic.wide(operands["weights_TZ"]).flatten()[pairs_N]
    placed = out_NL.new_zeros(operands["pairs_N"].shape[0], out_NL.shape[1])
    placed[pairs_N] = out_NL * weights_N.unsqueeze(-1)
    placed_TZL = placed.unflatten(0, (-1, top_k))
    total_TL = placed_TZL[:, 0]
    for choice in range(1, top_k):
        total_TL = total_TL + placed_TZL[:, choice]
    return {"latent_RTL": total_TL}
