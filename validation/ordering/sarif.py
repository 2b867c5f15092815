"""SARIF 2.1.0 of an audit, in the shape that code-scanning services show: rules with help, results with a physical location each.

A finding about a binary points to its source line when line info exists, else to the binary file itself; the instruction, the path on which
it runs early and the wait it escapes go into the message and the code flow.
"""

from __future__ import annotations

import hashlib
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from validation.ordering.findings import Report
from validation.ordering.manifest import Suppression
from validation.ordering.model import RULES, Finding, Severity
from validation.ordering.rule_texts import rule_section, rule_text

SCHEMA_URI = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}


def to_sarif(report: Report, version: str = "0") -> dict[str, Any]:
    """The whole log object. Suppressed findings are kept, marked as suppressed."""
    paths = {(result.kernel, result.arch): result.path for result in report.results}
    ids = list(RULES)
    rows: list[tuple[Finding, Suppression | None]] = [(finding, None) for finding in report.findings]
    rows += list(report.suppressed.suppressed)
    return {
        "$schema": SCHEMA_URI,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "fasttrack-audit",
                        "version": version,
                        "rules": [_rule(rule) for rule in ids],
                    }
                },
                "columnKind": "utf16CodeUnits",
                "invocations": [_invocation(report)],
                "results": [_result(finding, ids.index(finding.rule), paths, why) for finding, why in rows],
            }
        ],
    }


def _rule(rule: str) -> dict[str, Any]:
    severity, title = RULES[rule]
    return {
        "id": rule,
        "name": "".join(word.capitalize() for word in title.replace("-", " ").replace(",", "").split())[:120],
        "shortDescription": {"text": title},
        "fullDescription": {"text": rule_section(rule, "What it does")},
        "help": {"text": rule_section(rule, "How to fix"), "markdown": rule_text(rule)},
        "defaultConfiguration": {"level": LEVELS[severity]},
        "properties": {"tags": ["memory-ordering", "cuda"]},
    }


def _invocation(report: Report) -> dict[str, Any]:
    problems = [f"{error.path}: {error.reason}" for error in report.errors]
    problems += [f"{name}: the analysis did not finish" for name in report.incomplete]
    return {
        "executionSuccessful": not problems,
        "toolExecutionNotifications": [{"level": "error", "message": {"text": text}} for text in problems],
    }


def _result(finding: Finding, index: int, paths: Mapping[tuple[str, str], str], why: Suppression | None) -> dict[str, Any]:
    binary = paths.get((finding.kernel, finding.arch), "")
    row: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": LEVELS[finding.level],
        "message": {"text": _message(finding)},
        "locations": [_location(finding, binary)],
        "partialFingerprints": {"kernelRuleInstruction/v1": _fingerprint(finding)},
        "properties": {"arch": finding.arch, "pc": finding.pc, "role": finding.role.value, "stage": finding.stage.value},
    }
    if finding.path_witness:
        steps = [{"location": {"message": {"text": f"block at {pc:#06x}"}}} for pc in finding.path_witness]
        row["codeFlows"] = [{"message": {"text": "a path on which it runs early"}, "threadFlows": [{"locations": steps}]}]
    if why is not None:
        row["suppressions"] = [{"kind": "external", "status": "accepted", "justification": f"{why.reason} (until {why.expires})"}]
    return row


def _message(finding: Finding) -> str:
    parts = [finding.message]
    if finding.instruction:
        parts.append(f"Instruction: {finding.instruction}.")
    if finding.wait_text:
        parts.append(f"Wait it escapes: {finding.wait_text}.")
    if finding.fix:
        parts.append(f"Fix: {finding.fix}.")
    return " ".join(part if part.endswith(".") else f"{part}." for part in parts)


def _location(finding: Finding, binary: str) -> dict[str, Any]:
    file = finding.source_file or binary or "unknown"
    physical = {"artifactLocation": {"uri": uri(file)}, "region": {"startLine": max(1, finding.source_line)}}
    return {"physicalLocation": physical, "logicalLocations": [{"fullyQualifiedName": finding.kernel or "module", "kind": "function"}]}


def uri(path: str) -> str:
    """Relative to the working folder where it lies below it (what code scanning needs), else a file URI."""
    plain = Path(path.partition("!")[0])
    member = path[len(str(plain)) :] if path.startswith(str(plain)) else ""
    try:
        text = os.path.relpath(plain, Path.cwd()) if plain.is_absolute() else str(plain)
    except ValueError:
        text = str(plain)
    if text.startswith(".."):
        return plain.resolve().as_uri() + urllib.parse.quote(member)
    return urllib.parse.quote(Path(text).as_posix() + member)


def _fingerprint(finding: Finding) -> str:
    key = "\0".join((finding.rule, finding.kernel, finding.arch, finding.parameter, finding.instruction or finding.message))
    return hashlib.sha256(key.encode()).hexdigest()[:32]
