"""Dense SiTU MLP and the latent mixture of experts: router, latent projections, MXFP4 experts, shared experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.stock.basic import linear, linear_wide, rms_norm, situ, wide
from kimi_k3_decode.weights import DenseWeights, MoeWeights

# (row, expert) pairs up to which each pair's matrices are gathered; above, and up to the second bound, rows are grouped into one padded
# batch over experts; above that, experts are taken one at a time.
GATHER_PAIRS = 16
PADDED_PAIRS = 1024


@dataclass(frozen=True, kw_only=True)
class DenseOperands:
    """`gate` and `up` fused into one matrix [2F, D]."""

    gate_up: torch.Tensor
    down_DF: torch.Tensor

    @classmethod
    def prepare(cls, weights: DenseWeights, dtype: torch.dtype) -> DenseOperands:
        return cls(gate_up=torch.cat((weights.gate_FD, weights.up_FD)).to(dtype), down_DF=weights.down_DF.to(dtype))


@dataclass(frozen=True, kw_only=True)
class MoeOperands:
    """MXFP4 experts dequantised once: `w13` [E, 2F, L] in the activation dtype and `w2` [E, L, F] wide (its sum is not rounded)."""

    router_ED: torch.Tensor  # wide
    router_bias_E: torch.Tensor  # wide
    latent_down_LD: torch.Tensor
    latent_norm_L: torch.Tensor
    latent_up_DL: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    shared: DenseOperands
    top_k: int
    scaling: float

    @classmethod
    def prepare(cls, weights: MoeWeights, config: ModelConfig, dtype: torch.dtype) -> MoeOperands:
        high = wide(dtype)
        return cls(
            router_ED=weights.router_ED.to(high),
            router_bias_E=weights.router_bias_E.to(high),
            latent_down_LD=weights.latent_down_LD.to(dtype),
            latent_norm_L=weights.latent_norm_L.to(high),
            latent_up_DL=weights.latent_up_DL.to(dtype),
            w13=torch.cat((weights.w1.dequantize(dtype), weights.w3.dequantize(dtype)), dim=1),
            w2=weights.w2.dequantize(high),
            shared=DenseOperands.prepare(weights.shared, dtype),
            top_k=config.n_experts_per_token,
            scaling=config.routed_scaling_factor,
        )


def dense_mlp(ops: DenseOperands, config: ModelConfig, x: torch.Tensor) -> torch.Tensor:
    """`down(SiTU(gate x, up x))`, each matrix product rounded to the dtype of x."""
    gate, up = linear(x, ops.gate_up).chunk(2, dim=-1)
    return linear(situ(gate, up, config.situ_beta, config.situ_linear_beta), ops.down_DF)


def choose_experts(scores_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int) -> torch.Tensor:
    """Ids [T, top_k] of the largest `score + bias`, in falling order; a tie goes to the lower id."""
    return torch.sort(scores_TE + bias_E, dim=-1, descending=True, stable=True).indices[:, :top_k]


def route(ops: MoeOperands, x_TD: torch.Tensor, forced_TK: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [T, k] int64, weights [T, k] wide). Weights are the unbiased sigmoid scores of the chosen over their sum, times the scaling.

    `forced_TK` replaces the choice, not the scores. Logits are computed wide from BF16 values and are never rounded.
    """
    scores_TE = torch.sigmoid(linear_wide(x_TD, ops.router_ED))
    ids_TK = choose_experts(scores_TE, ops.router_bias_E, ops.top_k) if forced_TK is None else forced_TK.long()
    chosen_TK = scores_TE.gather(1, ids_TK)
    return ids_TK, chosen_TK / chosen_TK.sum(-1, keepdim=True) * ops.scaling


def _activate(config: ModelConfig, gate_up: torch.Tensor, high: torch.dtype) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return situ(gate, up, config.situ_beta, config.situ_linear_beta).to(high)


def _gathered(ops: MoeOperands, config: ModelConfig, z_TL: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    high = wide(z_TL.dtype)
    pairs = ids_TK.flatten()
    z_PL = z_TL.repeat_interleave(ids_TK.shape[1], dim=0)
    hidden = _activate(config, torch.bmm(ops.w13[pairs], z_PL.unsqueeze(-1)).squeeze(-1), high)
    return torch.bmm(ops.w2[pairs], hidden.unsqueeze(-1)).squeeze(-1)


def _grouped(ops: MoeOperands, config: ModelConfig, z_TL: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    """Pairs sorted by expert: one padded batch of all experts, or one expert at a time when there are many rows."""
    high, n_experts = wide(z_TL.dtype), ops.w13.shape[0]
    pairs = ids_TK.flatten()
    order = torch.argsort(pairs, stable=True)
    counts = torch.bincount(pairs, minlength=n_experts)
    tokens = order // ids_TK.shape[1]
    out_PL = torch.empty(pairs.numel(), z_TL.shape[1], dtype=high, device=z_TL.device)
    if pairs.numel() <= PADDED_PAIRS:
        sorted_ids = pairs[order]
        place = torch.arange(pairs.numel(), device=pairs.device) - (counts.cumsum(0) - counts)[sorted_ids]
        rows_EPL = z_TL.new_zeros(n_experts, int(counts.max()), z_TL.shape[1])
        rows_EPL[sorted_ids, place] = z_TL[tokens]
        hidden = _activate(config, torch.bmm(rows_EPL, ops.w13.transpose(1, 2)), high)
        out_PL[order] = torch.bmm(hidden, ops.w2.transpose(1, 2))[sorted_ids, place]
        return out_PL
    begin = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            rows = slice(begin, begin + count)
            hidden = _activate(config, linear(z_TL[tokens[rows]], ops.w13[expert]), high)
            out_PL[order[rows]] = linear(hidden, ops.w2[expert])
            begin += count
    return out_PL


def experts(ops: MoeOperands, config: ModelConfig, z_TL: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Weighted sum [T, L] wide of the chosen experts, added in rank order of the scores whatever the grouping."""
    run = _gathered if ids_TK.numel() <= GATHER_PAIRS else _grouped
    out_TKL = run(ops, config, z_TL, ids_TK).unflatten(0, ids_TK.shape)
    return torch.bmm(weights_TK.unsqueeze(1), out_TKL).squeeze(1)


def latent_moe(
    ops: MoeOperands, config: ModelConfig, x_TD: torch.Tensor, forced_TK: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [T, D], expert ids [T, k]). The latent sum is rounded, normed, projected up; the shared experts read the full hidden."""
    ids_TK, weights_TK = route(ops, x_TD, forced_TK)
    z_TL = linear(x_TD, ops.latent_down_LD)
    routed_TL = experts(ops, config, z_TL, ids_TK, weights_TK).to(x_TD.dtype)
    normed_TL = rms_norm(routed_TL, ops.latent_norm_L, config.rms_norm_eps, x_TD.dtype)
    return linear(normed_TL, ops.latent_up_DL) + dense_mlp(ops.shared, config, x_TD), ids_TK
