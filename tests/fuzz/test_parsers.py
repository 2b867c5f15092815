"""No parser crashes or hangs on other people's bytes: noise, near-valid documents, and documents with one thing wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_k3_decode.config import NANO
from kimi_k3_decode.config_io import config_document
from tests.fuzz.targets import TARGETS
from validation.policy import DEFAULT_POLICY

EXAMPLES = 40
NAMES = """id run check case subject params seed rank outcome measured measurements previous files records head cases settings config
weight_map payload signatures payloadType completed duration name schema isolation paths hooks rule limits evidence dtype shape data_offsets
BF16 $float nan ../../x"""
WORDS = st.sampled_from([*NAMES.split(), "\0"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=6), max_leaves=12)
DOCUMENTS = {
    "config": json.dumps(config_document(NANO)).encode(),
    "policy": DEFAULT_POLICY.read_bytes(),
    "settings": b'profile = "embedded"\nlanes = ["scope"]\nmemory_gib = 2.0\n',
    "bench": json.dumps(
        dict.fromkeys(
            ("completed", "duration", "output_throughput", "total_token_throughput", "median_tpot_ms", "median_ttft_ms", "median_itl_ms"), 1
        )
    ).encode(),
    "rules": b'A = 3\nALL = ("x",)\nC = Claim(id="C-A", checks=("a.*",), required_in=ALL)\n'
    b'L = Limit(measurement="m", op="<=", bound=A, why="w w")\n',
    "diff": b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n-a\n+b\n+c\ndiff --git a/y b/z\nrename from y\nrename to z\n",
    "evidence": b'{"id":"E-0","run":"R","check":"c","case":{"subject":"s","params":{},"seed":0},"outcome":"error","rank":0,"previous":""}',
    "safetensors_header": b'{"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}',
    "safetensors_index": b'{"weight_map":{"a":"model-1.safetensors"}}',
    "attestation": b'{"payload":"e30=","payloadType":"application/vnd.in-toto+json","signatures":[{"keyid":"a","sig":"b"}]}',
    "raw_records": b'{"case":"x","us":1.5}\n',
}


@st.composite
def damaged(draw, document: bytes) -> bytes:
    """A document with one stretch cut out, doubled or replaced."""
    begin = draw(st.integers(0, len(document)))
    end = draw(st.integers(begin, min(len(document), begin + 40)))
    return document[:begin] + draw(st.binary(max_size=12) | st.just(document[begin:end] * 2)) + document[end:]


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_no_crash_and_no_hang(name: str) -> None:
    target = TARGETS[name]
    noise = (
        st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()) | JSON.map(lambda v: b"\2" + json.dumps(v).encode())
    )
    inputs = noise | damaged(DOCUMENTS[name]) if name in DOCUMENTS else noise

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(inputs)
    def run(data: bytes) -> None:
        target(data)

    run()


@pytest.mark.parametrize("name", sorted(TARGETS))
@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"a.b.c = 1\n" * 3000, b"9" * 5000, b'"\\ud800"', b"\x00" * 64],
    ids=["empty", "not-utf8", "deep-list", "deep-object", "many-keys", "long-number", "surrogate", "zeros"],
)
def test_known_troublemakers(name: str, data: bytes) -> None:
    TARGETS[name](data)
