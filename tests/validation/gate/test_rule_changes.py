"""A change that loosens the rule it is judged by: shown, blocking, and let through only with a name. On git repositories made here."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.validation.scope.test_cli import POLICY
from tests.validation.scope.test_isolation import BASE, CLEAN, git, write
from validation.core.settings import PROJECT_ROOT
from validation.core.types import HarnessError, Status
from validation.gate import conditions
from validation.gate.rule_changes import rule_changes
from validation.scope.change import read_change

RULES = """
[lanes]
embedded = ["scope", "ordering"]
[limits.numerics]
error_ratio = 1.5
[limits.evals]
power = 0.8
[limits.evals.margin]
gsm8k_nano = 0.03
[evidence]
max_age_days = 90
bound_to = ["kernels", "toolchain"]
[mutants]
required = "all"
controls_survive_seeds = 20
[[rule]]
id = "P-ISO-1"
sentence = "Only the isolated folders change."
check = "scope.isolation"
test = "tests/test_a.py"
[[rule]]
id = "P-NUM-1"
sentence = "Errors stay within the factor."
check = "numerics.sublayer"
test = "tests/test_b.py"
"""
CLAIMS = """
ALL = ("embedded", "gpu")
CLAIMS = (
    Claim(id="C-A", sentence="s", lane="scope", checks=("scope.*", "scope.a"), required_in=ALL, proven_by="p"),
    Claim(id="C-B", sentence="s", lane="numerics", checks=("numerics.*",), required_in=("embedded",), proven_by="p"),
)
"""
CHECKS = """
RATIO = 1.5
def _at_most(name, bound, why):
    return Limit(measurement=name, op="<=", bound=bound, unit="1", why=why)
LIMITS = (_at_most("error", RATIO, "calibrated on stock"), Limit(measurement="rows", op=">=", bound=8, unit="count", why="enough of them"))
"""
POLICY_FILE = "rfc/policy.toml"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "main")
    policy = POLICY.replace('"docs/**"', '"docs/**", "rfc/**"') + RULES
    suite = {POLICY_FILE: policy, "validation/claims.py": CLAIMS, "validation/numerics/checks.py": CHECKS}
    write(tmp_path, {**BASE, **suite})
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "base")
    git(tmp_path, "checkout", "-qb", "change")
    write(tmp_path, CLEAN)
    return tmp_path


def replace(repository: Path, file: str, old: str, new: str) -> None:
    path = repository / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def changes(repository: Path) -> dict[str, bool]:
    return {one.key: one.loosens for one in rule_changes(read_change(repository, "main"), POLICY_FILE)}


def gate_of(repository: Path, **more) -> conditions.Gate:
    return conditions.Gate(
        repository=repository, base="main", policy_file=repository / POLICY_FILE, claims=(), runs=(), left_out=(), **more
    )


def test_a_change_that_touches_no_rule_passes(repository):
    assert changes(repository) == {}
    assert conditions.rules(gate_of(repository)).status is Status.PASS


@pytest.mark.parametrize(
    ("file", "old", "new", "key"),
    [
        (POLICY_FILE, "error_ratio = 1.5", "error_ratio = 15", "limits.numerics.error_ratio"),
        (POLICY_FILE, "error_ratio = 1.5", "error_ratio = nan", "limits.numerics.error_ratio"),
        (POLICY_FILE, "error_ratio = 1.5", 'error_ratio = "off"', "limits.numerics.error_ratio"),
        (POLICY_FILE, "error_ratio = 1.5", "", "limits.numerics.error_ratio"),
        (POLICY_FILE, "error_ratio = 1.5", "error_ratio = 1.5\nspread_ratio = 9", "limits.numerics.spread_ratio"),
        (POLICY_FILE, "power = 0.8", "power = 0.1", "limits.evals.power"),
        (POLICY_FILE, "gsm8k_nano = 0.03", "gsm8k_nano = 0.3", "limits.evals.margin.gsm8k_nano"),
        (POLICY_FILE, "max_age_days = 90", "max_age_days = 9000", "evidence.max_age_days"),
        (POLICY_FILE, '"kernels", "toolchain"', '"toolchain"', "evidence.bound_to"),
        (POLICY_FILE, 'required = "all"', 'required = "none"', "mutants.required"),
        (POLICY_FILE, "controls_survive_seeds = 20", "controls_survive_seeds = 1", "mutants.controls_survive_seeds"),
        (POLICY_FILE, '["scope", "ordering"]', '["scope"]', "lanes.embedded"),
        (POLICY_FILE, 'check = "numerics.sublayer"', 'check = "scope.isolation"', "rule.P-NUM-1.check"),
        (POLICY_FILE, 'id = "P-NUM-1"', 'id = "P-NUM-9"', "rule.P-NUM-1.check"),
        (POLICY_FILE, 'paths = ["', 'paths = ["engine/**", "', "isolation.paths"),
        (POLICY_FILE, "max_added_lines = 3", "max_added_lines = 300", "isolation.hooks.engine/model.py.max_added_lines"),
        ("validation/claims.py", '    Claim(id="C-B"', '    other(id="C-B"', "claim.C-B"),
        ("validation/claims.py", '("scope.*", "scope.a")', '("scope.a",)', "claim.C-A.checks"),
        ("validation/claims.py", '("embedded", "gpu")', '("gpu",)', "claim.C-A.required_in"),
        ("validation/numerics/checks.py", "RATIO = 1.5", "RATIO = 150.0", "validation/numerics/checks.py:RATIO"),
        ("validation/numerics/checks.py", "bound=8", "bound=0", "validation/numerics/checks.py:rows"),
        ("validation/numerics/checks.py", '_at_most("error", RATIO, "calibrated on stock"), ', "", "validation/numerics/checks.py:error"),
    ],
    ids=lambda value: value if "." in str(value) and "=" not in str(value) and " " not in str(value) else "",
)
def test_a_loosened_rule_is_shown_and_blocks(repository, file, old, new, key):
    replace(repository, file, old, new)
    assert changes(repository).get(key) is True
    result = conditions.rules(gate_of(repository))
    assert result.status is Status.FAIL
    assert any(key in reason and reason.startswith("BLOCKS") for reason in result.reasons)
    assert conditions.decide([result], ()) is Status.FAIL  # also when nobody requires it


@pytest.mark.parametrize(
    ("file", "old", "new", "key"),
    [
        (POLICY_FILE, "error_ratio = 1.5", "error_ratio = 1.2", "limits.numerics.error_ratio"),
        (POLICY_FILE, "power = 0.8", "power = 0.9", "limits.evals.power"),
        (POLICY_FILE, '["scope", "ordering"]', '["scope", "ordering", "numerics"]', "lanes.embedded"),
        ("validation/numerics/checks.py", "bound=8", "bound=9", "validation/numerics/checks.py:rows"),
        (
            POLICY_FILE,
            "[[rule]]\nid",
            '[[rule]]\nid = "P-NEW-1"\nsentence = "s"\ncheck = "c"\ntest = "t"\n[[rule]]\nid',
            "rule.P-NEW-1.check",
        ),
    ],
)
def test_a_tighter_or_new_rule_is_shown_and_does_not_block(repository, file, old, new, key):
    replace(repository, file, old, new)
    assert changes(repository)[key] is False
    result = conditions.rules(gate_of(repository))
    assert result.status is Status.PASS
    assert any(key in reason for reason in result.reasons)


def test_reworded_reasons_and_added_limits_are_no_change(repository):
    replace(repository, "validation/numerics/checks.py", "enough of them", "a few prove nothing")
    with (repository / "validation/numerics/checks.py").open("a") as file:
        file.write('MORE = Limit(measurement="cols", op=">=", bound=1, unit="count", why="w")\n')
    assert changes(repository) == {}


def test_a_policy_the_base_does_not_have_is_nothing_to_compare_with(repository):
    (repository / "rfc/other.toml").write_text(POLICY)
    found = rule_changes(read_change(repository, "main"), "rfc/other.toml")
    assert [(one.key, one.loosens) for one in found] == [("rfc/other.toml", True)]


def test_a_policy_outside_the_repository_does_not_hide_the_other_rules(repository, tmp_path_factory):
    outside = tmp_path_factory.mktemp("elsewhere") / "policy.toml"
    outside.write_text((repository / POLICY_FILE).read_text())
    gate = dataclasses.replace(gate_of(repository), policy_file=outside)
    replace(repository, POLICY_FILE, "error_ratio = 1.5", "error_ratio = 15")  # judges nothing here
    assert conditions.rules(gate).status is Status.PASS
    replace(repository, "validation/numerics/checks.py", "RATIO = 1.5", "RATIO = 150.0")
    assert conditions.rules(gate).status is Status.FAIL


def test_only_the_named_change_is_accepted(repository):
    replace(repository, POLICY_FILE, "error_ratio = 1.5", "error_ratio = 2.0")
    accepted = {"limits.numerics.error_ratio": "A. Maintainer"}
    result = conditions.rules(gate_of(repository, accepted=accepted))
    assert result.status is Status.PASS
    assert result.reasons == ("accepted by A. Maintainer: limits.numerics.error_ratio: 1.5 -> 2.0",)
    replace(repository, POLICY_FILE, "power = 0.8", "power = 0.1")
    assert conditions.rules(gate_of(repository, accepted=accepted)).status is Status.FAIL
    with pytest.raises(HarnessError, match="no-such-rule"):
        conditions.rules(gate_of(repository, accepted={"no-such-rule": "A. Maintainer"}))


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [((), 1, None), (("--accept", "limits.numerics.error_ratio=A. Maintainer"), 2, "A. Maintainer"),
     (("--accept", "limits.numerics.error_ratio="), 3, None), (("--accept", "nonsense"), 3, None)],
)  # fmt: skip
def test_the_command(repository, tmp_path_factory, more, code, said):
    replace(repository, POLICY_FILE, "error_ratio = 1.5", "error_ratio = 2.0")
    command = [sys.executable, "-m", "validation", "gate", "--repo", str(repository), "--policy", str(repository / POLICY_FILE)]
    for option in ("runs-dir", "published"):
        command += [f"--{option}", str(tmp_path_factory.mktemp("empty"))]
    command += more
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=PROJECT_ROOT)
    assert done.returncode == code, done.stderr
    body = json.loads(done.stdout.splitlines()[-1])
    if code < 3:
        assert body["conditions"]["rules"] == ("pass" if said else "fail")
        assert list(body["accepted"].values()) == ([said] if said else [])
        assert "limits.numerics.error_ratio" in done.stderr
