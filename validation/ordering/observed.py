"""Roles as they were observed: what a trace of real launches says about each kernel parameter.

A trace (JSON, written by `observe` on a GPU, or by anybody else) lists every launch of some steps with the memory each parameter points to
and whether that memory changed while the launch ran, and what changed between the steps:

    {"schema": 1, "device": "...", "steps": 3,
     "launches": [{"step": 0, "order": 0, "rank": 0, "graph": "nano-tp1", "kernel": "kda[h2-p1168-q1]",
                   "params": [{"index": 0, "name": "x_TD", "address": 139..., "bytes": 512, "changed": false}]}],
     "host_writes": [{"step": 1, "graph": "nano-tp1", "address": 139..., "bytes": 32}]}

From that: never written -> weight; written by an earlier launch of the same step -> input; written by another rank -> mailbox; written by
the host alone -> table; written in an earlier step -> state; written by this launch -> output, or state when nobody else touches it.
One observation is an example, not a proof: a role that was observed may be stricter than needed, and a write of equal bits is not seen.
"""

from __future__ import annotations

import bisect
import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from validation.core.types import HarnessError
from validation.ordering.model import WRITING, AuditResult, Finding, Role, RoleEntry, RoleMap, Severity

SCHEMA = 1
# How early memory of a role may be touched: 0 any time, 1 behind a full edge from its writer, 2 only after the wait or an acquire.
STRICTNESS = {
    Role.WEIGHT: 0, Role.TABLE: 1, Role.STATE: 1, Role.INPUT: 2, Role.OUTPUT: 2, Role.SCRATCH: 2, Role.MAILBOX: 2,
}  # fmt: skip
# Where launches of one kernel disagree, the first of these wins.
PRECEDENCE = (Role.MAILBOX, Role.INPUT, Role.OUTPUT, Role.STATE, Role.TABLE, Role.WEIGHT)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One pointer of one launch. `index` is the kernel parameter, `changed` whether the memory differed after the launch."""

    index: int
    address: int
    bytes: int
    changed: bool
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class SeenLaunch:
    """`order` counts within a step; launches of different ranks with the same order ran side by side."""

    step: int
    order: int
    kernel: str
    params: tuple[Seen, ...]
    rank: int = 0
    graph: str = ""


@dataclass(frozen=True, kw_only=True)
class HostWrite:
    """Memory that changed between steps; `step` is the one that came after."""

    step: int
    address: int
    bytes: int
    graph: str = ""


@dataclass(frozen=True, kw_only=True)
class Trace:
    launches: tuple[SeenLaunch, ...]
    host_writes: tuple[HostWrite, ...] = ()
    device: str = ""
    steps: int = 0
    sources: str = ""  # digest of the kernels' sources, for the project's own
    path: str = ""

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(launch.kernel for launch in self.launches))


@dataclass(frozen=True, kw_only=True)
class ObservedRole:
    role: Role
    reason: str
    name: str = ""
    launches: int = 0


# ---- the file ----
def read_trace(path: Path) -> Trace:
    """Raises HarnessError for a file that is no trace."""
    try:
        data = path.read_bytes()
        table: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        if table["schema"] != SCHEMA:
            raise ValueError(f"schema {table['schema']}")
        launches = tuple(
            SeenLaunch(**{**row, "params": tuple(Seen(**{"changed": False, **param}) for param in row["params"])})
            for row in table["launches"]
        )
        host = tuple(HostWrite(**row) for row in table.get("host_writes", ()))
        device, sources = (str(table.get(name, "")) for name in ("device", "sources"))
        found = Trace(launches=launches, host_writes=host, device=device, sources=sources, steps=int(table["steps"]), path=str(path))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HarnessError(f"trace {path}: got {type(error).__name__}: {error}, needs the documented form; see observed.py") from error
    if not launches or found.steps < 2:
        raise HarnessError(f"trace {path}: got {len(launches)} launches of {found.steps} steps, needs >= 1 of >= 2 steps")
    return found


def trace_json(trace: Trace) -> dict[str, Any]:
    """The trace as JSON values."""
    return {
        "schema": SCHEMA,
        "device": trace.device,
        "sources": trace.sources,
        "steps": trace.steps,
        "launches": [{**vars(launch), "params": [vars(param) for param in launch.params]} for launch in trace.launches],
        "host_writes": [vars(write) for write in trace.host_writes],
    }


# ---- who writes what ----
@dataclass
class _Touches:
    """Everything that touches memory, found by overlap. Ranges are kept sorted by address with the largest length, for bisection."""

    rows: list[tuple[int, int, int, SeenLaunch, Seen]] = field(default_factory=list)  # start, end, serial, ...
    longest: int = 0

    def close(self) -> None:
        self.rows.sort(key=lambda row: row[:3])
        self.longest = max((end - start for start, end, *_ in self.rows), default=0)

    def overlapping(self, address: int, size: int) -> Iterable[tuple[SeenLaunch, Seen]]:
        at = bisect.bisect_left(self.rows, address - self.longest, key=lambda row: row[0])
        while at < len(self.rows) and self.rows[at][0] < address + size:
            if self.rows[at][1] > address:
                yield self.rows[at][3], self.rows[at][4]
            at += 1


def observed_roles(trace: Trace) -> dict[str, dict[int, ObservedRole]]:
    """{kernel: {parameter index: role}} for every pointer that the trace holds."""
    touches: dict[str, _Touches] = {}
    for serial, launch in enumerate(trace.launches):
        for param in launch.params:
            touches.setdefault(launch.graph, _Touches()).rows.append((param.address, param.address + param.bytes, serial, launch, param))
    for found in touches.values():
        found.close()
    host: dict[str, list[HostWrite]] = {}
    for write in trace.host_writes:
        host.setdefault(write.graph, []).append(write)
    votes: dict[str, dict[int, list[tuple[Role, str, str]]]] = {}
    for launch in trace.launches:
        for param in launch.params:
            role, reason = _role_of(launch, param, touches[launch.graph], host.get(launch.graph, []))
            votes.setdefault(launch.kernel, {}).setdefault(param.index, []).append((role, reason, param.name))
    return {
        kernel: {index: _strictest(found, trace.steps) for index, found in sorted(by_index.items())} for kernel, by_index in votes.items()
    }


def _strictest(votes: list[tuple[Role, str, str]], steps: int) -> ObservedRole:
    role, reason, name = min(votes, key=lambda vote: PRECEDENCE.index(vote[0]))
    return ObservedRole(role=role, reason=f"observed over {steps} steps: {reason}", name=name, launches=len(votes))


def _role_of(launch: SeenLaunch, param: Seen, touches: _Touches, host: list[HostWrite]) -> tuple[Role, str]:
    others = [(other, seen) for other, seen in touches.overlapping(param.address, param.bytes) if other is not launch]
    writers = [other for other, seen in others if seen.changed]
    peers = [other for other in writers if other.rank != launch.rank]
    if peers:
        return Role.MAILBOX, f"written by {peers[0].kernel} of rank {peers[0].rank}"
    earlier = [other for other in writers if other.step == launch.step and other.order < launch.order]
    if param.changed:
        alone = all(other.kernel == launch.kernel and other.order == launch.order for other, _ in others)
        return (Role.STATE, "written here, touched by nothing else") if alone else (Role.OUTPUT, "written here")
    if earlier:
        return Role.INPUT, f"written by {earlier[-1].kernel} in the same step"
    if writers:
        return Role.STATE, f"written by {writers[0].kernel} after this launch or in an earlier step"
    refill = [write for write in host if write.address < param.address + param.bytes and param.address < write.address + write.bytes]
    if refill:
        return Role.TABLE, f"written by the host between steps ({len(refill)} times)"
    return Role.WEIGHT, "never written"


# ---- what it is good for ----
def role_map(roles: Mapping[int, ObservedRole], source: str) -> RoleMap:
    """The observed roles in the form the audit takes."""
    entries = {(index, 0): RoleEntry(role=seen.role, reason=seen.reason, name=seen.name) for index, seen in roles.items()}
    return RoleMap(by_index=entries, source=f"observed {source}")


def contradictions(kernel: str, arch: str, declared: RoleMap, observed: Mapping[int, ObservedRole]) -> list[Finding]:
    """MO013 where a declared role allows more than what was seen: an error when it allows any time, a note between state and input."""
    found = []
    for index, seen in observed.items():
        entry = declared.by_index.get((index, 0))
        if entry is None or entry.role not in STRICTNESS or STRICTNESS[entry.role] >= STRICTNESS[seen.role]:
            continue
        # State and tables that an earlier launch of the step wrote are safe as long as no launch declares them ordered beforehand.
        severity = Severity.NOTE if entry.role in (Role.STATE, Role.TABLE) else Severity.ERROR
        found.append(
            Finding(
                rule="MO013",
                kernel=kernel,
                arch=arch,
                message=f"{entry.name or f'p{index}'} is declared {entry.role.value}, but {seen.reason}: {seen.role.value}",
                parameter=entry.name or f"p{index}",
                role=entry.role,
                role_reason=entry.reason,
                severity=severity,
                fix=f"declare it {seen.role.value}, or explain in the contract why that write does not matter",
            )
        )
    return found


def unseen_stores(result: AuditResult, launches: Iterable[SeenLaunch]) -> list[Finding]:
    """MO013 where memory changed through a parameter for which the audit knows no store: a hole in the audit, or in the trace."""
    stores = {base.index for access in result.accesses if access.kind in WRITING for base in access.bases}
    if any(access.unknown_base and access.kind in WRITING for access in result.accesses):
        return []
    missing: dict[int, str] = {}
    ranges = [(param, launch) for launch in launches for param in launch.params]
    for param, launch in ranges:
        aliased = any(
            other.index in stores and other.address < param.address + param.bytes and param.address < other.address + other.bytes
            for other in launch.params
        )
        if param.changed and param.index not in stores and not aliased:
            missing.setdefault(param.index, param.name or f"p{param.index}")
    return [
        Finding(
            rule="MO013",
            kernel=result.kernel,
            arch=result.arch,
            message=f"{name} changed while the kernel ran, and the audit found no store through it",
            parameter=name,
            severity=Severity.ERROR,
            fix="look for a store whose origin was lost; until then nothing about this kernel is proven",
        )
        for index, name in sorted(missing.items())
    ]


def manifest_lines(trace: Trace) -> str:
    """The observed roles as manifest entries, to be read and corrected by the kernels' owner."""
    lines = [f"# Roles observed over {trace.steps} steps on {trace.device or 'an unnamed device'}: examples, not proofs. Check each.", ""]
    for kernel, roles in observed_roles(trace).items():
        lines += ["[[kernel]]", f"name = {json.dumps(kernel)}", "[kernel.params]"]
        for index, seen in roles.items():
            name = f", name = {json.dumps(seen.name)}" if seen.name else ""
            lines.append(f"p{index} = {{ role = {json.dumps(seen.role.value)}, reason = {json.dumps(seen.reason)}{name} }}")
        lines.append("")
    return "\n".join(lines)
