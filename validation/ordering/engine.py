"""Runs the flow analysis for the roles of a kernel and collects every access with the waits it has behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from validation.ordering.flow import Flow, Handover, Key, Program, compile_program
from validation.ordering.machine import ASSUME, DEPTH, FIRST, MAY, MUST, WAITED, AccessSite, Code
from validation.ordering.model import KernelBinary, LaunchFacts
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
    depth: tuple[int, int, int, int]
    may: int
    assume: frozenset[int]


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
    for _ in range(MAX_ROUNDS):
        leader = _run(program, launch, leader_role, handover)
        flows = [_run(program, launch, role, handover) for role in roles]
        found = handed_over([leader, *flows]) if launch.barrier_transitivity else {}
        if found == handover.barriers:
            break
        handover = Handover(barriers=found, mbarriers=handover.mbarriers)
    records = [record for flow in flows for record in _records(flow)]
    notes = set(analysis.notes).union(*(flow.notes for flow in flows))
    if handover.barriers:
        notes.add("a full-block barrier hands the wait of one role to all: " + ", ".join(sorted(handover.barriers)))
    return Analysis(program, flows, leader, records, True, analysis.wait_pcs, notes)


def handed_over(flows: list[Flow]) -> dict[str, int]:
    """Barrier id -> MUST bits that some kind of thread has behind it whenever it arrives there."""
    found: dict[str, int] = {}
    for flow in flows:
        for name, must in flow.barrier_must.items():
            if must > 0:
                found[name] = found.get(name, 0) | must
    return found


def warp_roles(analysis: Analysis, launch: LaunchFacts) -> list[WarpRole]:
    """Groups of warps that decide every test over the thread id alike."""
    kernel, flow = analysis.program.kernel, analysis.flows[0]
    threads = launch.cta_threads or kernel.cta_threads or DEFAULT_THREADS
    seen: dict[int, bool] = {}
    domain = analysis.program.compiler.domain
    symbols = sorted(symbol for symbol in flow.branch_symbols if mentions_thread(domain, symbol, seen))
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
    program, compiler, resolver = flow.program, flow.compiler, flow.program.resolver
    for key, start in flow.states.items():
        if not program.events[key[0]]:
            continue
        block = flow.graph.blocks[key[0]]
        state = start + program.tail
        for code in program.codes[block.first : block.last + 1]:
            if (code.site is not None or code.event) and (code.guard is None or flow.truth(state, code.guard) in (None, code.guard_sense)):
                yield _record(flow, key, code, state, resolver)
            for op in code.ops:
                op(state)
    del compiler


def _record(flow: Flow, key: Key, code: Code, state: list, resolver) -> Record:
    site = code.site
    if site is None:
        resolved = Resolved(frozenset(), False, "none")
    else:
        low, high = resolver.masks(state, site)
        resolved = resolver.resolve(low, high, site.descriptor, site.generic)
    waited = key[1] or bool(state[MUST] & WAITED)
    return Record(code, site, key, flow, resolved, waited, state[MUST], state[DEPTH], state[MAY], state[ASSUME])


__all__ = ["FIRST", "Analysis", "Record", "analyse", "refine"]
