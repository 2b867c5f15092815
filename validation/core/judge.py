"""Applies limits to stored evidence and claims to findings. A pure function: no GPU, no torch, no clock, no file.

    records + planned limits --> findings (holds | violated | no_evidence) --> claims (pass | fail | not_proven) --> verdict

A claim passes only when every case of every one of its checks was measured and every limit holds. A crash, a refusal, a missing record, a
missing measurement, NaN and a claim without limits are all something else than a pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from validation.core.registry import PlannedCase
from validation.core.types import Claim, ClaimResult, Evidence, Finding, Holds, Limit, Outcome, Status, Verdict

PolicyLimits = Mapping[str, Mapping[str, Any]]  # lane -> measurement name -> bound


def judge(
    *,
    run: str,
    profile: str,
    lanes: Sequence[str],
    records: Iterable[Evidence],
    plan: Sequence[PlannedCase],
    claims: Sequence[Claim],
    policy_limits: PolicyLimits,
    policy_digest: str,
) -> Verdict:
    """The verdict on one run. `lanes` are those the run was asked for: a claim of another lane is listed, and required of nobody."""
    by_case: dict[tuple[str, str], list[Evidence]] = {}
    for record in records:
        by_case.setdefault((record.check, record.case.id), []).append(record)
    findings: dict[str, list[Finding]] = {}
    for item in plan:
        limits = tuple(with_policy(limit, item.lane, policy_limits) for limit in item.limits)
        found = judge_case(item, limits, by_case.get((item.check, item.case.id), []))
        findings.setdefault(item.check, []).extend(found)
    results = tuple(
        decide_claim(claim, findings, required=profile in claim.required_in and claim.lane in lanes, lane_ran=claim.lane in lanes)
        for claim in claims
    )
    return Verdict(run=run, status=overall(results), claims=results, policy_digest=policy_digest)


def with_policy(limit: Limit, lane: str, policy_limits: PolicyLimits) -> Limit:
    """The limit with the policy's number for `[limits.<lane>] <measurement>`, where the policy names one."""
    bound = policy_limits.get(lane, {}).get(limit.measurement)
    if isinstance(bound, bool) or not isinstance(bound, (int, float)):
        return limit
    return dataclasses.replace(limit, bound=float(bound))


def judge_case(item: PlannedCase, limits: Sequence[Limit], records: Sequence[Evidence]) -> list[Finding]:
    """One finding per limit and record (several ranks give several records)."""
    blank = Finding(check=item.check, case=item.case.id, evidence="", holds=Holds.NO_EVIDENCE, limit=None, value=None)
    if not records:
        return [dataclasses.replace(blank, note="not measured")]
    if not limits:
        return [dataclasses.replace(blank, evidence=record.id, note="measured, but no limit judges it") for record in records]
    return [_apply(limit, record, blank) for record in records for limit in limits]


def _apply(limit: Limit, record: Evidence, blank: Finding) -> Finding:
    here = Finding(check=blank.check, case=blank.case, evidence=record.id, holds=Holds.NO_EVIDENCE, limit=limit, value=None)
    if record.outcome is not Outcome.MEASURED:
        return dataclasses.replace(here, note=f"{record.outcome.value}: {'; '.join(record.reasons) or 'no reason given'}")
    found = [m for m in record.measurements if m.name == limit.measurement]
    if not found:
        return dataclasses.replace(here, note=f"the record holds no measurement {limit.measurement!r}")
    wrong_unit = [m.unit for m in found if m.unit != limit.unit]
    if wrong_unit:
        return dataclasses.replace(here, note=f"measured in {wrong_unit[0]!r}, the limit is in {limit.unit!r}")
    failing = [m for m in found if not limit.holds(m.value)]
    shown = (failing or found)[0]
    holds = Holds.VIOLATED if failing else Holds.HOLDS
    return Finding(check=blank.check, case=blank.case, evidence=record.id, holds=holds, limit=limit, value=shown.value)


def decide_claim(claim: Claim, findings: Mapping[str, Sequence[Finding]], *, required: bool, lane_ran: bool) -> ClaimResult:
    """`claim.checks` are check ids or patterns (`numerics.*`); one that matches nothing is missing evidence."""
    matched: dict[str, Sequence[Finding]] = {}  # by check, so that two patterns that name one check count its findings once
    missing = []
    for pattern in claim.checks:
        found = {check: group for check, group in findings.items() if group and fnmatchcase(check, pattern)}
        matched |= found
        if not found:
            missing.append(pattern)
    gathered = [finding for group in matched.values() for finding in group]
    status = _claim_status(gathered, missing)
    return ClaimResult(
        claim=claim.id, status=status, required=required, findings=tuple(gathered), note=_note(claim, status, gathered, missing, lane_ran)
    )


def _claim_status(findings: Sequence[Finding], missing: Sequence[str]) -> Status:
    if any(found.holds is Holds.VIOLATED for found in findings):
        return Status.FAIL
    if missing or not findings or any(found.holds is Holds.NO_EVIDENCE for found in findings):
        return Status.NOT_PROVEN
    return Status.PASS


def _note(claim: Claim, status: Status, findings: Sequence[Finding], missing: Sequence[str], lane_ran: bool) -> str:
    if status is Status.FAIL:
        bad = [found for found in findings if found.holds is Holds.VIOLATED]
        return f"{len(bad)} of {len(findings)} findings violated, first {bad[0].evidence} ({bad[0].check}, {bad[0].case})"
    if status is Status.PASS:
        return f"{len(findings)} findings hold"
    reasons = [] if lane_ran else [f"lane {claim.lane} was not part of this run"]
    if missing:
        reasons.append(f"no case of {', '.join(missing)}")
    unmet = [found for found in findings if found.holds is Holds.NO_EVIDENCE]
    if unmet:
        reasons.append(f"{len(unmet)} of {len(findings)} findings lack evidence, first {unmet[0].check} {unmet[0].case}: {unmet[0].note}")
    return "; ".join([*reasons, f"would be proven by: {claim.proven_by}"])


def overall(results: Sequence[ClaimResult]) -> Status:
    """A violated limit fails the run whether or not its claim is required; missing evidence counts for required claims only."""
    if any(result.status is Status.FAIL for result in results):
        return Status.FAIL
    required = [result for result in results if result.required]
    if not required or any(result.status is Status.NOT_PROVEN for result in required):
        return Status.NOT_PROVEN
    return Status.PASS
