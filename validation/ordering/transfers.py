"""Building blocks of transfer functions: assignments to slots, and the operand orders that many instructions share."""

from __future__ import annotations

from collections.abc import Callable

from validation.ordering.machine import TRASH, Compiler, Op, State, sources_of, split_destinations
from validation.ordering.operands import Operand, register_step
from validation.ordering.values import Value

Operands = tuple[Operand, ...]
Handler = Callable[[Compiler, tuple[str, ...], Operands, list[Op]], None]


def assign(ops: list[Op], target: int, source: int) -> None:
    def op(s: State) -> None:
        s[target] = s[source]

    ops.append(op)


def set_value(ops: list[Op], target: int, value: Value) -> None:
    def op(s: State) -> None:
        s[target] = value

    ops.append(op)


def apply(ops: list[Op], target: int, function: Callable[..., Value], *slots: int) -> None:
    """target = function(slots...), specialised on the number of slots because this is the inner loop of the analysis."""
    if len(slots) == 1:
        a = slots[0]

        def op1(s: State) -> None:
            s[target] = function(s[a])

        ops.append(op1)
    elif len(slots) == 2:
        a, b = slots

        def op2(s: State) -> None:
            s[target] = function(s[a], s[b])

        ops.append(op2)
    elif len(slots) == 3:
        a, b, c = slots

        def op3(s: State) -> None:
            s[target] = function(s[a], s[b], s[c])

        ops.append(op3)
    else:

        def op(s: State) -> None:
            s[target] = function(*[s[slot] for slot in slots])

        ops.append(op)


def clear_predicates(c: Compiler, destinations: list[Operand], ops: list[Op]) -> None:
    for destination in destinations:
        set_value(ops, c.write_register(destination.name), c.domain.data)


def destination(c: Compiler, operand: Operand, step: int = 0) -> int:
    if operand.kind not in ("reg", "pred"):
        return TRASH
    return c.write_register(register_step(operand.name, step) if step else operand.name)


def carry_split(operands: Operands) -> tuple[list[Operand], Operand, list[Operand], list[Operand]]:
    """(result predicates before and after Rd, Rd, sources, trailing predicates) of `OP [P,] Rd, [P, P,] sources, [P, P]`."""
    first, rest = split_destinations(operands)
    target = rest[0]
    second, sources = split_destinations(tuple(rest[1:]))
    values, trailing = sources_of(sources)
    return [*first, *second], target, values, trailing
