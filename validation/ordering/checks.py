"""The ordering lane: what `make validate` measures about memory ordering on any machine, without a GPU.

    ordering.corpus    the audit itself: every expected finding on the corpus, and no other, for each architecture
    ordering.kernels   the binaries of the specialised step: no finding, no unknown role, all operations covered
    ordering.roles     the audit's eyes: declare a weight that is read early an input, and the finding must appear
    ordering.graph     the launch plan: no race; and planted faults in the plan must be found
    ordering.source    the kernels' source: no inline PTX with an undeclared memory effect

`fasttrack audit` runs the same over every scheduled configuration; here one variant an operation is compiled, for Hopper at the
fewest and the most rows, so that a cold run stays within minutes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from validation.core.types import Case, Limit, Measurement, Target

CLAIM = "C-ORD-1"
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
SCOPE_OF = {"sm_90a": "ends", "sm_100a": "ops", "sm_103a": "ops"}
TIME_LIMIT_S = 900.0
JOBS = 2
MAX_ROWS = 40  # of a table in the details
MAX_TIMELINES = 12  # kernels whose timeline a record carries
TIMELINE_ROWS = 60


def _count(name: str, value: float, unit: str = "count") -> Measurement:
    return Measurement(name=name, value=float(value), unit=unit)


def _none(name: str, why: str) -> Limit:
    return Limit(measurement=name, op="==", bound=0.0, unit="count", why=why)


def _least(name: str, bound: float, why: str, unit: str = "count") -> Limit:
    return Limit(measurement=name, op=">=", bound=bound, unit=unit, why=why)


@functools.cache
def _own(arch: str) -> tuple[Any, Any]:
    """Report and build of the project's kernels for one architecture, once a process."""
    from validation.ordering import driver

    return driver.audit_own(SCOPE_OF[arch], (arch,), jobs=JOBS)


@dataclass(frozen=True)
class _Check:
    """What the ordering checks share: no target is run, the subject is the code itself."""

    id: str
    claim: str = CLAIM
    roles: tuple[str, ...] = ()
    must_kill: tuple[str, ...] = ()
    time_limit_s: float = TIME_LIMIT_S


class CorpusCheck(_Check):
    """All expected findings, no other; a case that the toolchain no longer moves is counted and judged by its twin."""

    def cases(self) -> Iterable[Case]:
        return [Case(subject="corpus", params={"arch": arch}) for arch in ARCHITECTURES]

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from validation.ordering.corpus_run import State, run_corpus

        report = run_corpus((case.params["arch"],), jobs=JOBS)
        results = report.results
        cases = [result for result in results if result.family != "lint"]  # the lint looks at the same cases a second time
        negatives = sum(result.true_negative for result in cases)
        measured = (
            _count("missing_findings", sum(len(r.missing) for r in results if r.state is State.FAILED)),
            _count("unexpected_findings", sum(len(r.unexpected) for r in results)),
            _count("wrong_cases", len(report.bad)),
            _count("cases", len({r.case for r in results})),
            _count("near_miss_share", negatives / len(cases) if cases else 0.0, "share"),
            _count("no_longer_moving", report.count(State.NO_LONGER_MOVES)),
            _count("instructions", report.instructions),
        )
        wrong = [{"case": r.case, "family": r.family, "missing": r.missing, "unexpected": r.unexpected, "note": r.note} for r in report.bad]
        still = [r.case for r in results if r.state is State.NO_LONGER_MOVES]
        details = {"wrong": wrong[:MAX_ROWS], "no_longer_moving": still, "toolchain": dict(report.toolchain)}
        return measured, details

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return (
            _none("missing_findings", "every expected finding of the corpus is reported"),
            _none("unexpected_findings", "nothing else is reported: near misses stay clean"),
            _none("wrong_cases", "every case compiles and is judged as its file says"),
            _least("cases", 60, "the corpus is at least this large"),
            _least("near_miss_share", 0.5, "at least half of it are near misses, so that an audit that reports everything fails", "share"),
        )


class KernelsCheck(_Check):
    """The specialised step's own binaries."""

    def cases(self) -> Iterable[Case]:
        return [Case(subject="kernels", params={"arch": arch, "scope": SCOPE_OF[arch]}) for arch in ARCHITECTURES]

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from validation.ordering.findings import UNKNOWN_RULES, finding_json, offending
        from validation.ordering.model import LIMITS, Severity

        _refuse_without_kernels()
        report, build = _own(case.params["arch"])
        serious = [f for f in report.findings if f.level is not Severity.NOTE and f.rule not in UNKNOWN_RULES and f.rule != "MO012"]
        unknown = [f for f in report.findings if f.rule in UNKNOWN_RULES]
        measured = (
            _count("findings", len([f for f in serious if f.rule != "MO101"])),
            _count("unknown_roles", len(unknown)),
            _count("unread_files", len(report.errors)),
            _count("incomplete", len(report.incomplete)),
            _count("variants", len(report.results)),
            _count("operations_missing", len(_missing_operations(build.kernels))),
            _count("instructions", sum(r.instructions for r in report.results)),
            _count("unknown_origins", sum(r.unknown_bases for r in report.results)),
            _count("lost_prefetches", sum(f.rule == "MO014" for f in report.findings)),
        )
        shown = [r for r in offending(report) if any((f.kernel, f.arch) == (r.kernel, r.arch) for f in [*serious, *unknown])]
        details = {
            "findings": [finding_json(f) for f in [*serious, *unknown]][:MAX_ROWS],
            "errors": [vars(error) for error in report.errors][:MAX_ROWS],
            "timelines": [_timeline(r, build, [*serious, *unknown]) for r in shown][:MAX_TIMELINES],
            "timeline_example": _example(report, build),
            "operations_missing": _missing_operations(build.kernels),
            "limits": list(LIMITS),
            "compile_seconds": build.seconds,
        }
        return measured, details

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return (
            _none("findings", "no read of what the step writes can run before its wait, in no binary"),
            _none("unknown_roles", "every access that matters has a role and an origin"),
            _none("unread_files", "every variant compiles and can be read"),
            _none("incomplete", "every analysis finished"),
            _none("operations_missing", "every operation of the plan has a kernel here"),
            _least("variants", 1, "something was audited"),
        )


def _timeline(result: Any, build: Any, findings: Iterable[Any]) -> dict[str, Any]:
    """One kernel's accesses before and after its wait, with the roles of its contract, as JSON values."""
    from validation.ordering.findings import excerpt, timeline

    owner = next(kernel for kernel in build.kernels if f"{kernel.model} {kernel.variant}" == result.kernel)
    roles = {index: entry.role for (index, _), entry in owner.roles().by_index.items()}
    rows = timeline(result, findings, roles)
    kept = excerpt(rows, TIMELINE_ROWS)
    return {
        "kernel": result.kernel,
        "arch": result.arch,
        "left_out": len(rows) - len(kept),
        "rows": [vars(row) | {"rules": list(row.rules)} for row in kept],
    }


def _example(report: Any, build: Any) -> dict[str, Any] | None:
    """A kernel without a finding that reads weights before its wait and activations after it, or None when there is none."""
    from validation.ordering.model import Severity, When

    bad = {finding.kernel for finding in report.findings if finding.level is not Severity.NOTE}
    found = [
        result
        for result in report.results
        if result.kernel not in bad and {When.BEFORE, When.AFTER} <= {access.when for access in result.accesses}
    ]
    shortest = min(found, key=lambda result: (len(result.accesses), result.kernel), default=None)
    return _timeline(shortest, build, ()) if shortest is not None else None


def _refuse_without_kernels() -> None:
    from validation.core.worker import Refused
    from validation.ordering.own_kernels import kernels_exist

    if not kernels_exist():
        raise Refused(("ordering.kernels: got no kernels in kimi_k3_decode, needs them to prove anything about the path",))


def _missing_operations(kernels: Iterable[Any]) -> list[str]:
    from kimi_k3_decode.ops.registry import CONTRACTS

    return sorted(set(CONTRACTS) - {kernel.op for kernel in kernels})


class RolesCheck(_Check):
    """If the contract said `input` where it says `weight`, would the audit notice? One judgement an operand that is read early."""

    def cases(self) -> Iterable[Case]:
        return [Case(subject="roles", params={"arch": "sm_90a"})]

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from validation.ordering import driver
        from validation.ordering.model import Role

        _refuse_without_kernels()
        arch = case.params["arch"]
        report, build = _own(arch)
        early = driver.early_by_op(build.kernels, report.results)
        one_each = list({kernel.op: kernel for kernel in build.kernels}.values())
        weights = {
            k.op: sorted({p["name"] for p in k.params if p["role"] == Role.WEIGHT.value} & early.get(k.op, frozenset())) for k in one_each
        }
        silent, tried = [], 0
        results, _ = driver.audit_kernels(one_each, jobs=JOBS)
        seen_early = driver.early_by_op(one_each, results)
        for name in sorted({name for names in weights.values() for name in names}):
            owners = [k for k in one_each if name in weights[k.op] and name in seen_early.get(k.op, frozenset())]
            found, _ = driver.audit_kernels(owners, jobs=JOBS, changed={name: Role.INPUT})
            for kernel, result in zip(owners, found, strict=True):
                tried += 1
                if not any(f.parameter == name and f.rule in ("MO001", "MO002", "MO007", "MO008") for f in result.findings):
                    silent.append(f"{kernel.op}.{name}")
        measured = (_count("silent_role_changes", len(silent)), _count("role_changes", tried))
        return measured, {"silent": silent}

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return (
            _none("silent_role_changes", "an early read of what is no weight is reported"),
            _least("role_changes", 5, "there were early reads to try it on"),
        )


class GraphCheck(_Check):
    """Happens-before over whole steps, and planted faults that it must find."""

    def cases(self) -> Iterable[Case]:
        return [Case(subject="launch_graph", params={"planted": planted}) for planted in (0, 1)]

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from validation.ordering import driver, planted

        waits: Mapping[str, Any] = {}
        early: Mapping[str, frozenset[str]] = {}
        if case.params["planted"]:
            faults = planted.try_faults()
            missed = [fault.name for fault in faults if not fault.found]
            return (_count("planted_faults_missed", len(missed)), _count("planted_faults", len(faults))), {
                "missed": missed,
                "chains": {fault.name: fault.chain for fault in faults},
            }
        from validation.ordering.own_kernels import kernels_exist

        if kernels_exist():
            report, build = _own("sm_90a")
            waits, early = driver.waits_by_op(build.kernels, report.results), driver.early_by_op(build.kernels, report.results)
        launches, findings = driver.audit_plan(waits, early)
        details = {"races": [{"message": f.message, "chain": str(f.details.get("chain", ""))} for f in findings][:MAX_ROWS]}
        return (_count("races", len(findings)), _count("launches", launches)), details

    def limits(self, case: Case) -> tuple[Limit, ...]:
        if case.params["planted"]:
            return (
                _none("planted_faults_missed", "a graph check that cannot find a planted race proves nothing"),
                _least("planted_faults", 6, "each class of fault is planted"),
            )
        return (
            _none("races", "every pair of conflicting accesses of a step is ordered"),
            _least("launches", 100, "whole steps were looked at"),
        )


class SourceCheck(_Check):
    """MO101 over the package."""

    def cases(self) -> Iterable[Case]:
        return [Case(subject="source")]

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from validation.ordering import lint

        _refuse_without_kernels()
        package = Path(__file__).resolve().parents[2] / "kimi_k3_decode"
        found = lint.lint_paths([package])
        rows = [{"file": f.source_file, "line": f.source_line, "message": f.message} for f in found.findings]
        measured = (
            _count("findings", len(found.findings)),
            _count("statements", found.statements),
            _count("unread_files", len(found.errors)),
        )
        return measured, {"findings": rows[:MAX_ROWS]}

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return (
            _none("findings", "every inline-PTX statement that touches memory says so"),
            _none("unread_files", "every source file was read"),
            _least("statements", 10, "there were statements to judge"),
        )


def checks() -> list[Any]:
    """The lane's checks."""
    return [
        CorpusCheck("ordering.corpus"),
        KernelsCheck("ordering.kernels"),
        RolesCheck("ordering.roles"),
        GraphCheck("ordering.graph"),
        SourceCheck("ordering.source"),
    ]
