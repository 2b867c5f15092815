"""Kimi Delta Attention: projections, short convolution, bounded gate, recurrent decode and verify, output gate.

Equations and constants: Kimi Linear (arXiv 2510.26692) and the fine print of the model notes. State layout [slot, head, V, K].
The chunked prefill form is in `kda_chunk.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import silu

from kimi_k3_decode.cache import KdaLayerCache, StepBatch
from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.stock.basic import l2_normalize, linear, rms_norm, wide
from kimi_k3_decode.weights import KdaWeights

O_NORM_EPS = 1e-5  # a constant of the operation, not the model's eps
# Requests whose states are updated together: as many as keep the states in a core's second-level cache.
STATE_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class KdaOperands:
    """A sublayer's weights arranged for use: one fused input projection [q | k | v | gate | F_A | beta] and wide gate parameters."""

    in_proj: torch.Tensor
    conv_WM: torch.Tensor  # taps of the q | k | v channels, wide
    decay_H: torch.Tensor  # exp(A_log), wide
    dt_bias_C: torch.Tensor
    f_b_CK: torch.Tensor
    o_norm_K: torch.Tensor
    o_proj_DC: torch.Tensor
    lower_bound: float
    heads: int
    head_dim: int

    @classmethod
    def prepare(cls, weights: KdaWeights, config: ModelConfig, dtype: torch.dtype) -> KdaOperands:
        w, high = weights, wide(dtype)
        return cls(
            in_proj=torch.cat((w.q_proj_CD, w.k_proj_CD, w.v_proj_CD, w.g_proj_CD, w.f_a_KD, w.b_proj_HD)).to(dtype),
            conv_WM=torch.cat((w.q_conv_CW, w.k_conv_CW, w.v_conv_CW)).to(high).T.contiguous(),
            decay_H=w.A_log_H.to(high).exp(),
            dt_bias_C=w.dt_bias_C.to(high),
            f_b_CK=w.f_b_CK.to(dtype),
            o_norm_K=w.o_norm_K.to(high),
            o_proj_DC=w.o_proj_DC.to(dtype),
            lower_bound=config.gate_lower_bound,
            heads=w.A_log_H.shape[0],
            head_dim=config.kda_head_dim,
        )


@dataclass(frozen=True, kw_only=True)
class KdaInputs:
    """What the recurrence reads, wide, rows in any leading shape: q (scaled), k, v, log decay [..., H, K] and beta [..., H]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


def project(ops: KdaOperands, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [..., D] -> raw q | k | v [..., 3C] (what the conv state stores), output gate [..., C], F_A x [..., K], beta logits [..., H]."""
    channels = ops.heads * ops.head_dim
    raw, gate, f_a, b = linear(x, ops.in_proj).split((3 * channels, channels, ops.head_dim, ops.heads), dim=-1)
    return raw, gate, f_a, b


def short_conv(ops: KdaOperands, rows: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution and SiLU: rows [..., n + 3, 3C] with three taps of history -> [..., n, 3C] rounded to their dtype."""
    taps = ops.conv_WM.shape[0]
    n = rows.shape[-2] - taps + 1
    source = rows.to(ops.conv_WM.dtype)
    total = source[..., :n, :] * ops.conv_WM[0]
    for tap in range(1, taps):
        total.addcmul_(source[..., tap : tap + n, :], ops.conv_WM[tap])
    return silu(total, inplace=True).to(rows.dtype)


def recurrence_inputs(ops: KdaOperands, convolved: torch.Tensor, f_a: torch.Tensor, b: torch.Tensor) -> KdaInputs:
    """Normalise q and k, scale q, and form the bounded gate `lower_bound * sigmoid(exp(A_log) (F_B F_A x + dt_bias))` and beta."""
    high = ops.conv_WM.dtype
    heads = (*convolved.shape[:-1], 3, ops.heads, ops.head_dim)
    q, k, v = convolved.to(high).view(heads).unbind(-3)
    f = (linear(f_a, ops.f_b_CK).to(high) + ops.dt_bias_C).unflatten(-1, (ops.heads, ops.head_dim))
    return KdaInputs(
        q=l2_normalize(q) * ops.head_dim**-0.5,
        k=l2_normalize(k),
        v=v,
        log_decay=ops.lower_bound * torch.sigmoid(ops.decay_H.unsqueeze(-1) * f),
        beta=torch.sigmoid(b.to(high)),
    )


def gated_output(ops: KdaOperands, o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """o [..., H, V] already rounded to the activation dtype -> RMSNorm over V, times sigmoid(gate), rounded once, then o_proj."""
    high = wide(o.dtype)
    normed = rms_norm(o.to(high), ops.o_norm_K, O_NORM_EPS, high).flatten(-2)
    return linear((normed * torch.sigmoid(gate.to(high))).to(o.dtype), ops.o_proj_DC)


def recurrent_step(
    state_NHVK: torch.Tensor,
    q_NHK: torch.Tensor,
    k_NHK: torch.Tensor,
    v_NHV: torch.Tensor,
    log_decay_NHK: torch.Tensor,
    beta_NH: torch.Tensor,
) -> torch.Tensor:
    """One token of every request: updates `state_NHVK` in place and returns o [N, H, V], wide.

    S' = exp(g) S + (beta k)(v - k^T exp(g) S)^T and o = q^T S', with both products against the old state taken in one pass over it:
    q^T S' = (q exp(g))^T S + (q . k) delta.
    """
    decay_NHK = log_decay_NHK.exp()
    both_NH2K = torch.stack((k_NHK * decay_NHK, q_NHK * decay_NHK), dim=2)
    predicted_NHV, carried_NHV = _state_products(both_NH2K, state_NHVK).unbind(2)
    delta_NHV = beta_NH.unsqueeze(-1) * (v_NHV - predicted_NHV)
    state_NHVK.mul_(decay_NHK.unsqueeze(-2)).addcmul_(delta_NHV.unsqueeze(-1), k_NHK.unsqueeze(-2))
    return carried_NHV + (q_NHK * k_NHK).sum(-1, keepdim=True) * delta_NHV


def _state_products(rows_NH2K: torch.Tensor, state_NHVK: torch.Tensor) -> torch.Tensor:
    """Two vectors times S^T, [N, H, 2, V]. A strided view of the slots goes head by head: `matmul` would copy all its states first."""
    transposed_NHKV = state_NHVK.transpose(2, 3)
    if state_NHVK.is_contiguous():
        return rows_NH2K @ transposed_NHKV
    heads = range(state_NHVK.shape[1])
    return torch.stack([torch.bmm(rows_NH2K[:, head], transposed_NHKV[:, head]) for head in heads], dim=1)


def recurrent(inputs: KdaInputs, states_SHVK: torch.Tensor, read_B: torch.Tensor, write_BQ: torch.Tensor) -> torch.Tensor:
    """Q tokens of B requests, o [B, Q, H, V] wide. Reads slot `read_B`; token t writes slot `write_BQ[:, t]` if > 0."""
    n_requests, q_tokens = write_BQ.shape
    per_request = states_SHVK[0].numel() * states_SHVK.element_size()
    block = max(1, STATE_BLOCK_BYTES // per_request)
    buffer = states_SHVK.new_empty(min(block, n_requests), *states_SHVK.shape[1:])
    output = torch.empty_like(inputs.v)
    all_written = bool((write_BQ > 0).all())
    for begin in range(0, n_requests, block):
        rows = slice(begin, min(begin + block, n_requests))
        in_place = _strided(states_SHVK, read_B[rows], write_BQ[rows])
        if in_place is not None:
            output[rows, 0] = recurrent_step(
                in_place, inputs.q[rows, 0], inputs.k[rows, 0], inputs.v[rows, 0], inputs.log_decay[rows, 0], inputs.beta[rows, 0]
            )
            continue
        work = buffer[: rows.stop - rows.start]
        torch.index_select(states_SHVK, 0, read_B[rows], out=work)
        for t in range(q_tokens):
            output[rows, t] = recurrent_step(
                work, inputs.q[rows, t], inputs.k[rows, t], inputs.v[rows, t], inputs.log_decay[rows, t], inputs.beta[rows, t]
            )
            slots = write_BQ[rows, t]
            if all_written:
                states_SHVK.index_copy_(0, slots, work)
            else:
                states_SHVK.index_copy_(0, slots[slots > 0], work[slots > 0])
    return output


def _strided(states_SHVK: torch.Tensor, read_N: torch.Tensor, write_NQ: torch.Tensor) -> torch.Tensor | None:
    """The states as a view when one token is read from and written to evenly spaced slots (the usual case); None otherwise.

    Saves a gather and a scatter of the largest tensors of a step; the arithmetic is the same.
    """
    slots = read_N.tolist()
    if write_NQ.shape[1] != 1 or write_NQ[:, 0].tolist() != slots:
        return None
    stride = slots[1] - slots[0] if len(slots) > 1 else 1
    if stride < 1 or any(b - a != stride for a, b in pairwise(slots)):
        return None
    return states_SHVK[slots[0] : slots[-1] + 1 : stride]


def decode(ops: KdaOperands, x_BQD: torch.Tensor, batch: StepBatch, cache: KdaLayerCache) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode or verify step: (o [B, Q, H, V] rounded, before the norm; gate [B, Q, C]). Padding rows give zeros and write nothing."""
    raw, gate, f_a, b = project(ops, x_BQD)
    slots_BQ, accepted_B = batch.slots_BQ.long(), batch.accepted_B.long()
    read_B = slots_BQ.clamp(min=0).gather(1, (accepted_B - 1).unsqueeze(1)).squeeze(1)
    active_B = (slots_BQ[:, 0] > 0) & (read_B > 0)
    o_BQHV = x_BQD.new_zeros(*x_BQD.shape[:2], ops.heads, ops.head_dim)
    rows = None if bool(active_B.all()) else active_B.nonzero().squeeze(1)
    if rows is not None:
        raw, f_a, b, slots_BQ, accepted_B, read_B = (t[rows] for t in (raw, f_a, b, slots_BQ, accepted_B, read_B))
    sequence = conv_window(cache, slots_BQ[:, 0], accepted_B, raw)
    inputs = recurrence_inputs(ops, short_conv(ops, sequence), f_a, b)
    o = recurrent(inputs, cache.state_SHVK, read_B, slots_BQ).to(x_BQD.dtype)
    if rows is None:
        return o, gate
    o_BQHV[rows] = o
    return o_BQHV, gate


def conv_window(cache: KdaLayerCache, slot_B: torch.Tensor, accepted_B: torch.Tensor, raw_BQM: torch.Tensor) -> torch.Tensor:
    """[3 kept taps | Q new raw rows] of each request, read from offset `accepted - 1`; stores all but the first row back in the slot."""
    offsets = (accepted_B - 1).unsqueeze(1) + torch.arange(3, device=slot_B.device)
    sequence = torch.cat((cache.conv_SWC[slot_B.unsqueeze(1), offsets].to(raw_BQM.dtype), raw_BQM), dim=1)
    cache.conv_SWC[slot_B, : sequence.shape[1] - 1] = sequence[:, 1:].to(cache.conv_SWC.dtype)
    return sequence
