"""What each launch of the fused layer costs, from published times of launches alone: a part that moves bytes and a part that does not.

    time = fixed + rows x row + (bytes / rate) / fraction         least squares of relative errors, no term negative

Only the last term becomes shorter on a GPU with a faster memory; the others are chains of latencies (launch, barriers, reductions, polls)
that no data sheet promises to shorten. Shown beside the projections, which rest on whole layers (`model.py`). Launches overlap: `overlap`
is, by rows, the measured layer over the sum of its launches alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from perf.roofline import Traffic

LEAST_SHAPES = 2  # a point each; a fit of one shape says nothing about another
LEAST_SLOWNESS = 0.5
BYTES_COUNT_SHARE = 0.05  # of the time that the bytes need at least; below it in every point the launch is latency


@dataclass(frozen=True, kw_only=True)
class LaunchPoint:
    """One launch measured alone: bytes it must move, token rows of the step, microseconds, its record."""

    op: str
    hbm_bytes: float
    rows: int
    us: float
    evidence: str


@dataclass(frozen=True, kw_only=True)
class LaunchFit:
    """Microseconds; `slowness` is time spent over the memory floor of the measured GPU (0: no byte of it shows in the time)."""

    op: str
    fixed_us: float
    row_us: float
    slowness: float
    points: int
    error: float  # largest |fitted / measured - 1|

    def latency_us(self, rows: int) -> float:
        return self.fixed_us + rows * self.row_us

    def memory_us(self, hbm_bytes: float, bytes_per_s: float) -> float:
        return self.slowness * 1e6 * hbm_bytes / bytes_per_s


@dataclass(frozen=True, kw_only=True)
class LaunchFits:
    by_op: Mapping[str, LaunchFit]
    overlap: Mapping[int, float]
    evidence: tuple[str, ...]

    def overlap_at(self, rows: int) -> float:
        """That of the nearest measured row count."""
        return self.overlap[min(self.overlap, key=lambda known: abs(np.log(known / max(rows, 1))))]

    def parts_us(self, launches: Iterable[Traffic], rows: int, bytes_per_s: float) -> tuple[float, float, list[Traffic]]:
        """(latency, memory) in microseconds of the launches that were fitted, overlap taken off, and the launches that were not."""
        latency = memory = 0.0
        others = []
        overlap = self.overlap_at(rows)
        for launch in launches:
            fit = self.by_op.get(launch.op)
            if fit is None:
                others.append(launch)
                continue
            latency += overlap * fit.latency_us(rows)
            memory += overlap * fit.memory_us(launch.hbm_bytes, bytes_per_s)
        return latency, memory, others


def fit_launch(points: Sequence[LaunchPoint], bytes_per_s: float) -> LaunchFit:
    """Raises ValueError for no point."""
    if not points:
        raise ValueError("launch fit: got no point, needs at least one")
    measured, ideal = np.array([p.us for p in points]), np.array([1e6 * p.hbm_bytes / bytes_per_s for p in points])
    table = np.array([[1.0, p.rows, us] for p, us in zip(points, ideal, strict=True)])
    (fixed, row, slowness), _ = nnls(table / measured[:, None], np.ones(len(points)))
    # Few bytes, or bytes that seem to move at twice the memory's rate and more: the fit took latency for them, or latency hides them.
    if float((ideal / measured).max()) < BYTES_COUNT_SHARE or slowness < LEAST_SLOWNESS:
        table[:, 2] = 0.0
        (fixed, row, slowness), _ = nnls(table / measured[:, None], np.ones(len(points)))
    error = float(np.abs(table @ np.array([fixed, row, slowness]) / measured - 1).max())
    return LaunchFit(op=points[0].op, fixed_us=float(fixed), row_us=float(row), slowness=float(slowness), points=len(points), error=error)


def fit_launches(
    points: Iterable[LaunchPoint], layers: Iterable[tuple[Sequence[Traffic], int, float]], bytes_per_s: float
) -> LaunchFits | None:
    """Fits of every launch with enough points; None where some launch of the measured layers has too few.

    Args:
        layers: (launches, rows, measured microseconds) of whole layers, which tell the overlap.
    """
    grouped: dict[str, list[LaunchPoint]] = {}
    for point in points:
        grouped.setdefault(point.op, []).append(point)
    kept = tuple(layers)
    needed = {launch.op for launches, _, _ in kept for launch in launches}
    if not needed or any(len({(p.hbm_bytes, p.rows) for p in grouped.get(op, ())}) < LEAST_SHAPES for op in needed):
        return None
    fits = {op: fit_launch(grouped[op], bytes_per_s) for op in sorted(needed)}
    alone = LaunchFits(by_op=fits, overlap={1: 1.0}, evidence=())
    ratios: dict[int, list[float]] = {}
    for launches, rows, us in kept:
        ratios.setdefault(rows, []).append(us / sum(alone.parts_us(launches, rows, bytes_per_s)[:2]))
    evidence = tuple(dict.fromkeys(p.evidence for op in sorted(needed) for p in grouped[op]))
    return LaunchFits(by_op=fits, overlap={rows: statistics.median(r) for rows, r in sorted(ratios.items())}, evidence=evidence)
