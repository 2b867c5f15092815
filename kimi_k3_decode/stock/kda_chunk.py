"""Chunked KDA for prefill: the WY / UT form of the gated delta rule with per-channel decay, over chunks of 64 tokens.

With G the decay accumulated inside a chunk and S the state before it (Kimi Linear, arXiv 2510.26692, section 3; Yang et al. 2024,
arXiv 2406.06484 for the transform):

    u_i = beta_i (v_i - (k_i e^G_i)^T S - sum_{j<i} M_ij u_j)      M_ij = sum_c k_i k_j e^(G_i - G_j)
    o_i = (q_i e^G_i)^T S + sum_{j<=i} A_ij u_j                    A_ij = sum_c q_i k_j e^(G_i - G_j)
    S'  = e^G_end S + sum_j (k_j e^(G_end - G_j)) u_j^T

e^(G_i - G_j) must be split into a row factor and a column factor to be a matrix product. Sub-blocks of 16 keep both factors finite: off
the diagonal the reference is the start of the row's block, so both are at most 1; on it the reference is the block's middle, so
neither exceeds e^(8 * 5). G is accumulated in FP64 because differences of large sums are what matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kimi_k3_decode.stock.kda import KdaInputs

CHUNK = 64
SUB_BLOCK = 16
MAX_EXPONENT = 80.0  # e^80 is finite in FP32, and so is a sum of 128 such products with a factor e^0


@dataclass(frozen=True, kw_only=True)
class ChunkIndex:
    """Where the tokens of packed segments sit in chunks: `token_NC` [chunks, 64] packed row, or T for padding; `chunks_of[s]` in order."""

    token_NC: torch.Tensor
    chunks_of: tuple[range, ...]

    @classmethod
    def build(cls, lengths: list[int], device: torch.device) -> ChunkIndex:
        """Segments of these lengths lie one after another in the packed rows."""
        total = sum(lengths)
        tables, ranges, begin, first = [], [], 0, 0
        for length in lengths:
            n_chunks = -(-length // CHUNK)
            rows = torch.arange(n_chunks * CHUNK, device=device)
            tables.append(torch.where(rows < length, rows + begin, total).view(n_chunks, CHUNK))
            ranges.append(range(first, first + n_chunks))
            begin, first = begin + length, first + n_chunks
        return cls(token_NC=torch.cat(tables), chunks_of=tuple(ranges))


def _to_chunks(rows_THX: torch.Tensor, token_NC: torch.Tensor) -> torch.Tensor:
    """Packed [T, H, X] -> [N, H, 64, X], zeros in padding (no decay, no key, no beta: the state passes through)."""
    padded = torch.cat((rows_THX, rows_THX.new_zeros(1, *rows_THX.shape[1:])))
    return padded[token_NC].transpose(1, 2)


def _decayed_products(q: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(A, M) [N, H, 64, 64] from q, k and FP64 accumulated decay [N, H, 64, K]: A lower with diagonal, M strictly lower."""
    both = torch.stack((q, k))
    products = both.new_zeros(2, *q.shape[:-1], CHUNK)
    for begin in range(0, CHUNK, SUB_BLOCK):
        rows = slice(begin, begin + SUB_BLOCK)
        if begin:
            start = total[..., begin - 1 : begin, :]
            left = both[..., rows, :] * (total[..., rows, :] - start).exp().to(q.dtype)
            right = k[..., :begin, :] * (start - total[..., :begin, :]).exp().to(q.dtype)
            products[..., rows, :begin] = left @ right.transpose(-1, -2)
        middle = total[..., begin + SUB_BLOCK // 2 - 1 : begin + SUB_BLOCK // 2, :]
        left = both[..., rows, :] * (total[..., rows, :] - middle).exp().to(q.dtype)
        right = k[..., rows, :] * (middle - total[..., rows, :]).exp().to(q.dtype)
        products[..., rows, rows] = left @ right.transpose(-1, -2)
    return products[0].tril(), products[1].tril(-1)


def chunked(inputs: KdaInputs, index: ChunkIndex, state_RHKV: torch.Tensor, lower_bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed rows of R segments -> (o [T, H, V] wide, final states [R, H, K, V]); `state_RHKV` holds the states before, and is not changed.

    Raises ValueError when the gate's bound would overflow a sub-block in FP32.
    """
    if -lower_bound * SUB_BLOCK > MAX_EXPONENT and inputs.q.dtype == torch.float32:
        raise ValueError(f"gate_lower_bound: got {lower_bound}, needs >= {-MAX_EXPONENT / SUB_BLOCK} in FP32; use FP64")
    token_NC = index.token_NC
    q, k, v = (_to_chunks(x, token_NC) for x in (inputs.q, inputs.k, inputs.v))
    beta = _to_chunks(inputs.beta.unsqueeze(-1), token_NC)
    total = _to_chunks(inputs.log_decay, token_NC).double().cumsum(-2)
    attention, keys = _decayed_products(q, k, total)
    decay = total.exp().to(q.dtype)
    unit_lower = torch.eye(CHUNK, dtype=q.dtype, device=q.device) + beta * keys
    solved = torch.linalg.solve_triangular(unit_lower, beta * torch.cat((v, k * decay), dim=-1), upper=False, unitriangular=True)
    fresh, from_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    to_end = (k * (total[..., -1:, :] - total).exp().to(q.dtype)).transpose(-1, -2)
    output = torch.empty_like(v)
    state = _scan(index.chunks_of, state_RHKV, fresh, from_state, q * decay, attention, to_end, decay[..., -1, :].unsqueeze(-1), output)
    flat = output.transpose(1, 2).flatten(0, 1)
    packed = flat.new_empty(inputs.v.shape)
    real = token_NC.flatten() < packed.shape[0]
    packed[token_NC.flatten()[real]] = flat[real]
    return packed, state


def _scan(
    chunks_of: tuple[range, ...],
    state_RHKV: torch.Tensor,
    fresh: torch.Tensor,
    from_state: torch.Tensor,
    queries: torch.Tensor,
    attention: torch.Tensor,
    to_end: torch.Tensor,
    decay_end: torch.Tensor,
    output: torch.Tensor,
) -> torch.Tensor:
    """Carry the states over the chunks, all segments that still have one at a time. Fills `output` [N, H, 64, V]; returns final states."""
    order = sorted(range(len(chunks_of)), key=lambda s: -len(chunks_of[s]))
    state = state_RHKV[order]
    for step in range(max(len(chunks) for chunks in chunks_of)):
        active = [chunks_of[s][step] for s in order if len(chunks_of[s]) > step]
        n = len(active)
        at = slice(active[0], active[0] + 1) if n == 1 else torch.tensor(active, device=state.device)
        before = state[:n]
        u = fresh[at] - from_state[at] @ before
        output[at] = queries[at] @ before + attention[at] @ u
        state[:n] = decay_end[at] * before + to_end[at] @ u
    final = torch.empty_like(state)
    final[order] = state
    return final
