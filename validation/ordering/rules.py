"""Rules about one kernel: which accesses need a wait, and what to say when they may run without it (MO001, MO003-MO008, MO011, MO013)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from validation.ordering.engine import Analysis, Record
from validation.ordering.flow import Flow, Key
from validation.ordering.machine import RELEASED, WAITED, AccessSite
from validation.ordering.model import (
    READING,
    WRITING,
    Finding,
    Kind,
    LaunchFacts,
    Parameter,
    ParamRef,
    Role,
    RoleEntry,
    RoleMap,
    Severity,
)
from validation.ordering.roles import mentions_special, parameters_of

FIXES = {
    "MO001": "put the load behind griddepcontrol.wait (or the acquire that guards its buffer) on every path that reaches it",
    "MO003": "read it through a coherent load: no __ldg, no `const __restrict__`, no invariant=True, no ld.global.nc",
    "MO004": "execute griddepcontrol.wait before the early exit, or return only after it",
    "MO005": "call griddepcontrol.wait before the first access that depends on an earlier kernel, or drop the PDL launch attribute",
    "MO006": "move the store behind griddepcontrol.wait: an earlier kernel may still read or write this memory",
    "MO007": "let this warp role execute griddepcontrol.wait itself, or put a full-block barrier between the waiting role and this access",
    "MO008": "prefetch only static weights; move the prefetch behind the wait, or leave it out",
    "MO011": "release dependents after the last access to memory that a dependent touches before its own wait",
    "MO013": "give the parameter a role in the contract or the manifest, with the reason",
}


@dataclass
class Subject:
    """One kernel under audit: the analysis with everything that gives its findings a name."""

    analysis: Analysis
    roles: RoleMap
    launch: LaunchFacts
    names: dict[int, str] = field(default_factory=dict)  # parameter index -> name
    places: dict[tuple[int, str], Record] = field(default_factory=dict)  # (pc, rule) -> where a finding was seen, for its path

    @property
    def kernel(self):
        return self.analysis.program.kernel

    @property
    def has_wait(self) -> bool:
        return bool(self.analysis.wait_pcs)

    @property
    def programmatic(self) -> bool:
        """Whether the grid wait means anything here: a PDL launch, or an unknown one of a kernel that waits."""
        return self.launch.pdl is True or (self.launch.pdl is None and self.has_wait)

    def parameter(self, index: int) -> Parameter | None:
        return next((p for p in self.kernel.parameters if p.index == index), None)

    def name(self, ref: ParamRef) -> str:
        entry = self.entry(ref)
        known = (entry.name if entry else "") or self.names.get(ref.index, "")
        if not known:
            return str(ref)
        text = known + (f"+{ref.offset}" if ref.offset else "")
        return f"*{text}" if ref.via_table else text

    def entry(self, ref: ParamRef) -> RoleEntry | None:
        return self.roles.lookup(ref, self.names.get(ref.index, ""))

    def role(self, ref: ParamRef) -> Role:
        entry = self.entry(ref)
        return entry.role if entry else Role.UNKNOWN

    # ------------------------------------------------------------------ what an access needs
    def ordered(self, record: Record, ref: ParamRef) -> bool:
        """Whether this record of an access has the wait behind it that `ref` needs."""
        entry = self.entry(ref)
        role = entry.role if entry else Role.UNKNOWN
        if role in (Role.SCALAR, Role.MAILBOX) or ref.index in self.launch.ordered:
            return True
        site = record.site
        if role is Role.WEIGHT and site is not None and site.kind not in WRITING:
            return True
        if entry is not None and entry.guarded_by is not None:
            return bool(record.must & self.acquire_mask(frozenset({entry.guarded_by})))
        if self.programmatic and self.has_wait:
            return record.waited
        if self.programmatic:
            return True  # said once, as MO005
        if role is Role.INPUT and self.launch.pdl is None and self.guarding_polls():
            return bool(record.must & ~WAITED)
        return True

    def acquire_mask(self, indices: frozenset[int]) -> int:
        mask = 0
        for bases, bit in self.analysis.program.resolver.acquire_bits.items():
            if bases & indices:
                mask |= bit
        return mask

    def guarding_polls(self) -> bool:
        """Whether some poll of a mailbox ends in an acquire: then inputs are ordered by it when there is no grid wait."""
        return bool(self.analysis.program.resolver.acquire_bits)

    # ------------------------------------------------------------------ findings
    def finding(self, rule: str, message: str, record: Record | None = None, ref: ParamRef | None = None, **more: object) -> Finding:
        values: dict[str, object] = {"rule": rule, "kernel": self.kernel.name, "arch": self.kernel.arch, "message": message}
        values["fix"] = FIXES.get(rule, "")
        if record is not None:
            instruction = self.instruction(record.code.pc)
            values.update(pc=record.code.pc, instruction=str(instruction), source_file=instruction.file, source_line=instruction.line)
            self.places.setdefault((record.code.pc, str(values["rule"])), record)
            values["warps"] = "" if record.flow.role.name in ("all", "") else record.flow.role.name
        if ref is not None:
            entry = self.entry(ref)
            values.update(parameter=self.name(ref), role=self.role(ref), role_reason=entry.reason if entry else "")
        values.update(more)
        return Finding(**values)  # type: ignore[arg-type]

    def instruction(self, pc: int):
        return self.kernel.instructions[pc // 16]

    def escaped_wait(self, pc: int) -> tuple[int, str]:
        """The first grid wait after an instruction in address order, else the first of all."""
        waits = self.analysis.wait_pcs
        found = next((wait for wait in waits if wait > pc), waits[0] if waits else -1)
        return found, str(self.instruction(found)) if found >= 0 else ""


def witness(flow: Flow, key: Key, pc: int) -> tuple[int, ...]:
    """Starts of the blocks on the first path found to an instruction, ending with it."""
    path: list[int] = [pc]
    seen: set[Key] = set()
    at: Key | None = key
    while at is not None and at not in seen:
        seen.add(at)
        start = flow.pc_of(at)
        if start != path[-1]:
            path.append(start)
        at = flow.came_from.get(at)
    return tuple(reversed(path))


def with_witnesses(subject: Subject, findings: list[Finding]) -> list[Finding]:
    """The findings with the path on which each runs early. Done once at the end: a path costs more than a finding."""
    done = []
    for finding in findings:
        record = subject.places.get((finding.pc, finding.rule)) or next(
            (r for (pc, _), r in subject.places.items() if pc == finding.pc), None
        )
        if record is not None and not finding.path_witness:
            finding = replace(finding, path_witness=witness(record.flow, record.key, record.code.pc))
        done.append(finding)
    return done


def early_records(subject: Subject) -> Iterator[tuple[Record, ParamRef]]:
    """Global accesses that lack the wait one of their bases needs, on some path."""
    for record in subject.analysis.records:
        if record.site is None or record.resolved.space != "global":
            continue
        for ref in sorted(record.resolved.bases):
            if not subject.ordered(record, ref):
                yield record, ref


def group(pairs: Iterator[tuple[Record, ParamRef]]) -> dict[tuple[int, ParamRef], list[Record]]:
    found: dict[tuple[int, ParamRef], list[Record]] = {}
    for record, ref in pairs:
        found.setdefault((record.code.pc, ref), []).append(record)
    return found


def order_findings(subject: Subject) -> list[Finding]:
    """MO001, MO006, MO007, MO008, MO013 for accesses ahead of their wait."""
    found: list[Finding] = []
    for (pc, ref), records in sorted(group(early_records(subject)).items(), key=lambda item: item[0]):
        record = records[0]
        site = record.site
        if site is None:
            continue
        role = subject.role(ref)
        wait_pc, wait_text = subject.escaped_wait(pc)
        warps = ",".join(sorted({r.flow.role.name for r in records} - {"all", ""}))
        guard = runtime_guard(subject, record)
        rule = rule_for(subject, records, site, role)
        more: dict[str, object] = {"wait_pc": wait_pc, "wait_text": wait_text, "warps": warps}
        if role is Role.UNKNOWN and rule != "MO013":
            rule = "MO013"
        if guard:
            more["severity"] = Severity.WARNING
            more["details"] = {"guard": guard}
        elif mixed(subject, record):
            more["severity"] = Severity.WARNING
        found.append(subject.finding(rule, _message(subject, rule, record, ref, guard, wait_pc), record, ref, **more))
    return merged(found)


def merged(findings: list[Finding]) -> list[Finding]:
    """One finding for all instructions that break the same rule on the same parameter in the same way; the first names the others."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.rule, finding.parameter, finding.role, finding.level, finding.warps, finding.details.get("guard"))
        groups.setdefault(key, []).append(finding)
    result = []
    for same in groups.values():
        first = same[0]
        if len(same) > 1:
            others = ", ".join(f"{finding.pc:#x}" for finding in same[1:9]) + (" ..." if len(same) > 9 else "")
            first = replace(first, details={**first.details, "instructions": len(same), "also_at": others})
        result.append(first)
    return result


def rule_for(subject: Subject, records: list[Record], site: AccessSite, role: Role) -> str:
    if role is Role.WEIGHT:
        return "MO013"
    if site.kind is Kind.PREFETCH:
        return "MO008"
    if subject.has_wait and subject.programmatic and not any(r.flow.passes_wait for r in records) and subject.analysis.refined:
        return "MO007"
    return "MO006" if site.kind in WRITING and site.kind not in READING else "MO001"


def mixed(subject: Subject, record: Record) -> bool:
    """The address may also be one that needs no wait: a select between pointers."""
    return any(subject.ordered(record, ref) for ref in record.resolved.bases if subject.role(ref) is not Role.SCALAR)


def runtime_guard(subject: Subject, record: Record) -> str:
    """The parameter whose value skips the wait on this path, when a run-time flag decides it ("" otherwise)."""
    guard = exit_guard(subject, record.flow, record.assume)
    return "" if not guard or _wait_follows(record) else guard


def exit_guard(subject: Subject, flow: Flow, assume: frozenset[int]) -> str:
    """The parameter whose value decides, under these conditions, that no wait is executed."""
    domain = subject.analysis.program.compiler.domain
    for symbol in sorted(assume & flow.skipping):
        words = parameters_of(domain, abs(symbol))
        if words:
            refs = [subject.analysis.program.resolver.parameter_at(word) for word in sorted(words)]
            return ", ".join(subject.name(ref) for ref in refs if ref is not None)
    return ""


def _wait_follows(record: Record) -> bool:
    """A wait can still be executed after this access: then no flag has turned it off, the access is merely too early."""
    return any(
        record.key[0] in before and not any(-symbol in conditions for symbol in record.assume)
        for before, conditions in record.flow.waits_ahead
    )


def _message(subject: Subject, rule: str, record: Record, ref: ParamRef, guard: str, wait_pc: int) -> str:
    site = record.site
    kind = site.kind.value.replace("_", " ") if site else "access"
    name, role = subject.name(ref), subject.role(ref).value
    wait = f"the grid wait at {wait_pc:#x}" if wait_pc >= 0 and subject.programmatic else "the acquire that guards it"
    unless = f"; only when {guard} turns the wait off" if guard else ""
    if rule == "MO013" and subject.role(ref) is Role.WEIGHT:
        return f"{name} is declared a weight but is written at {record.code.pc:#x}"
    if rule == "MO013":
        return f"{kind} of {name}, whose role nobody gave, may run before {wait}{unless}"
    if rule == "MO007":
        return f"{kind} of {name} ({role}) runs in warps {record.flow.role.name}, which never wait; {wait} is in another role{unless}"
    return f"{kind} of {name} ({role}) may run before {wait}{unless}"


def unknown_base_findings(subject: Subject) -> list[Finding]:
    """MO013 for early accesses whose pointer could not be followed, one for each instruction."""
    found: dict[int, Finding] = {}
    for record in subject.analysis.records:
        site = record.site
        if site is None or not subject.programmatic or not subject.has_wait or record.waited or record.code.pc in found:
            continue
        if record.resolved.unknown and record.resolved.space == "global":
            message = f"{site.kind.value} before the wait through a pointer that could not be followed to a parameter"
            found[record.code.pc] = subject.finding("MO013", message, record)
        elif record.resolved.symbols and not record.resolved.bases:
            symbols = [s for s in record.resolved.symbols if not s.lstrip("*").startswith(("__cudart", "$str", "__constant"))]
            entry = next((subject.roles.by_name[s] for s in symbols if s in subject.roles.by_name), None)
            if symbols and (entry is None or (entry.role is not Role.WEIGHT and site.kind in READING)):
                message = f"{site.kind.value} of the device variable {symbols[0]} before the wait"
                rule = "MO013" if entry is None else "MO001"
                found[record.code.pc] = subject.finding(rule, message, record, parameter=symbols[0])
    return [found[pc] for pc in sorted(found)]


def noncoherent_findings(subject: Subject) -> list[Finding]:
    """MO003: the only class of load that ptxas moves across a wait, used on memory that is not a weight."""
    found: dict[tuple[int, ParamRef], Finding] = {}
    written = {ref for r in subject.analysis.records if r.site and r.site.kind in WRITING for ref in r.resolved.bases}
    for record in subject.analysis.records:
        site = record.site
        if site is None or site.coherent or site.kind is not Kind.LOAD:
            continue
        for ref in sorted(record.resolved.bases):
            role = subject.role(ref)
            safe = ref.index in subject.launch.ordered and ref not in written
            if role in (Role.WEIGHT, Role.SCALAR, Role.UNKNOWN) or safe or (record.code.pc, ref) in found:
                continue
            entry = subject.entry(ref)
            guarded = entry is not None and entry.guarded_by is not None  # an acquire inside the kernel orders it, whatever the launch
            if subject.launch.pdl is False and role not in (Role.SCRATCH, Role.MAILBOX) and not guarded and ref not in written:
                continue
            if not subject.programmatic and not subject.guarding_polls() and role is Role.INPUT and ref not in written:
                continue
            message = f"non-coherent load of {subject.name(ref)} ({role.value}): the compiler may move it across any wait"
            found[record.code.pc, ref] = subject.finding("MO003", message, record, ref)
    return merged([found[key] for key in sorted(found)])


def written_weights(subject: Subject) -> list[Finding]:
    """MO013: a parameter that is declared a weight and written; reported wherever the write is."""
    found: dict[tuple[int, ParamRef], Finding] = {}
    for record in subject.analysis.records:
        if record.site is None or record.site.kind not in WRITING or record.resolved.space != "global":
            continue
        for ref in record.resolved.bases:
            if subject.role(ref) is Role.WEIGHT and not mixed_write(subject, record):
                message = f"{subject.name(ref)} is declared a weight but is written at {record.code.pc:#x}"
                found.setdefault((record.code.pc, ref), subject.finding("MO013", message, record, ref))
    return merged([found[key] for key in sorted(found)])


def mixed_write(subject: Subject, record: Record) -> bool:
    return any(subject.role(ref) not in (Role.WEIGHT, Role.SCALAR) for ref in record.resolved.bases)


def launch_findings(subject: Subject) -> list[Finding]:
    """MO004 and MO005: what a PDL launch needs of the kernel as a whole."""
    if subject.launch.pdl is True and not subject.has_wait:
        message = "launched with the PDL attribute, but the binary holds no griddepcontrol.wait (ACQBULK)"
        return [subject.finding("MO005", message)]
    if not subject.programmatic:
        return []
    flows = [*subject.analysis.flows, *([subject.analysis.leader] if subject.analysis.leader else [])]
    if any(flow.exits and all(must & WAITED or key[1] for key, must, _ in flow.exits) for flow in flows):
        return []  # some thread of every block waits, so the grid cannot complete before its predecessor
    domain = subject.analysis.program.compiler.domain
    for flow in flows:
        for key, must, assume in flow.exits:
            if key[1] or must & WAITED:
                continue
            block = flow.graph.blocks[key[0]]
            pc = subject.kernel.instructions[block.last].pc
            guard = exit_guard(subject, flow, assume)
            varies = any(mentions_special(domain, abs(s), ("SR_TID", "SR_LANEID", "SR_WARPID", "SR_CTAID", "elect")) for s in assume)
            wait_pc, wait_text = subject.escaped_wait(pc)
            instruction = subject.instruction(pc)
            return [
                subject.finding(
                    "MO004",
                    f"a path leaves the kernel at {pc:#x} without the wait at {wait_pc:#x}: a later kernel may overtake an earlier one"
                    + (f"; only when {guard} turns the wait off" if guard else ""),
                    pc=pc,
                    instruction=str(instruction),
                    path_witness=witness(flow, key, pc),
                    wait_pc=wait_pc,
                    wait_text=wait_text,
                    source_file=instruction.file,
                    source_line=instruction.line,
                    severity=Severity.WARNING if varies or guard else None,
                    details={"exit_depends_on": "thread or block id" if varies else guard or "launch parameters or memory"},
                )
            ]
    return []


def release_findings(subject: Subject) -> list[Finding]:
    """MO011: an access behind launch_dependents to memory that a dependent touches before its own wait."""
    found: dict[tuple[int, ParamRef], Finding] = {}
    for record in subject.analysis.records:
        if record.site is None or not record.may & RELEASED:
            continue
        for ref in record.resolved.bases:
            if ref.index in subject.launch.released and subject.role(ref) is not Role.WEIGHT:
                kind = record.site.kind.value.replace("_", " ")
                message = f"{kind} of {subject.name(ref)} may run after dependents were released, and one of them touches it early"
                found.setdefault((record.code.pc, ref), subject.finding("MO011", message, record, ref))
    return [found[key] for key in sorted(found)]


RULES_OF_ORDER: tuple[Callable[[Subject], list[Finding]], ...] = (
    order_findings,
    unknown_base_findings,
    noncoherent_findings,
    written_weights,
    launch_findings,
    release_findings,
)
