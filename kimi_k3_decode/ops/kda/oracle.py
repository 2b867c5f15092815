"""One KDA step in plain torch. Source of the equations: the Kimi Linear paper (Kimi Delta Attention) and the published K3 config."""

from __future__ import annotations

from dataclasses import dataclass

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
    flat_NVK = state_BHVK.view(-1, *state_BHVK.shape[2:])
    q_NK, k_NK, v_NV, decay_NK = (x.flatten(0, 1) for x in (q_BHK, k_BHK, v_BHV, decay_BHK))
    # (decay ⊙ S) applied to k and to q is S applied to decay ⊙ k and decay ⊙ q, so that one pass over the old state gives both.
    both_NVU = torch.bmm(flat_NVK, torch.stack((k_NK, q_NK), dim=-1).mul_(decay_NK.unsqueeze(-1)))
    delta_NV = (v_NV - both_NVU[..., 0]) * beta_BH.reshape(-1, 1)
    flat_NVK.mul_(decay_NK.unsqueeze(1)).addcmul_(delta_NV.unsqueeze(-1), k_NK.unsqueeze(1))
    return (both_NVU[..., 1] + (q_NK * k_NK).sum(-1, keepdim=True) * delta_NV).view(v_BHV.shape)


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


@dataclass(frozen=True)
class _Requests:
    """Where each request reads and writes: slots [B, q], the slot its state comes from, and which requests are real."""

    slots_BQ: torch.Tensor
    source_B: torch.Tensor
    first_B: torch.Tensor
    accepted_B: torch.Tensor
    active: torch.Tensor | None  # indices of the real requests; None when all are

    @classmethod
    def of(cls, operands: Operands) -> _Requests:
        slots_BQ, accepted_B = operands["slots_BQ"].long(), operands["accepted_B"].long()
        source_B = slots_BQ.clamp(min=0).gather(1, accepted_B.unsqueeze(1) - 1).squeeze(1)
        first_B = slots_BQ[:, 0].clamp(min=0)
        real_B = (first_B > 0) & (source_B > 0)
        return cls(slots_BQ, source_B, first_B, accepted_B, None if bool(real_B.all()) else real_B.nonzero().squeeze(1))

    @property
    def rows(self) -> torch.Tensor:
        return torch.arange(self.slots_BQ.shape[0]) if self.active is None else self.active


def window(raw_BQC: torch.Tensor, requests: _Requests, conv_SW3C: torch.Tensor) -> torch.Tensor:
    """[3 taps before the anchor | q raw rows] of each request; stores all but the first entry back in its first slot.

    Entry i of a stored window is token i - 2 of the step that wrote it: the taps before the next anchor start at accepted - 1.
    """
    offset_BU = requests.accepted_B.unsqueeze(1) - 1 + torch.arange(KEPT_TAPS)
    taps_BUC = conv_SW3C[requests.first_B.unsqueeze(1), offset_BU].flatten(2).to(raw_BQC.dtype)
    found_BUC = torch.cat((taps_BUC, raw_BQC), dim=1)
    kept_BUC, slot_B = found_BUC[:, 1:], requests.first_B
    if requests.active is not None:
        kept_BUC, slot_B = kept_BUC[requests.active], slot_B[requests.active]
    conv_SW3C[slot_B, : kept_BUC.shape[1]] = kept_BUC.unflatten(2, (3, -1)).to(conv_SW3C.dtype)
    return found_BUC


def unit(x: torch.Tensor) -> torch.Tensor:
    """L2 norm over the last axis: x · rsqrt(Σx² + 1e-6)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def oracle(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """out_TC, and o_BQHV before its norm; updates conv_SW3C and state_SHVK in place (slots > 0 only).

    Rounding points: the conv state (as stored) and out_TC. Rows of padding requests are zero.
    """
    wide, q = arithmetic.wide, contract.parameters["q"]
    proj_TP = wide(operands["proj_TP"])
    heads, head_dim = operands["a_log_H"].shape[0], config.kda_head_dim
    width = heads * head_dim
    requests = _Requests.of(operands)
    window_BUC = window(proj_TP[:, : 3 * width].unflatten(0, (-1, q)), requests, operands["conv_SW3C"])
    mixed = convolve(window_BUC, wide(operands["conv_weight_CW"])).unflatten(2, (3, heads, head_dim))
    q_BQHK, k_BQHK, v_BQHV = mixed.unbind(2)
    decay_THK, beta_TH = gates(proj_TP, wide(operands["f_b_CK"]), wide(operands["a_log_H"]), wide(operands["dt_bias_C"]), config)
    tokens = (unit(q_BQHK) * head_dim**-0.5, unit(k_BQHK), v_BQHV, decay_THK.unflatten(0, (-1, q)), beta_TH.unflatten(0, (-1, q)))
    out_BQHV = recur_requests(tokens, requests, operands["state_SHVK"], arithmetic)
    normed_TC = arithmetic.rms_norm(out_BQHV, operands["o_norm_V"], O_NORM_EPS).flatten(2).flatten(0, 1)
    out_TC = arithmetic.bf16(normed_TC * torch.sigmoid(proj_TP[:, 3 * width : 4 * width]))
    if requests.active is not None:
        zero_TC = torch.zeros_like(out_TC).unflatten(0, (-1, q))
        zero_TC[requests.active] = out_TC.unflatten(0, (-1, q))[requests.active]
        out_TC = zero_TC.flatten(0, 1)
    return {"out_TC": out_TC, "o_BQHV": out_BQHV}


def recur_requests(tokens: tuple[torch.Tensor, ...], requests: _Requests, state_SHVK: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """All tokens (q, k, v, decay, beta, each [B, q, H, ...]) of all real requests: o [B, q, H, V]; states go to slots > 0."""
    out_BQHV = torch.zeros_like(tokens[2])
    group = max(1, STATE_BYTES_AT_ONCE // (state_SHVK[0].numel() * state_SHVK.element_size()))
    buffer_BHVK = state_SHVK.new_empty(min(group, out_BQHV.shape[0]), *state_SHVK.shape[1:])
    for part in requests.rows.split(group):
        q_BQHK, k_BQHK, v_BQHV, decay_BQHK, beta_BQH = (x.index_select(0, part) for x in tokens)
        torch.index_select(state_SHVK, 0, requests.source_B[part], out=buffer_BHVK[: part.shape[0]])
        state_BHVK = arithmetic.wide(buffer_BHVK[: part.shape[0]])
        for t, slot_B in enumerate(requests.slots_BQ[part].unbind(1)):
            out_BQHV[part, t] = recur(state_BHVK, q_BQHK[:, t], k_BQHK[:, t], v_BQHV[:, t], decay_BQHK[:, t], beta_BQH[:, t])
            written = slot_B > 0
            kept = (slot_B, state_BHVK) if bool(written.all()) else (slot_B[written], state_BHVK[written])
            state_SHVK.index_copy_(0, kept[0], kept[1].to(state_SHVK.dtype))
    return out_BQHV
