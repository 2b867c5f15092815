"""PTX against SASS: who put an access where it is (MO002), what is gone (MO016), what sank (MO014, MO017).

Accesses are matched by what they touch: parameter, direction and kind. Instructions are not matched one to one, since loops unroll and
loads merge; a claim about order is made only when it holds for all PTX accesses of that parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from validation.ordering.engine import Analysis, Record, analyse, refine
from validation.ordering.machine import ACQUIRE, BARRIER, MBARRIER, RELEASE
from validation.ordering.model import READING, WRITING, Finding, Kind, LaunchFacts, ParamRef, PtxKernel, Role, RoleMap, Stage
from validation.ordering.ptx_lower import Lowered, lower_ptx
from validation.ordering.rules import Subject, early_records, launch_findings, merged
from validation.ordering.rules_sync import POLL_FIX, poll_findings

MOVED = frozenset({"MO001", "MO006", "MO007", "MO008"})
KIND_NAMES = {BARRIER: "a barrier", MBARRIER: "an mbarrier wait", ACQUIRE: "an acquire"}
SINK_NAMES = {BARRIER: "a barrier", RELEASE: "a release"}
Place = tuple[int, bool, str]  # parameter index, through a table, "read" | "write" | "prefetch"


@dataclass
class PtxSide:
    """The PTX of the kernel, analysed the same way. Accesses are found by what they touch."""

    subject: Subject
    lowered: Lowered
    records: dict[Place, list[Record]]
    early: set[Place]

    def line(self, record: Record) -> tuple[int, str]:
        source = self.lowered.sources[record.code.pc // 16]
        return source.line, " ".join(source.text.split())


def analyse_ptx(ptx: PtxKernel, roles: RoleMap, launch: LaunchFacts, names: dict[int, str]) -> PtxSide:
    lowered = lower_ptx(ptx)
    analysis: Analysis = analyse(lowered.kernel, launch)
    subject = Subject(analysis, roles, launch, names)
    if (subject.has_wait or subject.guarding_polls()) and (any(True for _ in early_records(subject)) or launch_findings(subject)):
        subject.analysis = analysis = refine(analysis, launch)
    records: dict[Place, list[Record]] = {}
    for record, ref in _global(analysis):
        records.setdefault(place_of(record, ref), []).append(record)
    early = {place_of(record, ref) for record, ref in early_records(subject)}
    return PtxSide(subject, lowered, records, early)


def _global(analysis: Analysis) -> list[tuple[Record, ParamRef]]:
    return [(r, ref) for r in analysis.records if r.site is not None and r.resolved.space == "global" for ref in sorted(r.resolved.bases)]


def place_of(record: Record, ref: ParamRef) -> Place:
    kind = record.site.kind if record.site is not None else Kind.LOAD
    return place(kind, ref)


def place(kind: Kind, ref: ParamRef) -> Place:
    direction = "prefetch" if kind is Kind.PREFETCH else ("read" if kind in READING and kind is not Kind.ATOMIC else "write")
    return ref.index, ref.via_table, direction


def compare_with_ptx(subject: Subject, ptx: PtxKernel, findings: list[Finding]) -> list[Finding]:
    """The findings with their stage and PTX lines, plus those that only the comparison can make."""
    side = analyse_ptx(ptx, subject.roles, subject.launch, subject.names)
    places = _finding_places(subject)
    staged = [_stage(subject, side, finding, places) for finding in findings]
    checks: tuple[Callable[[Subject, PtxSide], list[Finding]], ...] = (moved_across_barriers, sunk_reads, lost_prefetch, gone)
    known = {(finding.rule, finding.pc, finding.parameter) for finding in staged}
    for check in checks:
        staged.extend(f for f in check(subject, side) if (f.rule, f.pc, f.parameter) not in known)
    subject.analysis.notes.update(f"PTX: {note}" for note in side.lowered.notes)
    return staged


def _finding_places(subject: Subject) -> dict[tuple[int, str], Place]:
    """(pc, parameter name) of a finding -> what it touches."""
    return {(record.code.pc, subject.name(ref)): place_of(record, ref) for record, ref in _global(subject.analysis)}


def _stage(subject: Subject, side: PtxSide, finding: Finding, places: dict[tuple[int, str], Place]) -> Finding:
    where = places.get((finding.pc, finding.parameter))
    if finding.rule == "MO016":
        return replace(finding, stage=Stage.NVVM) if poll_findings(side.subject) else replace(finding, stage=Stage.PTXAS)
    if where is None or where not in side.records:
        return finding
    if finding.rule not in MOVED:
        return _with_line(side, finding, side.records[where][0])
    if where not in side.early:
        line, text = side.line(side.records[where][0])
        message = f"{finding.message}; in the PTX it comes after its wait (line {line}), so ptxas moved it"
        rule = "MO002" if where[2] == "read" else finding.rule
        return replace(finding, rule=rule, message=message, stage=Stage.PTXAS, ptx_line=line, ptx_text=text, fix=_moved_fix(finding))
    early = next(r for r, ref in early_records(side.subject) if place_of(r, ref) == where)
    finding = _with_line(side, finding, early)
    stage = _source_stage(side, early)
    if stage is Stage.NVVM and where[2] == "read":
        return replace(
            finding, rule="MO002", stage=stage, fix=_moved_fix(finding),
            message=f"{finding.message}; by its source line it belongs behind the wait, but the PTX has it before: the front end moved it",
        )  # fmt: skip
    return replace(finding, stage=stage, details={**finding.details, "in_ptx": "before the wait too"})


def _moved_fix(finding: Finding) -> str:
    return f"{finding.fix}; load it coherently and with side effects, so that no compiler stage may move it"


def _with_line(side: PtxSide, finding: Finding, record: Record) -> Finding:
    line, text = side.line(record)
    return replace(finding, ptx_line=line, ptx_text=text)


def _source_stage(side: PtxSide, record: Record) -> Stage:
    """NVVM when the source line of the access lies behind the wait's in the same file, SOURCE when before it, else unknown.

    Line 0 in code that otherwise has lines also means NVVM: LLVM drops the location of an instruction that it hoists or merges.
    """
    own = side.lowered.sources[record.code.pc // 16]
    if not own.source_line:
        dropped = bool(own.source_file) and any(source.source_line for source in side.lowered.sources)
        return Stage.NVVM if dropped else Stage.UNKNOWN
    polled = {side.lowered.sources[pc // 16].line for pc in side.subject.analysis.program.resolver.ended_polls}
    waits = [s for s in side.lowered.sources if s.opcode == "griddepcontrol.wait"]
    waits = waits or [s for s in side.lowered.sources if s.line in polled]
    lines = [s.source_line for s in waits if s.source_line and s.source_file == own.source_file]
    if not lines:
        return Stage.UNKNOWN
    return Stage.NVVM if own.source_line > max(lines) else Stage.SOURCE


def _protected(subject: Subject, ref_index: int) -> bool:
    return subject.role(ParamRef(index=ref_index)) not in (Role.WEIGHT, Role.SCALAR, Role.UNKNOWN)


def _depths(records: list[Record], kind: int) -> list[int]:
    """Smallest count of one kind of wait for each instruction, sorted."""
    by_pc: dict[int, int] = {}
    for record in records:
        by_pc[record.code.pc] = min(record.depth[kind], by_pc.get(record.code.pc, record.depth[kind]))
    return sorted(by_pc.values())


def _noncoherent(subject: Subject) -> dict[Place, list[Record]]:
    """Non-coherent loads of what is not a weight: the only ones that ptxas moves."""
    found: dict[Place, list[Record]] = {}
    for record, ref in _global(subject.analysis):
        if record.site is not None and not record.site.coherent and _protected(subject, ref.index):
            found.setdefault(place_of(record, ref), []).append(record)
    return found


def moved_across_barriers(subject: Subject, side: PtxSide) -> list[Finding]:
    """MO002 for waits inside the kernel: every PTX load of the parameter is behind more of them than some SASS load."""
    found = []
    for where, records in sorted(_noncoherent(subject).items()):
        originals = [r for r in side.records.get(where, []) if r.site is not None and not r.site.coherent]
        for kind, name in KIND_NAMES.items():
            if not originals or min(_depths(records, kind)) >= min(_depths(originals, kind)):
                continue
            record = min(records, key=lambda r: (r.depth[kind], r.code.pc))
            ref = next(ref for ref in sorted(record.resolved.bases) if ref.index == where[0])
            line, text = side.line(originals[0])
            message = (
                f"non-coherent load of {subject.name(ref)} runs ahead of {name} that it follows in the PTX (line {line}): ptxas moved it"
            )
            fix = "read it through a coherent load: no __ldg, no `const __restrict__`, no invariant=True, no ld.global.nc"
            found.append(subject.finding("MO002", message, record, ref, stage=Stage.PTXAS, ptx_line=line, ptx_text=text, fix=fix))
    return merged(found)


def sunk_reads(subject: Subject, side: PtxSide) -> list[Finding]:
    """MO017: as many loads as in the PTX, and some behind more barriers or releases than there."""
    found = []
    for where, records in sorted(_noncoherent(subject).items()):
        originals = [r for r in side.records.get(where, []) if r.site is not None and not r.site.coherent]
        for kind, name in SINK_NAMES.items():
            here, there = _depths(records, kind), _depths(originals, kind)
            if len(here) != len(there) or not any(a > b for a, b in zip(here, there, strict=True)):
                continue
            record = max(records, key=lambda r: (r.depth[kind], r.code.pc))
            ref = next(ref for ref in sorted(record.resolved.bases) if ref.index == where[0])
            line, text = side.line(originals[0])
            message = f"non-coherent load of {subject.name(ref)} sank below {name} that it precedes in the PTX (line {line})"
            fix = "read it through a coherent load, or consume the value before the barrier or release"
            found.append(subject.finding("MO017", message, record, ref, stage=Stage.PTXAS, ptx_line=line, ptx_text=text, fix=fix))
    return found


def lost_prefetch(subject: Subject, side: PtxSide) -> list[Finding]:
    """MO014: weights that the PTX reads before the wait and the binary only after it."""
    if not subject.programmatic or not subject.has_wait:
        return []
    here: dict[Place, list[Record]] = {}
    for record, ref in _global(subject.analysis):
        here.setdefault(place_of(record, ref), []).append(record)
    found = []
    for where, originals in sorted(side.records.items()):
        if where[2] == "write" or subject.role(ParamRef(index=where[0])) is not Role.WEIGHT or where not in here:
            continue
        early = {r.code.pc for r in originals if not r.waited}
        if not early or any(not r.waited for r in here[where]):
            continue
        record = here[where][0]
        ref = next(ref for ref in sorted(record.resolved.bases) if ref.index == where[0])
        line, text = side.line(next(r for r in originals if not r.waited))
        message = f"{len(early)} read(s) of the weight {subject.name(ref)} come before the wait in the PTX and after it in the binary"
        fix = "pin the prefetch: load it with side effects (volatile inline PTX) or prefetch it into L2, and use it after the wait"
        found.append(subject.finding("MO014", message, record, ref, stage=Stage.PTXAS, ptx_line=line, ptx_text=text, fix=fix))
    return found


def _merged_across(mine: list[Record], originals: list[Record]) -> str:
    """The kind of wait that separates PTX loads of which the binary holds only the early ones; "" when there is none."""
    for kind, name in KIND_NAMES.items():
        there, here = _depths(originals, kind), _depths(mine, kind)
        if len(here) < len(there) and there[0] == 0 < there[-1] and here[-1] == 0:
            return name
    return ""


def gone(subject: Subject, side: PtxSide) -> list[Finding]:
    """MO016: grid waits, strong loads or whole read-after-wait accesses of the PTX that the binary does not hold."""
    found = []
    if side.subject.has_wait and not subject.has_wait:
        message = "the PTX holds griddepcontrol.wait, the binary holds no ACQBULK: the wait is gone"
        found.append(subject.finding("MO016", message, stage=Stage.PTXAS, fix="keep the wait volatile"))
    here: dict[Place, list[Record]] = {}
    for record, ref in _global(subject.analysis):
        here.setdefault(place_of(record, ref), []).append(record)
    for where, originals in sorted(side.records.items()):
        ref = ParamRef(index=where[0], via_table=where[1])
        if where[2] != "read" or not _protected(subject, where[0]):
            continue
        mine = here.get(where, [])
        strong = [r for r in originals if r.site is not None and r.site.strength != "weak"]
        line, text = side.line(originals[0])
        if strong and not any(r.site is not None and r.site.strength != "weak" for r in mine):
            message = f"strong loads of {subject.name(ref)} in the PTX (line {line}) are gone from the binary"
            found.append(subject.finding("MO016", message, None, ref, stage=Stage.PTXAS, ptx_line=line, ptx_text=text))
        elif subject.has_wait and mine and any(r.waited for r in originals) and not any(r.waited for r in mine) and where in side.early:
            message = (
                f"{subject.name(ref)} is read before and after the wait in the PTX, and only before it in the binary: loads were merged"
            )
            found.append(subject.finding("MO016", message, mine[0], ref, stage=Stage.PTXAS, ptx_line=line, ptx_text=text))
        elif mine and (name := _merged_across(mine, originals)):
            message = f"{subject.name(ref)} is read before and after {name} in the PTX, and only before it in the binary: loads were merged"
            found.append(subject.finding("MO016", message, mine[0], ref, stage=Stage.PTXAS, ptx_line=line, ptx_text=text))
    endless = poll_findings(side.subject)
    if endless and not poll_findings(subject):
        line, text = side.lowered.sources[endless[0].pc // 16].line, " ".join(side.lowered.sources[endless[0].pc // 16].text.split())
        message = (
            f"the PTX loop at line {line} reads nothing and its condition never changes: a poll was hoisted, and ptxas dropped the loop"
        )
        found.append(subject.finding("MO016", message, stage=Stage.NVVM, ptx_line=line, ptx_text=text, fix=POLL_FIX))
    polls, originals_polls = subject.analysis.program.resolver.ended_polls, side.subject.analysis.program.resolver.ended_polls
    if originals_polls and not polls:
        message = "a polling loop of the PTX is no loop in the binary"
        found.append(subject.finding("MO016", message, stage=Stage.PTXAS, fix="poll with a relaxed, acquire, volatile or mmio load"))
    return found


__all__ = ["WRITING", "PtxSide", "analyse_ptx", "compare_with_ptx"]
