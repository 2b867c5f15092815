"""Runs the flow analysis for the roles of a kernel and collects every access with the waits it has behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from validation.ordering.flow import Flow, Handover, Key
from validation.ordering.lift import overlaid, restore
from validation.ordering.machine import ASSUME, DEPTH, FIRST, MAY, MUST, WAITED, AccessSite, Code
from validation.ordering.model import KernelBinary, LaunchFacts
from validation.ordering.program import Program, compile_program
from validation.ordering.resolve import Resolved
from validation.ordering.roles import WARP_THREADS, Evaluator, WarpRole, mentions_thread

MAX_ROLES = 16
MAX_ROUNDS = 4
DEFAULT_THREADS = 1024


@dataclass(slots=True)
class Record:
    """One access (or ordering event) on one group of paths."""

    code: Code
    site: AccessSite | None
    key: Key
    flow: Flow
    resolved: Resolved
    waited: bool
    must: int
    depth: tuple[int, ...]
    may: int
    assume: frozenset[int]
    mbarrier: object = None  # which mbarrier it arrives at or waits for: (symbol, offset), None when not known


@dataclass
class Analysis:
    """All roles of one kernel. `flows` are real threads' runs; `leader` is the extra one for thread 0, elected."""

    program: Program
    flows: list[Flow]
    leader: Flow | None
    records: list[Record]
    refined: bool
    wait_pcs: tuple[int, ...]
    notes: set[str] = field(default_factory=set)


def analyse(kernel: KernelBinary, launch: LaunchFacts) -> Analysis:
    """First run, for all threads at once: enough for kernels whose accesses are all ordered."""
    program = compile_program(kernel)
    wait_pcs = tuple(i.pc for i in kernel.instructions if i.opcode.startswith("ACQBULK"))
    flow = _run(program, launch, WarpRole("all"), Handover())
    records = list(_records(flow))
    return Analysis(program, [flow], None, records, False, wait_pcs, set(flow.notes))


def refine(analysis: Analysis, launch: LaunchFacts) -> Analysis:
    """Reruns per warp role, with waits handed over by barriers until nothing changes."""
    program = analysis.program
    roles = warp_roles(analysis, launch)
    handover = Handover()
    leader_role = WarpRole("thread 0", 0, 0, True)
    flows: list[Flow] = []
    leader: Flow | None = None
    records: list[Record] = []
    for _ in range(MAX_ROUNDS):
        leader = _run(program, launch, leader_role, handover)
        flows = [_run(program, launch, role, handover) for role in roles]
        records = [record for flow in flows for record in _records(flow)]
        if not launch.barrier_transitivity:
            break
        everyone = [*records, *_records(leader)]
        found = Handover(handed_over([leader, *flows]), mbarriers_handed_over(flows, everyone))
        if found == handover:
            break
        handover = found
    notes = set(analysis.notes).union(*(flow.notes for flow in flows))
    if handover.barriers:
        notes.add("full-block barriers hand the wait of one role to all: " + ", ".join(sorted({name for name, _ in handover.barriers})))
    if handover.mbarriers:
        notes.add("mbarrier waits hand over the wait of their producer at " + ", ".join(f"{pc:#x}" for pc in sorted(handover.mbarriers)))
    return Analysis(program, flows, leader, records, True, analysis.wait_pcs, notes)


def handed_over(flows: list[Flow]) -> dict[tuple[str, int], int]:
    """What some kind of thread has behind it whenever it arrives at a barrier: MUST bits by (id, pc).

    When all kinds of threads meet one barrier id at the same places, they pass them in the same order, so that one place is one
    meeting. Otherwise any arrival may match any other, and only what holds at all of them counts.
    """
    places: dict[str, list[set[int]]] = {}
    for flow in flows:
        mine: dict[str, set[int]] = {}
        for name, pc in flow.barrier_must:
            mine.setdefault(name, set()).add(pc)
        for name, pcs in mine.items():
            places.setdefault(name, []).append(pcs)
    found: dict[tuple[str, int], int] = {}
    for name, sets in places.items():
        aligned = len(sets) == len(flows) and all(pcs == sets[0] for pcs in sets)
        for flow in flows:
            arrivals = {pc: must for (other, pc), must in flow.barrier_must.items() if other == name}
            if not aligned:
                common = -1
                for must in arrivals.values():
                    common &= must
                arrivals = {-1: common} if arrivals else {}
            for pc, must in arrivals.items():
                if must > 0:
                    found[name, pc] = found.get((name, pc), 0) | must
    return found


def mbarriers_handed_over(flows: list[Flow], records: list[Record]) -> dict[int, int]:
    """What a successful try_wait has behind it: MUST bits common to everything that can complete its phase.

    A phase that asynchronous copies complete needs all of their bytes, so only the copies count; otherwise every arrival does. A wait
    whose first phase is not 0 passes at once (the idiom for slots that start empty) and hands over nothing.
    """
    compiler = flows[0].compiler
    waits: dict[int, set[object]] = {}
    copies: list[tuple[object, int]] = []
    arrivals: list[tuple[object, int]] = []
    for record in records:
        if record.code.event == "try_wait":
            waits.setdefault(record.code.pc, set()).add(record.mbarrier)
        elif record.code.event == "arrive":
            arrivals.append((record.mbarrier, record.must))
        elif record.site is not None and record.site.mbarrier is not None:
            copies.append((record.mbarrier, record.must))
    found: dict[int, int] = {}
    for pc, places in waits.items():
        if compiler.first_phase.get(pc) != 0:
            continue
        completing = [must for place, must in copies if _may_alias(places, place)]
        completing = completing or [must for place, must in arrivals if _may_alias(places, place)]
        common = -1 if completing else 0
        for must in completing:
            common &= must
        if common > 0:
            found[pc] = common
    return found


def _may_alias(places: set[object], place: object) -> bool:
    return place is None or None in places or place in places


def warp_roles(analysis: Analysis, launch: LaunchFacts) -> list[WarpRole]:
    """Groups of warps that decide every test over the thread id alike."""
    kernel, flow = analysis.program.kernel, analysis.flows[0]
    threads = launch.cta_threads or kernel.cta_threads or DEFAULT_THREADS
    domain = analysis.program.compiler.domain
    symbols = sorted(symbol for symbol in flow.branch_symbols if mentions_thread(domain, symbol))
    groups: dict[tuple[bool | None, ...], list[int]] = {}
    for warp in range((threads + WARP_THREADS - 1) // WARP_THREADS):
        role = WarpRole("", warp * WARP_THREADS, min(threads, (warp + 1) * WARP_THREADS) - 1)
        evaluator = _evaluator(analysis.program, launch, role)
        groups.setdefault(tuple(evaluator.decide(symbol) for symbol in symbols), []).append(warp)
    if len(groups) <= 1 or len(groups) > MAX_ROLES:
        if len(groups) > MAX_ROLES:
            analysis.notes.add(f"{len(groups)} kinds of warps: analysed together")
        return [WarpRole("all", 0, threads - 1)]
    return [WarpRole(_ranges(warps), warps[0] * WARP_THREADS, min(threads, (warps[0] + 1) * WARP_THREADS) - 1) for warps in groups.values()]


def _ranges(numbers: list[int]) -> str:
    """ "0,2-5" of sorted numbers."""
    parts: list[str] = []
    start = previous = numbers[0]
    for number in [*numbers[1:], numbers[-1] + 2]:
        if number != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = number
        previous = number
    return ",".join(parts)


def _evaluator(program: Program, launch: LaunchFacts, role: WarpRole) -> Evaluator:
    kernel = program.kernel
    nonzero = frozenset(p.offset for p in kernel.parameters if p.index in launch.guards_true)
    return Evaluator(program.compiler.domain, role, nonzero, kernel.one_dimensional, None)


def _run(program: Program, launch: LaunchFacts, role: WarpRole, handover: Handover) -> Flow:
    flow = Flow(program, role, _evaluator(program, launch, role), handover)
    flow.run()
    return flow


def _records(flow: Flow) -> Iterator[Record]:
    """Every access and ordering event of the reached states, with predicates that cannot hold left out."""
    program, resolver = flow.program, flow.program.resolver
    for key, start in flow.states.items():
        if not program.events[key[0]]:
            continue
        block = flow.graph.blocks[key[0]]
        state = start + program.tail
        for code in program.codes[block.first : block.last + 1]:
            if (code.site is not None or code.event) and (code.guard is None or flow.truth(state, code.guard) in (None, code.guard_sense)):
                view = overlaid(state, code.guard, code.guard_sense) if code.guard is not None else []
                yield _record(flow, key, code, state, resolver)
                restore(state, view)
            for op in code.ops:
                op(state)


def _record(flow: Flow, key: Key, code: Code, state: list, resolver) -> Record:
    site = code.site
    if site is None:
        resolved = Resolved(frozenset(), False, "none")
    else:
        low, high = resolver.masks(state, site)
        resolved = resolver.resolve(low, high, site.descriptor, site.generic)
    waited = key[1] or bool(state[MUST] & WAITED)
    return Record(
        code, site, key, flow, resolved, waited, state[MUST], state[DEPTH], state[MAY], state[ASSUME], _mbarrier_of(flow, code, state)
    )


def _mbarrier_of(flow: Flow, code: Code, state: list) -> object:
    if code.event in ("try_wait", "arrive") and code.event_slots:
        value, offset = state[code.event_slots[0]], code.event_offset
    elif code.site is not None and code.site.mbarrier is not None:
        value, offset = state[code.site.mbarrier], 0
    else:
        return None
    if value.const is not None:
        return 0, value.const + offset
    if not value.symbol:
        return None
    node = flow.domain.nodes[value.symbol]
    return (node[1], node[2] + offset) if node[0] == "plus" else (value.symbol, offset)


__all__ = ["FIRST", "Analysis", "Record", "analyse", "refine"]
