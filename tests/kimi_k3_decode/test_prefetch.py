"""Prefetch ranges come from weights only, each byte at most once, inside the budget, before its reader."""

from __future__ import annotations

import pytest

from kimi_k3_decode.config import K3, NANO, Shard
from kimi_k3_decode.launches import launch_graph
from kimi_k3_decode.ops.contract import ContractError, Role
from kimi_k3_decode.prefetch import ROUTED_OPS, prefetch_plan, weight_ranges


@pytest.fixture(scope="module")
def graph():
    return launch_graph(K3, Shard(config=K3, tp=8), 8)[:80]


def test_anything_but_a_weight_is_refused_by_name_all_at_once(graph):
    launch = next(x for x in graph if x.op == "kda")
    with pytest.raises(ContractError) as error:
        weight_ranges(launch, ["f_b_CK", "proj_TP", "state_SHVK", "slots_BQ", "out_TC", "nothing"])
    assert len(error.value.reasons) == 5
    for name, role in (("proj_TP", "input"), ("state_SHVK", "state"), ("slots_BQ", "table"), ("out_TC", "output")):
        assert any(f"{launch.id}.{name}: got role {role}, needs weight" in reason for reason in error.value.reasons)


def test_a_mailbox_is_refused(graph):
    launch = next(x for x in graph if x.op == "latent_reduce")
    with pytest.raises(ContractError, match="got role mailbox"):
        weight_ranges(launch, ["latent_RTL"])


@pytest.mark.parametrize("budget_bytes", [1, 1 << 20, 40 << 20])
def test_plan_ranges(graph, budget_bytes):
    plan = prefetch_plan(graph, budget_bytes)
    position = {launch.id: i for i, launch in enumerate(graph)}
    launches = {launch.id: launch for launch in graph}
    seen: set[tuple[str, str]] = set()
    assert plan
    for prefetch in plan:
        assert 0 < prefetch.size_bytes <= budget_bytes
        assert position[prefetch.after] < position[prefetch.during]
        assert launches[prefetch.during].contract.of_role(Role.MAILBOX)
        for part in prefetch.ranges:
            reader = launches[part.launch]
            assert position[prefetch.during] < position[part.launch]
            assert reader.contract[part.operand].role is Role.WEIGHT
            assert reader.op not in ROUTED_OPS
            assert part.begin_bytes + part.size_bytes <= (reader.contract[part.operand].bytes or 0)
            assert (part.launch, part.operand) not in seen
            seen.add((part.launch, part.operand))


def test_the_wait_for_o_proj_pulls_the_moe_front(graph):
    plan = prefetch_plan(graph, 64 << 20)
    during = next(p for p in plan if p.during == "L01.mlp_res")
    assert during.after == "L01.o_proj"
    assert "L01.moe_front" in {r.launch for r in during.ranges}


def test_budget_is_checked():
    with pytest.raises(ValueError, match="needs >= 1"):
        prefetch_plan(launch_graph(NANO, None, 1), 0)
