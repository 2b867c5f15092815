"""Findings that need more than one kernel binary to see: a mailbox that nobody polls, and moves that happened before PTX was written.

The binary rules compare SASS with PTX. A load that the compiler's middle end lifts above its wait is early in both. The source tells: when
every use of the load stands behind the first wait of its kernel, in source order, the move was NVVM's and MO001 becomes MO002.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from validation.ordering.lint_doors import Function, Source, called_name, find_sites
from validation.ordering.model import READING, AuditResult, Finding, Kind, Role, RoleMap, Stage, WaitKind

WAIT_NAMES = frozenset({"griddepcontrol_wait", "grid_wait", "cudaGridDependencySynchronize"})
WAIT_TEXT = ("griddepcontrol.wait", ".acquire", "mbarrier.try_wait", "mbarrier.test_wait")


def unpolled_mailboxes(result: AuditResult, roles: RoleMap) -> tuple[Finding, ...]:
    """MO016 for parameters with the role mailbox that no instruction touches: the poll (or the message) is gone from the binary."""
    if result.unknown_bases or not result.complete:
        return ()
    touched = {ref.index for access in result.accesses for ref in access.bases}
    touched |= {ref.index for wait in result.waits for ref in wait.bases}
    found = []
    for (index, offset), entry in sorted(roles.by_index.items()):
        if entry.role is Role.MAILBOX and offset == 0 and index not in touched and index < len(result.parameters):
            name = entry.name or f"p{index}"
            found.append(
                Finding(
                    rule="MO016",
                    kernel=result.kernel,
                    arch=result.arch,
                    message=f"mailbox {name} is touched by no instruction: its poll or its message is gone from the binary",
                    parameter=name,
                    role=Role.MAILBOX,
                    role_reason=entry.reason,
                    fix="poll with ld.acquire, ld.relaxed or a volatile load; declare inline PTX side-effecting",
                )
            )
    return tuple(found)


def guards_not_polled(result: AuditResult, roles: RoleMap) -> tuple[Finding, ...]:
    """MO016 for flags that guard a buffer and are read in no loop that waits for them: unordered when the peer is late."""
    guards = {entry.guarded_by for entry in roles.by_index.values() if entry.guarded_by is not None}
    polled = {ref.index for wait in result.waits if wait.kind is WaitKind.ACQUIRE for ref in wait.bases}
    found = []
    for access in result.accesses:
        for ref in sorted(access.bases):
            if access.kind is not Kind.LOAD or ref.index not in guards - polled or access.strength == "weak":
                continue
            entry = roles.lookup(ref)
            name = entry.name if entry is not None and entry.name else str(ref)
            found.append(
                Finding(
                    rule="MO016",
                    kernel=result.kernel,
                    arch=result.arch,
                    message=f"flag {name} guards a buffer and is read once, not polled in a loop",
                    pc=access.pc,
                    instruction=access.text,
                    parameter=name,
                    role=Role.MAILBOX,
                    role_reason=entry.reason if entry is not None else "",
                    source_file=access.file,
                    source_line=access.line,
                    fix="poll it in a loop with acquire until the expected value is there",
                )
            )
    return tuple(found)


def moved_by_nvvm(result: AuditResult, sources: Iterable[Path], context: Iterable[Path] = ()) -> AuditResult:
    """`result` with each MO001 read raised to MO002 (stage nvvm) that the kernel's source has only behind its first wait.

    Only inline PTX declared free of side effects can move before PTX is written, so only kernels that use such a statement are looked at.
    """
    candidates = [finding for finding in result.findings if finding.rule == "MO001" and finding.stage is not Stage.PTXAS]
    if not candidates:
        return result
    parsed = [source for path in (*sources, *context) if (source := _parse(path)) is not None]
    kernel = next((f for s in parsed for f in s.functions if f.kernel and f"_{f.name}_" in f"_{result.kernel}_"), None)
    if kernel is None:
        return result
    helpers = {
        site.function.name
        for site in find_sites(parsed)
        if site.function is not None and site.effects.constant is False and isinstance(site.text.constant, str)
    }
    wait = first_wait_line(kernel, parsed)
    uses = [item.lineno for item in ast.walk(kernel.node) if isinstance(item, ast.Call) and called_name(item) in helpers]
    if wait is None or not uses or min(uses) <= wait:
        return result
    raised = tuple(_raise(finding, kernel, wait, min(uses)) if finding in candidates else finding for finding in result.findings)
    return replace(result, findings=raised)


def _parse(path: Path) -> Source | None:
    try:
        return Source(path)
    except (OSError, SyntaxError, ValueError):
        return None


def first_wait_line(kernel: Function, sources: Sequence[Source]) -> int | None:
    """Last line of the first wait in source order: a grid wait, or the loop (or call) that polls with acquire. None when there is none."""
    waiting = {
        site.function.name
        for site in find_sites(sources)
        if site.function is not None and isinstance(site.text.constant, str) and any(word in site.text.constant for word in WAIT_TEXT)
    }
    waits = WAIT_NAMES | waiting
    lines = [
        item.end_lineno or item.lineno for item in ast.walk(kernel.node) if isinstance(item, ast.Call | ast.While) and _is_wait(item, waits)
    ]
    return min(lines) if lines else None


def _is_wait(item: ast.Call | ast.While, waits: frozenset[str] | set[str]) -> bool:
    if isinstance(item, ast.Call):
        return called_name(item) in waits or _acquires(item)
    return any(isinstance(part, ast.Call) and _acquires(part) for part in ast.walk(item))


def _acquires(call: ast.Call) -> bool:
    return any(k.arg == "sem" and isinstance(k.value, ast.Constant) and k.value.value == "acquire" for k in call.keywords)


def _raise(finding: Finding, kernel: Function, wait: int, use: int) -> Finding:
    return replace(
        finding,
        rule="MO002",
        stage=Stage.NVVM,
        message=f"{finding.message}; in source the read (line {use}) stands behind the wait (line {wait}), in PTX before it: moved by NVVM",
        source_file=finding.source_file or str(kernel.path),
        source_line=finding.source_line or use,
        fix="declare the inline PTX side-effecting and add the memory clobber",
    )


def more_findings(result: AuditResult, roles: RoleMap) -> tuple[Finding, ...]:
    """Everything here that needs roles and one result."""
    return (*unpolled_mailboxes(result, roles), *guards_not_polled(result, roles))


def reads_before_wait(result: AuditResult) -> int:
    """How many reads and prefetches may run before the wait: what a role change could turn into findings."""
    kinds = READING | {Kind.PREFETCH}
    return sum(access.kind in kinds and access.when.value in ("before", "maybe_before", "no_wait") for access in result.accesses)
