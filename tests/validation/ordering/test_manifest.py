"""Manifests: roles by index, offset and name; suppressions that expire; everything unknown is an error."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from validation.core.types import HarnessError
from validation.ordering.manifest import read_manifest, starter_manifest, suppress
from validation.ordering.model import Finding, KernelBinary, Parameter, ParamRef, Role

GOOD = """
[[kernel]]
name = "moe_*"
launch = { pdl = true, ordered = ["state"], guards_true = ["p3"], cta_threads = 128 }
[kernel.params]
p0 = { role = "input", reason = "activations", name = "x" }
"p1+16" = { role = "weight", reason = "second pointer of a struct" }
p2 = { role = "state", reason = "recurrent state", name = "state" }
p4 = { role = "weight", reason = "pointer table", target = "input" }
p5 = { role = "input", reason = "payload of a peer", guarded_by = "p6" }
named = { role = "table", reason = "slots" }

[[suppress]]
rule = "MO003"
kernel = "moe_*"
param = "x"
reason = "measured: no difference; rewritten in the next release"
expires = 2027-01-31

[lint]
weight_readers = ["load_weight_*"]
"""


def kernel(name: str = "moe_up") -> KernelBinary:
    parameters = tuple(Parameter(index=i, offset=8 * i, size=8) for i in range(7))
    return KernelBinary(name=name, arch="sm_90a", digest="d", path="f", parameters=parameters, param_base=0x210, instructions=())


def read(tmp_path: Path, text: str):
    path = tmp_path / "audit.toml"
    path.write_text(text)
    return read_manifest(path)


def test_roles_and_launch(tmp_path: Path) -> None:
    manifest = read(tmp_path, GOOD)
    roles, launch = manifest.roles(kernel()), manifest.launch(kernel())
    assert roles.lookup(ParamRef(index=0)).role is Role.INPUT
    assert roles.lookup(ParamRef(index=1, offset=16)).role is Role.WEIGHT
    assert roles.lookup(ParamRef(index=1)) is None
    assert roles.lookup(ParamRef(index=4, via_table=True)).role is Role.INPUT
    assert roles.lookup(ParamRef(index=4)).role is Role.WEIGHT
    assert roles.lookup(ParamRef(index=6), "named").role is Role.TABLE
    assert roles.lookup(ParamRef(index=5)).guarded_by == 6
    assert (launch.pdl, launch.ordered, launch.guards_true, launch.cta_threads) == (True, {2}, {3}, 128)
    assert manifest.weight_readers == ("load_weight_*",)


def test_kernel_without_an_entry_has_no_roles(tmp_path: Path) -> None:
    manifest = read(tmp_path, GOOD)
    assert manifest.roles(kernel("other")).lookup(ParamRef(index=0)) is None
    assert manifest.launch(kernel("other")).pdl is None


def test_everything_wrong_is_named_at_once(tmp_path: Path) -> None:
    bad = """
colour = 1
[[kernel]]
name = "a"
shape = 3
launch = { pdl = true, speed = "high" }
[kernel.params]
p0 = { role = "colourful", reason = "x" }
p1 = { role = "weight" }
p2 = { role = "weight", reason = "x", because = "y" }
p3 = { role = "input", reason = "x", guarded_by = "flag" }
[[suppress]]
rule = "MO003"
kernel = "a"
expires = "soon"
[[suppress]]
rule = "MO998"
kernel = "a"
reason = "r"
expires = 2027-01-01
[lint]
weights = []
"""
    with pytest.raises(HarnessError) as caught:
        read(tmp_path, bad)
    text = str(caught.value)
    for word in ("colour", "shape", "speed", "colourful", "p1: got no reason", "because", "guarded_by", "suppress[0]", "MO998", "weights"):
        assert word in text


@pytest.mark.parametrize("text", ["not = toml = at all", "kernel = 3\n", "[[kernel]]\nname = 3\n"])
def test_unreadable_manifests(tmp_path: Path, text: str) -> None:
    with pytest.raises(HarnessError):
        read(tmp_path, text)


def test_missing_manifest_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="--init"):
        read_manifest(tmp_path / "absent.toml")


def finding(rule: str = "MO003", name: str = "moe_up", parameter: str = "x") -> Finding:
    return Finding(rule=rule, kernel=name, arch="sm_90a", message="m", parameter=parameter)


def test_suppression_until_it_expires(tmp_path: Path) -> None:
    rules = read(tmp_path, GOOD).suppressions
    findings = [finding(), finding("MO001"), finding(parameter="y"), finding(name="attn")]
    before = suppress(findings, rules, datetime.date(2027, 1, 31))
    assert [item.rule for item, _ in before.suppressed] == ["MO003"]
    assert len(before.kept) == 3
    assert before.expired == ()
    after = suppress(findings, rules, datetime.date(2027, 2, 1))
    assert after.suppressed == ()
    assert len(after.kept) == 4
    assert len(after.expired) == 1


def test_unused_suppression_is_told(tmp_path: Path) -> None:
    split = suppress([finding("MO001")], read(tmp_path, GOOD).suppressions, datetime.date(2026, 1, 1))
    assert len(split.unused) == 1


def test_starter_manifest_can_be_read_and_decides_nothing(tmp_path: Path) -> None:
    odd = kernel('k[0]*?"name')
    manifest = read(tmp_path, starter_manifest([odd], {}))
    assert manifest.entry(odd.name) is not None  # the name is matched literally
    assert manifest.entry("k0anything") is None
    assert {entry.role for entry in manifest.roles(odd).by_index.values()} == {Role.SCALAR}
