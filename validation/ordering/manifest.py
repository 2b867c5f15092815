"""Roles, launch facts and suppressions for kernels that have no operand contract: a TOML file its owner keeps beside the kernels.

    [[kernel]]
    name = "fused_moe_*"                     # shell pattern over kernel names; the first entry that matches counts
    launch = { pdl = true, ordered = ["p5"] }   # pdl, cta_threads, ordered, has_dependents, guards_true, released
    [kernel.params]
    p0 = { role = "input", reason = "activations of this step", name = "x" }
    "p3+16" = { role = "weight", reason = "second pointer of the argument struct" }
    p4 = { role = "weight", reason = "expert pointer table", target = "weight" }
    p6 = { role = "input", reason = "peer payload", guarded_by = "p7" }   # ordered by the acquire of that mailbox

    [[suppress]]
    rule = "MO003"
    kernel = "fused_moe_*"
    param = "x"                              # optional: any
    reason = "..."
    expires = 2027-03-01

    [lint]
    weight_readers = ["load_weight_*"]       # helpers whose pointer arguments are weights by convention

Parameters are named p<index>, p<index>+<byte offset>, or by their PTX name. Everything unknown is an error, all of them at once.
"""

from __future__ import annotations

import datetime
import fnmatch
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from validation.core.types import HarnessError
from validation.ordering.model import RULES, AuditResult, Finding, KernelBinary, LaunchFacts, Parameter, ParamRef, Role, RoleEntry, RoleMap
from validation.ordering.observed import ObservedRole

_PARAM = re.compile(r"p(\d+)(?:\+(\d+))?")
_TOP = {"kernel", "suppress", "lint"}
_KERNEL = {"name", "launch", "params"}
_LAUNCH = {"pdl", "cta_threads", "ordered", "has_dependents", "guards_true", "released"}
_ENTRY = {"role", "reason", "name", "target", "guarded_by"}
_SUPPRESS = {"rule", "kernel", "param", "reason", "expires"}


@dataclass(frozen=True, kw_only=True)
class Suppression:
    """A finding its owner accepts for a while. It is shown in every report."""

    rule: str
    kernel: str
    reason: str
    expires: datetime.date
    param: str = ""

    def covers(self, finding: Finding) -> bool:
        return (
            finding.rule == self.rule
            and fnmatch.fnmatchcase(finding.kernel, self.kernel)
            and (not self.param or finding.parameter == self.param)
        )

    def __str__(self) -> str:
        return f"{self.rule} in {self.kernel}{f' ({self.param})' if self.param else ''} until {self.expires}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class KernelEntry:
    pattern: str
    params: Mapping[str, RoleEntry]
    launch: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    kernels: tuple[KernelEntry, ...] = ()
    suppressions: tuple[Suppression, ...] = ()
    weight_readers: tuple[str, ...] = ()
    path: str = ""

    def entry(self, kernel: str) -> KernelEntry | None:
        return next((entry for entry in self.kernels if fnmatch.fnmatchcase(kernel, entry.pattern)), None)

    def roles(self, kernel: KernelBinary) -> RoleMap:
        """Roles of one kernel; empty when no entry matches, so that every access is reported as of unknown role."""
        entry = self.entry(kernel.name)
        if entry is None:
            return RoleMap(source=f"manifest {self.path}")
        by_index: dict[tuple[int, int], RoleEntry] = {}
        by_name: dict[str, RoleEntry] = {}
        for key, role in entry.params.items():
            match = _PARAM.fullmatch(key)
            if match:
                by_index[(int(match[1]), int(match[2] or 0))] = role
            else:
                by_name[key] = role
        return RoleMap(by_index=by_index, by_name=by_name, source=f"manifest {self.path}")

    def launch(self, kernel: KernelBinary) -> LaunchFacts:
        """Launch facts of one kernel; unknown ones stay None."""
        entry = self.entry(kernel.name)
        if entry is None:
            return LaunchFacts()
        facts: dict[str, Any] = {}
        for key, value in entry.launch.items():
            if key in ("ordered", "guards_true", "released"):
                value = frozenset(_index(name, entry, kernel.parameters) for name in value)
            facts[key] = value
        return LaunchFacts(**facts)


def _index(name: str, entry: KernelEntry, parameters: Sequence[Parameter]) -> int:
    match = _PARAM.fullmatch(name)
    if match:
        return int(match[1])
    for key, role in entry.params.items():
        if role.name == name and (found := _PARAM.fullmatch(key)):
            return int(found[1])
    for parameter in parameters:
        if parameter.name == name:
            return parameter.index
    raise HarnessError(f"manifest, kernel {entry.pattern}: got the parameter {name!r}, needs p<index> or a name given in params")


def read_manifest(path: Path) -> Manifest:
    """Parse and check a manifest. Raises HarnessError naming every unknown key, role, rule and missing reason at once."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise HarnessError(f"manifest {path}: got {error}, needs a readable TOML file; `audit --init` writes a first one") from error
    reasons = [f"{key}: got an unknown table, needs one of {sorted(_TOP)}" for key in table if key not in _TOP]
    kernels = [_kernel(row, f"kernel[{number}]", reasons) for number, row in enumerate(_rows(table, "kernel", reasons))]
    suppressions = [_suppression(row, f"suppress[{number}]", reasons) for number, row in enumerate(_rows(table, "suppress", reasons))]
    lint = table.get("lint", {})
    if not isinstance(lint, dict) or set(lint) - {"weight_readers"}:
        reasons.append(f"lint: got {lint}, needs weight_readers alone")
        lint = {}
    if reasons:
        raise HarnessError(f"manifest {path}: " + "; ".join(reasons))
    return Manifest(
        kernels=tuple(k for k in kernels if k),
        suppressions=tuple(s for s in suppressions if s),
        weight_readers=tuple(lint.get("weight_readers", ())),
        path=str(path),
    )


def _rows(table: Mapping[str, Any], key: str, reasons: list[str]) -> list[Mapping[str, Any]]:
    rows = table.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        reasons.append(f"{key}: got {type(rows).__name__}, needs [[{key}]] tables")
        return []
    return rows


def _kernel(row: Mapping[str, Any], where: str, reasons: list[str]) -> KernelEntry | None:
    before = len(reasons)
    reasons += [f"{where}.{key}: got an unknown key, needs one of {sorted(_KERNEL)}" for key in row if key not in _KERNEL]
    launch, params = row.get("launch", {}), row.get("params", {})
    if not isinstance(row.get("name"), str) or not isinstance(launch, dict) or not isinstance(params, dict):
        reasons.append(f"{where}: got name {row.get('name')!r}, needs a pattern, a launch table and a params table")
        return None
    reasons += [f"{where}.launch.{key}: got an unknown key, needs one of {sorted(_LAUNCH)}" for key in launch if key not in _LAUNCH]
    entries = {key: _role(value, f"{where}.params.{key}", reasons) for key, value in params.items()}
    if len(reasons) > before:
        return None
    return KernelEntry(pattern=row["name"], params={k: v for k, v in entries.items() if v is not None}, launch=dict(launch))


def _role(value: Any, where: str, reasons: list[str]) -> RoleEntry | None:
    if not isinstance(value, dict):
        reasons.append(f"{where}: got {value!r}, needs {{ role = ..., reason = ... }}")
        return None
    unknown = sorted(set(value) - _ENTRY)
    roles = [str(value[key]) for key in ("role", "target") if key in value]
    wrong = [role for role in roles if role not in {item.value for item in Role}]
    if unknown or wrong or "role" not in value:
        known = ", ".join(role.value for role in Role)
        reasons.append(f"{where}: got unknown keys {unknown} and roles {wrong}, needs {', '.join(sorted(_ENTRY))} with roles {known}")
        return None
    if not str(value.get("reason", "")).strip() and value["role"] not in (Role.UNKNOWN, Role.SCALAR):
        reasons.append(f"{where}: got no reason, needs one; say who writes this memory and when")
        return None
    target = Role(value["target"]) if "target" in value else None
    guard = _PARAM.fullmatch(str(value.get("guarded_by", "p0")))
    if guard is None:
        reasons.append(f"{where}.guarded_by: got {value['guarded_by']!r}, needs p<index> of the mailbox parameter")
        return None
    return RoleEntry(
        role=Role(value["role"]),
        reason=str(value.get("reason", "")),
        name=str(value.get("name", "")),
        target=target,
        guarded_by=int(guard[1]) if "guarded_by" in value else None,
    )


def _suppression(row: Mapping[str, Any], where: str, reasons: list[str]) -> Suppression | None:
    unknown = sorted(set(row) - _SUPPRESS)
    missing = [key for key in ("rule", "kernel", "reason", "expires") if not row.get(key)]
    if unknown or missing or row["rule"] not in RULES:
        reasons.append(
            f"{where}: got unknown keys {unknown}, missing {missing}, rule {row.get('rule')!r}; needs rule, kernel, reason, expires"
        )
        return None
    expires = row["expires"]
    if isinstance(expires, datetime.datetime) or not isinstance(expires, datetime.date):
        reasons.append(f"{where}.expires: got {expires!r}, needs a date like 2027-03-01 without quotes")
        return None
    return Suppression(rule=row["rule"], kernel=row["kernel"], param=row.get("param", ""), reason=row["reason"], expires=expires)


@dataclass(frozen=True, kw_only=True)
class Suppressed:
    """What is left after suppressions, what they took away, and which did nothing."""

    kept: tuple[Finding, ...]
    suppressed: tuple[tuple[Finding, Suppression], ...]
    expired: tuple[Suppression, ...]  # past their date: their findings are kept
    unused: tuple[Suppression, ...]


def suppress(findings: Iterable[Finding], suppressions: Sequence[Suppression], today: datetime.date) -> Suppressed:
    """Split findings. An expired suppression suppresses nothing and is reported."""
    active = [item for item in suppressions if item.expires >= today]
    kept, taken, used = [], [], set()
    for finding in findings:
        match = next((item for item in active if item.covers(finding)), None)
        if match is None:
            kept.append(finding)
        else:
            taken.append((finding, match))
            used.add(match)
    expired = tuple(item for item in suppressions if item.expires < today)
    unused = tuple(item for item in active if item not in used)
    return Suppressed(kept=tuple(kept), suppressed=tuple(taken), expired=expired, unused=unused)


# ---- starter ----
def starter_manifest(
    kernels: Sequence[KernelBinary],
    results: Mapping[tuple[str, str], AuditResult],
    observed: Mapping[str, Mapping[int, ObservedRole]] | None = None,
) -> str:
    """A first manifest from what the binaries show: every parameter with its size and how it is used; roles are for the owner to fill in.

    `results` are audits without roles, by (kernel, arch). Scalars (no access derives from them) are filled in; pointers stay "unknown",
    which the audit reports as MO013 until somebody decides, except where a trace shows what they are: `observed`, by kernel and index.
    """
    lines = ["# Starter manifest: decide the role of every pointer and say why.", ""]
    lines += ["# Roles: " + " | ".join(role.value for role in Role if role is not Role.UNKNOWN), ""]
    for name in dict.fromkeys(kernel.name for kernel in kernels):
        kernel = next(item for item in kernels if item.name == name)
        result = results.get((kernel.name, kernel.arch))
        lines += [
            "[[kernel]]",
            f"name = {_quoted(name)}",
            "launch = { pdl = true }  # false when launched without programmatic serialization",
        ]
        lines.append("[kernel.params]")
        for parameter in result.parameters if result else kernel.parameters:
            lines += _starter_lines(parameter, result, (observed or {}).get(name, {}).get(parameter.index))
        lines.append("")
    return "\n".join(lines)


def _starter_lines(parameter: Parameter, result: AuditResult | None, seen: ObservedRole | None) -> list[str]:
    uses: dict[int, set[str]] = {}
    for access in result.accesses if result else ():
        for base in access.bases:
            if base.index == parameter.index:
                via = " through a pointer it holds" if base.via_table else ""
                uses.setdefault(base.offset, set()).add(f"{access.kind.value} {access.when.value} the wait{via}".replace("_", " "))
    name = f', name = "{parameter.name}"' if parameter.name else ""
    if not uses:
        return [f'p{parameter.index} = {{ role = "scalar", reason = ""{name} }}  # {parameter.size} bytes, no access derives from it']
    lines = []
    for offset, words in sorted(uses.items()):
        key = f"p{parameter.index}" if offset == 0 else f'"p{parameter.index}+{offset}"'
        role, reason = (seen.role.value, seen.reason) if seen is not None and offset == 0 else ("unknown", "")
        lines.append(
            f'{key} = {{ role = "{role}", reason = {_quoted_text(reason)}{name} }}  # {parameter.size} bytes: {", ".join(sorted(words))}'
        )
    return lines


def _quoted(text: str) -> str:
    # Characters that a shell pattern would interpret are matched by themselves in brackets.
    return _quoted_text(re.sub(r"([*?\[])", r"[\1]", text))


def _quoted_text(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def renamed(finding: Finding, kernel: KernelBinary, roles: RoleMap) -> Finding:
    """The finding with the manifest's own name for its parameter, where the binary knows only a number."""
    match = _PARAM.fullmatch(finding.parameter)
    if not match:
        return finding
    entry = roles.lookup(ParamRef(index=int(match[1]), offset=int(match[2] or 0)))
    return replace(finding, parameter=entry.name) if entry is not None and entry.name else finding
