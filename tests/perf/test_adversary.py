"""Every planted cheat is caught, honest subjects are not accused, and a real difference is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf.adversary import Comparison, Subject, Workload, compare, summary
from tests.perf import planted
from validation.core.types import HarnessError

WORKLOAD = Workload(inputs=planted.inputs, oracle=planted.oracle, error_limit=1e-4)
HERE = "tests.perf.planted"


def run(name: str, *, pairs: int = 10, config: dict | None = None, device_state=None, limit_s: float = 30.0) -> Comparison:
    with (
        Subject("stock", f"{HERE}:honest", {}) as stock,
        Subject("candidate", f"{HERE}:{name}", config or {}, limit_s=limit_s) as candidate,
    ):
        return compare(stock, candidate, WORKLOAD, pairs=pairs, device_state=device_state)


CHEATS = {
    "cached": "off by",
    "replayed": "off by",
    "good_in_warm_up": "off by",
    "first_row_only": "off by",
    "nan_as_wildcard": "off by inf",
    "coarse": "off by",
    "mutated_inputs": "off by",
    "correct_but_mutates": "changed its inputs",
    "patched_timer": "timer was changed",
    "work_left_running": "left running",
    "other_shape": "off by inf",
}


@pytest.mark.parametrize("cheat", sorted(CHEATS))
def test_each_cheat_is_caught_and_named(cheat: str) -> None:
    found = run(cheat)
    assert found.outcome == "refused"
    assert any(CHEATS[cheat] in reason for reason in found.reasons), found.reasons
    assert "speed_up" not in summary(found)
    with pytest.raises(HarnessError, match="no trustworthy measurement"):
        _ = found.speed_up


def test_a_device_setting_that_stays_changed_is_caught(tmp_path: Path) -> None:
    setting = tmp_path / "persisting_l2"
    setting.write_text("0 MB")
    found = run("pinned_cache", config={"setting": str(setting)}, device_state=lambda: {"persisting_l2": setting.read_text()})
    assert any("persisting_l2" in reason for reason in found.reasons), found.reasons


def test_lazy_outputs_gain_nothing() -> None:
    found = run("lazy", pairs=20)
    assert found.outcome == "measured"
    assert found.speed_up.low < 1.15  # the interval, since the machine may be busy


def test_honest_against_honest_is_one() -> None:
    found = run("honest", pairs=30)
    assert found.outcome == "measured"
    assert found.stock.objections == found.candidate.objections == ()
    assert found.speed_up.low < 1.1
    assert found.speed_up.high > 0.9


def test_a_real_slowdown_is_measured() -> None:
    found = run("honest", pairs=20, config={"extra_us": 60_000})
    assert found.outcome == "measured"
    assert found.speed_up.high < 0.7


@pytest.mark.parametrize(("name", "limit_s"), [("hangs", 1.0), ("dies", 30.0)])
def test_a_subject_that_hangs_or_dies_is_one_error(name: str, limit_s: float) -> None:
    with pytest.raises(HarnessError, match="needs an answer within"):
        run(name, limit_s=limit_s)


def test_a_subject_that_does_not_load_says_why() -> None:
    with pytest.raises(HarnessError, match="no such GPU"):
        run("refuses_to_load")


@pytest.mark.parametrize("requests", [1, 2, 3, 6])
def test_each_request_of_a_group_is_asked_of_either_side_first_in_turns(monkeypatch, requests) -> None:
    asked: list[str] = []

    class Told:
        def __init__(self, name: str) -> None:
            self.name = name

        def ask(self, inputs):
            asked.append(self.name)
            return 1.0, {"own_us": 1e9}, planted.oracle(inputs)

        def demand_s(self):
            return 0.0, 0.0

        def idle_share(self):
            return 0.0

    work = Workload(inputs=planted.inputs, oracle=planted.oracle, error_limit=1e-4, requests=requests)
    assert compare(Told("stock"), Told("candidate"), work, pairs=4 * requests, warm_ups=0).outcome == "measured"
    first = asked[::2]
    for place in range(requests):
        assert [first[place + turn * requests] for turn in range(2)] in (["stock", "candidate"], ["candidate", "stock"])
        assert first[place::requests].count("stock") == 2
