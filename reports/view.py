"""What a report shows, gathered from the files of one run folder and nothing else.

A number enters the view only together with the id of the record it comes from. Findings that hold are grouped per check and measurement so
that a report of a hundred thousand records still fits a page; violations and missing evidence are always listed one by one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from validation.core import jsonio
from validation.core.store import read_evidence, read_json, read_run
from validation.core.types import Claim, ClaimResult, Evidence, Finding, HarnessError, Holds, Outcome, Run, Status, Verdict
from validation.freshness.published import Cell

VERDICT_FILE = "verdict.json"
FRESHNESS_FILE = "freshness.json"
LANES = ("scope", "ordering", "numerics", "evals", "schedule", "perf", "mutants")
MAX_ROWS = 60  # of one table in report.md; the HTML holds every row


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number a report may print: the value, its unit and the record that measured it."""

    value: float
    unit: str
    evidence: str

    @property
    def text(self) -> str:
        return format_value(self.value, self.unit)


def format_value(value: float | None, unit: str = "") -> str:
    """At most five significant digits; counts stay whole; what is not a number says so."""
    if value is None:
        return "none"
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("infinite" if value > 0 else "-infinite")
    if value == int(value) and abs(value) < 1e9:
        text = str(int(value))
    else:
        text = f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return text if unit in ("", "1") else f"{text} {unit}"


@dataclass(frozen=True, kw_only=True)
class Group:
    """All findings of one check on one measurement: how many hold, and the one nearest to (or furthest past) its limit."""

    check: str
    measurement: str
    counts: Mapping[str, int]
    worst: Finding

    @property
    def status(self) -> str:
        if self.counts.get(Holds.VIOLATED):
            return "fail"
        return "not_proven" if self.counts.get(Holds.NO_EVIDENCE) else "pass"


@dataclass(frozen=True, kw_only=True)
class Lane:
    name: str
    claims: tuple[tuple[Claim, ClaimResult], ...]
    groups: tuple[Group, ...]
    open_findings: tuple[Finding, ...]  # violated or without evidence
    outcomes: Mapping[str, int]
    records: tuple[Evidence, ...]  # those with tables or figures in them


@dataclass(frozen=True, kw_only=True)
class Freshness:
    """How the published evidence stood; `problems` refuse PR-ready."""

    published: int
    fresh: int
    stale: int
    problems: tuple[str, ...]
    renew: tuple[str, ...]
    cells: tuple[Cell, ...]  # the stale ones


@dataclass(frozen=True, kw_only=True)
class View:
    run: Run
    run_dir: Path
    verdict: Verdict
    lanes: tuple[Lane, ...]
    n_records: int
    outcomes: Mapping[str, int]
    troubles: tuple[Evidence, ...] = field(default_factory=tuple)  # refused and crashed attempts
    freshness: Freshness | None = None  # of the published evidence, when the run was judged

    @property
    def claims(self) -> Iterator[tuple[Claim, ClaimResult]]:
        for lane in self.lanes:
            yield from lane.claims

    @property
    def candidate(self) -> str:
        settings = self.run.config.get("settings", {})
        return str(settings.get("candidate", "unknown"))

    def lane(self, name: str) -> Lane | None:
        return next((lane for lane in self.lanes if lane.name == name), None)


def margin(finding: Finding) -> float:
    """How far inside its limit a finding is, as a share of the bound; negative outside, -inf where nothing can be compared."""
    if finding.limit is None or finding.value is None or math.isnan(finding.value):
        return -math.inf
    bound, value = finding.limit.bound, finding.value
    room = bound - value if finding.limit.op in ("<=", "<") else value - bound
    if finding.limit.op == "==":
        room = -abs(value - bound)
    return room / (abs(bound) or 1.0)


def group_findings(findings: Iterable[Finding]) -> tuple[Group, ...]:
    table: dict[tuple[str, str], tuple[Counter, Finding]] = {}
    for finding in findings:
        key = (finding.check, finding.limit.measurement if finding.limit else "")
        if key not in table:
            table[key] = (Counter(), finding)
        counts, worst = table[key]
        counts[finding.holds.value] += 1
        if margin(finding) < margin(worst):
            table[key] = (counts, finding)
    return tuple(Group(check=k[0], measurement=k[1], counts=c, worst=w) for k, (c, w) in sorted(table.items()))


def stored_verdict(run_dir: Path, run: Run) -> tuple[Verdict, tuple[Claim, ...]]:
    """What verdict.json says. It is not sealed with the run: whoever decides on it judges again. Raises HarnessError."""
    body = dict(read_json(run_dir / VERDICT_FILE))
    texts = body.pop("claim_texts", {})
    verdict: Verdict = jsonio.decode(Verdict, body, VERDICT_FILE)
    known = tuple(jsonio.decode(Claim, text, f"{VERDICT_FILE} {name}") for name, text in texts.items())
    if verdict.run != run.id:
        raise HarnessError(f"{VERDICT_FILE}: got a verdict of {verdict.run}, needs one of {run.id}; run `judge` on this folder")
    return verdict, known


def load_view(run_dir: Path, judged: tuple[Verdict, tuple[Claim, ...]] | None = None) -> View:
    """Read run.json, evidence.jsonl and, unless a verdict and its claims are given, verdict.json.

    Raises:
        HarnessError: a file is missing or unreadable, or the verdict is of another run.
    """
    run = read_run(run_dir)
    verdict, known = judged if judged is not None else stored_verdict(run_dir, run)
    lane_of_check = {check: claim.lane for claim in known for check in claim.checks}
    outcomes: Counter = Counter()
    per_lane: dict[str, Counter] = {}
    shown: dict[str, list[Evidence]] = {}
    troubles: list[Evidence] = []
    n_records = 0
    for record in read_evidence(run_dir):
        n_records += 1
        lane = lane_of_check.get(record.check, record.check.split(".")[0])  # a check id starts with its lane's name
        outcomes[record.outcome.value] += 1
        per_lane.setdefault(lane, Counter())[record.outcome.value] += 1
        if record.details and len(shown.setdefault(lane, [])) < 2000:
            shown[lane].append(record)
        if record.outcome != Outcome.MEASURED and len(troubles) < 500:
            troubles.append(record)
    results = {result.claim: result for result in verdict.claims}
    lanes = []
    others = {claim.lane for claim in known} | set(per_lane)
    for name in (*LANES, *sorted(others - set(LANES))):  # a lane that nobody listed here is still shown
        claims = tuple((claim, results[claim.id]) for claim in known if claim.lane == name and claim.id in results)
        findings = [finding for _, result in claims for finding in result.findings]
        open_findings = tuple(f for f in findings if f.holds != Holds.HOLDS)
        if claims or name in per_lane:
            lanes.append(
                Lane(
                    name=name,
                    claims=claims,
                    groups=group_findings(findings),
                    open_findings=open_findings,
                    outcomes=per_lane.get(name, {}),
                    records=tuple(shown.get(name, ())),
                )
            )
    return View(
        run=run,
        run_dir=run_dir,
        verdict=verdict,
        lanes=tuple(lanes),
        n_records=n_records,
        outcomes=outcomes,
        troubles=tuple(troubles),
        freshness=_freshness(run_dir),
    )


def _freshness(run_dir: Path) -> Freshness | None:
    path = run_dir / FRESHNESS_FILE
    return jsonio.decode(Freshness, read_json(path), FRESHNESS_FILE) if path.exists() else None


def status_word(status: Status | str) -> str:
    return {"pass": "PASS", "fail": "FAIL", "not_proven": "NOT PROVEN"}[str(status)]


def json_text(value: Any) -> str:
    """Compact, readable text of a configuration value."""
    return value if isinstance(value, str) else jsonio.dumps(value)
