"""A claim that a profile requires has a case of each of its checks there; otherwise nothing could ever prove it."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from validation.claims import CLAIMS
from validation.core import registry


@pytest.mark.parametrize("profile", ["embedded", "gpu"])
def test_what_a_profile_requires_it_can_prove(profile):
    planned: dict[str, list[str]] = {}
    for lane, module in registry.LANE_MODULES.items():
        planned[lane] = [c.id for c in registry.load_checks(lane, module) if profile in getattr(c, "profiles", registry.PROFILES)]
    for claim in (claim for claim in CLAIMS if profile in claim.required_in):
        for pattern in claim.checks:
            assert any(fnmatchcase(check, pattern) for check in planned[claim.lane]), f"{claim.id}: no case of {pattern} in {profile}"
