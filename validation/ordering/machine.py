"""Compiles SASS instructions into functions on one list: the abstract state of a thread.

Layout of the list: MUST, DEPTH, MAY, ASSUME, MEMORY, TRASH, OVERLAY, then one slot per register, then (at negative indices) constants.
The first five hold the order state, so that one list copy carries everything:
- MUST    int, bits of waits that every path has passed (bit 0: the grid wait);
- DEPTH   tuple, the smallest number of each kind passed on any path (grid waits, barriers, mbarrier waits, acquires, releases);
- MAY     int, bits of events that some path has passed (dependents released, shared memory written, ...);
- ASSUME  frozenset of signed symbols: conditions known to hold on this path;
- MEMORY  dict of stack and shared-memory slots to values (replaced, never changed in place).
OVERLAY holds, until the predicate is written or paths meet, what registers are when a predicate turns out true: a load under @P sees
what @P wrote just before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from validation.ordering import opcodes
from validation.ordering.model import Instruction, KernelBinary, Kind
from validation.ordering.operands import Operand, Term, half_bits, parse_operands, register_step
from validation.ordering.values import Domain, Value

MUST, DEPTH, MAY, ASSUME, MEMORY, TRASH, OVERLAY, FIRST = range(8)
GRID, BARRIER, MBARRIER, ACQUIRE, RELEASE = range(5)
WAITED = 1  # bit of the grid wait in MUST
RELEASED, DIRTY_SHARED, DIRTY_TILE = 1, 2, 4  # bits of MAY; a tile is what wide stores write, single words are bookkeeping
DIRTY_GLOBAL_SHIFT = 8  # MAY bits 8 + 2i, 9 + 2i: parameter i was written since the last proxy fence; written weakly since the last membar
PARITY = (1 << 2 * 256) // 3  # 0b0101...: every second bit
DIRTY_MASK = PARITY << DIRTY_GLOBAL_SHIFT
PENDING_MASK = PARITY << (DIRTY_GLOBAL_SHIFT + 1)
STACK_TOP = 0x00FFFD00  # stands for the initial stack pointer, whose real value no kernel needs

State = list[Any]  # heterogeneous on purpose: see the module text
Op = Callable[[State], None]


def bump(state: State, kind: int) -> None:
    """One more of that kind is behind this state. Changes the list in place."""
    depth = state[DEPTH]
    state[DEPTH] = (*depth[:kind], depth[kind] + 1, *depth[kind + 1 :])


@dataclass(slots=True)
class AccessSite:
    """Where an instruction touches global memory: slots of the address, resolved when the state is known."""

    pc: int
    kind: Kind
    coherent: bool
    strength: str
    low: tuple[int, ...]
    high: tuple[int, ...]
    offset: int
    byte_count: int
    generic: bool = False  # LD/ST: may be shared or local memory
    descriptor: bool = False  # the address names a TMA descriptor
    guard: int | None = None  # slot of the predicate
    guard_sense: bool = True
    mbarrier: int | None = None  # slot of the shared address of the mbarrier that completes it


@dataclass(slots=True)
class Code:
    """One compiled instruction. `ops` change values; `site` is its access, if any; `event` names an ordering effect."""

    pc: int
    ops: list[Op] = field(default_factory=list)
    site: AccessSite | None = None
    event: str = ""
    event_slots: tuple[int, ...] = ()
    event_offset: int = 0  # immediate of the address in event_slots[0]
    guard: int | None = None
    guard_sense: bool = True
    barrier: str = ""  # barrier id text of BAR, "" when only known at run time


class Compiler:
    """Compiles one kernel. `size` is the number of non-constant slots once everything is compiled."""

    def __init__(self, kernel: KernelBinary) -> None:
        self.kernel = kernel
        self.domain = Domain()
        self.slots: dict[str, int] = {}
        self.predicate_slots: set[int] = set()
        self.constants: list[Value] = []
        self._constant_slots: dict[Value, int] = {}
        self._temporaries = 0
        self.written: list[int] = []  # slots that the instruction being compiled may write
        self.unknown: dict[str, list[int]] = {}
        self.lifted: dict[tuple[str, str, str], Code] = {}  # by text: instructions that mean the same wherever they stand
        self.resolver: Any = None  # set by `flow.compile_program`; only its `note_address` and `dirty_bits` are called from operations
        self.param_end = kernel.param_base + max((p.offset + p.size for p in kernel.parameters), default=1 << 15)
        self.strong_loads: dict[int, int] = {}  # pc -> mask of its MEM sources
        self.mbar_bits: dict[int, int] = {}
        self.first_phase: dict[int, int | None] = {}  # try_wait pc -> phase operand when first executed
        self.zero = self.value_slot(self.domain.zero)
        self.one = self.value_slot(self.domain.one)
        number = int("".join(c for c in kernel.arch if c.isdigit()) or 0)
        self.block_pointer = 0x348 if number >= 100 else 0x198
        self.stack_word = 0x37C if number >= 100 else 0x28

    # ------------------------------------------------------------------ slots
    def value_slot(self, value: Value) -> int:
        found = self._constant_slots.get(value)
        if found is None:
            self.constants.append(value)
            found = self._constant_slots[value] = -len(self.constants)
        return found

    def tail(self) -> list[Value]:
        """Constants in the order that makes index -k the k-th of them."""
        return self.constants[::-1]

    @property
    def size(self) -> int:
        return FIRST + len(self.slots)

    def slot(self, name: str) -> int:
        found = self.slots.get(name)
        if found is None:
            found = self.slots[name] = FIRST + len(self.slots)
            if name.lstrip("U").startswith("P"):
                self.predicate_slots.add(found)
        return found

    def read_register(self, name: str) -> int:
        if name in ("RZ", "URZ"):
            return self.zero
        if name in ("PT", "UPT"):
            return self.one
        return self.slot(name)

    def write_register(self, name: str) -> int:
        slot = TRASH if name.endswith(("Z", "T")) else self.slot(name)
        self.written.append(slot)
        return slot

    def temporary(self) -> int:
        self._temporaries += 1
        slot = self.slot(f"~{self._temporaries % 8}")
        self.written.append(slot)
        return slot

    def initial(self) -> State:
        state: State = [0, (0, 0, 0, 0, 0), 0, frozenset(), {}, self.domain.bottom, {}]
        state.extend([self.domain.bottom] * len(self.slots))
        return state

    # ------------------------------------------------------------------ operands
    def constant_word(self, bank: int, offset: int) -> Value:
        domain = self.domain
        if bank != 0:
            return domain.source("bank", bank, offset, symbol=True)
        if offset in (self.stack_word, 0x28) and offset < self.kernel.param_base:
            return domain.constant(STACK_TOP)
        if offset in (self.block_pointer, self.block_pointer + 4):
            return domain.source("pblock", 0, offset - self.block_pointer, symbol=True)
        if self.kernel.param_base <= offset < self.param_end:
            return domain.source("param", offset - self.kernel.param_base, symbol=True)
        return domain.source("driver", offset, symbol=True)

    def read(self, operand: Operand, ops: list[Op], step: int = 0) -> int:
        """Slot of a source operand (`step` 1: its high word), with sign and complement applied by operations put into `ops`."""
        if operand.kind == "reg":
            base = self.read_register(register_step(operand.name, step) if step else operand.name)
        elif operand.kind == "pred":
            base = self.read_register(operand.name)
        elif operand.kind == "number":
            number = operand.number if step == 0 else (-1 if operand.number < 0 else 0)
            return self.value_slot(self.domain.constant(number))
        elif operand.kind == "const":
            base = self._read_constant(operand, ops, step)
        else:
            return self.value_slot(self.domain.data)
        if not (operand.negative or operand.inverted):
            return base
        return self._signed(base, operand, ops)

    def _signed(self, base: int, operand: Operand, ops: list[Op]) -> int:
        domain = self.domain
        apply = domain.invert if operand.kind == "pred" else (domain.complement if operand.inverted else domain.negate_number)
        if base < 0:
            return self.value_slot(apply(self.constants[-base - 1]))
        target = self.temporary()

        def op(s: State) -> None:
            s[target] = apply(s[base])

        ops.append(op)
        return target

    def _read_constant(self, operand: Operand, ops: list[Op], step: int) -> int:
        if not operand.terms:
            return self.value_slot(self.constant_word(operand.bank, operand.number + 4 * step))
        if operand.bank != 0:
            return self.value_slot(self.domain.source("bank", operand.bank, operand.number, symbol=False))
        # A dynamically indexed read of the parameters: a table of pointers passed by value.
        domain, offset, half = self.domain, operand.number + 4 * step, step
        index = self.read_register(operand.terms[0].name)
        dynamic = domain.source("pdyn", max(0, operand.number - self.kernel.param_base), half)
        target = self.temporary()

        def op(s: State) -> None:
            value = s[index]
            if value.const is not None:
                s[target] = self.constant_word(0, (value.const + offset) & 0xFFFF)
                return
            places = domain.possible(value.symbol) or domain.block_offsets(value)
            words = [self.constant_word(0, (place + offset) & 0xFFFF) for place in sorted(places)]
            s[target] = functools.reduce(domain.join, words) if words else dynamic

        ops.append(op)
        return target

    def address(self, operand: Operand, modifiers: tuple[str, ...], wide: bool) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """(low slots, high slots, immediate) of an address operand."""
        low, high = [], []
        for term in operand.terms:
            low.append(self.read_register(term.name))
            if not term.narrow and (term.wide or wide):
                high.append(self.read_register(register_step(term.name, 1)))
        return tuple(low), tuple(high), operand.number


def guard_of(compiler: Compiler, instruction: Instruction) -> tuple[int | None, bool]:
    if not instruction.pred:
        return None, True
    sense = "!" not in instruction.pred
    name = instruction.pred.lstrip("@!")
    return compiler.read_register(name), sense


def split_destinations(operands: tuple[Operand, ...]) -> tuple[list[Operand], list[Operand]]:
    """Leading plain predicates are results; the rest are sources."""
    at = 0
    while at < len(operands) and operands[at].kind == "pred" and not operands[at].inverted:
        at += 1
    return list(operands[:at]), list(operands[at:])


def sources_of(operands: list[Operand]) -> tuple[list[Operand], list[Operand]]:
    """(value operands, trailing predicates)."""
    end = len(operands)
    while end > 0 and operands[end - 1].kind == "pred":
        end -= 1
    return operands[:end], operands[end:]


def parse(instruction: Instruction) -> tuple[str, tuple[str, ...], tuple[Operand, ...]]:
    root, modifiers = opcodes.root_of(instruction.opcode)
    return root, modifiers, parse_operands(instruction.operands)


def packed_halves(high: Operand, low: Operand) -> int:
    """HFMA2 Rd, -RZ, RZ, a, b is how ptxas spells a constant: two halves."""
    return half_bits(high.name or str(high.number)) << 16 | half_bits(low.name or str(low.number))


__all__ = ["AccessSite", "Code", "Compiler", "Op", "State", "Term", "bump", "guard_of", "parse", "sources_of", "split_destinations"]
