"""A policy of the wrong form is one HarnessError that names every problem, never a crash and never half a policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from validation.core.types import HarnessError
from validation.policy import DEFAULT_POLICY, load_policy

HEAD = 'schema = 1\nname = "x"\nopt_in = { name = "a", file = "b", default = "c" }\n'
ISOLATED = HEAD + 'isolation = { paths = ["a"] }\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("isolation = 3\n", ["[isolation]", "needs a table"]),
        (HEAD + "isolation = { paths = 'a' }\n", ["paths", "a list of texts"]),
        (HEAD + "isolation = { paths = [3] }\n", ["paths", "a list of texts"]),
        (HEAD + "isolation = { paths = ['a'], hooks = [3] }\n", ["isolation.hooks"]),
        (HEAD + "isolation = { paths = ['a'], hooks = [{ file = 'x', max_added_lines = '9' }] }\n", ["max_added_lines", "whole number"]),
        (HEAD + "isolation = { paths = ['a'], hooks = [{ file = 'x', max_added_lines = true }] }\n", ["max_added_lines"]),
        (ISOLATED + "lanes = 3\nlimits = 4\n", ["[lanes]", "[limits]"]),
        (ISOLATED + "lanes = { embedded = 3 }\nlimits = { numerics = 4 }\n", ["embedded", "numerics"]),
        (ISOLATED + "rule = 3\n", ["[rule]"]),
        (ISOLATED + "rule = [{ id = 3, sentence = 4, check = 5, test = 6 }]\n", ["id", "sentence", "check", "test"]),
        ("a = " + "[" * 100_000, ["readable TOML"]),
        ("schema = 2\n", ["isolation", "opt_in", "schema"]),
    ],
)
def test_a_malformed_policy_names_every_problem(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(HarnessError) as error:
        load_policy(path)
    assert all(word in str(error.value) for word in words), error.value


def test_the_shipped_policies_load() -> None:
    assert load_policy().sentence("gate.rules").endswith(".")
    for path in (DEFAULT_POLICY, *(DEFAULT_POLICY.parent / "policies").glob("*.toml")):
        assert load_policy(path).isolation.paths
    with pytest.raises(HarnessError, match=r"no\.such"):
        load_policy().sentence("no.such")
