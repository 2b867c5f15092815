"""Checks at the edges of the numerics lane: routing scale, padding, slots, accepted and row counts, ties, NaN, state layout.

They run on a few layers of the checkpoint, so the whole set takes seconds. Where a rule is exact (a padding row reaches nobody, a tie goes
to the lower id), bits are compared and the limit is zero; where rounding is involved, the limit is the candidate's error against the FP64
oracle over stock's own. Light to import; the measuring is in `edge_measure.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from validation.core.types import Case, Check, Limit, Measurement, Target

CLAIM = "C-NUM-1"
ROLES = ("candidate", "oracle", "stock")
ERROR_RATIO = 1.5
# |x - y| of two results that are each within 1.5 of stock's error from the oracle: sqrt(2) x 1.5 when their errors are independent.
SPREAD_RATIO = 2.2
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 24, 32, 33, 48, 63, 64)
ACCEPTED = (1, 2, 3, 4, 5, 6, 7, 8)

_CALIBRATED = "calibrated: at most this multiple of the stock path's own error against the FP64 oracle on the same rows"


def _zero(name: str, why: str) -> Limit:
    return Limit(measurement=name, op="==", bound=0, unit="count", why=why)


def _some(name: str) -> Limit:
    return Limit(measurement=name, op=">=", bound=1, unit="count", why="a comparison of nothing proves nothing")


def _ratio(name: str, bound: float = ERROR_RATIO, why: str = _CALIBRATED) -> Limit:
    return Limit(measurement=name, op="<=", bound=bound, unit="1", why=why)


_STOCK_ERRS = Limit(measurement="stock_error", op=">", bound=0, unit="1", why="stock itself must be off the oracle")
_FINITE = _zero("non_finite", "no NaN or infinity where the inputs are finite")

LIMITS: Mapping[str, tuple[Limit, ...]] = {
    "numerics.routing_scale": (_ratio("error_ratio"), _STOCK_ERRS, _FINITE, _some("rows")),
    "numerics.padding": (
        _zero("rows_changed", "padding rows, free pages and slots that hold NaN change no bit of a real row"),
        _zero("cache_changed", "nor of anything that a real request keeps"),
        _zero("null_written", "the null slot and the null page are never written"),
        _some("rows"),
        _some("padding_rows"),
    ),
    "numerics.slots": (
        _zero("rows_changed", "which slots a request owns, and the gaps between them, change no bit"),
        _zero("slots_changed", "no slot of nobody is written, the null slot among them"),
        _zero("states_changed", "what an owned slot holds does not depend on its number"),
        _some("rows"),
        _some("slots"),
    ),
    "numerics.verify": (
        _ratio("error_ratio", why=f"{_CALIBRATED}; the oracle decodes one token a step, the path verifies"),
        _ratio("state_ratio", why=f"{_CALIBRATED}; recurrent states of all slots"),
        _ratio("window_ratio", why=f"{_CALIBRATED}; kept taps of the convolution"),
        _STOCK_ERRS,
        _FINITE,
        _some("rows"),
    ),
    "numerics.row_count": (
        _ratio("error_ratio"),
        _ratio("spread_ratio", SPREAD_RATIO, "a row differs from itself alone by no more than two independent roundings of stock's size"),
        _STOCK_ERRS,
        _FINITE,
        _some("rows"),
    ),
    "numerics.ties": (
        _zero("wrong_ids", "of equal scores the lower expert ids are chosen, in rising order"),
        _FINITE,
        _some("rows"),
    ),
    "numerics.nonfinite": (
        _zero("swallowed", "a NaN or infinity that reaches a row shows in that row's logits"),
        _zero("leaked", "and changes no bit of any other row"),
        _zero("broken", "no bit pattern in the data breaks the step: -0.0, NaN, 0xFFFFFFFF"),
        _zero("minus_zero_differs", "-0.0 is a zero"),
        _some("rows"),
    ),
    "numerics.state_layout": (
        _ratio("error_ratio"),
        _ratio("state_ratio", why=f"{_CALIBRATED}; recurrent states after the step"),
        Limit(measurement="coarse_share", op="<=", bound=0.1, unit="share", why="states are kept in FP32: few values fit BF16 by chance"),
        _STOCK_ERRS,
        _FINITE,
        _some("rows"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class EdgeCheck:
    """One edge; what is measured is the function of the same name in `edge_measure`."""

    id: str
    planned: tuple[Case, ...]
    must_kill: tuple[str, ...] = ()
    claim: str = CLAIM
    roles: tuple[str, ...] = ROLES

    def cases(self) -> Iterable[Case]:
        return self.planned

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return LIMITS[self.id]

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from validation.numerics.edge_measure import MEASURES

        return MEASURES[self.id](case, targets)


def _cases(subject: str, name: str, values: Iterable[Any]) -> tuple[Case, ...]:
    return tuple(Case(subject=subject, params={name: value}) for value in values)


def edge_checks() -> list[Check]:
    """The checks of this module, in the order of their cost."""
    return [
        EdgeCheck(id="numerics.ties", planned=_cases("router", "tie", ("all_equal", "bias_pairs", "twin_experts", "zero_rows")),
                  must_kill=("router_ties_high",)),
        EdgeCheck(id="numerics.routing_scale", planned=_cases("moe", "layer", (1, 3, 6)), must_kill=("router_not_renormalised",)),
        EdgeCheck(id="numerics.padding", planned=_cases("padding", "form", ("bucket", "rows", "verify")), must_kill=("padding_routed",)),
        EdgeCheck(id="numerics.slots", planned=_cases("slots", "form", ("permuted", "gapped", "null")),
                  must_kill=("slots_assumed_dense", "null_slot_written")),
        EdgeCheck(id="numerics.state_layout", planned=_cases("state", "q", (1, 8)), must_kill=("kda_state_transposed",)),
        EdgeCheck(id="numerics.nonfinite", planned=_cases("data", "form", ("nan_state", "nan_page", "nan_head", "patterns")),
                  must_kill=("nan_swallowed",)),
        EdgeCheck(id="numerics.verify", planned=_cases("verify", "accepted", ACCEPTED), must_kill=("kda_wrong_accepted_slot",)),
        EdgeCheck(id="numerics.row_count", planned=_cases("rows", "rows", ROW_COUNTS),
                  must_kill=("depends_on_rows", "autotune_bad_choice")),
    ]  # fmt: skip
