"""One audit's outcome as data: what was audited, what was found, what was suppressed, what could not be read; and as JSON.

The verdict follows the suite's rule that no evidence is never a pass: an unreadable file, an incomplete analysis, an unknown role or an
empty input make it "not proven", an error or a warning makes it "fail", notes alone do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from validation.core.types import Status
from validation.ordering.manifest import Suppressed
from validation.ordering.model import LIMITS, RULES, Access, AuditResult, FileError, Finding, Role, Severity, Wait, WaitKind, When

SCHEMA = 1
UNKNOWN_RULES = frozenset({"MO013"})  # a hole in the evidence rather than a fault


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything one run of the audit has to say. `findings` are those left after suppression."""

    results: tuple[AuditResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    suppressed: Suppressed = field(default_factory=lambda: Suppressed(kept=(), suppressed=(), expired=(), unused=()))
    errors: tuple[FileError, ...] = ()
    linted_files: int = 0
    linted_statements: int = 0
    graph_launches: int = 0
    toolchain: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def incomplete(self) -> tuple[str, ...]:
        """Kernels whose analysis did not finish, or that hold instructions nobody has described."""
        return tuple(f"{r.kernel} ({r.arch})" for r in self.results if not r.complete)

    @property
    def status(self) -> Status:
        """Fail, not proven or pass, as the module says."""
        serious = [f for f in self.findings if f.level in (Severity.ERROR, Severity.WARNING)]
        # A role that was contradicted by what happened is a fault; one that nobody gave is a hole.
        if any(finding.rule not in UNKNOWN_RULES or finding.level is Severity.ERROR for finding in serious):
            return Status.FAIL
        audited = self.results or self.linted_files or self.graph_launches
        if serious or self.errors or self.incomplete or not audited:
            return Status.NOT_PROVEN
        return Status.PASS

    def count(self, severity: Severity) -> int:
        return sum(finding.level is severity for finding in self.findings)


@dataclass(frozen=True, kw_only=True)
class TimelineRow:
    """One line of the annotated timeline: `zone` is "before", "wait", "after", "fence" or "release"."""

    pc: int
    zone: str
    text: str
    bases: str = ""
    rules: tuple[str, ...] = ()
    ptx_line: int = 0


def timeline(result: AuditResult, findings: Iterable[Finding] = (), roles: Mapping[int, Role] | None = None) -> tuple[TimelineRow, ...]:
    """Accesses and waits of one kernel in program order, with the rules that each access breaks. `roles`, by parameter, are shown too."""
    names = {parameter.index: parameter.name or f"p{parameter.index}" for parameter in result.parameters}
    names |= {index: f"{names.get(index, f'p{index}')} ({role.value})" for index, role in (roles or {}).items()}
    broken: dict[int, list[str]] = {}
    for finding in findings:
        if finding.kernel == result.kernel and finding.arch in ("", result.arch) and finding.pc >= 0:
            broken.setdefault(finding.pc, []).append(finding.rule)
    rows = [_access_row(access, names, tuple(dict.fromkeys(broken.get(access.pc, ())))) for access in result.accesses]
    rows += [_wait_row(wait, names) for wait in result.waits]
    return tuple(sorted(rows, key=lambda row: row.pc))


def excerpt(rows: tuple[TimelineRow, ...], limit: int) -> tuple[TimelineRow, ...]:
    """At most `limit` rows: all when they fit, else those that break a rule or are a wait, then the ones nearest to them."""
    if len(rows) <= limit:
        return rows
    marked = [at for at, row in enumerate(rows) if row.rules or row.zone == "wait"]
    broken = [at for at in marked if rows[at].rules]
    anchors = broken or marked or [0]
    order = sorted(range(len(rows)), key=lambda at: (at not in broken, at not in marked, min(abs(at - anchor) for anchor in anchors)))
    return tuple(rows[at] for at in sorted(order[:limit]))


def _base_names(bases: Iterable[Any], names: Mapping[int, str]) -> str:
    return ", ".join(sorted(str(base).replace(f"p{base.index}", names.get(base.index) or f"p{base.index}", 1) for base in bases))


def _access_row(access: Access, names: Mapping[int, str], rules: tuple[str, ...]) -> TimelineRow:
    early = access.when in (When.BEFORE, When.MAYBE_BEFORE)
    bases = _base_names(access.bases, names) + (" ?" if access.unknown_base else "")
    zone = "before" if early else "after" if access.when is When.AFTER else access.when.value.replace("_", " ")
    return TimelineRow(
        pc=access.pc, zone=zone, text=access.text or access.opcode, bases=bases.strip(), rules=rules, ptx_line=access.ptx_line
    )


def _wait_row(wait: Wait, names: Mapping[int, str]) -> TimelineRow:
    zone = {WaitKind.FENCE: "fence", WaitKind.RELEASE_DEPENDENTS: "release"}.get(wait.kind, "wait")
    return TimelineRow(pc=wait.pc, zone=zone, text=wait.text or wait.opcode, bases=_base_names(wait.bases, names))


def offending(report: Report) -> list[AuditResult]:
    """Results of kernels that have a finding left, each once."""
    keys = {(finding.kernel, finding.arch) for finding in report.findings}
    return [result for result in report.results if (result.kernel, result.arch) in keys]


def to_json(report: Report) -> dict[str, Any]:
    """Plain JSON values; stable keys."""
    return {
        "schema": SCHEMA,
        "status": report.status.value,
        "kernels": [
            {
                "kernel": r.kernel, "arch": r.arch, "path": r.path, "cubin_sha256": r.digest, "code_sha256": r.code_digest,
                "instructions": r.instructions, "registers": r.registers, "spill_bytes": r.spill_bytes, "accesses": len(r.accesses),
                "waits": len(r.waits), "unknown_bases": r.unknown_bases, "ptx_compared": r.ptx_compared, "complete": r.complete,
                "notes": list(r.notes),
            }
            for r in report.results
        ],
        "findings": [finding_json(finding) for finding in report.findings],
        "suppressed": [
            {"finding": finding_json(finding), "reason": why.reason, "expires": why.expires.isoformat()}
            for finding, why in report.suppressed.suppressed
        ],
        "suppressions_expired": [str(item) for item in report.suppressed.expired],
        "suppressions_unused": [str(item) for item in report.suppressed.unused],
        "timelines": [
            {"kernel": r.kernel, "arch": r.arch, "rows": [dataclasses.asdict(row) for row in timeline(r, report.findings)]}
            for r in offending(report)
        ],
        "errors": [dataclasses.asdict(error) for error in report.errors],
        "incomplete": list(report.incomplete),
        "linted_files": report.linted_files,
        "linted_statements": report.linted_statements,
        "graph_launches": report.graph_launches,
        "toolchain": dict(report.toolchain),
        "seconds": round(report.seconds, 3),
        "limits": list(LIMITS),
    }  # fmt: skip


def finding_json(finding: Finding) -> dict[str, Any]:
    """One finding as JSON values, with its rule's title and the level that applies."""
    row = {field.name: getattr(finding, field.name) for field in dataclasses.fields(finding)}
    row |= {"role": finding.role.value, "stage": finding.stage.value, "path_witness": list(finding.path_witness)}
    row |= {"details": dict(finding.details), "severity": finding.level.value, "title": RULES[finding.rule][1]}
    return row
