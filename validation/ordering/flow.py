"""The fixpoint: which waits every path to an instruction has passed, with the register values on the way.

States are kept apart by whether the grid wait has been passed and by the return addresses of calls in progress; everything else joins.
A role (`roles.WarpRole`) decides tests over the thread id; without one, both ways are followed.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from validation.ordering.cfg import convergence_register, is_divergence_test
from validation.ordering.machine import (
    ACQUIRE,
    ASSUME,
    BARRIER,
    DEPTH,
    FIRST,
    GRID,
    MAY,
    MBARRIER,
    MEMORY,
    MUST,
    OVERLAY,
    WAITED,
    State,
    bump,
)
from validation.ordering.model import INSTRUCTION_BYTES
from validation.ordering.operands import parse_operands
from validation.ordering.program import Program
from validation.ordering.roles import Evaluator, WarpRole
from validation.ordering.values import Value

Key = tuple[int, bool, tuple[int, ...]]  # block, grid wait passed, return pcs
MAX_CALLS = 4
MAX_VISITS = 400
CALLEE_SAVED = frozenset({"R1", *(f"R{n}" for n in range(16, 32))})


@dataclass
class Handover:
    """What a full-block barrier or an mbarrier try_wait (by pc) is known to pass on: MUST bits."""

    barriers: dict[tuple[str, int], int] = field(default_factory=dict)  # (id, pc), or (id, -1) wherever it stands
    mbarriers: dict[int, int] = field(default_factory=dict)


def _under(overlay: dict, state: State, slot: int) -> Value:
    """A register under the predicate of an overlay; what was written since then no longer depends on it."""
    known = overlay.get(slot)
    return known[1] if known is not None and state[slot] is known[0] else state[slot]


class Flow:
    """One run of the analysis over a program for one role."""

    def __init__(self, program: Program, role: WarpRole, evaluator: Evaluator, handover: Handover) -> None:
        self.program, self.role, self.evaluator, self.handover = program, role, evaluator, handover
        self.compiler, self.graph, self.domain = program.compiler, program.graph, program.compiler.domain
        self.states: dict[Key, State] = {}
        self.came_from: dict[Key, Key | None] = {}
        self.visits: dict[Key, int] = {}
        self.joins: set[Key] = set()  # where more than one path arrives
        self.exits: list[tuple[Key, int, frozenset[int]]] = []  # key, MUST, conditions at a reachable exit
        self.threads: int | None = program.kernel.cta_threads
        self.barrier_must: dict[tuple[str, int], int] = {}  # (barrier id, pc) -> MUST bits common to every arrival
        self.branch_symbols: set[int] = set()  # undecided stable conditions
        self.skips: set[int] = set()  # signed symbols under which a guarded grid wait is skipped
        self.notes: set[str] = set()
        self._poll_mask = 0
        for mask in self.compiler.strong_loads.values():
            self._poll_mask |= mask
        self._mbar_mask = 0
        for bit in self.compiler.mbar_bits.values():
            self._mbar_mask |= bit
        self.acquire_bits: dict[frozenset[int], int] = program.resolver.acquire_bits

    # ------------------------------------------------------------------ driver
    def run(self) -> None:
        if not self.graph.blocks:
            return
        order = self.graph.order
        start: Key = (0, False, ())
        self.states[start] = self.compiler.initial()
        self.came_from[start] = None
        queue = [(order[0], start)]
        queued = {start}
        while queue:
            _, key = heapq.heappop(queue)
            queued.discard(key)
            self.visits[key] = self.visits.get(key, 0) + 1
            if self.visits[key] > MAX_VISITS:
                self.notes.add(f"analysis stopped refining the block at {self.pc_of(key):#x}")
                continue
            for target, state in self.step(key, self.execute(key)):
                if self.merge(target, state, key) and target not in queued:
                    queued.add(target)
                    heapq.heappush(queue, (order[target[0]], target))
        for key in list(self.states):
            self.finish(key)

    def pc_of(self, key: Key) -> int:
        return self.program.kernel.instructions[self.graph.blocks[key[0]].first].pc

    def execute(self, key: Key) -> State:
        state = self.states[key] + self.program.tail
        for op in self.program.block_ops[key[0]]:
            op(state)
        return state

    def merge(self, key: Key, state: State, source: Key) -> bool:
        """Joins into the state at `key`; True when it changed."""
        old = self.states.get(key)
        size = self.compiler.size
        if old is not None and self.came_from[key] != source:
            self.joins.add(key)
        if old is None:
            self.states[key] = state[:size]
            self.came_from[key] = source
            return True
        if old == state[:size]:
            return False
        join = self.domain.join
        changed = False
        for index in range(FIRST, size):
            a, b = old[index], state[index]
            if a is not b:
                joined = join(a, b)
                if joined is not a:
                    if not changed:
                        old = old[:]
                        changed = True
                    old[index] = joined
        order = (old[MUST] & state[MUST], tuple(map(min, old[DEPTH], state[DEPTH])), old[MAY] | state[MAY], old[ASSUME] & state[ASSUME])
        if order != (old[MUST], old[DEPTH], old[MAY], old[ASSUME]):
            old = old if changed else old[:]
            old[MUST], old[DEPTH], old[MAY], old[ASSUME] = order
            changed = True
        if old[OVERLAY] != state[OVERLAY]:
            alone = self.came_from[key] == source and key not in self.joins
            overlay = state[OVERLAY] if alone else self._join_overlay(self.states[key], state, old)
            if overlay != old[OVERLAY]:
                old = old if changed else old[:]
                old[OVERLAY] = overlay
                changed = True
        if old[MEMORY] is not state[MEMORY]:
            merged = self._join_memory(old[MEMORY], state[MEMORY])
            if merged is not None:
                old = old if changed else old[:]
                old[MEMORY] = merged
                changed = True
        if changed:
            self.states[key] = old
        return changed

    def _join_overlay(self, a: State, b: State, joined: State) -> dict:
        """What registers are when a predicate turns out true, where two paths meet. A path that does not say has the register's value."""
        found: dict = {}
        for place in a[OVERLAY].keys() | b[OVERLAY].keys():
            first, second, values = a[OVERLAY].get(place, {}), b[OVERLAY].get(place, {}), {}
            for slot in first.keys() | second.keys():
                now = joined[slot]
                when = self.domain.join(_under(first, a, slot), _under(second, b, slot))
                if when is not now:
                    values[slot] = (now, when)
            if values:
                found[place] = values
        return found

    def _join_memory(self, a: dict, b: dict) -> dict | None:
        merged = None
        for place, value in b.items():
            joined = self.domain.join(a[place], value) if place in a else value
            if place not in a or joined is not a[place]:
                merged = merged if merged is not None else dict(a)
                merged[place] = joined
        return merged

    # ------------------------------------------------------------------ conditions
    def truth(self, state: State, slot: int) -> bool | None:
        """What a predicate is on this path, if known."""
        value = state[slot]
        if value.const is not None:
            return bool(value.const)
        if not value.symbol:
            return None
        symbol, positive = self.domain.literal(value.symbol)
        if symbol in state[ASSUME]:
            return positive
        if -symbol in state[ASSUME]:
            return not positive
        decided = self.evaluator.decide(symbol)
        if decided is None:
            self.branch_symbols.add(symbol)
            return None
        return decided == positive

    def split(self, state: State, slot: int, outcome: bool) -> State:
        """The state where a predicate has turned out to be `outcome`."""
        taken = state[:]
        value = state[slot]
        if slot >= 0:
            taken[slot] = self.domain.one if outcome else self.domain.zero
        if value.symbol:
            symbol, positive = self.domain.literal(value.symbol)
            taken[ASSUME] = taken[ASSUME] | {symbol if positive == outcome else -symbol}
        return taken

    def both_ways(self, state: State, slot: int | None, sense: bool) -> Iterator[tuple[bool, State]]:
        """(guard holds, state) for each possible way."""
        if slot is None:
            yield True, state
            return
        known = self.truth(state, slot)
        if known is not None:
            yield known == sense, state
            return
        yield True, self.split(state, slot, sense)
        yield False, self.split(state, slot, not sense)

    # ------------------------------------------------------------------ terminators
    def step(self, key: Key, state: State) -> Iterator[tuple[Key, State]]:
        block = self.graph.blocks[key[0]]
        code = self.program.codes[block.last]
        instruction = self.program.kernel.instructions[block.last]
        if not block.kind:
            yield from self.go(key, state, block.last + 1)
            return
        kind = "BRA" if block.kind == "JMP" else block.kind
        for holds, state_here in self.both_ways(state, code.guard, code.guard_sense):
            slot = code.guard
            if not holds:
                if kind == "ACQBULK" and slot is not None and state[slot].symbol:
                    symbol, positive = self.domain.literal(state[slot].symbol)
                    self.skips.add(symbol if positive != code.guard_sense else -symbol)
                state_here = self.edge_events(key, state, state_here, slot, block.last + 1, not code.guard_sense)
                yield from self.go(key, state_here, block.last + 1)
                continue
            if kind == "BRA":
                yield from self.branch(key, state, state_here, instruction.opcode, instruction.operands, slot, code.guard_sense)
            elif kind in ("BRX", "BRXU", "JMX", "JMXU"):
                for target in block.successors:
                    yield from self.enter(key, state_here, target)
            elif kind == "CALL":
                yield from self.call(key, state_here, block.last)
            elif kind == "RET":
                yield from self.give_back(key, state_here, instruction.pc)
            elif kind == "BSYNC":
                yield from self.meet(key, state_here, instruction.operands)
            elif kind == "ACQBULK":
                yield from self.go((key[0], True, key[2]), self.waited(state_here), block.last + 1, key)
            elif kind == "BAR":
                yield from self.barrier(key, state_here, instruction)
            elif kind == "WARPSYNC":
                for target in block.successors:
                    yield from self.enter(key, state_here, target)
            elif kind not in ("EXIT", "KILL", "RTT", "BPT"):
                yield from self.go(key, state_here, block.last + 1)

    def go(self, key: Key, state: State, instruction: int, origin: Key | None = None) -> Iterator[tuple[Key, State]]:
        target = self.graph.block_at.get(instruction * INSTRUCTION_BYTES)
        if target is None:
            if instruction < len(self.program.codes):
                self.notes.add(f"control runs into the middle of a block at {instruction * INSTRUCTION_BYTES:#x}")
            return
        yield (target, key[1] or bool(state[MUST] & WAITED), key[2]), state

    def enter(self, key: Key, state: State, block: int) -> Iterator[tuple[Key, State]]:
        yield (block, key[1] or bool(state[MUST] & WAITED), key[2]), state

    def branch(
        self, key: Key, before: State, state: State, opcode: str, operands: str, guard: int | None, sense: bool
    ) -> Iterator[tuple[Key, State]]:
        block = self.graph.blocks[key[0]]
        parsed = parse_operands(operands)
        target = next((operand.number for operand in reversed(parsed) if operand.kind == "number"), None)
        conditions = [operand for operand in parsed if operand.kind == "pred"]
        following = block.last + 1
        if is_divergence_test(opcode):
            yield from self.go(key, state, following)
            conditions = []
        slot, want = guard, sense
        ways: list[tuple[bool, State]] = [(True, state)]
        if conditions:
            slot, want = self.compiler.read_register(conditions[0].name), not conditions[0].inverted
            ways = list(self.both_ways(state, slot, want))
        for taken, way in ways:
            where = target // INSTRUCTION_BYTES if taken and target is not None else following
            way = self.edge_events(key, before, way, slot, where, want if taken else not want)
            yield from self.go(key, way, where)

    def edge_events(self, key: Key, before: State, after: State, slot: int | None, instruction: int, outcome: bool) -> State:
        """Waits that are passed by taking an edge: a poll that ended, a try_wait that succeeded."""
        if slot is None:
            return after
        value = before[slot]
        mask = value.add | value.scaled
        if mask & self._mbar_mask:
            after = self.mbarrier_edge(before, after, value, mask, outcome)
        if mask & self._poll_mask:
            after = self.poll_edge(key, after, mask, instruction)
        return after

    def mbarrier_edge(self, before: State, after: State, value, mask: int, outcome: bool) -> State:
        if value.symbol and self.domain.literal(value.symbol)[1] != outcome:
            return after
        if value.symbol == 0 and not outcome:
            return after
        after = after[:]
        bump(after, MBARRIER)
        for pc, bit in self.compiler.mbar_bits.items():
            if mask & bit and pc in self.handover.mbarriers:
                after[MUST] |= self.handover.mbarriers[pc]
        return after

    def poll_edge(self, key: Key, after: State, mask: int, instruction: int) -> State:
        """An edge that leaves the loop of a strong load whose value decides it, or that skips such a loop (a peeled first try)."""
        target = self.graph.block_at.get(instruction * INSTRUCTION_BYTES)
        if target is None:
            return after
        here, there = self.graph.blocks[key[0]], self.graph.blocks[target]
        for pc, bits in self.compiler.strong_loads.items():
            if not mask & bits:
                continue
            load_block = self.graph.blocks[self.graph.block_of_pc(pc)]
            left = (load_block.loops & here.loops) - there.loops
            if left or self.skips_loop(here.index, there.index, pc):
                bases = self.program.resolver.polled.get(pc, frozenset())
                if self.program.resolver.acquires(pc, self.graph):
                    after = after[:]
                    bump(after, ACQUIRE)
                    after[MUST] |= self.program.resolver.acquire_bit(bases)
                self.program.resolver.ended_polls.add(pc)
        return after

    def skips_loop(self, here: int, there: int, pc: int) -> bool:
        """Another way out of this block enters a loop that polls the same memory, and this one does not."""
        resolver = self.program.resolver
        for other in self.graph.blocks[here].successors:
            if other == there:
                continue
            for header in self.graph.blocks[other].loops - self.graph.blocks[here].loops:
                if header in self.graph.blocks[there].loops:
                    continue
                for second in self.compiler.strong_loads:
                    same = resolver.polled.get(second, frozenset()) & resolver.polled.get(pc, frozenset())
                    if second != pc and same and self.graph.block_of_pc(second) in self.graph.loops[header]:
                        return True
        return False

    def waited(self, state: State) -> State:
        after = state[:]
        after[MUST] |= WAITED
        bump(after, GRID)
        return after

    def barrier(self, key: Key, state: State, instruction) -> Iterator[tuple[Key, State]]:
        name = self.barrier_id(instruction.operands)
        after = state[:]
        bump(after, BARRIER)
        if name is not None:
            after[MUST] |= self.handover.barriers.get((name, -1), 0) | self.handover.barriers.get((name, instruction.pc), 0)
        yield from self.go(key, after, self.graph.blocks[key[0]].last + 1)

    def call(self, key: Key, state: State, index: int) -> Iterator[tuple[Key, State]]:
        block = self.graph.blocks[key[0]]
        following = self.graph.block_at.get((index + 1) * INSTRUCTION_BYTES)
        callees = [successor for successor in block.successors if successor != following]
        pc = self.program.kernel.instructions[index].pc
        if not callees or len(key[2]) >= MAX_CALLS:
            self.notes.add(f"call of unknown code at {pc:#x}")
            lost = self.domain.source("unknown", pc)
            after = state[:]
            for name, slot in self.compiler.slots.items():
                if name.startswith("R") and name not in CALLEE_SAVED:
                    after[slot] = lost
            yield from self.go(key, after, index + 1)
            return
        for callee in callees:
            yield (callee, key[1], (*key[2], (index + 1) * INSTRUCTION_BYTES)), state

    def give_back(self, key: Key, state: State, pc: int) -> Iterator[tuple[Key, State]]:
        if not key[2]:
            self.notes.add(f"return without a call at {pc:#x}")
            return
        yield from self.go((key[0], key[1], key[2][:-1]), state, key[2][-1] // INSTRUCTION_BYTES)

    def meet(self, key: Key, state: State, operands: str) -> Iterator[tuple[Key, State]]:
        """Threads continue where the BSSY of this barrier said; the block before that place simply falls through."""
        block = self.graph.blocks[key[0]]
        name = convergence_register(operands)
        known = state[self.compiler.slots[name]].const if name in self.compiler.slots else None
        if known is not None and known in self.graph.block_at:
            yield from self.enter(key, state, self.graph.block_at[known])
            return
        for target in block.successors:
            yield from self.enter(key, state, target)

    def barrier_id(self, operands: str) -> str | None:
        """Id of a barrier that all threads of the block take part in; None for part of the block or an id known at run time."""
        parsed = parse_operands(operands)
        if any(operand.kind != "number" for operand in parsed) or len(parsed) > 2:
            return None
        if len(parsed) == 2 and parsed[1].number != self.threads:
            return None
        return str(parsed[0].number) if parsed else "0"

    # ------------------------------------------------------------------ facts, once the states are final
    @functools.cached_property
    def waits_ahead(self) -> list[tuple[frozenset[int], frozenset[int]]]:
        """For each grid wait that is reached unwaited: blocks that lead to it, and the conditions known there."""
        predecessors: dict[int, list[int]] = {}
        for block in self.graph.blocks:
            for successor in block.successors:
                predecessors.setdefault(successor, []).append(block.index)
        found = []
        for key, state in self.states.items():
            if self.graph.blocks[key[0]].kind != "ACQBULK" or key[1]:
                continue
            before: set[int] = set()
            stack = [key[0]]
            while stack:
                block_index = stack.pop()
                if block_index not in before:
                    before.add(block_index)
                    stack.extend(predecessors.get(block_index, ()))
            found.append((frozenset(before), state[ASSUME]))
        return found

    @functools.cached_property
    def passes_wait(self) -> bool:
        """Whether some path of this role passes the grid wait, by itself or handed over."""
        return any(key[1] for key in self.states)

    @functools.cached_property
    def skipping(self) -> frozenset[int]:
        """Signed symbols under which a grid wait is not executed: its own guard, or a branch around it."""
        return frozenset(self.skips) | {-symbol for _, conditions in self.waits_ahead for symbol in conditions}

    def finish(self, key: Key) -> None:
        block = self.graph.blocks[key[0]]
        if block.kind not in ("EXIT", "BAR"):
            return
        state = self.execute(key)
        code = self.program.codes[block.last]
        for holds, here in self.both_ways(state, code.guard, code.guard_sense):
            if not holds:
                continue
            if block.kind == "EXIT":
                self.exits.append((key, here[MUST], here[ASSUME]))
            else:
                instruction = self.program.kernel.instructions[block.last]
                name = self.barrier_id(instruction.operands)
                if name is not None:
                    place = (name, instruction.pc)
                    self.barrier_must[place] = self.barrier_must.get(place, -1) & here[MUST]
