"""Puts the parts of the audit together: binaries with a manifest, Python sources, launch graphs, and the project's own kernels."""

from __future__ import annotations

import datetime
import fnmatch
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from validation.core.types import HarnessError
from validation.ordering import crosscheck, drift, lint
from validation.ordering.binaries import load_binaries
from validation.ordering.corpus_build import writable_cache
from validation.ordering.corpus_cases import ARCHITECTURES
from validation.ordering.findings import Report
from validation.ordering.graph_inputs import from_plan, read_graph
from validation.ordering.graph_order import StepGraph, Waits
from validation.ordering.launch_graph import check_graph
from validation.ordering.manifest import Manifest, renamed, suppress
from validation.ordering.model import (
    AuditResult,
    FileError,
    Finding,
    KernelBinary,
    LaunchFacts,
    Loaded,
    Parameter,
    PtxKernel,
    Role,
    RoleMap,
    When,
)
from validation.ordering.observed import Trace, contradictions, observed_roles, role_map, trace_json, unseen_stores
from validation.ordering.own_kernels import OwnBuild, OwnKernel, build_own
from validation.ordering.units import Unit, audit_units, units_of

RECORD = Path(__file__).parent / "recorded.json"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a user asked to audit, sorted by kind."""

    binaries: tuple[Path, ...] = ()
    sources: tuple[Path, ...] = ()
    graphs: tuple[Path, ...] = ()


def sort_inputs(paths: Iterable[Path], graphs: Iterable[Path] = ()) -> Inputs:
    """Python files and folders of them are linted, everything else is read as binaries. Raises HarnessError for a missing path."""
    binaries, sources, missing = [], [], []
    for path in paths:
        if not path.exists():
            missing.append(str(path))
        elif path.suffix == ".py" or (path.is_dir() and not _has_binaries(path) and any(path.rglob("*.py"))):
            sources.append(path)
        else:
            binaries.append(path)
            if path.is_dir() and any(path.rglob("*.py")):
                sources.append(path)
    missing += [str(path) for path in graphs if not path.is_file()]
    if missing:
        raise HarnessError(f"audit: got {missing}, needs paths that exist")
    return Inputs(binaries=tuple(binaries), sources=tuple(sources), graphs=tuple(graphs))


def _has_binaries(folder: Path) -> bool:
    return any(path.suffix in (".cubin", ".ptx", ".so", ".o", ".whl", ".fatbin") for path in folder.rglob("*") if path.is_file())


def load(paths: Sequence[Path], arch: str | None = None) -> tuple[Loaded, dict[str, list[PtxKernel]]]:
    """Kernels below these paths, and their PTX by name."""
    loaded = load_binaries(list(paths), arch)
    texts: dict[str, list[PtxKernel]] = {}
    for text in loaded.ptx:
        texts.setdefault(text.name, []).append(text)
    return loaded, texts


@dataclass(frozen=True)
class ManifestFacts:
    """Roles from a manifest, else as observed in a trace; launch facts from the manifest."""

    manifest: Manifest
    observed: Trace | None = None

    def roles(self, kernel: KernelBinary) -> RoleMap:
        if self.observed is not None and self.manifest.entry(kernel.name) is None:
            seen = observed_roles(self.observed).get(kernel.name)
            if seen is not None:
                return role_map(seen, self.observed.path)
        return self.manifest.roles(kernel)

    def launch(self, kernel: KernelBinary) -> LaunchFacts:
        return self.manifest.launch(kernel)

    def token(self) -> str:
        seen = trace_json(self.observed) if self.observed is not None else ""
        return repr((self.manifest.kernels, seen))


def _folder(cache: Path | None) -> Path:
    return writable_cache(cache) / "results"


def audit_inputs(
    inputs: Inputs,
    manifest: Manifest,
    *,
    arch: str | None = None,
    jobs: int = 2,
    today: datetime.date | None = None,
    cache: Path | None = None,
    observed: Trace | None = None,
) -> Report:
    """Audit somebody's binaries, sources and launch graphs. Raises HarnessError for a bad graph or manifest.

    Results are kept in `cache` (default: the project's own) by the content of each file. `observed` gives roles where the manifest
    has none.
    """
    started = time.perf_counter()
    findings: list[Finding] = []
    results: list[AuditResult] = []
    errors: list[FileError] = []
    for answer in audit_units(units_of(inputs.binaries, ManifestFacts(manifest, observed), arch), workers=jobs, cache=_folder(cache)):
        errors += answer.errors
        for kernel, result in zip(answer.kernels, answer.results, strict=True):
            roles = ManifestFacts(manifest, observed).roles(kernel)
            finished = finish(result, roles, inputs.sources)
            named = tuple(renamed(finding, kernel, roles) for finding in finished.findings)
            results.append(replace(finished, findings=named))
            findings += named
    linted = lint.lint_paths(inputs.sources, weights_of(manifest)) if inputs.sources else None
    if linted is not None:
        findings += linted.findings
        errors += linted.errors
    launches = 0
    for path in inputs.graphs:
        graph = read_graph(path)
        launches += len(graph.nodes)
        findings += check_graph(graph, str(path))
    split = suppress(findings, manifest.suppressions, today or datetime.date.today())
    return Report(
        results=tuple(results),
        findings=split.kept,
        suppressed=split,
        errors=tuple(errors),
        linted_files=len(linted.files) if linted else 0,
        linted_statements=linted.statements if linted else 0,
        graph_launches=launches,
        seconds=time.perf_counter() - started,
    )


def weights_of(manifest: Manifest) -> lint.IsWeight:
    """The lint's question answered from a manifest: parameter names with the role weight, and readers of weights by convention."""

    def is_weight(function: str, parameter: str) -> bool:
        if any(fnmatch.fnmatchcase(function, pattern) for pattern in manifest.weight_readers):
            return True
        for entry in manifest.kernels:
            if fnmatch.fnmatchcase(function, entry.pattern) or f"_{function}_" in f"_{entry.pattern}_":
                named = (role for key, role in entry.params.items() if parameter in (key, role.name))
                return any(role.role is Role.WEIGHT for role in named)
        return False

    return is_weight


def finish(result: AuditResult, roles: RoleMap, sources: Sequence[Path] = (), context: Sequence[Path] = ()) -> AuditResult:
    """Adds the findings that need more than the binary."""
    raised = crosscheck.moved_by_nvvm(result, _files(sources), context) if sources else result
    named = tuple(_with_name(parameter, roles) for parameter in raised.parameters)
    return replace(raised, parameters=named, findings=(*raised.findings, *crosscheck.more_findings(raised, roles)))


def _with_name(parameter: Parameter, roles: RoleMap) -> Parameter:
    """The owner's name for a parameter instead of the compiler's, where a role gives one."""
    entry = roles.by_index.get((parameter.index, 0)) or roles.by_name.get(parameter.name)
    return replace(parameter, name=entry.name) if entry is not None and entry.name else parameter


def _files(paths: Iterable[Path]) -> list[Path]:
    return [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


# ---- the project's own kernels ----
def audit_own(
    scope: str,
    archs: Sequence[str] = ARCHITECTURES,
    *,
    cache: Path | None = None,
    jobs: int = 2,
    changed: Mapping[str, Role] | None = None,
    observed: Trace | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Report, OwnBuild]:
    """Compile and audit the project's kernels, lint its sources and check the launch graph of its plan.

    With `observed`, the contracts are also held against what a GPU did.
    """
    started = time.perf_counter()
    say(f"compiling the project's kernels ({scope}, {', '.join(archs)})")
    build = build_own(scope, archs, cache=cache, jobs=jobs)
    say(f"auditing {len(build.kernels)} binaries")
    results, errors = audit_kernels(build.kernels, jobs=jobs, changed=changed, cache=writable_cache(cache))
    errors += [FileError(path=name, reason=f"does not compile: {reason}") for name, reason in build.errors.items()]
    package = Path(__file__).resolve().parents[2] / "kimi_k3_decode"
    linted = lint.lint_paths([package])
    say("ordering the launches of a step")
    launches, races = audit_plan(waits_by_op(build.kernels, results), early_by_op(build.kernels, results))
    findings = [finding for result in results for finding in result.findings] + list(linted.findings) + races
    findings += observed_findings(observed, build.kernels, results) if observed is not None else []
    report = Report(
        results=tuple(results),
        findings=tuple(findings),
        errors=(*errors, *linted.errors),
        linted_files=len(linted.files),
        linted_statements=linted.statements,
        graph_launches=launches,
        seconds=time.perf_counter() - started,
    )
    return report, build


@dataclass(frozen=True)
class OwnFacts:
    """Roles of one compiled variant from its contract."""

    kernel: OwnKernel
    changed: Mapping[str, Role] | None = None

    def roles(self, kernel: KernelBinary) -> RoleMap:
        return self.kernel.roles(self.changed)

    def launch(self, kernel: KernelBinary) -> LaunchFacts:
        return self.kernel.launch()

    def token(self) -> str:
        return repr((sorted(self.kernel.roles(self.changed).by_index.items()), self.kernel.launch()))


def audit_kernels(
    kernels: Sequence[OwnKernel], *, jobs: int = 2, changed: Mapping[str, Role] | None = None, cache: Path | None = None
) -> tuple[list[AuditResult], list[FileError]]:
    """One result a compiled variant, named by the variant; files that could not be read come back as errors.

    `cache` is a folder of earlier results, by the content of binary and PTX, the roles and the audit's own sources.
    """
    units = [Unit((kernel.cubin, kernel.ptx), OwnFacts(kernel, changed)) for kernel in kernels]
    results: list[AuditResult] = []
    errors: list[FileError] = []
    for kernel, answer in zip(kernels, audit_units(units, workers=jobs, cache=cache and cache / "results"), strict=True):
        errors += answer.errors
        if not answer.results:
            errors.append(FileError(path=kernel.variant, reason="its cubin holds no kernel"))
        for binary, result in zip(answer.kernels, answer.results, strict=True):
            described = sum(param["count"] for param in kernel.params)
            if described != len(binary.parameters):
                reason = f"parameters: got {len(binary.parameters)}, needs the {described} of its contract"
                errors.append(FileError(path=kernel.variant, reason=reason))
            results.append(_named(kernel, finish(result, kernel.roles(changed))))
    return results, errors


def _named(kernel: OwnKernel, result: AuditResult) -> AuditResult:
    name = f"{kernel.model} {kernel.variant}"
    return replace(result, kernel=name, findings=tuple(replace(finding, kernel=name) for finding in result.findings))


def observed_findings(trace: Trace, kernels: Sequence[OwnKernel], results: Sequence[AuditResult]) -> list[Finding]:
    """Where contracts or the audit's stores disagree with a trace; kernels that it does not hold are not judged."""
    seen = observed_roles(trace)
    owners = {f"{kernel.model} {kernel.variant}": kernel for kernel in kernels}
    findings: list[Finding] = []
    for result in results:
        kernel = owners[result.kernel]
        if kernel.variant not in seen:
            continue
        findings += contradictions(result.kernel, result.arch, kernel.roles(), seen[kernel.variant])
        findings += unseen_stores(result, [launch for launch in trace.launches if launch.kernel == kernel.variant])
    return findings


def waits_by_op(kernels: Sequence[OwnKernel], results: Sequence[AuditResult]) -> dict[str, Waits]:
    """On which paths each op waits, from its binaries: the weakest of its variants."""
    ops = {f"{kernel.model} {kernel.variant}": kernel.op for kernel in kernels}
    waits: dict[str, Waits] = {}
    for result in results:
        rules = {finding.rule for finding in result.findings}
        found = Waits.NONE if "MO005" in rules else Waits.SOME if "MO004" in rules else Waits.ALL
        order = (Waits.NONE, Waits.SOME, Waits.ALL)
        op = ops[result.kernel]
        waits[op] = min(waits.get(op, Waits.ALL), found, key=order.index)
    return waits


def early_by_op(kernels: Sequence[OwnKernel], results: Sequence[AuditResult]) -> dict[str, frozenset[str]]:
    """Operands that some binary of an op touches before its wait."""
    ops = {f"{kernel.model} {kernel.variant}": kernel for kernel in kernels}
    early: dict[str, set[str]] = {}
    for result in results:
        kernel = ops[result.kernel]
        names = {index: entry.name for (index, _), entry in kernel.roles().by_index.items()}
        for access in result.accesses:
            if access.when in (When.BEFORE, When.MAYBE_BEFORE, When.NO_WAIT):
                early.setdefault(kernel.op, set()).update(names[base.index] for base in access.bases if base.index in names)
    return {op: frozenset(found) for op, found in early.items()}


def audit_plan(waits: Mapping[str, Waits], early: Mapping[str, frozenset[str]]) -> tuple[int, list[Finding]]:
    """(launches, races) of the project's own step: nano on one and two ranks over four steps, K3 on two of its ranks over two."""
    launches = 0
    findings: list[Finding] = []
    for graph in plan_graphs(waits, early):
        launches += len(graph.nodes)
        findings += check_graph(graph, "kimi_k3_decode/launches.py")
    return launches, findings


def plan_graphs(waits: Mapping[str, Waits], early: Mapping[str, frozenset[str]]) -> list[StepGraph]:
    """The launch graphs of the plan. Two ranks stand for all: every rank runs the same list."""
    from kimi_k3_decode.config import K3, NANO, Shard
    from kimi_k3_decode.launches import launch_graph

    graphs = []
    for config, tp, ranks, steps, rows, q in ((NANO, 1, 1, 4, 4, 4), (NANO, 2, 2, 4, 8, 8), (K3, 8, 2, 2, 4, 4)):
        shards = [Shard(config=config, tp=tp, rank=rank) for rank in range(ranks)]
        plans = [[launch_graph(config, shard, rows, q, step=step) for shard in shards] for step in range(steps)]
        graphs.append(from_plan(plans, waits=waits, early=early))
    return graphs


def with_drift(report: Report, record: Path, toolchain: Mapping[str, str]) -> Report:
    """Adds MO015 where a record exists; without one, says nothing."""
    if not record.is_file():
        return report
    rows, was = drift.read_record(record)
    found = drift.compare(report.results, rows, was, toolchain)
    return replace(report, findings=(*report.findings, *found), toolchain=toolchain)
