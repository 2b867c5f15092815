"""Makes `fake_lane` importable here and in the workers these tests start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from validation.core.settings import Settings

HERE = Path(__file__).resolve().parent


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """`fake(cases_a, cases_b=None, **settings)`: settings of a run over the fake lane, kept in tmp_path."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))

    def make(cases_a, cases_b=None, **settings):
        plans = {"fake.a": cases_a, **({"fake.b": cases_b} if cases_b else {})}
        monkeypatch.setenv("FAKE_CASES", json.dumps(plans))
        defaults = {
            "lanes": ("fake",),
            "lane_modules": {"fake": "fake_lane"},
            "claims": "fake_lane:CLAIMS",
            "runs_dir": str(tmp_path / "runs"),
            "policy": str(tmp_path / "no-policy.toml"),
            "memory_gib": 1.0,
            "case_time_limit_s": 30.0,
        }
        return Settings(**{**defaults, **settings})

    return make
