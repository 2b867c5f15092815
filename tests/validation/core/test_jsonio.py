"""JSON of the suite's types: strict for any reader, and equal after a round trip."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.core import jsonio
from validation.core.types import (
    Case,
    Claim,
    ClaimResult,
    Evidence,
    Finding,
    HarnessError,
    Holds,
    Limit,
    Measurement,
    Outcome,
    Run,
    Status,
    Verdict,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5).filter(lambda k: k != "$float"), inner, max_size=4),
    max_leaves=12,
)


def same(a, b):
    """Equality that takes NaN for itself and tells 1 from 1.0 and True."""
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def strict(text):
    def refuse(name):
        raise AssertionError(f"bare {name}")

    return json.loads(text, parse_constant=refuse)


@given(json_values)
def test_any_json_value_survives(value):
    text = jsonio.dumps(value)
    strict(text)
    assert same(jsonio.loads(text), value)


FINDING = Finding(check="c", case="k", evidence="E-1", holds=Holds.VIOLATED, limit=None, value=None)
LIMIT = Limit(measurement="m", op="<=", bound=math.inf, unit="1", why="w")


@pytest.mark.parametrize(
    "value",
    [
        Case(subject="kda", params={"rows": 4, "name": "x", "nested": {"a": [1, 2.5]}}, seed=17),
        Measurement(name="m", value=math.nan, unit="nats", samples=(1.0, -math.inf, 5e-324)),
        LIMIT,
        FINDING,
        Finding(check="c", case="k", evidence="", holds=Holds.NO_EVIDENCE, limit=LIMIT, value=-0.0),
        Claim(id="C-1", sentence="s", lane="evals", checks=("a", "b"), required_in=(), proven_by="p"),
        Verdict(
            run="R-1",
            status=Status.NOT_PROVEN,
            claims=(ClaimResult(claim="C-1", status=Status.FAIL, required=True, findings=(FINDING,)),),
            policy_digest="d",
        ),
        Run(
            id="R-1",
            started_utc="t",
            argv=("a", "b"),
            commit="c",
            dirty=True,
            profile="gpu",
            config={"x": math.nan},
            hardware={"gpus": []},
            versions={"torch": "2"},
        ),
        Evidence(
            id="E-1",
            run="R-1",
            check="c",
            case=Case(subject="s"),
            outcome=Outcome.ERROR,
            measurements=(Measurement(name="m", value=1.0, unit="1"),),
            fingerprints={"stock": "f"},
            reasons=("why \ud800 \u2028 <script>",),
            details={"rows": [[1, None, "x"]]},
            artifacts={"a": "d"},
            rank=3,
            seconds=1.5,
            previous="p",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_type_survives(value):
    text = jsonio.dumps(value)
    strict(text)
    back = jsonio.decode(type(value), jsonio.loads(text))
    assert same(jsonio.plain(back), jsonio.plain(value))
    assert "nan" in repr(value) or back == value


def test_numpy_and_torch_scalars_become_numbers():
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    value = {"a": numpy.float32(0.5), "b": numpy.int64(3), "c": torch.tensor(2.0), "d": numpy.float64("inf"), "e": numpy.bool_(True)}
    assert jsonio.loads(jsonio.dumps(value)) == {"a": 0.5, "b": 3, "c": 2.0, "d": math.inf, "e": True}


@pytest.mark.parametrize("value", [{1: 2}, {"$float": "nan"}, object(), b"bytes", {"a": {2, 3}}])
def test_what_json_cannot_hold_is_named(value):
    with pytest.raises(HarnessError, match="value"):
        jsonio.dumps(value)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "{", '{"$float":"one"}', '{"$float":[]}', b"\xff\xfe", "[" * 100_000])
def test_bad_text_is_a_harness_error(text):
    with pytest.raises(HarnessError, match="strict JSON"):
        jsonio.loads(text)


@pytest.mark.parametrize(
    "change",
    [{"extra": 1}, {"check": 5}, {"rank": True}, {"rank": 1.0}, {"outcome": "maybe"}, {"case": None}, {"measurements": {}}],
)
def test_a_wrong_field_is_a_harness_error(change):
    good = jsonio.loads(jsonio.dumps(Evidence(id="", run="", check="c", case=Case(subject="s"), outcome=Outcome.MEASURED)))
    assert jsonio.decode(Evidence, good).check == "c"
    with pytest.raises(HarnessError):
        jsonio.decode(Evidence, {**good, **change})
