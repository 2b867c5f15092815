"""Multi-head latent attention without rotation (NoPE): prefill over expanded heads, absorbed decode over the paged latents, output gate.

Equations: DeepSeek-V2 (arXiv 2405.04434, section 2.1) with the fine print of the model notes: the key's shared channels are neither
normed nor rotated, and `sigmoid(g_proj x)` multiplies the heads' output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kimi_k3_decode.cache import NULL_PAGE, MlaLayerCache, StepBatch
from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.stock.basic import linear, rms_norm, wide
from kimi_k3_decode.weights import MlaWeights

# Context values gathered at a time in decode: they stay in a core's second-level cache, and memory is bounded at a million tokens.
DECODE_BLOCK_VALUES = 1 << 19
# Query rows a prefill attention call takes when there is cached context; bounds the mask.
PREFILL_QUERY_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class MlaOperands:
    """A sublayer's weights arranged for use: one fused input projection [q_a | kv_a | gate] and `kv_b` split per head."""

    in_proj: torch.Tensor
    q_a_norm_R: torch.Tensor
    q_b_XR: torch.Tensor
    kv_a_norm_L: torch.Tensor
    kv_b_ZL: torch.Tensor
    key_up_HNL: torch.Tensor
    value_up_HLV: torch.Tensor
    o_proj_DO: torch.Tensor
    heads: int
    nope: int
    rope: int
    value: int
    eps: float

    @classmethod
    def prepare(cls, weights: MlaWeights, config: ModelConfig, dtype: torch.dtype) -> MlaOperands:
        nope, value = config.qk_nope_head_dim, config.v_head_dim
        heads = weights.o_proj_DO.shape[1] // value
        key_up, value_up = weights.kv_b_ZL.to(dtype).view(heads, nope + value, -1).split((nope, value), dim=1)
        return cls(
            in_proj=torch.cat((weights.q_a_RD, weights.kv_a_YD, weights.g_proj_OD)).to(dtype),
            q_a_norm_R=weights.q_a_norm_R.to(wide(dtype)),
            q_b_XR=weights.q_b_XR.to(dtype),
            kv_a_norm_L=weights.kv_a_norm_L.to(wide(dtype)),
            kv_b_ZL=weights.kv_b_ZL.to(dtype),
            key_up_HNL=key_up.contiguous(),
            value_up_HLV=value_up.transpose(1, 2).contiguous(),
            o_proj_DO=weights.o_proj_DO.to(dtype),
            heads=heads,
            nope=nope,
            rope=config.qk_rope_head_dim,
            value=value,
            eps=config.rms_norm_eps,
        )

    @property
    def scale(self) -> float:
        return (self.nope + self.rope) ** -0.5

    @property
    def latent(self) -> int:
        return self.kv_a_norm_L.shape[0]


def project(ops: MlaOperands, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [..., D] -> queries [..., H, nope + pe], cache entry [..., latent | pe] (latent normed, pe raw), output gate [..., H v]."""
    widths = (ops.q_a_norm_R.shape[0], ops.latent, ops.rope, ops.heads * ops.value)
    q_a, latent, key_pe, gate = linear(x, ops.in_proj).split(widths, dim=-1)
    queries = linear(rms_norm(q_a, ops.q_a_norm_R, ops.eps, x.dtype), ops.q_b_XR).unflatten(-1, (ops.heads, ops.nope + ops.rope))
    return queries, torch.cat((rms_norm(latent, ops.kv_a_norm_L, ops.eps, x.dtype), key_pe), dim=-1), gate


def gated_output(ops: MlaOperands, heads_out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Heads' output [..., H, v] (rounded) times sigmoid(gate), rounded once, then o_proj -> [..., D]."""
    high = wide(heads_out.dtype)
    gated = heads_out.flatten(-2).to(high) * torch.sigmoid(gate.to(high))
    return linear(gated.to(heads_out.dtype), ops.o_proj_DO)


# ---- prefill ----
def read_pages(cache: MlaLayerCache, pages: list[int], n_tokens: int) -> torch.Tensor:
    """The first `n_tokens` cached entries [n, latent | pe] of a request with these pages."""
    page_tokens = cache.pages_PTC.shape[1]
    used = torch.tensor(pages[: -(-n_tokens // page_tokens)], dtype=torch.int64, device=cache.pages_PTC.device)
    return cache.pages_PTC[used].flatten(0, 1)[:n_tokens]


def write_pages(cache: MlaLayerCache, pages: list[int], start: int, entries_TC: torch.Tensor) -> None:
    """Store entries at positions start, start + 1, ... of a request with these pages."""
    page_tokens = cache.pages_PTC.shape[1]
    positions = torch.arange(start, start + entries_TC.shape[0], device=entries_TC.device)
    page = torch.tensor(pages, dtype=torch.int64, device=entries_TC.device)[positions // page_tokens]
    cache.pages_PTC[page, positions % page_tokens] = entries_TC.to(cache.pages_PTC.dtype)


def prefill_attention(ops: MlaOperands, queries_THX: torch.Tensor, entries_SC: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last T of S positions over all S, heads expanded through kv_b. Returns [T, H, v] rounded."""
    n_queries, n_keys = queries_THX.shape[0], entries_SC.shape[0]
    latent, key_pe = entries_SC.split((ops.latent, ops.rope), dim=-1)
    key_nope, value = linear(latent, ops.kv_b_ZL).view(n_keys, ops.heads, -1).split((ops.nope, ops.value), dim=-1)
    key = torch.cat((key_nope, key_pe.unsqueeze(1).expand(-1, ops.heads, -1)), dim=-1).transpose(0, 1).unsqueeze(0)
    # The fused CPU kernel wants values as wide as keys; the added columns are zeros and are cut off again.
    value = pad(value, (0, max(0, key.shape[-1] - ops.value))).transpose(0, 1).unsqueeze(0)
    query = queries_THX.transpose(0, 1).unsqueeze(0)
    if n_queries == n_keys:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=ops.scale)
        return out[0, ..., : ops.value].transpose(0, 1)
    parts = []
    context = n_keys - n_queries
    for begin in range(0, n_queries, PREFILL_QUERY_ROWS):
        end = min(begin + PREFILL_QUERY_ROWS, n_queries)
        rows = torch.arange(context + begin, context + end, device=query.device)
        mask = rows.unsqueeze(1) >= torch.arange(context + end, device=query.device)
        keys = (key[:, :, : context + end], value[:, :, : context + end])
        parts.append(scaled_dot_product_attention(query[:, :, begin:end], *keys, attn_mask=mask, scale=ops.scale))
    return torch.cat(parts, dim=2)[0, ..., : ops.value].transpose(0, 1)


# ---- decode ----
def store_step(cache: MlaLayerCache, batch: StepBatch, entries_BQC: torch.Tensor) -> None:
    """Write the step's entries to their pages; rows whose page is the null page (padding) are not written."""
    page_tokens = cache.pages_PTC.shape[1]
    position_BQ = batch.lengths_B.long().unsqueeze(1) + torch.arange(batch.q, device=entries_BQC.device)
    page_BQ = batch.block_table_BN.long().gather(1, position_BQ // page_tokens)
    row_BQ = position_BQ % page_tokens
    if bool((page_BQ == NULL_PAGE).any()):
        real = page_BQ != NULL_PAGE
        cache.pages_PTC[page_BQ[real], row_BQ[real]] = entries_BQC[real].to(cache.pages_PTC.dtype)
    else:
        cache.pages_PTC[page_BQ, row_BQ] = entries_BQC.to(cache.pages_PTC.dtype)


def visible_rows(batch: StepBatch, visible_BR: torch.Tensor, page_tokens: int, first: int, last: int) -> torch.Tensor:
    """Flat row numbers [B, last - first] of the entries at positions first..last-1; what no query row may see points at the null page."""
    position_S = torch.arange(first, last, device=visible_BR.device)
    row_BS = batch.block_table_BN.long()[:, position_S // page_tokens] * page_tokens + position_S % page_tokens
    return torch.where(position_S < visible_BR.amax(1, keepdim=True), row_BS, NULL_PAGE)


def absorbed_attention(
    ops: MlaOperands, query_BRC: torch.Tensor, visible_BR: torch.Tensor, batch: StepBatch, cache: MlaLayerCache
) -> torch.Tensor:
    """Softmax attention of absorbed queries over the paged entries: [B, R, latent] wide, R = Q x H.

    Row r sees the first `visible_BR[b, r]` entries (0: the row gives zeros). Requests and positions are taken in blocks, with a running
    maximum and sum over positions, so memory does not grow with the context. Entries that no row may see are not read.
    """
    n_requests, _, width = query_BRC.shape
    page_tokens = cache.pages_PTC.shape[1]
    longest = max(1, int(visible_BR.max()))
    positions = min(longest, max(page_tokens, DECODE_BLOCK_VALUES // width))
    requests = max(1, DECODE_BLOCK_VALUES // (positions * width))
    parts = []
    for begin in range(0, n_requests, requests):
        some = slice(begin, begin + requests)
        block = replace(batch, block_table_BN=batch.block_table_BN[some])
        parts.append(_attend_blocks(ops, query_BRC[some], visible_BR[some], block, cache, positions))
    return torch.cat(parts)


def _attend_blocks(
    ops: MlaOperands, query_BRC: torch.Tensor, visible_BR: torch.Tensor, batch: StepBatch, cache: MlaLayerCache, positions: int
) -> torch.Tensor:
    high = wide(query_BRC.dtype)
    n_requests, n_rows, width = query_BRC.shape
    flat_SC = cache.pages_PTC.view(-1, width)
    page_tokens = cache.pages_PTC.shape[1]
    shortest, longest = int(visible_BR.min()), int(visible_BR.max())
    query = query_BRC.to(high) * ops.scale
    peak = query.new_full((n_requests, n_rows, 1), float("-inf"))
    total, mixed = query.new_zeros(n_requests, n_rows, 1), query.new_zeros(n_requests, n_rows, ops.latent)
    for first in range(0, longest, positions):
        last = min(first + positions, longest)
        rows_BS = visible_rows(batch, visible_BR, page_tokens, first, last)
        entries_BSC = flat_SC.index_select(0, rows_BS.flatten()).to(high).view(n_requests, last - first, width)
        scores = torch.bmm(query, entries_BSC.transpose(1, 2))
        if last > shortest:
            hidden = torch.arange(first, last, device=query.device) >= visible_BR.unsqueeze(-1)
            scores.masked_fill_(hidden, float("-inf"))
        if first == 0 and last == longest:  # one block: a plain softmax; rows that see nothing come out as NaN
            mixed = torch.bmm(scores.softmax(-1), entries_BSC[..., : ops.latent])
            return mixed if shortest > 0 else torch.where(visible_BR.unsqueeze(-1) > 0, mixed, 0.0)
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        anchor = new_peak.clamp(min=torch.finfo(high).min)  # a row that sees nothing yet has no finite peak
        shares = torch.exp_(scores.sub_(anchor))
        carried = torch.exp(peak - anchor)
        total = total * carried + shares.sum(-1, keepdim=True)
        mixed = mixed * carried + torch.bmm(shares, entries_BSC[..., : ops.latent])
        peak = new_peak
    return torch.where(total > 0, mixed / total, 0.0)


def decode(ops: MlaOperands, x_BQD: torch.Tensor, batch: StepBatch, cache: MlaLayerCache) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode or verify step: (heads' output [B, Q, H, v] rounded, gate [B, Q, H v]). Padding rows give zeros and write nothing."""
    dtype = x_BQD.dtype
    queries_BQHX, entries, gate = project(ops, x_BQD)
    store_step(cache, batch, entries)
    q_nope, q_pe = queries_BQHX.flatten(0, 1).split((ops.nope, ops.rope), dim=-1)
    absorbed_THL = torch.bmm(q_nope.transpose(0, 1), ops.key_up_HNL).transpose(0, 1)
    query = torch.cat((absorbed_THL, q_pe), dim=-1).view(*x_BQD.shape[:1], batch.q * ops.heads, -1)
    visible_BQ = batch.lengths_B.long().unsqueeze(1) + torch.arange(1, batch.q + 1, device=query.device)
    visible_BQ = torch.where((batch.slots_BQ[:, :1] > 0), visible_BQ, 0)
    mixed = absorbed_attention(ops, query, visible_BQ.repeat_interleave(ops.heads, dim=1), batch, cache).to(dtype)
    mixed_HTL = mixed.view(-1, ops.heads, ops.latent).transpose(0, 1)
    heads_out_THV = torch.bmm(mixed_HTL, ops.value_up_HLV).transpose(0, 1)
    return heads_out_THV.unflatten(0, x_BQD.shape[:2]), gate
