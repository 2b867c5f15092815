"""Error of one path's logits against the oracle's, token by token, and what is made of many tokens: ratios, drift, flips.

Errors are in nats: differences of log-probabilities over the oracle's most likely tokens. Two paths are compared by the ratio of their
errors against the *same* oracle, so a limit on the ratio is calibrated by stock itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

TOP_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class TokenErrors:
    """One path against the oracle over N tokens; all tensors float64 [N], in nats unless named otherwise."""

    kl: torch.Tensor  # KL(oracle || path) over the whole vocabulary
    rms: torch.Tensor  # of the log-probability error over the oracle's top tokens
    largest: torch.Tensor  # absolute, over the same tokens
    agrees: torch.Tensor  # bool: same most likely token
    margin: torch.Tensor  # the oracle's log-probability lead of its first over its second token
    lead_lost: torch.Tensor  # at a flip: how much likelier the oracle holds its own choice than the path's; 0 elsewhere
    non_finite: int  # values of the path's logits that are NaN or infinite


def token_errors(oracle_NV: torch.Tensor, path_NV: torch.Tensor, top: int = TOP_TOKENS) -> TokenErrors:
    """Compare logits [N, V]. A non-finite logit of the path makes its token's errors NaN, which no limit lets pass."""
    expected = torch.log_softmax(oracle_NV.double(), dim=-1)
    got = torch.log_softmax(path_NV.double(), dim=-1)
    bad_N = ~torch.isfinite(path_NV).all(dim=-1)
    got = torch.where(bad_N.unsqueeze(-1), math.nan, got)
    best = expected.topk(min(top, expected.shape[-1]), dim=-1)
    error_NK = got.gather(-1, best.indices) - best.values
    choice_N = torch.where(bad_N, -1, path_NV.argmax(dim=-1))
    agrees_N = choice_N == best.indices[:, 0]
    lost_N = best.values[:, 0] - expected.gather(-1, choice_N.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return TokenErrors(
        kl=(expected.exp() * (expected - got)).sum(-1),
        rms=error_NK.square().mean(-1).sqrt(),
        largest=error_NK.abs().amax(-1),
        agrees=agrees_N,
        margin=best.values[:, 0] - best.values[:, 1],
        lead_lost=torch.where(agrees_N, 0.0, lost_N),
        non_finite=int((~torch.isfinite(path_NV)).sum()),
    )


def concatenate(parts: Sequence[TokenErrors]) -> TokenErrors:
    """Errors over all tokens of several windows."""
    joined = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in ("kl", "rms", "largest", "agrees", "margin", "lead_lost")
    }
    return TokenErrors(**joined, non_finite=sum(part.non_finite for part in parts))


def root_mean_square(values: torch.Tensor) -> float:
    """NaN stays NaN; nothing measured is NaN."""
    return float(values.double().square().mean().sqrt()) if values.numel() else math.nan


def geometric_mean(values: torch.Tensor) -> float:
    """exp(mean(log)): 0 where a value is 0, NaN where one is NaN or nothing was measured. Not led by a few tokens, as an RMS is."""
    return float(values.double().log().mean().exp()) if values.numel() else math.nan


def ratio_low(candidate_N: torch.Tensor, stock_N: torch.Tensor, draws: int = 1000) -> float:
    """Low end of the 95 % bootstrap interval of sum(candidate) / sum(stock) over tokens drawn in pairs; NaN if any value is NaN.

    A ratio of heavy-tailed sums says little by itself; that even its low end is above a limit says much.
    """
    n = candidate_N.numel()
    if n == 0 or bool(candidate_N.isnan().any()) or bool(stock_N.isnan().any()):
        return math.nan
    drawn = torch.randint(n, (draws, n), generator=torch.Generator().manual_seed(n))
    sums = candidate_N.double()[drawn].sum(-1), stock_N.double()[drawn].sum(-1)
    ratios = torch.tensor([ratio(c, s) for c, s in zip(sums[0].tolist(), sums[1].tolist(), strict=True)], dtype=torch.float64)
    return float(ratios.quantile(0.025))


def largest(values: torch.Tensor) -> float:
    """The largest value, NaN if any is NaN or there is none."""
    if not values.numel() or bool(values.isnan().any()):
        return math.nan
    return float(values.max())


def ratio(candidate: float, stock: float) -> float:
    """candidate / stock; 1 when both are exactly zero, infinite when only stock is, NaN when either is."""
    if stock == 0.0:
        return 1.0 if candidate == 0.0 else (math.nan if math.isnan(candidate) else math.inf)
    return candidate / stock


@dataclass(frozen=True, kw_only=True)
class Slope:
    """Least-squares slope with its two-sided 95 % interval."""

    value: float
    low: float
    high: float


def slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Ordinary least squares of y on x. With fewer than three points, or no spread in x, all three numbers are NaN."""
    from scipy import stats

    n = len(x)
    x_N, y_N = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
    if n < 3 or len(set(x)) < 2 or not bool(torch.isfinite(y_N).all()):
        return Slope(value=math.nan, low=math.nan, high=math.nan)
    off_N = x_N - x_N.mean()
    spread = float(off_N.square().sum())
    value = float((off_N * (y_N - y_N.mean())).sum()) / spread
    residual = float((y_N - y_N.mean() - value * off_N).square().sum())
    half = float(stats.t.ppf(0.975, n - 2)) * math.sqrt(residual / (n - 2) / spread)
    return Slope(value=value, low=value - half, high=value + half)


def drift(positions: Sequence[int], candidate: TokenErrors, stock: TokenErrors) -> Slope:
    """Growth of log(candidate error / stock error) per doubling of the position; 0 means that both age alike.

    Equal errors, both zero included, count as a ratio of 1.
    """
    pairs = zip(candidate.rms.tolist(), stock.rms.tolist(), strict=True)
    ratios = [ratio(c, s) for c, s in pairs]
    return slope([math.log2(p) for p in positions], [math.log(r) if r > 0 else math.nan for r in ratios])


def worst_tokens(errors: TokenErrors, tokens: Sequence[int], positions: Sequence[int], count: int = 5) -> list[dict[str, Any]]:
    """The tokens with the largest error, with the text before each; NaN counts as the largest. `tokens[i]` stands at position i."""
    order = torch.argsort(torch.nan_to_num(errors.rms, nan=math.inf), descending=True)[:count].tolist()
    return [
        {
            "position": positions[i],
            "before": "".join(_character(t) for t in tokens[max(0, positions[i] - 39) : positions[i] + 1]),
            "rms_nats": float(errors.rms[i]),
            "largest_nats": float(errors.largest[i]),
            "kl_nats": float(errors.kl[i]),
            "agrees": bool(errors.agrees[i]),
            "margin_nats": float(errors.margin[i]),
        }
        for i in order
    ]


def _character(token: int) -> str:
    return chr(token) if 32 <= token < 127 else ("\\n" if token == 10 else f"<{token}>")
