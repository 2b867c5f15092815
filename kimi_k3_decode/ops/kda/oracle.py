"""One KDA step in plain torch. Source of the equations: the Kimi Linear paper (Kimi Delta Attention) and the published K3 config."""

from __future__ import annotations

import torch

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.ops.arithmetic import Arithmetic, Operands, Outputs
from kimi_k3_decode.ops.contract import Contract

L2_EPS = 1e-6  # of the q and k norms
O_NORM_EPS = 1e-5  # a constant of the architecture, not rms_norm_eps
KEPT_TAPS = 3
STATE_BYTES_AT_ONCE = 1 << 20  # requests are walked in groups whose states stay in a core's cache


def convolve(window_BUN: torch.Tensor, weight_CW: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution and SiLU: [B, q + 3, C] with taps [C, W] gives [B, q, C]; the last tap is the current token."""
    taps = weight_CW.shape[1]
    rows = window_BUN.shape[1] - taps + 1
    total = window_BUN[:, :rows] * weight_CW[:, 0]
    for tap in range(1, taps):
        total = total + window_BUN[:, tap : tap + rows] * weight_CW[:, tap]
    return torch.nn.functional.silu(total)


def recur(
    state_BHVK: torch.Tensor, q_BHK: torch.Tensor, k_BHK: torch.Tensor, v_BHV: torch.Tensor, decay_BHK: torch.Tensor, beta_BH: torch.Tensor
) -> torch.Tensor:
    """One token, state updated in place: S ← decay ⊙ S, then S ← S + (beta k)(v − kᵀS)ᵀ; returns o = qᵀS [B, H, V].

    `decay` is exp(g) per key channel. The state is held [V, K], the transpose of the mathematics.
    """
    state_BHVK.mul_(decay_BHK.unsqueeze(2))
    seen_BHV = torch.matmul(state_BHVK, k_BHK.unsqueeze(-1)).squeeze(-1)
    delta_BHV = (v_BHV - seen_BHV) * beta_BH.unsqueeze(-1)
    shape = state_BHVK.shape
    state_BHVK.view(-1, *shape[2:]).baddbmm_(delta_BHV.reshape(-1, shape[2], 1), k_BHK.reshape(-1, 1, shape[3]))
    return torch.matmul(state_BHVK, q_BHK.unsqueeze(-1)).squeeze(-1)


def gates(
    proj_TP: torch.Tensor, f_b_CK: torch.Tensor, a_log_H: torch.Tensor, dt_bias_C: torch.Tensor, config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """(decay [T, H, K] = exp(g), beta [T, H]) from the F_A and beta columns; no activation between F_A and F_B."""
    heads, head_dim = a_log_H.shape[0], config.kda_head_dim
    begin = 4 * heads * head_dim
    f_TC = proj_TP[:, begin : begin + head_dim] @ f_b_CK.T + dt_bias_C
    f_THK = f_TC.view(-1, heads, head_dim) * a_log_H.exp().unsqueeze(-1)
    decay_THK = torch.exp(config.gate_lower_bound * torch.sigmoid(f_THK))
    return decay_THK, torch.sigmoid(proj_TP[:, begin + head_dim : begin + head_dim + heads])


def oracle(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """out_TC; updates conv_SW3C and state_SHVK in place (slots > 0 only). Rounding points: the conv state (as stored) and out_TC."""
    wide, q = arithmetic.wide, contract.parameters["q"]
    proj_TP = wide(operands["proj_TP"])
    heads, head_dim = operands["a_log_H"].shape[0], config.kda_head_dim
    width = heads * head_dim
    slots_BQ, conv_SW3C, state_SHVK = operands["slots_BQ"].long(), operands["conv_SW3C"], operands["state_SHVK"]
    requests = slots_BQ.shape[0]
    accepted_B = operands["accepted_B"].long()
    source_B = slots_BQ.clamp(min=0).gather(1, accepted_B.unsqueeze(1) - 1).squeeze(1)
    first_B = slots_BQ[:, 0].clamp(min=0)
    active_B = (first_B > 0) & (source_B > 0)
    # Entry i of a stored window is token i - 2 of the step that wrote it: the three taps before the next anchor start at accepted - 1.
    offset_BU = accepted_B.unsqueeze(1) - 1 + torch.arange(KEPT_TAPS)
    raw_BQC = proj_TP[:, : 3 * width].view(requests, q, 3 * width)
    taps_BUC = wide(conv_SW3C[first_B.unsqueeze(1), offset_BU].flatten(2))
    window_BUC = torch.cat((taps_BUC, raw_BQC), dim=1)
    if bool(active_B.all()):
        conv_SW3C[first_B, : q + KEPT_TAPS - 1] = window_BUC[:, 1:].unflatten(2, (3, width)).to(conv_SW3C.dtype)
    else:
        kept = window_BUC[active_B, 1:].unflatten(2, (3, width))
        conv_SW3C[first_B[active_B], : q + KEPT_TAPS - 1] = kept.to(conv_SW3C.dtype)
    mixed = convolve(window_BUC, wide(operands["conv_weight_CW"])).view(requests, q, 3, heads, head_dim)
    q_BQHK, k_BQHK, v_BQHV = mixed.unbind(2)
    q_BQHK = q_BQHK * (torch.rsqrt(q_BQHK.square().sum(-1, keepdim=True) + L2_EPS) * head_dim**-0.5)
    k_BQHK = k_BQHK * torch.rsqrt(k_BQHK.square().sum(-1, keepdim=True) + L2_EPS)
    decay_THK, beta_TH = gates(proj_TP, wide(operands["f_b_CK"]), wide(operands["a_log_H"]), wide(operands["dt_bias_C"]), config)
    decay_BQHK, beta_BQH = decay_THK.view(requests, q, heads, head_dim), beta_TH.view(requests, q, heads)
    out_BQHV = torch.zeros_like(v_BQHV)
    group = max(1, STATE_BYTES_AT_ONCE // (width * head_dim * 4))
    rows = torch.arange(requests) if bool(active_B.all()) else active_B.nonzero().squeeze(1)
    for part in rows.split(group):
        _recur_group(part, source_B, slots_BQ, state_SHVK, (q_BQHK, k_BQHK, v_BQHV, decay_BQHK, beta_BQH), out_BQHV, arithmetic)
    normed = arithmetic.rms_norm(out_BQHV, operands["o_norm_V"], O_NORM_EPS).view(requests * q, width)
    gate_TC = torch.sigmoid(proj_TP[:, 3 * width : 4 * width])
    out_TC = arithmetic.bf16(normed * gate_TC)
    if not bool(active_B.all()):
        out_TC = torch.where(active_B.repeat_interleave(q).unsqueeze(1), out_TC, out_TC.new_zeros(()))
    return {"out_TC": out_TC, "o_BQHV": out_BQHV}


def _recur_group(
    part: torch.Tensor,
    source_B: torch.Tensor,
    slots_BQ: torch.Tensor,
    state_SHVK: torch.Tensor,
    tokens: tuple[torch.Tensor, ...],
    out_BQHV: torch.Tensor,
    arithmetic: Arithmetic,
) -> None:
    """All tokens of the requests in `part` (indices), writing each token's state to its slot if > 0."""
    q_BQHK, k_BQHK, v_BQHV, decay_BQHK, beta_BQH = (x[part] for x in tokens)
    state_BHVK = arithmetic.wide(state_SHVK[source_B[part]])
    for t in range(slots_BQ.shape[1]):
        out_BQHV[part, t] = recur(state_BHVK, q_BQHK[:, t], k_BQHK[:, t], v_BQHV[:, t], decay_BQHK[:, t], beta_BQH[:, t])
        slot_B = slots_BQ[part, t]
        if bool((slot_B > 0).all()):
            state_SHVK[slot_B] = state_BHVK.to(state_SHVK.dtype)
        else:
            written = slot_B > 0
            state_SHVK[slot_B[written]] = state_BHVK[written].to(state_SHVK.dtype)
