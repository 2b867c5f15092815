"""The schedule lane on contract execution: its checks, cases and limits. Light to import; no GPU.

Here a step runs launch by launch on the host, so these checks prove the plan, the message protocol, the caches and the bookkeeping between
steps. What only real kernels can show is claim C-KERNEL-1. All limits are exact: order, poison and history must not change one bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from validation.core.types import Case, Check, Limit, Measurement, Target

CLAIM = "C-SCHED-1"
REPLAYS = 300


def _zero(name: str, why: str) -> Limit:
    return Limit(measurement=name, op="==", bound=0, unit="count", why=why)


def _least(name: str, bound: int, why: str = "a check of nothing proves nothing") -> Limit:
    return Limit(measurement=name, op=">=", bound=bound, unit="count", why=why)


_SAME = (
    _zero("rows_changed", "not one bit of a row's logits depends on it"),
    _zero("cache_changed", "nor of what the requests keep"),
    _zero("broken", "no step stops with a broken protocol"),
    _least("rows", 1),
)
LIMITS: Mapping[str, tuple[Limit, ...]] = {
    "schedule.ranks": (*_SAME, _least("orders", 4), _least("ranks", 1)),
    "schedule.poison": (
        *_SAME,
        _zero("unwritten", "every element of every output is written in the step that reads it"),
        _least("poisoned", 1),
    ),
    "schedule.replay": (*_SAME, _least("replays", REPLAYS), _least("shapes", 6)),
    "schedule.messages": (
        _zero("bits_lost", "what is not NaN arrives bit for bit, -0.0 included"),
        _zero("nan_lost", "NaN arrives as NaN, whatever its bits"),
        _zero("stuck", "a message whose parts were all published is ready, whatever it holds"),
        _zero("early", "and never before"),
        _zero("overwritten", "nothing is published over words that were not re-armed"),
        _least("messages", 1),
    ),
    "schedule.prefetch": (
        _zero("not_weights", "only static weights are prefetched"),
        _zero("written", "no launch of the step writes what is prefetched"),
        _zero("out_of_bounds", "a range ends within its buffer"),
        _least("ranges", 1),
    ),
    "schedule.acceptance": (
        _zero("steps_wrong", "greedy speculation gives the tokens of plain greedy decode"),
        _zero("rows_ignored", "each draft row's logits depend on its token"),
        Limit(measurement="length_error", op="<=", bound=1e-9, unit="tokens", why="the counted length is the scripted one"),
        Limit(measurement="emitted_error", op="<=", bound=1e-9, unit="tokens", why="AL is tokens gained over verify steps"),
        Limit(measurement="synthetic_error", op="<=", bound=0.02, unit="share", why="realised AL within the tolerance of the policy"),
        _least("steps", 5),
    ),
    "schedule.graph": (
        _zero("races", "every two conflicting accesses of a buffer are ordered by edges, waits or messages"),
        _least("launches", 1),
    ),
}


@dataclass(frozen=True, kw_only=True)
class ScheduleCheck:
    """One rule of the lane; what is measured is the function of the same name in `measure`."""

    id: str
    planned: tuple[Case, ...]
    must_kill: tuple[str, ...] = ()
    claim: str = CLAIM
    roles: tuple[str, ...] = ("candidate", "stock")
    time_limit_s: float = 300.0

    def cases(self) -> Iterable[Case]:
        return self.planned

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return LIMITS[self.id]

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from validation.schedule.measure import MEASURES

        return MEASURES[self.id](case, targets)


def checks() -> list[Check]:
    from validation.schedule.gpu import gpu_checks

    return [
        *gpu_checks(),
        ScheduleCheck(
            id="schedule.messages",
            planned=tuple(Case(subject="mailboxes", params={"tp": tp}) for tp in (2, 4)),
            must_kill=("publish_without_canonical", "rearm_dropped"),
        ),
        ScheduleCheck(
            id="schedule.prefetch",
            planned=tuple(Case(subject=model, params={"tp": tp}) for model, tp in (("nano", 2), ("k3", 8))),
            must_kill=("prefetch_of_inputs",),
        ),
        ScheduleCheck(
            id="schedule.graph",
            planned=tuple(Case(subject="nano", params={"ranks": ranks}) for ranks in (1, 2)),
            must_kill=("edge_to_shared_dropped", "edge_to_tail_dropped"),
        ),
        ScheduleCheck(
            id="schedule.acceptance",
            planned=(Case(subject="speculation"),),
            must_kill=("al_off_by_one", "row_zero_dropped", "synthetic_too_long"),
            roles=("candidate", "oracle", "stock"),
        ),
        ScheduleCheck(
            id="schedule.ranks",
            planned=tuple(Case(subject="ranks", params={"tp": tp}) for tp in (2, 4)),
            must_kill=("one_box_parity",),
        ),
        ScheduleCheck(
            id="schedule.poison",
            planned=tuple(Case(subject="step", params={"requests": n, "q": q}) for n, q in ((3, 1), (9, 1), (3, 4))),
            must_kill=("tail_before_shared", "last_tile_unwritten"),
        ),
        ScheduleCheck(id="schedule.replay", planned=(Case(subject="steps", params={"replays": REPLAYS}),), must_kill=("parity_baked",)),
    ]
