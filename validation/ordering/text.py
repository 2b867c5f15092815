"""Findings for people: coloured text with the instruction, the path, the wait it escapes, the fix, and a timeline of each kernel."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from validation.core.types import Status
from validation.ordering.corpus_run import CorpusReport, State
from validation.ordering.findings import Report, excerpt, offending, timeline
from validation.ordering.model import LIMITS, RULES, AuditResult, Finding, Severity

COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
STATUS = {Status.PASS: "[bold green]pass[/]", Status.FAIL: "[bold red]fail[/]", Status.NOT_PROVEN: "[bold yellow]not proven[/]"}
ZONES = {"before": "red", "wait": "bold green", "after": "", "release": "magenta", "fence": "blue"}
TIMELINE_ROWS = 60


def print_report(report: Report, console: Console, *, verbose: bool = False) -> None:
    """Findings grouped by kernel, then suppressions, errors, the summary and the limits."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in report.findings:
        groups.setdefault((finding.kernel, finding.arch), []).append(finding)
    for (kernel, arch), findings in groups.items():
        console.print(f"[bold]{escape(kernel or 'module')}[/]{f'  ({arch})' if arch else ''}")
        for finding in findings:
            _print_finding(finding, console)
        serious = any(finding.level is not Severity.NOTE for finding in findings)
        for result in offending(report):
            if serious and (result.kernel, result.arch) == (kernel, arch):
                console.print(timeline_table(result, findings))
    _print_suppressions(report, console)
    for error in report.errors:
        console.print(f"[yellow]not audited[/] {escape(error.path)}: {escape(error.reason)}")
    for name in report.incomplete:
        console.print(f"[yellow]incomplete[/] {escape(name)}: the analysis did not finish")
    if verbose:
        for result in report.results:
            for note in result.notes:
                console.print(f"[dim]{escape(result.kernel)} ({result.arch}): {escape(note)}[/]")
    _print_summary(report, console)


def _print_finding(finding: Finding, console: Console) -> None:
    colour = COLOURS[finding.level]
    stage = f" [dim](by {finding.stage.value})[/]" if finding.stage.value else ""
    console.print(f"  [{colour}]{finding.rule}[/] {escape(finding.message)}{stage}")
    lines = []
    if finding.parameter:
        reason = f": {finding.role_reason}" if finding.role_reason else ""
        lines.append(("parameter", f"{finding.parameter}, {finding.role.value}{reason}"))
    lines.append(("sass", finding.instruction))
    lines.append(("ptx", f"line {finding.ptx_line}: {finding.ptx_text}" if finding.ptx_line else finding.ptx_text))
    lines.append(("wait", finding.wait_text))
    lines.append(("warps", finding.warps))
    lines.append(("path", " > ".join(f"{pc:#06x}" for pc in finding.path_witness)))
    lines.append(("source", f"{finding.source_file}:{finding.source_line}" if finding.source_file else ""))
    lines.append(("chain", str(finding.details.get("chain", ""))))
    lines.append(("fix", finding.fix))
    for label, text in lines:
        if text:
            first, *rest = text.splitlines()
            console.print(f"    [dim]{label:>9}[/] {escape(first)}")
            for line in rest:
                console.print(f"    {'':>9} {escape(line)}")


def timeline_table(result: AuditResult, findings: Iterable[Finding]) -> Table:
    """Three columns, before the wait | wait | after; rows with a finding are marked with its rules."""
    rows = timeline(result, findings)
    table = Table("pc", "before the wait", "wait", "after", "memory", "", title=f"{result.kernel} {result.arch}", title_justify="left")
    shown = excerpt(rows, TIMELINE_ROWS)
    for row in shown:
        style = ZONES.get(row.zone, "")
        cell = f"[{style}]{escape(row.text)}[/]" if style else escape(row.text)
        before, wait, after = "", "", ""
        if row.zone in ("before", "no wait"):
            before = cell
        elif row.zone in ("wait", "release", "fence"):
            wait = cell
        else:
            after = cell
        table.add_row(f"{row.pc:#06x}", before, wait, after, escape(row.bases), " ".join(row.rules))
    if len(shown) < len(rows):
        table.caption = f"{len(rows) - len(shown)} rows left out"
    return table


def _print_suppressions(report: Report, console: Console) -> None:
    for finding, why in report.suppressed.suppressed:
        console.print(f"[dim]suppressed[/] {finding.rule} {escape(finding.kernel)} until {why.expires}: {escape(why.reason)}")
    for item in report.suppressed.expired:
        console.print(f"[yellow]suppression expired[/] {escape(str(item))}")
    for item in report.suppressed.unused:
        console.print(f"[dim]suppression without effect[/] {escape(str(item))}")


def _print_summary(report: Report, console: Console) -> None:
    parts = [f"{len(report.results)} kernels", f"{sum(r.instructions for r in report.results)} instructions"]
    if report.linted_files:
        parts.append(f"{report.linted_statements} inline-PTX statements in {report.linted_files} files")
    if report.graph_launches:
        parts.append(f"{report.graph_launches} launches")
    counts = ", ".join(f"{report.count(s)} {s.value}{'s' if report.count(s) != 1 else ''}" for s in Severity)
    console.print(f"{STATUS[report.status]}  {', '.join(parts)}: {counts}, {len(report.suppressed.suppressed)} suppressed")
    unknown = sum(result.unknown_bases for result in report.results)
    if unknown:
        console.print(f"[yellow]{unknown} accesses whose origin could not be followed: unknown, not clean[/]")
    for limit in LIMITS:
        console.print(f"[dim]limit: {limit}[/]")


def rule_table() -> Table:
    """Every rule with its level."""
    table = Table("rule", "level", "what")
    for rule, (severity, title) in RULES.items():
        table.add_row(rule, f"[{COLOURS[severity]}]{severity.value}[/]", title)
    return table


def print_corpus(report: CorpusReport, console: Console) -> None:
    """Totals of the corpus and every case that is not as expected."""
    for result in report.results:
        if result.state is State.NO_LONGER_MOVES:
            console.print(f"[cyan]{result.case}[/] ({result.arch}): {escape(result.note)}")
    for result in report.bad:
        console.print(f"[bold red]corpus {result.state.value}[/] {result.family}/{result.case} ({result.arch}) {escape(result.note)}")
        for label, pairs in (("missing", result.missing), ("unexpected", result.unexpected)):
            for rule, parameter in pairs:
                console.print(f"    [dim]{label}[/] {rule} {escape(parameter)}")
    negatives = sum(result.true_negative for result in report.results)
    console.print(
        f"corpus: {len(report.results)} judgements ({negatives} near misses), {report.count(State.OK)} as expected,"
        f" {report.count(State.NO_LONGER_MOVES)} no longer moved by this toolchain, {len(report.bad)} wrong"
    )
