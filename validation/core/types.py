"""The vocabulary of the suite: what is measured, what is judged, and what a verdict is made of.

    Case -> Target.run -> Check.measure -> Evidence -> judge(Limit) -> Finding -> decide(Claim) -> Verdict

All types are frozen and keyword-only. A measurement is never a boolean; a limit is written before the run; absence of evidence is
an outcome of its own and never a pass.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

SCHEMA_VERSION = 1


class HarnessError(RuntimeError):
    """The suite itself could not work (bad input, full disk, unreadable checkpoint): exit code 3, never a verdict on the candidate."""


class Outcome(enum.StrEnum):
    """What became of one attempt to measure."""

    MEASURED = "measured"
    REFUSED = "refused"  # the target said it does not support the case, with reasons
    ERROR = "error"  # it crashed, hung or ran out of a resource


class Holds(enum.StrEnum):
    HOLDS = "holds"
    VIOLATED = "violated"
    NO_EVIDENCE = "no_evidence"


class Status(enum.StrEnum):
    PASS = "pass"
    FAIL = "fail"
    NOT_PROVEN = "not_proven"


EXIT_CODES = {Status.PASS: 0, Status.FAIL: 1, Status.NOT_PROVEN: 2}
EXIT_HARNESS_ERROR = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to run. The same case gives the same input bits everywhere; `id` is readable and unique within a check."""

    subject: str  # op or model or suite: "kda", "nano", "gsm8k_nano"
    params: Mapping[str, Any] = field(default_factory=dict)  # rows, tp, q, context_tokens, ...
    seed: int = 0

    @property
    def id(self) -> str:
        parts = [self.subject, *(f"{key}{value}" for key, value in self.params.items())]
        return "-".join([*parts, f"s{self.seed}"])


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One number with its unit, and the raw samples it was made from when there are any."""

    name: str
    value: float
    unit: str  # "nats", "us", "share", "tokens", "count", "1" ...
    samples: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A bound on a measurement, decided before the run. `why` is shown to the reviewer."""

    measurement: str
    op: str  # one of "<=", ">=", "==", "<", ">"
    bound: float
    unit: str
    why: str

    def holds(self, value: float) -> bool:
        """True only for a real comparison: anything with NaN is False."""
        if math.isnan(value) or math.isnan(self.bound):
            return False
        return {
            "<=": value <= self.bound,
            ">=": value >= self.bound,
            "==": value == self.bound,
            "<": value < self.bound,
            ">": value > self.bound,
        }[self.op]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that identifies one invocation; written once, as `run.json`."""

    id: str  # R-<utc>-<digest>
    started_utc: str
    argv: tuple[str, ...]
    commit: str
    dirty: bool
    profile: str  # "embedded" | "gpu" | "serving"
    config: Mapping[str, Any]  # resolved
    hardware: Mapping[str, Any]  # cpu, cores, gpu, driver, clocks
    versions: Mapping[str, str]
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One recorded attempt, append-only. `previous` chains it to the record before (hex SHA-256)."""

    id: str  # E-<12 hex digits of the digest>
    run: str
    check: str
    case: Case
    outcome: Outcome
    measurements: tuple[Measurement, ...] = ()
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # role -> digest of kernels, weights, config
    reasons: tuple[str, ...] = ()  # refused or error: all of them
    details: Mapping[str, Any] = field(default_factory=dict)  # tables a report shows; JSON values only
    artifacts: Mapping[str, str] = field(default_factory=dict)  # relative path -> sha256
    rank: int = 0
    seconds: float = 0.0
    previous: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of the RFC with the checks that carry it. `required_in` names the profiles where missing evidence is exit code 2."""

    id: str  # "C-NUM-1"
    sentence: str
    lane: str  # scope | ordering | numerics | evals | perf | schedule | mutants
    checks: tuple[str, ...]
    required_in: tuple[str, ...]
    proven_by: str  # what would prove it where this profile cannot


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One limit applied to one evidence record."""

    check: str
    case: str
    evidence: str  # id, or "" when there is none
    holds: Holds
    limit: Limit | None
    value: float | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    claim: str
    status: Status
    required: bool
    findings: tuple[Finding, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    run: str
    status: Status
    claims: tuple[ClaimResult, ...]
    policy_digest: str
    schema: int = SCHEMA_VERSION


@runtime_checkable
class Target(Protocol):
    """Something that decodes. Whether it is stock, candidate or oracle is a role that a check gives it."""

    name: str

    def fingerprint(self) -> str: ...

    def unsupported(self, case: Case) -> tuple[str, ...]: ...

    def run(self, case: Case) -> Any: ...


class Check(Protocol):
    """Measures; never judges. `limits` are data fixed beforehand; the judge applies them to stored evidence."""

    @property
    def id(self) -> str: ...

    @property
    def claim(self) -> str: ...

    @property
    def roles(self) -> tuple[str, ...]: ...

    @property
    def must_kill(self) -> tuple[str, ...]: ...  # mutants

    def cases(self) -> Iterable[Case]: ...

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]: ...

    def limits(self, case: Case) -> tuple[Limit, ...]: ...
