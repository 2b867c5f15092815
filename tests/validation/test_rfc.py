"""The RFC and the suite say the same: every claim of the RFC has a check, and every claim of the suite stands in the RFC."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from validation.claims import CLAIMS
from validation.core.registry import LANE_MODULES
from validation.policy import Rule, load_policy
from validation.policy_check import claim_problems, known_checks, problems, rule_problems

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


def test_this_policy_and_these_claims_are_coherent():
    assert problems(load_policy()) == []


RULE = Rule(id="P-ISO-1", sentence="Only the isolated folders change.", check="scope.isolation", test="tests/validation/test_rfc.py")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": "iso"}, "form"),
        ({"sentence": "Isolate"}, "sentence"),
        ({"check": "scope.absent"}, "no check"),
        ({"test": "tests/absent.py"}, "no test"),
        ({"test": "../../etc/passwd"}, "no test"),
    ],
)
def test_a_rule_without_one_of_its_parts_is_a_problem(changes, words):
    policy = dataclasses.replace(load_policy(), rules=(dataclasses.replace(RULE, **changes),))
    found = rule_problems(policy, {"scope.isolation"})
    assert len(found) == 1
    assert words in found[0].message


def test_a_policy_without_rules_is_a_problem():
    assert rule_problems(dataclasses.replace(load_policy(), rules=()), {"scope.isolation"})


def test_a_claim_without_a_check_is_a_problem_both_ways():
    checks, _ = known_checks()
    text = RFC.read_text()
    assert claim_problems(CLAIMS, text + "\n| C-NEW-1 | it is also good |\n", checks, ())[0].where == "C-NEW-1"
    assert "C-SCO-1" in {p.where for p in claim_problems(CLAIMS[1:], text, checks, ())}
    orphan = dataclasses.replace(CLAIMS[0], checks=("scope.absent",))
    assert [p.kind for p in claim_problems((orphan,), "| C-SCO-1 | x |", checks, ())] == ["claim"]
    assert [p.kind for p in claim_problems((orphan,), "| C-SCO-1 | x |", checks, ("scope",))] == ["lane"]
