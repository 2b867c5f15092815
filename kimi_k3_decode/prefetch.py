"""Which bytes a side stream pulls into L2 while mailboxes wait: the *next* static weights, and nothing else.

A prefetch may run at any time, before any wait. That is safe for `weight` operands only: everything else may still be written, and a
line pulled early would be stale where the cache is not coherent with its writer. So ranges are built from contracts, by role, and any
other role is refused by name. Routed experts are left out: which of them are read is known only after routing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kimi_k3_decode.launches import Launch
from kimi_k3_decode.ops.contract import Access, ContractError, Role

# Chosen by routing, so most of their bytes would be pulled for nothing.
ROUTED_OPS = ("experts_up", "experts_down")


@dataclass(frozen=True, kw_only=True)
class Range:
    """`size_bytes` from `begin_bytes` of one weight buffer; `launch` is its reader."""

    launch: str
    operand: str
    buffer: str
    begin_bytes: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """Issued on the side stream after launch `after` has published, while launch `during` polls its mailbox."""

    after: str
    during: str
    ranges: tuple[Range, ...]

    @property
    def size_bytes(self) -> int:
        return sum(r.size_bytes for r in self.ranges)


def weight_ranges(launch: Launch, operands: Iterable[str] | None = None) -> tuple[Range, ...]:
    """Whole-buffer ranges of `operands` (all weights of the launch when None).

    Raises ContractError naming every operand whose role is not `weight`, and every unknown one.
    """
    names = [o.name for o in launch.contract.of_role(Role.WEIGHT)] if operands is None else list(operands)
    reasons = []
    for name in names:
        if name not in launch.contract:
            reasons.append(f"{launch.id}.{name}: got no such operand, needs one of {list(launch.contract.names)}")
        elif launch.contract[name].role is not Role.WEIGHT:
            reasons.append(f"{launch.id}.{name}: got role {launch.contract[name].role.value}, needs weight; it may still be written")
    if reasons:
        raise ContractError("prefetch", reasons)
    found = []
    for name in names:
        size = launch.contract[name].bytes
        if size is not None:
            found.append(Range(launch=launch.id, operand=name, buffer=launch.bindings[name][0], begin_bytes=0, size_bytes=size))
    return tuple(found)


def prefetch_plan(launches: Sequence[Launch], budget_bytes: int) -> list[Prefetch]:
    """For every wait on a mailbox, the weights of the launches behind it in issue order, at most `budget_bytes` a wait.

    A weight is pulled once, by the nearest wait before its reader with room left; a range is cut where the budget ends. Raises ValueError
    for a budget below one byte.
    """
    if budget_bytes < 1:
        raise ValueError(f"budget_bytes: got {budget_bytes}, needs >= 1; a share of the L2 size")
    writers: dict[str, int] = {}
    plan, done = [], 0
    for index, launch in enumerate(launches):
        boxes = launch.contract.of_role(Role.MAILBOX)
        polled = [launch.bindings[o.name][0] for o in boxes if o.access is Access.READ_WRITE]
        if polled:
            after = max(writers[name] for name in polled)
            done, ranges = _next_ranges(launches, max(done, index + 1), budget_bytes)
            if ranges:
                plan.append(Prefetch(after=launches[after].id, during=launch.id, ranges=ranges))
        writers.update({launch.bindings[o.name][0]: index for o in boxes if o.access is Access.WRITE})
    return plan


def _next_ranges(launches: Sequence[Launch], begin: int, budget_bytes: int) -> tuple[int, tuple[Range, ...]]:
    """Ranges from launch number `begin` on until the budget is full; also the first launch not yet covered."""
    left, found = budget_bytes, []
    for index in range(begin, len(launches)):
        if launches[index].op in ROUTED_OPS:
            continue
        for whole in weight_ranges(launches[index]):
            size = min(whole.size_bytes, left)
            if size:
                found.append(Range(launch=whole.launch, operand=whole.operand, buffer=whole.buffer, begin_bytes=0, size_bytes=size))
            left -= size
        if not left:
            return index + 1, tuple(found)
    return len(launches), tuple(found)
