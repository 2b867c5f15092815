"""MO015: registers, spills and the digest of the SASS of each kernel, recorded and compared, with the toolchain of both sides.

The record is a JSON file beside the kernels, one row a kernel and architecture. It changes only by `audit --record`, so a review shows it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from validation.core.types import HarnessError
from validation.ordering.model import AuditResult, Finding, Severity

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What one kernel looked like when it was last accepted."""

    registers: int
    spill_bytes: int
    code_digest: str
    findings: tuple[str, ...] = ()  # rules reported at the time


def key(result: AuditResult) -> str:
    return f"{result.kernel}|{result.arch}"


def rows_of(results: Iterable[AuditResult]) -> dict[str, Recorded]:
    """The record of these results."""
    return {
        key(result): Recorded(
            registers=result.registers,
            spill_bytes=result.spill_bytes,
            code_digest=result.code_digest,
            findings=tuple(sorted({finding.rule for finding in result.findings})),
        )
        for result in results
    }


def write_record(path: Path, results: Iterable[AuditResult], toolchain: Mapping[str, str]) -> int:
    """Write the record (temporary file, then rename). Returns the number of rows."""
    rows = rows_of(results)
    table = {
        "schema": SCHEMA,
        "toolchain": dict(sorted(toolchain.items())),
        "kernels": {name: vars(row) | {"findings": list(row.findings)} for name, row in sorted(rows.items())},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        json.dump(table, file, indent=1)
        file.write("\n")
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    return len(rows)


def read_record(path: Path) -> tuple[dict[str, Recorded], dict[str, str]]:
    """(rows, toolchain). Raises HarnessError when the file is not a record."""
    try:
        table: dict[str, Any] = json.loads(path.read_text())
        if table["schema"] != SCHEMA:
            raise ValueError(f"schema {table['schema']}")
        rows = {
            name: Recorded(
                registers=int(row["registers"]),
                spill_bytes=int(row["spill_bytes"]),
                code_digest=str(row["code_digest"]),
                findings=tuple(row.get("findings", ())),
            )
            for name, row in table["kernels"].items()
        }
        return rows, dict(table["toolchain"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HarnessError(f"record {path}: got {type(error).__name__}: {error}, needs what `audit --record` writes") from error


def compare(results: Iterable[AuditResult], rows: Mapping[str, Recorded], was: Mapping[str, str], now: Mapping[str, str]) -> list[Finding]:
    """A finding a kernel that changed: a warning for spills, registers or new rules, a note when only the code differs."""
    tools = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
    versions = ", ".join(f"{name} {was.get(name, 'absent')} -> {now.get(name, 'absent')}" for name in tools) or "same toolchain"
    findings = []
    recorded = {name.rpartition("|")[2] for name in rows}
    unrecorded: dict[str, list[AuditResult]] = {}
    for result in results:
        if result.arch not in recorded:
            unrecorded.setdefault(result.arch, []).append(result)
            continue
        old = rows.get(key(result))
        new = rows_of([result])[key(result)]
        if old is None:
            findings.append(_finding(result, f"not in the record; {versions}", Severity.NOTE))
        elif old != new:
            changes = _changes(old, new)
            worse = new.spill_bytes > old.spill_bytes or new.registers != old.registers or set(new.findings) - set(old.findings)
            severity = Severity.WARNING if worse else Severity.NOTE
            findings.append(_finding(result, f"{'; '.join(changes)}; {versions}", severity))
    for arch, missing in sorted(unrecorded.items()):
        message = f"the record holds no kernel of {arch}: {len(missing)} are not compared"
        findings.append(replace(_finding(missing[0], message, Severity.NOTE), kernel="module"))
    return findings


def _changes(old: Recorded, new: Recorded) -> list[str]:
    changes = []
    if old.registers != new.registers:
        changes.append(f"registers {old.registers} -> {new.registers}")
    if old.spill_bytes != new.spill_bytes:
        changes.append(f"spills {old.spill_bytes} -> {new.spill_bytes} bytes a thread")
    if old.findings != new.findings:
        changes.append(f"findings {', '.join(old.findings) or 'none'} -> {', '.join(new.findings) or 'none'}")
    if old.code_digest != new.code_digest:
        changes.append(f"SASS {old.code_digest[:12]} -> {new.code_digest[:12]}")
    return changes


def _finding(result: AuditResult, message: str, severity: Severity) -> Finding:
    return Finding(
        rule="MO015",
        kernel=result.kernel,
        arch=result.arch,
        message=message,
        severity=severity,
        fix="look at the new binary, measure it, then accept it with `fasttrack audit --record`",
    )
