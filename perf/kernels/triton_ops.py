"""Triton kernels of the stock layer: the fused elementwise steps and the MXFP4 grouped product a good stock path would launch.

They are baselines for speed, written to be fast in the ordinary way: one kernel an operation, BF16 between kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _residual(prefix, delta, blocks, score, norm, prefix_out, out, eps, D: tl.constexpr, N: tl.constexpr, T, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    live = k < D
    p = tl.load(prefix + row * D + k, live, 0.0).to(tl.float32) + tl.load(delta + row * D + k, live, 0.0).to(tl.float32)
    p = p.to(tl.bfloat16).to(tl.float32)
    tl.store(prefix_out + row * D + k, p.to(tl.bfloat16), live)
    s = tl.load(score + k, live, 0.0)
    top = tl.sum(s * p) * tl.rsqrt(tl.sum(p * p) / D + eps)
    total = 1.0
    mix = p
    for n in tl.static_range(N):
        b = tl.load(blocks + (n * T + row) * D + k, live, 0.0).to(tl.float32)
        logit = tl.sum(s * b) * tl.rsqrt(tl.sum(b * b) / D + eps)
        best = tl.maximum(top, logit)
        mix = mix * tl.exp(top - best) + b * tl.exp(logit - best)
        total = total * tl.exp(top - best) + tl.exp(logit - best)
        top = best
    y = mix / total
    y = y * tl.rsqrt(tl.sum(y * y) / D + eps) * tl.load(norm + k, live, 0.0).to(tl.float32)
    tl.store(out + row * D + k, y.to(tl.bfloat16), live)


def residual(prefix: Any, delta: Any, blocks: Any, score: Any, norm: Any, prefix_out: Any, out: Any, eps: float) -> None:
    rows, hidden = prefix.shape
    _residual[(rows,)](
        prefix,
        delta,
        blocks,
        score,
        norm,
        prefix_out,
        out,
        eps,
        hidden,
        blocks.shape[0],
        rows,
        triton.next_power_of_2(hidden),
        num_warps=16,
    )


@triton.jit
def _rms_norm(x, norm, out, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    live = k < D
    y = tl.load(x + row * D + k, live, 0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y) / D + eps) * tl.load(norm + k, live, 0.0).to(tl.float32)
    tl.store(out + row * D + k, y.to(tl.bfloat16), live)


def rms_norm(x: Any, norm: Any, out: Any, eps: float) -> None:
    _rms_norm[(x.shape[0],)](x, norm, out, eps, x.shape[1], triton.next_power_of_2(x.shape[1]), num_warps=8)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _situ(x, out, beta, linear_beta, INNER: tl.constexpr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, k = i // INNER, i % INNER
    g = tl.load(x + row * 2 * INNER + k, i < n, 0.0).to(tl.float32)
    u = tl.load(x + row * 2 * INNER + INNER + k, i < n, 0.0).to(tl.float32)
    y = beta * _tanh(g / beta) / (1.0 + tl.exp(-g)) * linear_beta * _tanh(u / linear_beta)
    tl.store(out + i, y.to(tl.bfloat16), i < n)


def situ(x: Any, out: Any, beta: float, linear_beta: float) -> None:
    n = out.numel()
    _situ[(triton.cdiv(n, 512),)](x, out, beta, linear_beta, out.shape[-1], n, 512, num_warps=4)


@triton.jit
def _conv(proj, taps, window, slots, out, beta, T, P, C: tl.constexpr, H: tl.constexpr, K: tl.constexpr, W, BLOCK: tl.constexpr):
    """Convolution and SiLU of one token; q, k and v to separate tensors, and beta's columns copied out."""
    C3: tl.constexpr = 3 * C
    row, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < C3
    slot = tl.load(slots + row)
    base = window + slot.to(tl.int64) * W * C3 + c
    a, b, d = tl.load(base, live, 0.0), tl.load(base + C3, live, 0.0), tl.load(base + 2 * C3, live, 0.0)
    x = tl.load(proj + row * P + c, live, 0.0)
    y = a.to(tl.float32) * tl.load(taps + c * 4, live, 0.0) + b.to(tl.float32) * tl.load(taps + c * 4 + 1, live, 0.0)
    y += d.to(tl.float32) * tl.load(taps + c * 4 + 2, live, 0.0) + x.to(tl.float32) * tl.load(taps + c * 4 + 3, live, 0.0)
    tl.store(base, b, live)
    tl.store(base + C3, d, live)
    tl.store(base + 2 * C3, x, live)
    tl.store(out + (c // C * T + row) * C + c % C, (y / (1.0 + tl.exp(-y))).to(tl.bfloat16), live)
    if tl.program_id(1) == 0:
        h = tl.arange(0, 16)
        tl.store(beta + row * H + h, tl.load(proj + row * P + 4 * C + K + h, h < H, 0.0), h < H)


def conv(proj: Any, taps: Any, window: Any, slots: Any, out: Any, beta: Any, head_dim: int) -> None:
    _, rows, channels = out.shape
    _conv[(rows, triton.cdiv(3 * channels, 256))](
        proj, taps, window, slots, out, beta, rows, proj.shape[1], channels, beta.shape[1], head_dim, window.shape[1], 256, num_warps=4
    )


@triton.jit
def _conv_verify(
    proj, taps, window, slots, accepted, out, beta, T, P, C: tl.constexpr, H: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, W,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for Q tokens of a verify step: the window is read behind the last accepted one, then two old and all new taps are kept."""
    C3: tl.constexpr = 3 * C
    request, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < C3
    base = window + tl.load(slots + request * Q).to(tl.int64) * W * C3 + c
    old = base + (tl.load(accepted + request) - 1) * C3
    a, b, d = tl.load(old, live, 0.0), tl.load(old + C3, live, 0.0), tl.load(old + 2 * C3, live, 0.0)
    w0, w1 = tl.load(taps + c * 4, live, 0.0), tl.load(taps + c * 4 + 1, live, 0.0)
    w2, w3 = tl.load(taps + c * 4 + 2, live, 0.0), tl.load(taps + c * 4 + 3, live, 0.0)
    tl.debug_barrier()
    tl.store(base, b, live)
    tl.store(base + C3, d, live)
    for t in tl.static_range(Q):
        row = request * Q + t
        x = tl.load(proj + row * P + c, live, 0.0)
        y = a.to(tl.float32) * w0 + b.to(tl.float32) * w1 + d.to(tl.float32) * w2 + x.to(tl.float32) * w3
        tl.store(base + (2 + t) * C3, x, live)
        tl.store(out + (c // C * T + row) * C + c % C, (y / (1.0 + tl.exp(-y))).to(tl.bfloat16), live)
        a, b, d = b, d, x
        if tl.program_id(1) == 0:
            h = tl.arange(0, 16)
            tl.store(beta + row * H + h, tl.load(proj + row * P + 4 * C + K + h, h < H, 0.0), h < H)


def conv_verify(proj: Any, taps: Any, window: Any, slots: Any, accepted: Any, out: Any, beta: Any, head_dim: int) -> None:
    _, rows, channels = out.shape
    requests, q = slots.shape
    _conv_verify[(requests, triton.cdiv(3 * channels, 256))](
        proj, taps, window, slots, accepted, out, beta, rows, proj.shape[1], channels, beta.shape[1], head_dim, q, window.shape[1], 256,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _gated_norm(o, proj, norm, out, P, GATE: tl.constexpr, H: tl.constexpr, V: tl.constexpr, eps):
    row, head = tl.program_id(0), tl.program_id(1)
    v = tl.arange(0, V)
    y = tl.load(o + (row * H + head) * V + v).to(tl.float32)
    gate = tl.load(proj + row * P + GATE + head * V + v).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y) / V + eps) * tl.load(norm + v).to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(out + row * H * V + head * V + v, y.to(tl.bfloat16))


def gated_norm(o: Any, proj: Any, norm: Any, out: Any, gate_column: int, eps: float) -> None:
    rows, heads, channels = o.shape
    _gated_norm[(rows, heads)](o, proj, norm, out, proj.shape[1], gate_column, heads, channels, eps, num_warps=1)


@triton.jit
def _mla_prepare(
    proj, q_norm, kv_norm, qa, cache, P, L, at, eps, Q: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    BQ: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """RMSNorm of the query's and of the cached latent of one row; the cache entry (latent and unrotated keys) is written at `at`."""
    row = tl.program_id(0)
    k = tl.arange(0, BQ)
    x = tl.load(proj + row * P + k, k < Q, 0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / Q + eps) * tl.load(q_norm + k, k < Q, 0.0).to(tl.float32)
    tl.store(qa + row * Q + k, y.to(tl.bfloat16), k < Q)
    c = tl.arange(0, BC)
    z = tl.load(proj + row * P + Q + c, c < C, 0.0).to(tl.float32)
    z = z * tl.rsqrt(tl.sum(z * z) / C + eps) * tl.load(kv_norm + c, c < C, 0.0).to(tl.float32)
    entry = cache + (row.to(tl.int64) * L + at) * E
    tl.store(entry + c, z.to(tl.bfloat16), c < C)
    e = tl.arange(0, BE)
    tl.store(entry + C + e, tl.load(proj + row * P + Q + C + e, e < E - C, 0.0), e < E - C)


def mla_prepare(proj: Any, q_norm: Any, kv_norm: Any, qa: Any, cache: Any, at: int, eps: float) -> None:
    rows, length, entry = cache.shape
    q, c = qa.shape[1], kv_norm.shape[0]
    sizes = [triton.next_power_of_2(n) for n in (q, c, entry - c)]
    _mla_prepare[(rows,)](proj, q_norm, kv_norm, qa, cache, proj.shape[1], length, at, eps, q, c, entry, *sizes, num_warps=8)


@triton.jit
def _mla_gate(values, proj, out, T, P, GATE, H: tl.constexpr, V: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1)
    v = tl.arange(0, V)
    y = tl.load(values + (head * T + row) * V + v).to(tl.float32)
    gate = tl.load(proj + row * P + GATE + head * V + v).to(tl.float32)
    tl.store(out + (row * H + head) * V + v, (y / (1.0 + tl.exp(-gate))).to(tl.bfloat16))


def mla_gate(values: Any, proj: Any, out: Any, gate_column: int) -> None:
    heads, rows, width = values.shape
    _mla_gate[(rows, heads)](values, proj, out, rows, proj.shape[1], gate_column, heads, width, num_warps=1)


@triton.jit
def _route(logits, bias, ids, weights, E: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    s = 1.0 / (1.0 + tl.exp(-tl.load(logits + row * E + e, e < E, -1e30)))
    v = tl.where(e < E, s + tl.load(bias + e, e < E, 0.0), -1e30)
    z = tl.arange(0, K)
    chosen = tl.zeros((K,), tl.float32)
    total = 0.0
    for i in range(K):
        best = tl.argmax(v, 0)
        score = tl.sum(tl.where(e == best, s, 0.0))
        tl.store(ids + row * K + i, best)
        chosen = tl.where(z == i, score, chosen)
        total += score
        v = tl.where(e == best, -1e30, v)
    tl.store(weights + row * K + z, (chosen / total).to(tl.bfloat16))


def route(logits: Any, bias: Any, ids: Any, weights: Any) -> None:
    experts = logits.shape[1]
    _route[(logits.shape[0],)](logits, bias, ids, weights, experts, triton.next_power_of_2(experts), ids.shape[1], num_warps=4)


@triton.jit
def _align(ids, order, block_expert, block_first, block_count, N, NP: tl.constexpr, M: tl.constexpr):
    """Pairs sorted by expert, cut into blocks of at most M pairs of one expert; unused blocks get expert -1."""
    i = tl.arange(0, NP)
    e = tl.load(ids + i, i < N, 4095)
    keys = tl.sort(e * 4096 + i)
    tl.store(order + i, keys)
    tl.debug_barrier()
    before = tl.load(order + i - 1, i > 0, -1)
    expert = keys // 4096
    start = (i == 0) | (before // 4096 != expert)
    first = tl.associative_scan(tl.where(start, i, 0), 0, _max)
    leader = ((i - first) % M == 0) & (expert < 4095)
    place = tl.cumsum(leader.to(tl.int32), 0) - 1
    tl.store(block_expert + i, -1 + 0 * i)
    tl.debug_barrier()
    tl.store(block_expert + place, expert, leader)
    tl.store(block_first + place, i, leader)


@triton.jit
def _max(a, b):
    return tl.maximum(a, b)


def align(ids: Any, order: Any, block_expert: Any, block_first: Any) -> None:
    n = ids.numel()
    size = triton.next_power_of_2(n)
    _align[(1,)](ids, order, block_expert, block_first, block_first, n, size, 16, num_warps=4 if size <= 256 else 16)


@triton.jit
def _grouped(
    x, codes, scales, second_codes, second_scales, out, order, block_expert, block_first, weights,
    N_PAIRS, EACH: tl.constexpr, OUT: tl.constexpr, K: tl.constexpr, TOP: tl.constexpr, PER_TOKEN: tl.constexpr, WEIGHTED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[pair or its token] W[expert]^T: a program per (block of pairs, BN outputs), codes widened in registers. EACH outputs
    come from the first matrix of an expert, the others from the second."""
    block, tile = tl.program_id(0), tl.program_id(1)
    expert = tl.load(block_expert + block)
    if expert < 0:
        return
    first = tl.load(block_first + block)
    m = tl.arange(0, M)
    key = tl.load(order + first + m, first + m < N_PAIRS, -1)
    live = (key >= 0) & (key // 4096 == expert)
    pair = key % 4096
    row = tl.where(live, pair // TOP if PER_TOKEN else pair, 0)
    n = tile * BN + tl.arange(0, BN)
    inside = n
    if EACH < OUT:
        second = tile * BN >= EACH
        codes = tl.where(second, second_codes, codes)
        scales = tl.where(second, second_scales, scales)
        inside = n - tl.where(second, EACH, 0)
    acc = tl.zeros((M, BN), tl.float32)
    base = expert.to(tl.int64) * EACH
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        j = k0 // 2 + tl.arange(0, BK // 2)
        g = k0 // 32 + tl.arange(0, BK // 32)
        a = tl.load(x + row[:, None] * K + k[None, :], live[:, None] & (k < K)[None, :], 0.0)
        c = tl.load(codes + (base + inside)[:, None] * (K // 2) + j[None, :], (j < K // 2)[None, :], 0).to(tl.int16)
        s = tl.load(scales + (base + inside)[:, None] * (K // 32) + g[None, :], (g < K // 32)[None, :], 0).to(tl.int16)
        low = ((c & 7) << 6) | ((c & 8) << 12)
        high = (((c >> 4) & 7) << 6) | (((c >> 4) & 8) << 12)
        w = tl.join(low, high).reshape(BN, BK // 32, 32).to(tl.bfloat16, bitcast=True)
        factor = ((s + 126) << 7).to(tl.bfloat16, bitcast=True)
        w = (w * factor[:, :, None]).reshape(BN, BK)
        acc = tl.dot(a, w.trans(), acc)
    if WEIGHTED:
        acc *= tl.load(weights + pair, live, 0.0).to(tl.float32)[:, None]
    tl.store(out + pair[:, None] * OUT + n[None, :], acc.to(out.dtype.element_ty), live[:, None])


def grouped(
    x: Any, codes: Sequence[Any], scales: Sequence[Any], out: Any, lists: Any, weights: Any, top_k: int, per_token: bool, weighted: bool
) -> None:
    """`codes` [E, N, K / 2] and `scales` of one matrix an expert, or of two whose outputs stand side by side: one launch reads both."""
    order, block_expert, block_first = lists
    each, k = codes[0].shape[1], codes[0].shape[2] * 2
    outputs = each * len(codes)
    pairs = out.shape[0]
    bn, bk = (32, 256) if k >= 1024 else (32, 64)
    _grouped[(pairs, outputs // bn)](
        x, codes[0], scales[0], codes[-1], scales[-1], out, order, block_expert, block_first, weights, pairs, each, outputs, k, top_k,
        per_token, weighted, bn, bk, 16, num_warps=4, num_stages=4,
    )  # fmt: skip


@triton.jit
def _combine(parts, out, L: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr):
    row, k = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for z in tl.static_range(TOP):
        total += tl.load(parts + (row * TOP + z) * L + k, k < L, 0.0).to(tl.float32)
    tl.store(out + row * L + k, total.to(tl.bfloat16), k < L)


def combine(parts: Any, out: Any, top_k: int) -> None:
    rows, latent = out.shape
    _combine[(rows, triton.cdiv(latent, 512))](parts, out, latent, top_k, 512, num_warps=4)


def empty_lists(pairs: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = triton.next_power_of_2(pairs)
    return tuple(torch.zeros(size, dtype=torch.int32, device=device) for _ in range(3))  # type: ignore[return-value]
