"""`fasttrack audit`: find reads that may run before the wait that orders them, in binaries, sources and launch graphs.

With paths it audits those, with a manifest for the roles. Without, it audits this project: all kernels of the specialised step for every
scheduled configuration and architecture, their sources, the launch graph of the plan, and the corpus that tests the audit itself.

Exit codes: 0 pass, 1 findings, 2 not proven (something could not be read, or has no role), 3 the audit could not work. The last line on
standard output is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from validation.core.types import EXIT_CODES, HarnessError, Status
from validation.ordering import captured, corpus_run, drift, driver, text
from validation.ordering.audit import audit_kernel
from validation.ordering.corpus_build import toolchain
from validation.ordering.corpus_cases import ARCHITECTURES
from validation.ordering.findings import Report, to_json
from validation.ordering.manifest import Manifest, read_manifest, starter_manifest
from validation.ordering.model import Finding, LaunchFacts, RoleMap, Severity
from validation.ordering.observed import Trace, observed_roles, read_trace
from validation.ordering.own_compile import SCOPES
from validation.ordering.own_kernels import kernels_exist
from validation.ordering.rule_texts import rule_text
from validation.ordering.sarif import to_sarif
from validation.ordering.units import match_ptx

FORMATS = ("text", "json", "sarif")
app = typer.Typer(help=__doc__, add_completion=False)

Paths = Annotated[list[Path] | None, typer.Argument(help="Cubins, PTX, fat binaries, libraries, wheels, Python sources, folders of them.")]
ManifestOption = Annotated[Path | None, typer.Option("--manifest", "-m", help="TOML with the roles of the parameters.")]
GraphOption = Annotated[list[Path] | None, typer.Option("--graph", "-g", help="Launch graph: TOML, or JSON of a captured CUDA graph.")]
Arch = Annotated[list[str] | None, typer.Option(help="Only this architecture (repeatable), e.g. sm_90a.")]
ObservedOption = Annotated[Path | None, typer.Option("--observed", help="Trace of real launches: roles seen on a GPU (see `observed.py`).")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the document (or the starter manifest) here.")]


@app.command()
def audit(
    paths: Paths = None,
    manifest: ManifestOption = None,
    graph: GraphOption = None,
    observed: ObservedOption = None,
    arch: Arch = None,
    output_format: Annotated[str, typer.Option("--format", "-f", help="text | json | sarif")] = "text",
    output: Output = None,
    init: Annotated[bool, typer.Option("--init", help="Write a starter manifest for the kernels in PATHS.")] = False,
    explain: Annotated[str | None, typer.Option(help="Print the documentation of a rule, or `all` for the list.")] = None,
    scope: Annotated[str, typer.Option(help=f"Own kernels: {' | '.join(SCOPES)}.")] = "full",
    corpus: Annotated[bool, typer.Option("--corpus/--no-corpus", help="Own kernels: also test the audit on its corpus.")] = True,
    record: Annotated[bool, typer.Option("--record", help="Accept registers, spills and SASS digests as they are now.")] = False,
    record_file: Annotated[Path, typer.Option(help="Where they are recorded.")] = driver.RECORD,
    jobs: Annotated[int, typer.Option(help="Worker processes.", min=1)] = min(2, os.cpu_count() or 1),
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Notes and limits of every kernel.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only findings and the result.")] = False,
) -> int:
    """Audit PATHS, or this project when there are none (minutes once, seconds when nothing changed; no GPU)."""
    console = Console(stderr=output_format != "text" or output is not None, highlight=False, soft_wrap=True)
    if explain is not None:
        return _explain(explain, console)
    _check_options(output_format, arch or [], scope, bool(paths or graph), init)
    trace = read_trace(observed) if observed is not None else None
    if init:
        return _init(paths or [], arch, output, trace)
    if paths or graph:
        report = _audit_paths(paths or [], graph or [], manifest, arch, jobs, trace)
        corpus_report = None
    else:
        report, corpus_report = _audit_project(scope, tuple(arch or ARCHITECTURES), corpus, jobs, console, quiet, trace)
    versions = toolchain()
    if record:
        rows = drift.write_record(record_file, report.results, versions)
        console.print(f"recorded {rows} kernels in {record_file}")
    elif record_file != driver.RECORD or not (paths or graph):
        report = driver.with_drift(report, record_file, versions)
    report = dataclasses.replace(report, toolchain=versions)
    return _finish(report, corpus_report, output_format, output, console, verbose)


def _check_options(output_format: str, archs: list[str], scope: str, own: bool, init: bool) -> None:
    reasons = []
    if output_format not in FORMATS:
        reasons.append(f"format: got {output_format!r}, needs one of {FORMATS}")
    if scope not in SCOPES:
        reasons.append(f"scope: got {scope!r}, needs one of {list(SCOPES)}")
    if not own and any(arch not in ARCHITECTURES for arch in archs):
        reasons.append(f"arch: got {archs}, needs some of {ARCHITECTURES} for the project's own kernels")
    if init and not own:
        reasons.append("init: got no path, needs the binaries to describe")
    if reasons:
        raise HarnessError("audit: " + "; ".join(reasons))


def _explain(rule: str, console: Console) -> int:
    if rule.lower() == "all":
        console.print(text.rule_table())
    else:
        console.print(Markdown(rule_text(rule.upper())))
    return _close(Status.PASS, None, rule=rule.upper())


def _init(paths: list[Path], archs: list[str] | None, output: Path | None, trace: Trace | None) -> int:
    inputs = driver.sort_inputs(paths)
    loaded, texts = driver.load(inputs.binaries, archs[0] if archs else None)
    if not loaded.kernels:
        raise HarnessError(
            f"init: got no kernel in {[str(p) for p in paths]} ({'; '.join(e.reason for e in loaded.errors[:3])}), needs some"
        )
    results = {
        (k.name, k.arch): audit_kernel(k, RoleMap(source="none"), match_ptx(k, texts.get(k.name, ())), LaunchFacts(pdl=True))
        for k in loaded.kernels
    }
    document = starter_manifest(loaded.kernels, results, observed_roles(trace) if trace is not None else {})
    if output is None:
        print(document)
    else:
        _write(output, document)
    return _close(Status.PASS, output, kernels=len(results))


def _audit_paths(
    paths: list[Path], graphs: list[Path], manifest: Path | None, archs: list[str] | None, jobs: int, trace: Trace | None
) -> Report:
    inputs = driver.sort_inputs(paths, graphs)
    known = read_manifest(manifest) if manifest is not None else Manifest()
    return driver.audit_inputs(inputs, known, arch=archs[0] if archs else None, jobs=jobs, observed=trace)


def _audit_project(
    scope: str, archs: tuple[str, ...], corpus: bool, jobs: int, console: Console, quiet: bool, trace: Trace | None
) -> tuple[Report, corpus_run.CorpusReport | None]:
    started = time.perf_counter()

    def say(line: str) -> None:
        if not quiet:
            console.print(f"[dim]{time.perf_counter() - started:6.1f} s  {line}[/]")

    corpus_report = None
    if corpus:
        say("building and auditing the corpus")
        corpus_report = corpus_run.run_corpus(archs, jobs=jobs)
    if not kernels_exist():
        say("the project has no kernels yet: the path itself is not proven")
        return Report(), corpus_report
    trace = trace or captured.committed_trace()
    if trace is None:
        say(
            "no trace of launches belongs to these sources: contracts are not held against a GPU; `validation.ordering.observe` records one"
        )
    else:
        say(f"contracts are held against {len(trace.launches)} launches on {trace.device}")
    report, _ = driver.audit_own(scope, archs, jobs=jobs, observed=trace, say=say)
    return report, corpus_report


def _finish(
    report: Report, corpus: corpus_run.CorpusReport | None, output_format: str, output: Path | None, console: Console, verbose: bool
) -> int:
    status = report.status
    if corpus is not None and corpus.bad:
        status = Status.FAIL
    if output_format == "text":
        if output is not None:
            with output.open("w") as file:
                text.print_report(report, Console(file=file, width=160, highlight=False), verbose=verbose)
        text.print_report(report, console, verbose=verbose)
        if corpus is not None:
            text.print_corpus(corpus, console)
        return _close(status, output, findings=len(report.findings), kernels=len(report.results), **_why(status, report, corpus))
    if why := _why(status, report, corpus):
        console.print(f"{status.value}: {why['reason']}", markup=False)  # on standard error, whatever becomes of the document
    document: dict[str, Any] = to_json(report) if output_format == "json" else to_sarif(report)
    if output is None:  # the document is the last line itself
        if output_format == "json":
            document = {"run": None, "verdict": status.value, "report": None, **document}
        print(json.dumps(document), flush=True)
        return EXIT_CODES[status]
    _write(output, json.dumps(document, indent=1) + "\n")
    return _close(status, output, findings=len(report.findings), kernels=len(report.results), **_why(status, report, corpus))


def _why(status: Status, report: Report, corpus: corpus_run.CorpusReport | None) -> dict[str, str]:
    """{"reason": ...} of anything but a pass: what was found, read or finished wrongly, the first of each."""
    if status is Status.PASS:
        return {}
    rules: dict[str, list[Finding]] = {}
    for finding in report.findings:
        if finding.level is not Severity.NOTE:
            rules.setdefault(finding.rule, []).append(finding)
    parts = [f"{rule} x {len(found)}, first in {found[0].kernel or 'module'}: {found[0].message}" for rule, found in sorted(rules.items())]
    parts += [f"{len(report.errors)} files not audited, first {e.path}: {e.reason}" for e in report.errors[:1]]
    parts += [f"{len(report.incomplete)} analyses not finished, first {name}" for name in report.incomplete[:1]]
    if corpus is not None:
        parts += [f"{len(corpus.bad)} corpus cases wrong, first {bad.case} ({bad.arch}) {bad.state.value}" for bad in corpus.bad[:1]]
    return {"reason": "; ".join(parts) or "nothing was audited"}


def _close(status: Status, output: Path | None, **fields: Any) -> int:
    print(json.dumps({"run": None, "verdict": status.value, "report": str(output) if output else None, **fields}), flush=True)
    return EXIT_CODES[status]


def _write(path: Path, document: str) -> None:
    if path.is_dir():
        raise HarnessError(f"audit: got --output {path}, which is a folder, needs a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            file.write(document)
            file.flush()
            os.replace(file.name, path)
        except OSError:  # a full disk: no half of a report stays beside it
            os.unlink(file.name)
            raise
