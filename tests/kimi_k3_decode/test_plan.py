"""Which steps run specialised: the decisions table, refusals all at once, prepared graphs, digests that ranks compare."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3_decode.cache import StepBatch
from kimi_k3_decode.config import K3, NANO, Unsupported
from kimi_k3_decode.plan import (
    ROW_BUCKETS,
    SPECIALIZED,
    SPECIALIZED_BACKEND,
    STOCK,
    Deployment,
    Plan,
    agree,
    bucket_of,
    padded_requests,
)


def batch(requests: int, q: int, *, uniform: bool = True) -> StepBatch:
    zero = torch.zeros(requests, dtype=torch.int32)
    return StepBatch(
        tokens_BQ=torch.zeros(requests, q, dtype=torch.int64),
        lengths_B=zero,
        block_table_BN=zero.unsqueeze(1),
        slots_BQ=torch.ones(requests, q, dtype=torch.int32),
        accepted_B=zero + 1,
        uniform=uniform,
    )


def plan(drafts: int = 0, **more: object) -> Plan:
    speculation = "dspark" if drafts else "none"
    return Plan.make(NANO, Deployment(decode_backend=SPECIALIZED_BACKEND, drafts=drafts, speculation=speculation, **more))


@pytest.mark.parametrize(
    ("drafts", "requests", "q", "uniform", "path", "says"),
    [
        (0, 1, 1, True, SPECIALIZED, "graph for 1"),
        (0, 8, 1, True, SPECIALIZED, "graph for 8"),
        (0, 9, 1, True, SPECIALIZED, "graph for 16"),
        (0, 64, 1, True, SPECIALIZED, "graph for 64"),
        (0, 65, 1, True, STOCK, "rows: got 65"),
        (0, 4, 1, False, STOCK, "mixes prefill"),
        (0, 4, 8, True, STOCK, "partial drafts: got 8"),
        (7, 8, 8, True, SPECIALIZED, "graph for 64"),
        (7, 9, 8, True, STOCK, "rows: got 72"),
        (7, 3, 5, True, STOCK, "partial drafts: got 5"),
        (7, 64, 1, True, SPECIALIZED, "graph for 64"),
        (7, 2, 9, True, STOCK, "q: got 9"),
        (3, 5, 4, True, SPECIALIZED, "graph for 32"),
        (2, 3, 3, True, SPECIALIZED, "graph for 15"),
        (0, 0, 1, True, STOCK, "rows: got 0"),
        (7, 80, 9, False, STOCK, "not uniform"),
    ],
)
def test_decisions(drafts, requests, q, uniform, path, says):
    decision = plan(drafts).decide(batch(requests, q, uniform=uniform))
    assert decision.path == path
    assert says in decision.reason
    assert (decision.requests > 0) == (path == SPECIALIZED)


def test_every_reason_of_a_step_is_given():
    reason = plan().decide(batch(80, 2, uniform=False)).reason
    assert "not uniform" in reason
    assert "rows: got 160" in reason


def test_opt_in():
    auto = Plan.make(NANO)
    assert not auto.opted_in
    assert auto.prepared() == ()
    assert auto.decide(batch(1, 1)).path == STOCK
    assert "auto" in auto.decide(batch(1, 1)).reason
    Plan.make(K3, Deployment(tensor_parallel=3, lora=True))  # "auto" never refuses to start
    with pytest.raises(Unsupported, match="decode_backend: got 'fast'"):
        Plan.make(NANO, Deployment(decode_backend="fast"))


WRONG = {
    "architecture": "sm_80",
    "tensor_parallel": 4,
    "pipeline_parallel": 2,
    "data_parallel": 0,
    "expert_parallel": True,
    "decode_context_parallel": 8,
    "dual_batch_overlap": True,
    "lora": True,
    "sleep_mode": True,
    "graph_mode": "piecewise",
    "conv_state_dtype": "float32",
    "recurrent_state_dtype": "bfloat16",
    "kv_cache_dtype": "float16",
    "expert_quantization": "nvfp4",
    "drafts": 8,
    "speculation": "eagle",
    "adaptive_verification": True,
}


def test_all_refusals_at_once():
    with pytest.raises(Unsupported) as error:
        Plan.make(K3, Deployment(decode_backend=SPECIALIZED_BACKEND, **WRONG))
    assert {reason.split(":")[0] for reason in error.value.reasons} == WRONG.keys()
    for reason in error.value.reasons:
        assert "got" in reason
        assert "needs" in reason
        assert reason.count(";") >= 1


@pytest.mark.parametrize("field", WRONG)
def test_each_refusal_alone(field):
    supported = {"architecture": "sm_100a", "tensor_parallel": 8, "speculation": "dspark", "drafts": 7}
    deployment = Deployment(**{**supported, field: WRONG[field]})
    fields = {reason.split(":")[0] for reason in deployment.unsupported(K3)}
    assert field in fields
    assert fields <= {field, "drafts"}
    assert Deployment(**supported).unsupported(K3) == ()


def test_deployment_has_a_refusal_test_for_every_field():
    assert {f.name for f in dataclasses.fields(Deployment)} == {*WRONG, "decode_backend"}


@pytest.mark.parametrize(
    ("config", "tp", "fits"), [(K3, 8, True), (K3, 16, True), (K3, 1, False), (NANO, 1, True), (NANO, 2, True), (NANO, 5, False)]
)
def test_tensor_parallel_sizes(config, tp, fits):
    reasons = Deployment(architecture="sm_103a", tensor_parallel=tp).unsupported(config)
    assert (reasons == ()) == fits


@given(st.integers(1, 8), st.integers(1, 64))
def test_padding_holds_every_request_and_stays_in_scope(q, requests):
    if requests * q > 64:
        with pytest.raises(Unsupported):
            padded_requests(requests, q)
        return
    padded = padded_requests(requests, q)
    assert requests <= padded
    assert padded * q <= bucket_of(requests * q) <= 64
    assert (padded + 1) * q > bucket_of(requests * q)


def test_prepared_graphs_cover_exactly_what_is_decided():
    made = plan(7)
    prepared = set(made.prepared())
    assert all(rows in {b * q for b, q in prepared if q == 1} for rows in ROW_BUCKETS)
    assert {(1, 8), (2, 8), (4, 8), (8, 8)} == {shape for shape in prepared if shape[1] == 8}
    for q in (1, 8):
        for requests in range(1, 64 // q + 1):
            decision = made.decide(batch(requests, q))
            assert (decision.requests, q) in prepared


def test_digest_is_the_same_on_all_ranks_and_sees_the_deployment():
    digests = [plan(7).digest(), plan(7).digest()]
    agree(digests)
    others = {plan(0).digest(), plan(7, kv_cache_dtype="float8_e4m3fn").digest(), plan(7, tensor_parallel=2).digest(), digests[0]}
    assert len(others) == 4
    with pytest.raises(Unsupported, match=r"ranks \[1, 3\]"):
        agree(["a", "b", "a", "c"])
