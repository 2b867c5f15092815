"""The trainable chunked KDA recurrence: `fla-core`'s kernel on a GPU, a plain chunked form elsewhere.

`S_t = diag(exp g_t) S_{t-1} + k_t u_t^T` with `u_t = beta_t (v_t - k_t^T diag(exp g_t) S_{t-1})` and `o_t = q_t^T S_t`
(Kimi Linear, arXiv 2510.26692).
With G the running sum of g inside a chunk, the writes of a chunk solve a unit lower-triangular system, so a chunk costs a few products.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

USE_KERNEL = True  # False: the plain form on a GPU too, where a few hundred steps do not repay compiling kernels
CHUNK = 16  # exp(16 * 5) still fits float32: the gate never falls below -5 a token


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def bounded_gate(raw_BTHK: torch.Tensor, a_log_H: torch.Tensor, bias_HK: torch.Tensor, lower_bound: float) -> torch.Tensor:
    """Log decay per key channel, in (lower_bound, 0)."""
    return lower_bound * torch.sigmoid(a_log_H.exp().unsqueeze(-1) * (raw_BTHK + bias_HK))


def chunked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """o [B, T, H, V] from q, k, g [B, T, H, K], v [B, T, H, V] and beta [B, T, H]; q and k are normalised and scaled."""
    batch, tokens, heads, _ = q.shape
    padding = -tokens % CHUNK
    parts = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v, g, beta.unsqueeze(-1))]
    q, k, v, g, beta = (x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4) for x in parts)  # [B, H, N, C, *]
    total = g.cumsum(-2)
    reading, writing, query = k * total.exp(), k * (-total).exp(), q * total.exp()
    lower = beta * (reading @ writing.mT).tril(-1)
    unit = torch.eye(CHUNK, dtype=q.dtype, device=q.device) + lower
    solved = torch.linalg.solve_triangular(unit, torch.cat((beta * v, beta * reading), dim=-1), upper=False, unitriangular=True)
    values, corrections = solved.split((v.shape[-1], q.shape[-1]), dim=-1)
    inside = (query @ writing.mT).tril()
    state = q.new_zeros(batch, heads, q.shape[-1], v.shape[-1])
    outputs = []
    for n in range(q.shape[2]):
        update = values[:, :, n] - corrections[:, :, n] @ state
        outputs.append(query[:, :, n] @ state + inside[:, :, n] @ update)
        state = total[:, :, n, -1].exp().unsqueeze(-1) * (state + writing[:, :, n].mT @ update)
    return torch.stack(outputs, dim=2).permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :tokens]


@functools.cache
def _gpu_kernel() -> Callable[..., tuple[torch.Tensor, None]]:
    """`chunk_kda` with one fixed configuration a kernel: tuning them on the spot takes minutes, which a short run does not have."""
    os.environ.setdefault("FLA_CACHE_MODE", "default")
    os.environ.setdefault("FLA_CONFIG_DIR", str(Path(__file__).with_name("fla_configs")))
    from fla.ops.kda import chunk_kda  # a GPU-only extra

    return chunk_kda


def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    bias_HK: torch.Tensor,
    lower: float,
) -> torch.Tensor:
    """The whole recurrence from un-normalised q, k and the raw gate; on CUDA in bf16 through `fla.ops.kda.chunk_kda`."""
    if USE_KERNEL and q.is_cuda and q.dtype == torch.bfloat16:
        out, _ = _gpu_kernel()(
            q=q,
            k=k,
            v=v,
            g=raw,
            beta=beta,
            A_log=a_log,
            dt_bias=bias_HK.flatten(),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            safe_gate=True,
            lower_bound=lower,
            disable_recompute=True,
        )
        return out
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    normal_q, normal_k = l2_normalise(q.to(work)) * q.shape[-1] ** -0.5, l2_normalise(k.to(work))
    gate = bounded_gate(raw.to(work), a_log.to(work), bias_HK.to(work), lower)
    return chunked(normal_q, normal_k, v.to(work), gate, beta.to(work)).to(q.dtype)
