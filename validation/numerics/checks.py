"""The numerics lane: its checks, cases and limits. Light to import; the measuring is in the other modules of this package.

Every limit on an error is a ratio: the candidate's error against the FP64 oracle over stock's own error against it, on the same tokens
and from the same caches. `forced` uses the oracle's expert choices in every path, so that a near tie in the router does not hide or fake
an error; `free` lets each path choose, as in service.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kimi_k3_decode.config import NANO
from validation.core.types import Case, Check, Limit, Measurement, Target

ROLES = ("candidate", "oracle", "stock")
ERROR_RATIO = 1.5
# A fault that hits a few tokens hard moves neither a typical token nor, beyond doubt, a heavy-tailed mean.
OUTLIER_FACTOR = 10.0
OUTLIER_SHARE = 0.03
SHAPES = ("narrow", "wide", "eight")
# (requests, tokens a request and step) of the end-to-end cases: one row up to the bound of 64, as decode and as verify steps.
END_TO_END_SHAPES = ((1, 1), (8, 1), (64, 1), (1, 8), (8, 8))
NEAR_TOKENS = (1024, 4096, 16384, 32768)
FAR_TOKENS = (65536, 131072, 262144, 1048575)

_CALIBRATED = "calibrated: at most this multiple of the stock path's own error against the FP64 oracle on the same tokens"


def _at_most(name: str, bound: float, why: str, unit: str = "1") -> Limit:
    return Limit(measurement=name, op="<=", bound=bound, unit=unit, why=why)


def _sound(count: str) -> tuple[Limit, ...]:
    """What every case must show besides its errors."""
    return (
        Limit(measurement="non_finite", op="==", bound=0, unit="count", why="no NaN or infinity in outputs, pages, windows or states"),
        Limit(measurement=count, op=">=", bound=1, unit="count", why="a comparison of nothing proves nothing"),
        Limit(
            measurement="stock_error", op=">", bound=0, unit="nats" if count == "tokens" else "1", why="stock itself must be off the oracle"
        ),
    )


def _routed(routing: str) -> tuple[Limit, ...]:
    """The typical token decides by its point estimate, the heavy tail only where even the low end of its interval is too large."""
    typical = f"{_CALIBRATED}; geometric mean over tokens of the RMS log-probability error, {routing} routing"
    tail = "RMS over tokens: violated when the whole 95 % bootstrap interval lies above the calibrated limit"
    kl = "KL grows with the square of the error, so the square of its limit; the whole interval must lie above to violate"
    return (
        _at_most(f"{routing}_error_ratio", ERROR_RATIO, typical),
        _at_most(f"{routing}_rms_ratio_low", ERROR_RATIO, tail),
        _at_most(f"{routing}_kl_ratio_low", ERROR_RATIO**2, kl),
    )


def _outliers(routing: str) -> Limit:
    why = f"share of tokens more than {OUTLIER_FACTOR:g} times worse than in stock; equal paths show hardly any"
    return _at_most(f"{routing}_outlier_share", OUTLIER_SHARE, why, unit="share")


@dataclass(frozen=True, kw_only=True)
class SublayerCheck:
    """Every sublayer of every layer on inputs of a real prefill, in decode and verify steps."""

    id: str = "numerics.sublayer"
    claim: str = "C-NUM-1"
    roles: tuple[str, ...] = ROLES
    must_kill: tuple[str, ...] = ("kda_state_transposed", "expert_scale_dropped", "conv_taps_shifted")

    def cases(self) -> Iterable[Case]:
        for layer in range(NANO.n_layers):
            parts = ("attention", "kda_before_norm", "mlp") if NANO.is_kda(layer) else ("attention", "mlp")
            for part in parts:
                for shape in SHAPES:
                    yield Case(subject=part, params={"layer": layer, "shape": shape})

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return (_at_most("error_ratio", ERROR_RATIO, f"{_CALIBRATED}; relative RMS of the sublayer's output"), *_sound("rows"))

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from validation.numerics.measure import measure_sublayer

        return measure_sublayer(case, targets)


@dataclass(frozen=True, kw_only=True)
class EndToEndCheck:
    """The whole model after short prefills, over the batch shapes that choose different kernels."""

    id: str = "numerics.end_to_end"
    claim: str = "C-NUM-2"
    roles: tuple[str, ...] = ROLES
    must_kill: tuple[str, ...] = ("kda_state_transposed", "conv_taps_shifted")

    def cases(self) -> Iterable[Case]:
        return [Case(subject="model", params={"requests": n, "q": q}) for n, q in END_TO_END_SHAPES]

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return (*_routed("forced"), *_routed("free"), *_sound("tokens"))

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from validation.numerics.measure import measure_end_to_end

        return measure_end_to_end(case, targets)


@dataclass(frozen=True, kw_only=True)
class LongContextCheck:
    """Per token, at the end of contexts filled by one real prefill. Flips and free routing are judged over all contexts together."""

    id: str = "numerics.long_context"
    claim: str = "C-NUM-3"
    roles: tuple[str, ...] = ROLES
    must_kill: tuple[str, ...] = ("kda_state_transposed", "conv_taps_shifted")
    time_limit_s: float = 900.0

    def cases(self) -> Iterable[Case]:
        return [Case(subject="model", params={"context_tokens": n}) for n in NEAR_TOKENS]

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return (*_routed("forced"), *_sound("tokens"))

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from validation.numerics.measure import measure_near

        return measure_near(case, targets)


@dataclass(frozen=True, kw_only=True)
class FarContextCheck:
    """Per token, at boundary and maximum positions over synthetic caches. Experts are forced: the caches are nobody's text."""

    id: str = "numerics.far_context"
    claim: str = "C-NUM-4"
    roles: tuple[str, ...] = ROLES
    must_kill: tuple[str, ...] = ()
    time_limit_s: float = 900.0

    def cases(self) -> Iterable[Case]:
        return [Case(subject="model", params={"position": n}) for n in FAR_TOKENS]

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return (*_routed("forced"), *_sound("tokens"))

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from validation.numerics.measure import measure_far

        return measure_far(case, targets)


@dataclass(frozen=True, kw_only=True)
class OverallCheck:
    """All windows together: overall ratios, agreement, and whether the candidate ages faster than stock as the position grows."""

    id: str
    claim: str
    subject: str  # "near" | "far"
    roles: tuple[str, ...] = ROLES
    must_kill: tuple[str, ...] = ()
    time_limit_s: float = 900.0

    def cases(self) -> Iterable[Case]:
        return [Case(subject=self.subject)]

    def limits(self, case: Case) -> tuple[Limit, ...]:
        free = (*_routed("free"), _outliers("free")) if self.subject == "near" else ()
        why = "growth of the log error ratio per doubling of the position: above this even at the low end of its 95 % interval is drift"
        agree = "share of tokens on which the candidate loses the oracle's choice, beyond stock's own"
        return (
            *_routed("forced"),
            _outliers("forced"),
            *free,
            _at_most("drift_low", 0.05, why, unit="1/doubling"),
            _at_most("agreement_loss", 0.05, agree, unit="share"),
            *_sound("tokens"),
        )

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from validation.numerics.measure import measure_overall

        return measure_overall(case, targets)


def checks() -> list[Check]:
    from validation.numerics.edges import edge_checks

    return [
        SublayerCheck(),
        *edge_checks(),
        EndToEndCheck(),
        LongContextCheck(),
        OverallCheck(id="numerics.long_context_overall", claim="C-NUM-3", subject="near"),
        FarContextCheck(),
        OverallCheck(id="numerics.far_context_overall", claim="C-NUM-4", subject="far"),
    ]
