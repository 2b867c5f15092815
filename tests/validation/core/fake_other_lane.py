"""The fake lane again, with a check of another name."""

from __future__ import annotations

import fake_lane


def checks():
    found = fake_lane.checks()[0]
    return [fake_lane.FakeCheck("fake.other", found._plan)]
