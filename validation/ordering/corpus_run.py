"""Runs the audit over the compiled corpus and compares what it reports with what it must report: all of it, and nothing else.

Three checks do not depend on one another: the expected findings, the text order of the SASS (for cases that a compiler must move), and
the hand-written twin of each moved order. When the text says that this toolchain no longer moves the load, the case is not a failure of the
audit; it is reported as such and its twin carries the proof.
"""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from validation.ordering import corpus_build, crosscheck, graph_inputs, launch_graph, lint
from validation.ordering.binaries import load_binaries
from validation.ordering.corpus_build import Build, Built
from validation.ordering.corpus_cases import ARCHITECTURES, CORPUS, PRELUDE, CorpusCase, load_cases, order_holds
from validation.ordering.corpus_graphs import GraphCase, load_graph_cases
from validation.ordering.model import AuditResult, KernelBinary, PtxKernel, Role
from validation.ordering.pool import Job, audit_many

Pair = tuple[str, str]


class State(enum.StrEnum):
    OK = "ok"
    FAILED = "failed"
    NO_LONGER_MOVES = "toolchain no longer moves"
    NOT_BUILT = "not built"


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    case: str
    family: str
    arch: str
    state: State
    true_negative: bool
    missing: tuple[Pair, ...] = ()
    unexpected: tuple[Pair, ...] = ()
    note: str = ""
    result: AuditResult | None = None


@dataclass(frozen=True, kw_only=True)
class CorpusReport:
    results: tuple[CaseResult, ...]
    toolchain: Mapping[str, str] = field(default_factory=dict)
    compile_seconds: float = 0.0
    audit_seconds: float = 0.0
    instructions: int = 0

    def count(self, state: State) -> int:
        return sum(result.state is state for result in self.results)

    @property
    def bad(self) -> tuple[CaseResult, ...]:
        return tuple(result for result in self.results if result.state in (State.FAILED, State.NOT_BUILT))


def run_corpus(
    archs: Iterable[str] = ARCHITECTURES,
    *,
    names: Sequence[str] = (),
    cache: Path | None = None,
    jobs: int = 2,
    root: Path = CORPUS,
) -> CorpusReport:
    """Build, audit, lint and compare. `names` limits it to some cases (their twins come along). Raises HarnessError for a broken corpus."""
    archs = tuple(archs)
    cases = load_cases(root)
    if names:
        wanted = set(names) | {case.moved.twin for case in cases if case.name in names and case.moved is not None}
        wanted |= {case.ptx_of for case in cases if case.name in wanted}
        cases = tuple(case for case in cases if case.name in wanted)
    build = corpus_build.build(cases, archs, cache=cache, jobs=jobs)
    started = time.perf_counter()
    results = _audit_cases(cases, archs, build, jobs)
    results = {key: _with_twin(result, cases, results) for key, result in results.items()}
    extra = [_lint_case(case) for case in cases if case.family == "cutedsl"]
    extra += [_graph_case(case) for case in load_graph_cases(root) if not names or case.name in names]
    return CorpusReport(
        results=(*results.values(), *extra),
        toolchain=build.toolchain,
        compile_seconds=build.seconds,
        audit_seconds=time.perf_counter() - started,
        instructions=sum(item.result.instructions for item in results.values() if item.result is not None),
    )


class _Loaded:
    """Kernels and PTX by name, each file read once."""

    def __init__(self, build: Build) -> None:
        files = sorted({path for built in build.built.values() for path in (built.cubin, built.ptx)})
        loaded = load_binaries(files)
        self.errors = {error.path: error.reason for error in loaded.errors}
        self.kernels: dict[str, list[KernelBinary]] = {}
        self.ptx: dict[str, list[PtxKernel]] = {}
        for kernel in loaded.kernels:
            self.kernels.setdefault(kernel.path, []).append(kernel)
        for text in loaded.ptx:
            self.ptx.setdefault(text.path, []).append(text)

    def kernel(self, built: Built) -> KernelBinary | None:
        return next((k for k in self.kernels.get(str(built.cubin), ()) if re.fullmatch(built.kernel, k.name)), None)

    def source(self, built: Built) -> PtxKernel | None:
        return next((k for k in self.ptx.get(str(built.ptx), ()) if re.fullmatch(built.kernel, k.name)), None)


def _judge_case(
    case: CorpusCase, arch: str, built: Built | None, reason: str, kernel: KernelBinary | None, result: AuditResult | None
) -> CaseResult:
    make = partial(CaseResult, case=case.name, family=case.family, arch=arch, true_negative=case.true_negative)
    if built is None or kernel is None or result is None:
        return make(state=State.NOT_BUILT, note=reason or "got no binary")
    if case.family == "cutedsl":
        result = crosscheck.moved_by_nvvm(result, [case.source], [case.source.parent / PRELUDE])
    result = replace(result, findings=(*result.findings, *crosscheck.more_findings(result, case.roles)))
    found = {(finding.rule, finding.parameter) for finding in result.findings}
    missing, unexpected = compare(case.expected(arch), found)
    state, note = (State.OK, "") if not missing and not unexpected else (State.FAILED, "")
    if not result.complete:
        state, note = State.FAILED, "audit incomplete: " + "; ".join(result.notes[:3])
    if case.moved is not None and arch in case.moved.archs:
        moved = order_holds([str(instruction) for instruction in kernel.instructions], case.moved)
        if not moved and not unexpected:
            state, note = State.NO_LONGER_MOVES, f"toolchain no longer moves the load; judged by {case.moved.twin}"
        elif not moved:
            state, note = State.FAILED, "the text order says that nothing moved, the audit says otherwise"
    return make(state=state, missing=missing, unexpected=unexpected, note=note, result=result)


def _audit_cases(cases: Sequence[CorpusCase], archs: Sequence[str], build: Build, jobs: int) -> dict[tuple[str, str], CaseResult]:
    loaded = _Loaded(build)
    keys = [(case, arch) for case in cases for arch in archs]
    kernels: list[KernelBinary | None] = []
    reasons: list[str] = []
    work: list[Job] = []
    for case, arch in keys:
        built = build.built.get((case.name, arch))
        kernel = loaded.kernel(built) if built else None
        ptx = loaded.source(build.built.get((case.ptx_of or case.name, arch), built)) if built else None
        kernels.append(kernel if ptx is not None else None)
        lost = loaded.errors.get(str(built.cubin), "kernel or PTX not found in its file") if built else ""
        reasons.append(build.errors.get((case.name, arch), lost))
        if kernel is not None and ptx is not None:
            work.append(Job(kernel=kernel, roles=case.roles, ptx=ptx, launch=case.launch))
    answers = iter(audit_many(work, jobs))
    return {
        (case.name, arch): _judge_case(case, arch, build.built.get((case.name, arch)), reason, kernel, next(answers) if kernel else None)
        for (case, arch), kernel, reason in zip(keys, kernels, reasons, strict=True)
    }


def compare(expected: Iterable[Pair], found: Iterable[Pair]) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """(missing, unexpected). An expectation without a parameter is met by any finding of its rule."""
    expected, found = set(expected), set(found)
    anywhere = {rule for rule, param in expected if not param}
    rules_found = {rule for rule, _ in found}
    missing = [pair for pair in expected if (pair[1] and pair not in found) or (not pair[1] and pair[0] not in rules_found)]
    unexpected = [pair for pair in found if pair not in expected and pair[0] not in anywhere]
    return tuple(sorted(missing)), tuple(sorted(unexpected))


def _with_twin(result: CaseResult, cases: Sequence[CorpusCase], results: Mapping[tuple[str, str], CaseResult]) -> CaseResult:
    if result.state is not State.NO_LONGER_MOVES:
        return result
    case = next(item for item in cases if item.name == result.case)
    twin = results.get((case.moved.twin, result.arch)) if case.moved is not None else None
    if twin is None or twin.state is not State.OK:
        return CaseResult(
            case=result.case, family=result.family, arch=result.arch, state=State.FAILED, true_negative=False, missing=result.missing,
            note=f"{result.note}, which fails: {twin.missing if twin else 'absent'}", result=result.result,
        )  # fmt: skip
    return result


def _lint_case(case: CorpusCase) -> CaseResult:
    weights = {entry.name for entry in case.roles.by_index.values() if entry.role is Role.WEIGHT}

    def is_weight(function: str, parameter: str) -> bool:
        return function == case.name and parameter in weights

    found = lint.lint_paths([case.source], is_weight, context=[case.source.parent / PRELUDE])
    counts: dict[str, int] = {}
    for finding in found.findings:
        counts[finding.rule] = counts.get(finding.rule, 0) + 1
    good = counts == dict(case.lint) and not found.errors
    return CaseResult(
        case=case.name, family="lint", arch="source", state=State.OK if good else State.FAILED, true_negative=not case.lint,
        note="" if good else f"lint: got {counts} and errors {[e.reason for e in found.errors]}, needs {dict(case.lint)}",
    )  # fmt: skip


def _graph_case(case: GraphCase) -> CaseResult:
    graph = graph_inputs.read_graph(case.path)
    found = case.races(launch_graph.find_races(graph), graph.baked_epochs)
    missing = tuple(sorted((r[0], "/".join(r[1:])) for r in case.expected - found))
    unexpected = tuple(sorted((r[0], "/".join(r[1:])) for r in found - case.expected))
    return CaseResult(
        case=case.name, family="graph", arch="graph", state=State.FAILED if missing or unexpected else State.OK,
        true_negative=not case.expected, missing=missing, unexpected=unexpected,
    )  # fmt: skip
