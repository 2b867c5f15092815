"""`audit_kernel`: one kernel, its roles, its PTX and its launch in; findings and the timeline of accesses out."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

from validation.ordering.compare import compare_with_ptx
from validation.ordering.engine import Analysis, Record, analyse, refine
from validation.ordering.model import (
    Access,
    AuditResult,
    Finding,
    KernelBinary,
    LaunchFacts,
    ParamRef,
    PtxKernel,
    RoleMap,
    Wait,
    WaitKind,
    When,
)
from validation.ordering.rules import RULES_OF_ORDER, Subject, early_records, launch_findings, with_witnesses
from validation.ordering.rules_sync import RULES_OF_SYNCHRONISATION

STRENGTHS = {"weak": "weak", "mmio": "mmio"}


def audit_kernel(kernel: KernelBinary, roles: RoleMap, ptx: PtxKernel | None = None, launch: LaunchFacts | None = None) -> AuditResult:
    """Every finding of the single-kernel rules, with the accesses and waits they rest on.

    A kernel that holds no instruction, or whose analysis could not finish, comes back with `complete=False` and a note saying why;
    such a result is never a clean one.
    """
    started = time.perf_counter()
    # The analysis builds very many small objects and next to no cycles; collecting them while it runs would cost more than it frees.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _audit(kernel, roles, ptx, launch or LaunchFacts(), started)
    finally:
        if collecting:
            gc.enable()


def _audit(kernel: KernelBinary, roles: RoleMap, ptx: PtxKernel | None, launch: LaunchFacts, started: float) -> AuditResult:
    if not kernel.instructions:
        return _result(kernel, started, notes=("no instructions: nothing was audited",), complete=False)
    analysis = analyse(kernel, launch)
    names = {p.index: p.name for p in (*kernel.parameters, *(ptx.parameters if ptx else ())) if p.name}
    subject = Subject(analysis, roles, launch, names)
    if _needs_roles(subject):
        subject.analysis = analysis = refine(analysis, launch)
    findings = [finding for rule in (*RULES_OF_ORDER, *RULES_OF_SYNCHRONISATION) for finding in rule(subject)]
    if ptx is not None:
        findings = compare_with_ptx(subject, ptx, findings)
    return _assemble(subject, with_witnesses(subject, findings), started, ptx is not None)


def _needs_roles(subject: Subject) -> bool:
    """Warp roles are looked at only when the run for all threads leaves something unordered."""
    if not subject.has_wait and not subject.guarding_polls():
        return False
    return any(True for _ in early_records(subject)) or bool(launch_findings(subject)) or _unknown_early(subject)


def _unknown_early(subject: Subject) -> bool:
    return any(r.resolved.unknown and not r.waited for r in subject.analysis.records if r.site is not None)


def _assemble(subject: Subject, findings: list[Finding], started: float, compared: bool) -> AuditResult:
    analysis, kernel = subject.analysis, subject.kernel
    unknown = analysis.program.compiler.unknown
    notes = [*kernel.notes, *analysis.program.notes, *sorted(analysis.notes)]
    notes += [f"unknown instruction {root} at {', '.join(f'{pc:#x}' for pc in pcs[:4])}" for root, pcs in sorted(unknown.items())]
    accesses = _accesses(subject)
    reached = {key[0] for flow in analysis.flows for key in flow.states}
    lost = [f"no path reaches the code at {kernel.instructions[b.first].pc:#x}" for b in _unreached(analysis, reached)]
    return AuditResult(
        kernel=kernel.name,
        arch=kernel.arch,
        digest=kernel.digest,
        path=kernel.path,
        findings=tuple(sorted(findings, key=lambda f: (f.rule, f.pc, f.parameter))),
        accesses=accesses,
        waits=_waits(subject),
        parameters=tuple(replace(p, name=p.name or subject.names.get(p.index, "")) for p in kernel.parameters),
        notes=tuple(dict.fromkeys([*notes, *lost])),
        unknown_instructions=tuple(sorted(unknown)),
        unknown_bases=sum(1 for access in accesses if access.unknown_base),
        instructions=len(kernel.instructions),
        registers=kernel.registers,
        spill_bytes=kernel.spill_bytes,
        code_digest=kernel.code_digest,
        ptx_compared=compared,
        complete=not any(note.startswith("analysis stopped") for note in notes),
        seconds=time.perf_counter() - started,
    )


def _unreached(analysis: Analysis, reached: set[int]) -> list:
    """Blocks with accesses that no path reaches: only those matter, padding behind the last exit does not."""
    events = analysis.program.events
    return [
        block for block in analysis.program.graph.blocks if block.index not in reached and any(code.site for code in events[block.index])
    ]


def _accesses(subject: Subject) -> tuple[Access, ...]:
    grouped: dict[int, list[Record]] = {}
    for record in subject.analysis.records:
        if record.site is not None and record.resolved.space == "global":
            grouped.setdefault(record.code.pc, []).append(record)
    return tuple(_access(subject, pc, records) for pc, records in sorted(grouped.items()))


def _access(subject: Subject, pc: int, records: list[Record]) -> Access:
    site = records[0].site
    if site is None:
        raise ValueError(f"access at {pc:#x}: got no site, needs one")
    instruction = subject.instruction(pc)
    waited = [record.waited for record in records]
    if not subject.has_wait:
        when = When.NO_WAIT
    else:
        when = When.AFTER if all(waited) else (When.MAYBE_BEFORE if any(waited) else When.BEFORE)
    must = -1
    for record in records:
        must &= record.must
    return Access(
        pc=pc,
        opcode=instruction.opcode,
        kind=site.kind,
        coherent=site.coherent,
        strength=site.strength,
        bases=frozenset(ref for record in records for ref in record.resolved.bases),
        symbols=tuple(dict.fromkeys(symbol for record in records for symbol in record.resolved.symbols)),
        unknown_base=any(record.resolved.unknown for record in records),
        when=when,
        waits=frozenset(subject.analysis.wait_pcs if when is When.AFTER else ()),
        guard=instruction.pred,
        warps=",".join(sorted({r.flow.role.name for r in records if not r.waited} - {"all", ""})),
        text=str(instruction),
        line=instruction.line,
        file=instruction.file,
        bytes_per_thread=site.byte_count,
    )


def _waits(subject: Subject) -> tuple[Wait, ...]:
    kinds = {
        "ACQBULK": WaitKind.GRID,
        "BAR": WaitKind.BARRIER,
        "UCGABAR_WAIT": WaitKind.BARRIER,
        "PREEXIT": WaitKind.RELEASE_DEPENDENTS,
        "MEMBAR": WaitKind.FENCE,
        "FENCE": WaitKind.FENCE,
    }
    resolver = subject.analysis.program.resolver
    found = []
    for instruction in subject.kernel.instructions:
        root = instruction.opcode.partition(".")[0]
        kind = kinds.get(root)
        if root == "SYNCS" and "PHASECHK" in instruction.opcode:
            kind = WaitKind.MBARRIER
        if instruction.pc in resolver.ended_polls:
            kind = WaitKind.ACQUIRE
        if kind is None or instruction.pred == "@!PT":
            continue
        refs = [p for p in subject.kernel.parameters if p.index in resolver.polled.get(instruction.pc, ())]
        found.append(
            Wait(
                pc=instruction.pc,
                kind=kind,
                opcode=instruction.opcode,
                guard=instruction.pred,
                bases=frozenset(ParamRef(index=p.index) for p in refs) if kind is WaitKind.ACQUIRE else frozenset(),
                text=str(instruction),
                line=instruction.line,
                file=instruction.file,
            )
        )
    return tuple(found)


def _result(kernel: KernelBinary, started: float, notes: tuple[str, ...], complete: bool) -> AuditResult:
    return AuditResult(
        kernel=kernel.name,
        arch=kernel.arch,
        digest=kernel.digest,
        path=kernel.path,
        parameters=kernel.parameters,
        notes=(*kernel.notes, *notes),
        instructions=len(kernel.instructions),
        registers=kernel.registers,
        spill_bytes=kernel.spill_bytes,
        code_digest=kernel.code_digest,
        complete=complete,
        seconds=time.perf_counter() - started,
    )
