"""Two sets of evidence, cell by cell: is anything slower than before, by more than the policy allows?

A cell is one check, case, rank, GPU and timed thing; each launch of a layer whose times were kept is a cell of its own, so that a slow-down
of one launch is found although the layer hides it, and named with the layer that holds it. Per cell: the ratio candidate over base with an
interval, and a p-value for "slower than the margin". Holm's step-down over all cells decides which slow-downs count.

fail         some cell is slower beyond the margin
not_proven   a cell of the base is missing, or its times are too scattered or too few to exclude a slow-down beyond the margin
pass         every cell of the base was measured again and each interval lies below the margin
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats as distributions

from perf.stats import holm
from validation.core.store import read_evidence, read_run
from validation.core.types import Evidence, HarnessError, Outcome, Status
from validation.core.verify import verify
from validation.policy import load_policy

ALPHA = 0.05
# Profiles are left out: their few passes carry an order of launches, not a time that two runs could be compared by.
SPEED_CHECKS = re.compile(r"perf\..*|published\.(kernel_layers|kernel_launches|kernel_steps|layer|ops)")
# What a measure is worth, and what stock takes, is no speed of this code: stock on another level is no slow-down of the candidate.
NO_CELL = re.compile(r"without_.*|stock(_again)?")
LEAST_SAMPLES = 3
NORMAL_IQR = 1.349  # interquartile range of a normal distribution in standard deviations
MEDIAN_EFFICIENCY = 1.2533  # standard error of a median over that of a mean, for normal samples


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of one cell in microseconds: samples, or a median with quartiles of `n` samples (1 where the record does not say)."""

    samples: tuple[float, ...] = ()
    median: float = math.nan
    low: float = math.nan
    high: float = math.nan
    n: int = 1
    evidence: str = ""

    @property
    def center(self) -> float:
        return float(np.median(self.samples)) if self.samples else self.median

    @property
    def log_error(self) -> float:
        """Standard error of the logarithm of the median; NaN when nothing tells it."""
        if len(self.samples) >= LEAST_SAMPLES:
            logs = np.log(np.asarray(self.samples))
            spread = max(float(np.subtract(*np.percentile(logs, [75, 25]))) / NORMAL_IQR, float(logs.std(ddof=1)) / 3)
            return MEDIAN_EFFICIENCY * spread / math.sqrt(len(self.samples))
        if self.low > 0 and self.high > 0:
            return MEDIAN_EFFICIENCY * math.log(self.high / self.low) / NORMAL_IQR / math.sqrt(self.n)
        return math.nan


@dataclass(frozen=True, kw_only=True)
class CellChange:
    """Candidate over base: above 1 is slower. `low` and `high` bound the ratio at 95 %."""

    cell: str
    ratio: float
    low: float
    high: float
    p_slower: float
    slower: bool
    base: str  # evidence ids
    candidate: str


@dataclass(frozen=True, kw_only=True)
class Change:
    margin: float
    cells: tuple[CellChange, ...]  # slowest first
    missing: tuple[str, ...]  # cells of the base that the candidate did not measure

    @property
    def slower(self) -> tuple[CellChange, ...]:
        return tuple(cell for cell in self.cells if cell.slower)

    @property
    def undecided(self) -> tuple[CellChange, ...]:
        return tuple(cell for cell in self.cells if not cell.slower and not cell.high <= 1 + self.margin)

    @property
    def status(self) -> Status:
        if self.slower:
            return Status.FAIL
        return Status.NOT_PROVEN if self.missing or self.undecided or not self.cells else Status.PASS


def times_of(records: Iterable[Evidence], gpu: str) -> dict[str, Times]:
    """Every timed cell of a run: measurements in us with samples, or `x_us` beside `x_low_us` and `x_high_us`; and a layer's launches.

    A raw record keeps the samples of `x_us` in its details as `x_samples`.
    """
    found: dict[str, Times] = {}
    for record in records:
        if not SPEED_CHECKS.fullmatch(record.check) or record.outcome is not Outcome.MEASURED:
            continue
        # Raw records are numbered as they come; the number is no part of the setting.
        setting = "-".join([record.case.subject, *(f"{k}{v}" for k, v in record.case.params.items() if k != "n")])
        place = f"{record.check} {setting} rank{record.rank} {gpu}"
        values = {m.name: m for m in record.measurements if m.unit == "us"}
        replays = next((int(m.value) for m in record.measurements if m.name in ("replays", "replays_count") and m.value >= 1), 1)
        for name, one in values.items():
            stem = name.removesuffix("_us")
            low, high = values.get(f"{stem}_low_us"), values.get(f"{stem}_high_us")
            if stem.endswith(("_low", "_high")) or stem.split(".")[-1] in ("floor", "low", "high") or NO_CELL.fullmatch(stem):
                continue
            samples = one.samples or _samples(record.details.get(f"{stem}_samples"))
            if samples:
                found[f"{place} {stem}"] = Times(samples=samples, evidence=record.id)
            elif low is not None and high is not None:
                found[f"{place} {stem}"] = Times(median=one.value, low=low.value, high=high.value, n=replays, evidence=record.id)
        found |= _launches(record, place)
    return found


def _samples(value: Any) -> tuple[float, ...]:
    """Three numbers or more; nothing else is a sample."""
    given = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in given)
    return tuple(float(x) for x in given) if numbers and len(given) >= LEAST_SAMPLES else ()


def _launches(record: Evidence, place: str) -> dict[str, Times]:
    """`details["launches"]`: launch -> samples in microseconds."""
    table = record.details.get("launches")
    if not isinstance(table, Mapping):
        return {}
    sampled = {name: _samples(samples) for name, samples in table.items()}
    return {f"{place} launch {name}": Times(samples=samples, evidence=record.id) for name, samples in sampled.items() if samples}


def compare_times(base: Mapping[str, Times], candidate: Mapping[str, Times], margin: float, *, alpha: float = ALPHA) -> Change:
    """Raises HarnessError for a margin that is no share, or a base without a timed cell."""
    if not 0 <= margin < 1:
        raise HarnessError(f"margin: got {margin}, needs a share of at least 0 and below 1")
    if not base:
        raise HarnessError("compare: got no timed cell in the base, needs at least one; its checks are perf.* or published layers")
    both = [name for name in base if name in candidate]
    judged = [_change(name, base[name], candidate[name], margin) for name in both]
    rejected, _ = holm([cell.p_slower for cell in judged], alpha)
    cells = [CellChange(**{**vars(cell), "slower": bad}) for cell, bad in zip(judged, rejected, strict=True)]
    return Change(
        margin=margin,
        cells=tuple(sorted(cells, key=lambda cell: (not cell.slower, -cell.ratio))),
        missing=tuple(name for name in base if name not in candidate),
    )


def _change(name: str, base: Times, candidate: Times, margin: float) -> CellChange:
    ratio = candidate.center / base.center if base.center > 0 else math.nan
    error = math.hypot(base.log_error, candidate.log_error)
    known = math.isfinite(ratio) and ratio > 0 and math.isfinite(error)
    if known and replace(base, evidence="") == replace(candidate, evidence=""):
        error = 0.0  # the same times, not taken again: there is nothing between them
    # Few samples: Student's t with the smaller side's degrees of freedom, which errs towards "not proven".
    freedom = max(1, min(len(base.samples) or base.n, len(candidate.samples) or candidate.n) - 1)
    scale = max(error, 1e-9) if known else math.nan
    reach = float(distributions.t.ppf(0.975, freedom)) * scale
    p = float(distributions.t.sf((math.log(ratio) - math.log1p(margin)) / scale, freedom)) if known else 1.0
    return CellChange(
        cell=name,
        ratio=ratio,
        low=ratio * math.exp(-reach) if known else 0.0,
        high=ratio * math.exp(reach) if known else math.inf,
        p_slower=p,
        slower=False,
        base=base.evidence,
        candidate=candidate.evidence,
    )


def compare_folders(base: Path, candidate: Path, *, margin: float | None = None) -> Change:
    """Compare two run folders. Raises HarnessError when one cannot be read or the base holds no timed cell."""
    allowed = load_policy().limit("perf", "slowdown_max") if margin is None else margin
    return compare_times(read_times(base), read_times(candidate), allowed)


def read_times(folder: Path) -> dict[str, Times]:
    """Every timed cell of a run folder. Raises HarnessError when it cannot be read, or holds records that were changed."""
    run = read_run(folder)
    changed = verify(folder).problems
    if changed:
        raise HarnessError(f"compare: got {folder} with {changed[0].kind} {changed[0].where}, needs the records as measured")
    gpus: Any = run.hardware.get("gpus") or [{}]
    first = gpus[0] if isinstance(gpus, list | tuple) and gpus and isinstance(gpus[0], Mapping) else {}
    gpu = str(run.hardware.get("gpu") or first.get("name") or run.hardware.get("cpu") or "unknown")
    return times_of(read_evidence(folder), gpu)


def lines(change: Change, shown: int = 15) -> list[str]:
    """What a person reads: the verdict's reasons, worst first, each with both evidence ids."""
    text = [
        f"slower: {c.cell}: {c.ratio:.3f} ({c.low:.3f}..{c.high:.3f}) of the base, allowed {1 + change.margin:.3f} "
        f"({c.base} -> {c.candidate})"
        for c in change.slower[:shown]
    ]
    text += [f"missing: {name}" for name in change.missing[:shown]]
    text += [
        f"cannot tell: {c.cell}: {c.ratio:.3f} ({c.low:.3f}..{c.high:.3f}), allowed {1 + change.margin:.3f}; measure with more replays"
        for c in change.undecided[:shown]
    ]
    n = (len(change.slower), len(change.missing), len(change.undecided))
    return [*text, f"{change.status.value}: {len(change.cells)} cells compared, {n[0]} slower, {n[1]} missing, {n[2]} undecided"]
