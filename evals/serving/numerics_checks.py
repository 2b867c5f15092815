"""The numerics lane behind two servers: per-token differences on the decode path, judged against stock's own noise.

There is no oracle over HTTP. Stock is run twice instead, in ways that must not matter, and the candidate may be off stock's first run at
most by a factor of what stock's second run is off it: the same statistics as the embedded lane, with stock's repetition in stock's place.
Why that factor is 2: `noise_rule.py`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals.serving.broker import config_of
from evals.serving.config import NumericsConfig
from evals.serving.noise_rule import NOISE_FACTOR
from validation.core.settings import Settings
from validation.core.types import Case, Check, Limit, Measurement

if TYPE_CHECKING:
    from evals.serving.passes import Passes

CLAIM = "C-SERVE-2"
ROLES = ("candidate", "stock")
MUST_KILL = ("expert_scale_dropped",)
TIME_LIMIT_S = 7 * 86400.0
FACTOR = NOISE_FACTOR
OUTLIER_FACTOR, OUTLIER_SHARE = 10.0, 0.03
COVERED_SHARE = 0.95
_CALIBRATED = "calibrated: at most this multiple of stock's own noise (again, among other requests, with another share of prefill)"


def _limit(name: str, op: str, bound: float, unit: str, why: str) -> Limit:
    return Limit(measurement=name, op=op, bound=bound, unit=unit, why=why)


def _ratios(prefix: str, factor: float) -> tuple[Limit, ...]:
    tail = "violated only when the whole bootstrap interval over blocks of tokens lies above the calibrated limit"
    return (
        _limit(f"{prefix}noise_ratio_low", "<=", factor, "1", f"{_CALIBRATED}; geometric mean over tokens, the low end of its interval"),
        _limit(f"{prefix}rms_noise_ratio_low", "<=", factor, "1", f"RMS over tokens: {tail}"),
        _limit(f"{prefix}kl_noise_ratio_low", "<=", factor**2, "1", f"KL grows with the square of the error: {tail}"),
    )


_SOUND = (
    _limit("non_finite", "==", 0, "count", "no NaN or infinity among the log-probabilities"),
    _limit("tokens", ">=", 1, "count", "a comparison of nothing proves nothing"),
    _limit("noise_floor", ">", 0, "nats", "stock's noise must be seen before anything is judged against it"),
)


@dataclass(frozen=True, kw_only=True)
class DecodeCheck:
    """One context length: every token of its windows."""

    id: str = "numerics.serving.decode"
    claim: str = CLAIM
    roles: tuple[str, ...] = ROLES
    must_kill: tuple[str, ...] = MUST_KILL
    profiles: tuple[str, ...] = ("serving",)
    time_limit_s: float = TIME_LIMIT_S

    def cases(self) -> Iterable[Case]:
        return _cases(NumericsConfig().bins, FACTOR, 1)

    def cases_of(self, settings: Settings) -> Iterable[Case]:
        config = config_of(settings)
        return _cases(config.numerics.bins, config.gate.noise_factor, len(config.candidate.base_url))

    def limits(self, case: Case) -> tuple[Limit, ...]:
        factor = float(case.params.get("factor", FACTOR))
        return (*_ratios("", factor), *_ratios("mixed_", factor), *_SOUND)

    def measure(self, case: Case, targets: Mapping[str, Any]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from evals.serving.noise import measure_contexts

        return measure_contexts(collected(targets, case), (int(case.params["context_tokens"]),))


@dataclass(frozen=True, kw_only=True)
class OverallCheck:
    """All contexts together: drift with the length, agreement, outliers, and whether the served maximum was reached."""

    id: str = "numerics.serving.overall"
    claim: str = CLAIM
    roles: tuple[str, ...] = ROLES
    must_kill: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ("serving",)
    time_limit_s: float = TIME_LIMIT_S

    def cases(self) -> Iterable[Case]:
        return _overall_cases(1)

    def cases_of(self, settings: Settings) -> Iterable[Case]:
        return _overall_cases(len(config_of(settings).candidate.base_url))

    def limits(self, case: Case) -> tuple[Limit, ...]:
        drift = "growth of the log error ratio per doubling of the position: above this even at the low end of its 95 % interval is drift"
        agree = "share of tokens on which the candidate chooses another token than stock, beyond stock's own noise"
        wild = f"share of tokens more than {OUTLIER_FACTOR:g} times further off than stock's noise is in the mean"
        return (
            *_ratios("", FACTOR),
            _limit("drift_low", "<=", 0.05, "1/doubling", drift),
            _limit("agreement_loss", "<=", 0.05, "share", agree),
            _limit("outlier_share", "<=", OUTLIER_SHARE, "share", wild),
            _limit("covered_share", ">=", COVERED_SHARE, "share", "the longest context reaches the served maximum"),
            *_SOUND,
        )

    def measure(self, case: Case, targets: Mapping[str, Any]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from evals.serving.noise import measure_overall

        return measure_overall(collected(targets, case), COVERED_SHARE, OUTLIER_FACTOR)


def _cases(bins: Sequence[int], factor: float, replicas: int) -> list[Case]:
    """One a context and replica of the candidate: a replica with a fault must not vanish among sound ones."""
    tighter = {"factor": factor} if factor != FACTOR else {}
    return [Case(subject="served", params={"context_tokens": n, **tighter, **which}) for n in bins for which in _replicas(replicas)]


def _overall_cases(replicas: int) -> list[Case]:
    return [Case(subject="all-contexts", params=which) for which in _replicas(replicas)]


def _replicas(replicas: int) -> list[dict[str, int]]:
    return [{"replica": k} if k > 1 else {} for k in range(1, max(1, replicas) + 1)]


def collected(targets: Mapping[str, Any], case: Case) -> Passes:
    """The passes over all contexts, measured on the first call and read from their files afterwards. Raises Refused."""
    from evals.serving.passes import Passes

    folder = Path(os.environ.get("FASTTRACK_SCRATCH") or tempfile.mkdtemp())
    passes = Passes(targets["stock"].config.numerics, targets, folder / "forced", int(case.params.get("replica", 1)))
    passes.collect()
    return passes


def checks() -> list[Check]:
    return [DecodeCheck(), OverallCheck()]
