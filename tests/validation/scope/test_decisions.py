"""Refusals, fallback and rank agreement on the real plan and path; and that each check sees the fault it is there for."""

from __future__ import annotations

import dataclasses

import pytest

from kimi_k3_decode import plan as plan_module
from kimi_k3_decode.plan import Decision, Deployment, Plan
from validation.core.types import Holds
from validation.policy import DEFAULT_POLICY, load_policy
from validation.scope.checks import checks
from validation.scope.decisions import UNSUPPORTED_SETTINGS, FallbackCheck, RankUniformCheck, RefusalsCheck


def judged(check, case=None) -> dict[str, bool]:
    case = case or next(iter(check.cases()))
    measured, _ = check.measure(case, {})
    values = {m.name: m.value for m in measured}
    return {limit.measurement: limit.holds(values[limit.measurement]) for limit in check.limits(case)}


@pytest.mark.parametrize("check", [RefusalsCheck(), RankUniformCheck()])
def test_the_real_plan_holds(check) -> None:
    assert all(judged(check).values())  # its first case; the lane measures all


@pytest.mark.slow
def test_the_real_path_falls_back_exactly_where_it_must() -> None:
    assert all(judged(FallbackCheck()).values())


@pytest.mark.parametrize("field", sorted(UNSUPPORTED_SETTINGS))
def test_a_dropped_predicate_is_noticed(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Deployment._predicates
    monkeypatch.setattr(Deployment, "_predicates", lambda self, config: [p for p in real(self, config) if p[0] != field])
    result = judged(RefusalsCheck())
    assert not result["not_refused"]
    assert not result["missing_when_combined"]


def test_the_first_reason_only_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Deployment.unsupported
    monkeypatch.setattr(Deployment, "unsupported", lambda self, config: real(self, config)[:1])
    result = judged(RefusalsCheck())
    assert result["not_refused"]
    assert not result["missing_when_combined"]


def test_refusing_everything_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deployment, "unsupported", lambda self, config: tuple(f"{name}: no" for name in UNSUPPORTED_SETTINGS))
    assert not judged(RefusalsCheck())["wrongly_refused"]


@pytest.mark.slow
def test_a_path_that_never_runs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F18: everything is decided stock, and speed and accuracy of stock would be reported as new."""
    monkeypatch.setattr(Plan, "decide", lambda self, batch: Decision(path=plan_module.STOCK, reason="never"))
    assert not judged(FallbackCheck())["on_the_wrong_path"]


def test_ranks_that_ignore_a_difference_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F10: the digest does not cover what the ranks decide on."""
    monkeypatch.setattr(plan_module, "agree", lambda digests: None)
    assert not judged(RankUniformCheck())["odd_rank_noticed"]


def test_every_rule_of_the_policy_has_its_check_and_its_test() -> None:
    policy = load_policy(DEFAULT_POLICY)
    ids = {check.id for check in checks()}
    assert {rule.check for rule in policy.rules if rule.check.startswith("scope.")} == ids
    for rule in policy.rules:
        assert (DEFAULT_POLICY.parents[1] / rule.test).is_file(), rule.id
        assert rule.sentence.endswith(".")


def test_every_check_has_limits_that_can_be_violated() -> None:
    for check in checks():
        for case in check.cases():
            limits = check.limits(case)
            assert limits
            assert any(not limit.holds(float("nan")) for limit in limits)
            assert dataclasses.is_dataclass(check)
    assert Holds.NO_EVIDENCE != Holds.HOLDS
