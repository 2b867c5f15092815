"""Rules about synchronisation inside a kernel: mailboxes (MO009), proxy fences (MO010), polls that cannot end (MO016)."""

from __future__ import annotations

from dataclasses import replace

from validation.ordering import opcodes
from validation.ordering.machine import DIRTY_GLOBAL_SHIFT, DIRTY_SHARED, DIRTY_TILE
from validation.ordering.model import READING, Finding, Kind, ParamRef, Role, Severity
from validation.ordering.opcodes import words
from validation.ordering.operands import parse_operands
from validation.ordering.rules import Subject

MAILBOX_FIX = "poll and publish with acquire/release (or relaxed/volatile for self-validating data), with a fence between payload and flag"
PROXY_FIX = "execute fence.proxy.async between the ordinary store and the asynchronous copy that reads it, in the storing threads"
POLL_FIX = "poll with a relaxed, acquire, volatile or mmio load; plain and cached loads are hoisted out of the loop"
EFFECTS = words("""LDG LD LDS LDL ATOMG ATOM ATOMS BAR SYNCS CALL S2R CS2R S2UR NANOSLEEP LDGMC VOTE ELECT""")


def mailbox_findings(subject: Subject) -> list[Finding]:
    """MO009: weak reads, weak publishing, and payload that its flag does not order."""
    found: dict[tuple[int, ParamRef, str], Finding] = {}
    strong_store = any(
        r.site and r.site.kind in (Kind.STORE, Kind.ATOMIC) and r.site.strength != "weak" and _mailbox(subject, r.resolved.bases)
        for r in subject.analysis.records
    )
    protected = _payload_bits(subject)
    consumed = _consumed(subject)
    for record in subject.analysis.records:
        site = record.site
        if site is None or record.resolved.space != "global":
            continue
        for ref in _mailbox(subject, record.resolved.bases):
            what, severity = "", None
            if site.kind in READING and site.strength == "weak" and not record.must & ~1:
                kind = "non-coherent" if not site.coherent else "weak"
                what = f"{kind} {site.kind.value.replace('_', ' ')} of mailbox {subject.name(ref)} with no acquire before it"
            elif site.kind is Kind.STORE and site.strength == "weak" and not strong_store:
                what = f"weak store to mailbox {subject.name(ref)}, and no strong store or atomic publishes it"
                if consumed.get(ref.index, record.code.pc) < record.code.pc:
                    # Most likely what was consumed is armed again, and the end of the kernel orders that for the next message.
                    what += "; fine when it re-arms what this kernel consumed, not when it forwards"
                    severity = Severity.NOTE
            elif site.kind in (Kind.STORE, Kind.ATOMIC) and site.strength != "weak" and record.may & protected:
                what = f"flag in mailbox {subject.name(ref)} is published while payload stores have no fence behind them"
            if what:
                finding = replace(subject.finding("MO009", what, record, ref, fix=MAILBOX_FIX), severity=severity)
                found.setdefault((record.code.pc, ref, what), finding)
    return [found[key] for key in sorted(found, key=str)]


def _mailbox(subject: Subject, bases: frozenset[ParamRef]) -> list[ParamRef]:
    return [ref for ref in sorted(bases) if subject.role(ref) is Role.MAILBOX]


def _consumed(subject: Subject) -> dict[int, int]:
    """Mailbox parameter -> first place where this kernel reads it strongly."""
    found: dict[int, int] = {}
    for record in subject.analysis.records:
        if record.site is not None and record.site.kind is Kind.LOAD and record.site.strength != "weak":
            for ref in _mailbox(subject, record.resolved.bases):
                found[ref.index] = min(found.get(ref.index, record.code.pc), record.code.pc)
    return found


def _payload_bits(subject: Subject) -> int:
    """MAY bits of weak stores, not yet fenced, to memory that a mailbox publishes: mailboxes, and buffers guarded by one."""
    bits = 0
    for parameter in subject.kernel.parameters:
        entry = subject.entry(ParamRef(index=parameter.index))
        if entry is not None and (entry.role is Role.MAILBOX or entry.guarded_by is not None):
            bits |= 2 << (DIRTY_GLOBAL_SHIFT + 2 * parameter.index)
    return bits


def proxy_findings(subject: Subject) -> list[Finding]:
    """MO010: the async proxy does not see ordinary writes without a proxy fence."""
    found: dict[int, Finding] = {}
    for record in subject.analysis.records:
        site, pc = record.site, record.code.pc
        if pc in found:
            continue
        # A matrix instruction reads tiles; single words stored before it are the allocator's and the scheduler's.
        dirty = DIRTY_SHARED if record.code.event == "async_store" else DIRTY_TILE if record.code.event == "async_read" else 0
        if record.may & dirty:
            what = "asynchronous copy" if record.code.event == "async_store" else "matrix instruction"
            message = f"{what} reads shared memory that ordinary stores wrote, with no fence.proxy.async between"
            found[pc] = subject.finding("MO010", message, record, fix=PROXY_FIX)
        elif site is not None and _reads_async(site.kind, subject, pc):
            for ref in sorted(record.resolved.bases):
                if record.may & (1 << (DIRTY_GLOBAL_SHIFT + 2 * ref.index)):
                    name = subject.name(ref)
                    message = f"asynchronous copy reads {name}, which ordinary stores of this kernel wrote, with no proxy fence"
                    found[pc] = subject.finding("MO010", message, record, ref, fix=PROXY_FIX)
    return [found[pc] for pc in sorted(found)]


def _reads_async(kind: Kind, subject: Subject, pc: int) -> bool:
    """TMA and bulk copies use the async proxy; LDGSTS does not."""
    return kind is Kind.TMA_LOAD or (kind is Kind.ASYNC_LOAD and not subject.instruction(pc).opcode.startswith("LDGSTS"))


def poll_findings(subject: Subject) -> list[Finding]:
    """MO016: a loop that reads nothing and whose condition never changes: its poll was hoisted, it can only hang."""
    found = []
    flow = subject.analysis.flows[0]
    reached = {key[0] for key in flow.states}
    instructions = subject.kernel.instructions
    for header, body in sorted(flow.graph.loops.items()):
        if header not in reached or len(body) > 4:
            continue
        inside = [i for member in sorted(body) for i in instructions[flow.graph.blocks[member].first : flow.graph.blocks[member].last + 1]]
        if any(opcodes.root_of(i.opcode)[0] in EFFECTS or i.opcode.startswith(("ST", "RED", "EXIT", "U")) for i in inside):
            continue
        if _condition_changes(inside):
            continue
        first = instructions[flow.graph.blocks[header].first]
        found.append(
            subject.finding(
                "MO016",
                f"the loop at {first.pc:#x} reads nothing and its condition never changes: a poll was hoisted out of it",
                pc=first.pc,
                instruction=str(inside[-1]),
                source_file=first.file,
                source_line=first.line,
                fix=POLL_FIX,
            )
        )
    return found


def _condition_changes(inside: list) -> bool:
    """Whether any predicate that a branch of the loop tests is written inside the loop from something that changes there."""
    tested: set[str] = set()
    for instruction in inside:
        if opcodes.root_of(instruction.opcode)[0] in ("BRA", "BSYNC", "JMP"):
            tested.update([instruction.pred.lstrip("@!")] if instruction.pred else [])
            tested.update(o.name for o in parse_operands(instruction.operands) if o.kind == "pred")
    changing = set(tested)
    written: dict[str, set[str]] = {}
    for instruction in inside:
        operands = parse_operands(instruction.operands)
        names = [o.name for o in operands if o.kind in ("reg", "pred")]
        if names and opcodes.root_of(instruction.opcode)[0] not in ("BRA", "BSYNC", "BSSY", "YIELD", "NOP"):
            written.setdefault(names[0], set()).update(names[1:])
    # A condition changes when something it depends on depends on itself: a counter.
    frontier, seen = list(changing), set()
    while frontier:
        name = frontier.pop()
        if name in seen:
            continue
        seen.add(name)
        frontier.extend(written.get(name, ()))
    return any(name in _reach(name, written) for name in seen)


def _reach(start: str, written: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    frontier = list(written.get(start, ()))
    while frontier:
        name = frontier.pop()
        if name not in found:
            found.add(name)
            frontier.extend(written.get(name, ()))
    return found


RULES_OF_SYNCHRONISATION = (mailbox_findings, proxy_findings, poll_findings)
