"""The RFC and the suite say the same: every claim of the RFC has a check, and every claim of the suite stands in the RFC."""

from __future__ import annotations

import re
from pathlib import Path

from validation.claims import CLAIMS
from validation.core.registry import LANE_MODULES

RFC = Path(__file__).resolve().parents[2] / "rfc" / "0001-kimi-k3.md"


def test_claims_of_the_rfc_and_of_the_suite_are_the_same() -> None:
    written = set(re.findall(r"^\| (C-[A-Z]+(?:-\d+)?) \|", RFC.read_text(), re.M))
    assert written == {claim.id for claim in CLAIMS}


def test_every_claim_names_its_checks_and_its_lane() -> None:
    for claim in CLAIMS:
        assert claim.checks, claim.id
        assert claim.lane in LANE_MODULES, claim.id
        assert all(check.split(".")[0] == claim.lane for check in claim.checks), claim.id
        assert claim.proven_by, claim.id
