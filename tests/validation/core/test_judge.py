"""The judge: only a real measurement within a real limit is ever a pass."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.core.judge import judge
from validation.core.registry import PlannedCase
from validation.core.settings import PROJECT_ROOT
from validation.core.types import Case, Claim, Evidence, Holds, Limit, Measurement, Outcome, Status

LIMIT = Limit(measurement="error_ratio", op="<=", bound=1.5, unit="1", why="w")


def planned(number=0, limits=(LIMIT,), check="numerics.x"):
    case = Case(subject="s", params={"n": number})
    return PlannedCase(lane="numerics", module="m", check=check, claim="C-1", roles=(), case=case, limits=tuple(limits), time_limit_s=1.0)


def record(number=0, *values, outcome=Outcome.MEASURED, unit="1", name="error_ratio", check="numerics.x", rank=0):
    return Evidence(
        id=f"E-{number}",
        run="R",
        check=check,
        case=Case(subject="s", params={"n": number}),
        outcome=outcome,
        measurements=tuple(Measurement(name=name, value=value, unit=unit) for value in values),
        reasons=("planted",) if outcome is not Outcome.MEASURED else (),
        rank=rank,
    )


def claim(*checks, identity="C-1", required=("embedded",), lane="numerics"):
    return Claim(id=identity, sentence="s", lane=lane, checks=checks or ("numerics.*",), required_in=required, proven_by="a GPU")


def verdict(records, plan=None, claims=None, **changes):
    arguments = {
        "run": "R",
        "profile": "embedded",
        "lanes": ("numerics",),
        "records": records,
        "plan": [planned()] if plan is None else plan,
        "claims": [claim()] if claims is None else claims,
        "policy_limits": {},
        "policy_digest": "d",
    }
    return judge(**{**arguments, **changes})


def test_a_measurement_within_its_limit_passes():
    result = verdict([record(0, 1.4)])
    assert result.status is Status.PASS
    assert result.claims[0].findings[0].evidence == "E-0"


@pytest.mark.parametrize(
    ("records", "status"),
    [
        ([record(0, 1.6)], Status.FAIL),
        ([record(0, math.nan)], Status.FAIL),
        ([record(0, math.inf)], Status.FAIL),
        ([record(0, 1.0, 1.6)], Status.FAIL),
        ([record(0, 1.0), record(0, 1.6, rank=1)], Status.FAIL),
        ([], Status.NOT_PROVEN),
        ([record(1, 1.0)], Status.NOT_PROVEN),
        ([record(0)], Status.NOT_PROVEN),
        ([record(0, 1.0, name="other")], Status.NOT_PROVEN),
        ([record(0, 1.0, unit="nats")], Status.NOT_PROVEN),
        ([record(0, 1.0, outcome=Outcome.ERROR)], Status.NOT_PROVEN),
        ([record(0, 1.0, outcome=Outcome.REFUSED)], Status.NOT_PROVEN),
        ([record(0, 1.0, check="numerics.y")], Status.NOT_PROVEN),
    ],
)
def test_everything_else_does_not(records, status):
    result = verdict(records)
    assert result.status is status
    assert result.claims[0].note


def test_every_case_counts():
    plan = [planned(0), planned(1)]
    assert verdict([record(0, 1.0)], plan).status is Status.NOT_PROVEN
    assert verdict([record(0, 1.0), record(1, 1.0)], plan).status is Status.PASS
    assert verdict([record(0, 9.0)], plan).status is Status.FAIL


def test_a_case_without_a_limit_proves_nothing():
    assert verdict([record(0, 1.0)], [planned(limits=())]).status is Status.NOT_PROVEN


def test_a_claim_whose_checks_are_absent_is_not_proven():
    result = verdict([record(0, 1.0)], claims=[claim("numerics.*", "numerics.absent")])
    assert result.status is Status.NOT_PROVEN
    assert "numerics.absent" in result.claims[0].note
    assert "a GPU" in result.claims[0].note


def test_claims_beyond_the_profile_are_listed_and_change_nothing():
    beyond = claim("perf.*", identity="C-2", required=("gpu",), lane="perf")
    result = verdict([record(0, 1.0)], claims=[claim(), beyond])
    assert result.status is Status.PASS
    assert [(c.claim, c.status, c.required) for c in result.claims] == [
        ("C-1", Status.PASS, True),
        ("C-2", Status.NOT_PROVEN, False),
    ]
    assert verdict([record(0, 1.0)], claims=[claim(), beyond], profile="gpu", lanes=("numerics", "perf")).status is Status.NOT_PROVEN


def test_a_violated_claim_fails_even_where_it_is_not_required():
    assert verdict([record(0, 9.0)], claims=[claim(required=())]).status is Status.FAIL


def test_nothing_required_is_not_a_pass():
    assert verdict([record(0, 1.0)], claims=[claim(required=())]).status is Status.NOT_PROVEN
    assert verdict([record(0, 1.0)], claims=[]).status is Status.NOT_PROVEN


def test_a_policy_number_replaces_the_bound_of_its_lane_only():
    records = [record(0, 1.4)]
    assert verdict(records, policy_limits={"numerics": {"error_ratio": 1.2}}).status is Status.FAIL
    assert verdict(records, policy_limits={"evals": {"error_ratio": 1.2}}).status is Status.PASS
    found = verdict(records, policy_limits={"numerics": {"error_ratio": 1.2}}).claims[0].findings[0]
    assert found.limit.bound == 1.2
    assert found.holds is Holds.VIOLATED


@given(st.floats(), st.floats(), st.sampled_from(["<=", ">=", "==", "<", ">"]))
def test_nan_never_holds(value, bound, op):
    held = Limit(measurement="m", op=op, bound=bound, unit="1", why="w").holds(value)
    assert not held or not (math.isnan(value) or math.isnan(bound))
    assert not Limit(measurement="m", op=op, bound=math.nan, unit="1", why="w").holds(value)


def test_judging_needs_no_torch():
    program = (
        "import sys, validation.core.judge, validation.core.validate, validation.claims, validation.__main__; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
