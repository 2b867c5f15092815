"""Claims and checks name each other, and every claim can be judged where it is required."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from validation.claims import CLAIMS
from validation.core import registry
from validation.core.types import Check, Limit


def installed_checks() -> list[tuple[str, Check]]:
    lanes = [(lane, module) for lane, module in registry.LANE_MODULES.items() if registry.lane_exists(module)]
    return [(lane, check) for lane, module in lanes for check in registry.load_checks(lane, module)]


CHECKS = installed_checks()
BY_ID = {claim.id: claim for claim in CLAIMS}


def test_claims_are_well_formed():
    assert len(BY_ID) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.lane in registry.LANE_MODULES
        assert set(claim.required_in) <= set(registry.PROFILES)
        assert claim.checks
        assert claim.proven_by


@pytest.mark.parametrize(("lane", "check"), CHECKS, ids=[check.id for _, check in CHECKS])
def test_a_check_carries_the_claim_it_names(lane, check):
    claim = BY_ID[check.claim]
    assert claim.lane == lane
    assert any(fnmatchcase(check.id, pattern) for pattern in claim.checks)
    assert set(check.roles) <= {"candidate", "stock", "oracle"}


@pytest.mark.parametrize(("lane", "check"), CHECKS, ids=[check.id for _, check in CHECKS])
def test_every_case_has_limits_and_an_id_of_its_own(lane, check):
    cases = list(check.cases())
    assert cases
    assert len({case.id for case in cases}) == len(cases)
    for case in cases:
        limits = check.limits(case)
        assert limits
        assert all(isinstance(limit, Limit) and limit.why and limit.bound == limit.bound for limit in limits)


def test_what_the_embedded_profile_requires_it_can_measure():
    for claim in CLAIMS:
        if "embedded" not in claim.required_in or claim.lane not in registry.DEFAULT_LANES:
            continue
        usable = [check.id for lane, check in CHECKS if lane == claim.lane and "embedded" in getattr(check, "profiles", registry.PROFILES)]
        for pattern in claim.checks:
            assert any(fnmatchcase(name, pattern) for name in usable), (claim.id, pattern)
