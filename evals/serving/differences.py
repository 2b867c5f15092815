"""Per-token differences between two forced windows, in the terms of the embedded lane (`validation.numerics.errors`).

A server tells its k most likely tokens only. Over the reference's tokens the other's log-probability is known, or known to be below the
smallest one it tells; that bound then stands for it, so that a wrong distribution cannot hide behind what it leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from evals.serving.forced import Position
from validation.numerics.errors import TokenErrors


def position_errors(reference: Sequence[Position], other: Sequence[Position]) -> TokenErrors:
    """`other` against `reference` at the same forced tokens. Raises ValueError when they are not the same."""
    if [p.token for p in reference] != [p.token for p in other]:
        raise ValueError(f"windows: got {len(reference)} and {len(other)} forced tokens that differ, needs the same text on both sides")
    rows = [_row(a, b) for a, b in zip(reference, other, strict=True)]

    def column(index: int) -> torch.Tensor:
        return torch.tensor([row[index] for row in rows], dtype=torch.float64)

    return TokenErrors(
        kl=column(0),
        rms=column(1),
        largest=column(2),
        agrees=column(3).bool(),
        margin=column(4),
        lead_lost=column(5),
        non_finite=sum(int(row[6]) for row in rows),
    )


def _row(reference: Position, other: Position) -> tuple[float, ...]:
    expected = sorted(reference.top.items(), key=lambda item: (-item[1], item[0]))
    got = other.top
    bad = sum(not math.isfinite(value) for value in got.values())
    margin = expected[0][1] - expected[1][1] if len(expected) > 1 else math.inf
    if bad or not got or any(not math.isfinite(value) for _, value in expected):
        return (math.nan, math.nan, math.nan, 0.0, margin, math.nan, float(max(bad, 1)))
    floor = min(got.values())
    # (reference, other) of every token that both tell, or whose bound already lies below the reference
    known = [(value, got.get(token, floor)) for token, value in expected if token in got or value > floor]
    errors = [theirs - ours for ours, theirs in known]
    best, choice = expected[0][0], min(got, key=lambda token: (-got[token], token))
    lost = expected[0][1] - reference.top.get(choice, expected[-1][1]) if choice != best else 0.0
    rms = math.sqrt(math.fsum(e * e for e in errors) / len(errors)) if errors else math.nan
    largest = max(abs(e) for e in errors) if errors else math.nan
    return (_divergence(known), rms, largest, float(choice == best), margin, lost, 0.0)


def _divergence(known: Sequence[tuple[float, float]]) -> float:
    """KL(reference || other) with everything outside `known` as one outcome: a lower bound of the whole divergence, in nats."""
    inside = math.fsum(math.exp(ours) * (ours - theirs) for ours, theirs in known)
    left, right = (max(0.0, 1.0 - math.fsum(math.exp(pair[side]) for pair in known)) for side in (0, 1))
    if left <= 0.0:
        return max(0.0, inside)
    return max(0.0, inside + left * (math.log(left) - math.log(right))) if right > 0.0 else math.inf
