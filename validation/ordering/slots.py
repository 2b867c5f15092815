"""Values kept in the stack frame or in fixed shared-memory places (register spills), word by word.

A slot is named by a known address (stack: a number; shared: a symbol of the thread's own address plus an offset). What is read from a
place that nothing was seen written to, or through an address that changes, is unknown - never absent.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from validation.ordering import opcodes
from validation.ordering.machine import MEMORY, Compiler, Op, State
from validation.ordering.operands import Operand
from validation.ordering.transfers import destination
from validation.ordering.values import Value

ANY = "any"  # joined content of everything written through a changing stack address


def key_of(c: Compiler, space: str, operand: Operand) -> Callable[[State], Hashable | None]:
    """Function of the state that gives (space, symbol, offset) of the first word, or None when the address is not fixed."""
    low, _, offset = c.address(operand, (), False)
    domain = c.domain

    def key(s: State) -> Hashable | None:
        address = domain.add_values(*[s[slot] for slot in low]) if low else domain.zero
        if address.const is not None:
            return (space, 0, (address.const + offset) & 0xFFFFFFFF)
        if space == "L" or not address.symbol:
            return None
        node = domain.nodes[address.symbol]
        if node[0] == "plus":
            return (space, node[1], (node[2] + offset) & 0xFFFFFFFF)
        return (space, address.symbol, offset & 0xFFFFFFFF)

    return key


def store_slot(c: Compiler, space: str, modifiers: tuple[str, ...], source: Operand, address: Operand, ops: list[Op]) -> None:
    count = opcodes.register_count(modifiers)
    slots = [c.read(source, ops, step) for step in range(count)]
    key, join, bottom, addressable = key_of(c, space, address), c.domain.join, c.domain.bottom, c.domain.addressable

    def op(s: State) -> None:
        memory = s[MEMORY]
        # Tiles staged in shared memory are data; only what may hold an address is worth a slot there.
        if space == "S" and not memory and not any(addressable(s[slot]) for slot in slots):
            return
        first = key(s)
        if first is not None:
            changes = {(first[0], first[1], first[2] + 4 * step): s[slot] for step, slot in enumerate(slots)}  # type: ignore[index]
            if space == "S":
                changes = {place: value for place, value in changes.items() if place in memory or addressable(value)}
        elif space == "L":
            place = (space, ANY, 0)
            joined = memory.get(place, bottom)
            for slot in slots:
                joined = join(joined, s[slot])
            changes = {place: joined}
        else:
            return
        if changes:
            s[MEMORY] = {**memory, **changes}

    ops.append(op)


def load_slot(c: Compiler, space: str, pc: int, modifiers: tuple[str, ...], target: Operand, address: Operand, ops: list[Op]) -> None:
    count = opcodes.register_count(modifiers)
    targets = [destination(c, target, step) for step in range(count)]
    key, join = key_of(c, space, address), c.domain.join
    lost = c.domain.source("shared" if space == "S" else "local", pc)

    def op(s: State) -> None:
        first = key(s)
        memory: dict[Hashable, Value] = s[MEMORY]
        anything = memory.get((space, ANY, 0))
        if first is None and space == "L":  # a changing index into the frame reads one of the words that were written to it
            for place, value in memory.items():
                if place[0] == "L":  # type: ignore[index]
                    anything = value if anything is None else join(anything, value)
            for slot in targets:
                s[slot] = lost if anything is None else anything
            return
        for step, slot in enumerate(targets):
            known = None if first is None else memory.get((first[0], first[1], first[2] + 4 * step))  # type: ignore[index]
            value = lost if known is None else known
            s[slot] = value if anything is None else join(value, anything)

    ops.append(op)
