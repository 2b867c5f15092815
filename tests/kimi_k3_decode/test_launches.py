"""The plan as data: counts, bindings, edges, hazards, mailbox parity, and rank-uniform digests."""

from __future__ import annotations

import itertools

import networkx as nx
import pytest

from kimi_k3_decode.config import K3, NANO, Shard
from kimi_k3_decode.launches import MAIN, SIDE, Launch, launch_graph, layer_plan, other_parity, plan_digest
from kimi_k3_decode.ops.contract import Access, Role

THIRTEEN = [
    "attn_res", "in_proj", "kda", "o_proj", "attn_res", "moe_front", "route", "experts_up", "experts_down", "shared_up", "shared_down",
    "latent_reduce", "moe_tail",
]  # fmt: skip


@pytest.mark.parametrize(("config", "tp"), [(K3, 8), (K3, 16), (NANO, 1), (NANO, 2)])
def test_a_kda_moe_layer_is_thirteen_launches(config, tp):
    layer = next(i for i in config.kda_layers if config.is_moe(i))
    assert [x.op for x in layer_plan(config, Shard(config=config, tp=tp), layer, 8)] == THIRTEEN


def test_an_mla_layer_replaces_the_recurrence_and_the_dense_layer_the_moe():
    ops = [x.op for x in layer_plan(K3, Shard(config=K3, tp=8), 3, 8, 8)]
    assert ops[2:6] == ["mla_query", "mla_decode", "mla_merge", "mla_value"]
    assert [*ops[:2], "kda", *ops[6:]] == THIRTEEN
    assert [x.op for x in layer_plan(K3, Shard(config=K3, tp=8), 0, 8)][-2:] == ["dense_up", "dense_down"]


def happens_before(graph: list[Launch]) -> nx.DiGraph:
    """Edges of the plan: the launch before on the same stream, and the full edges."""
    order, last = nx.DiGraph(), {}
    for launch in graph:
        order.add_node(launch.id)
        if launch.stream in last:
            order.add_edge(last[launch.stream], launch.id)
        order.add_edges_from((earlier, launch.id) for earlier in launch.waits_on)
        last[launch.stream] = launch.id
    return order


@pytest.mark.parametrize(("config", "rows", "q"), [(NANO, 8, 1), (NANO, 64, 8), (K3, 8, 1)])
def test_every_conflicting_pair_of_launches_is_ordered(config, rows, q):
    """No read-after-write, write-after-read or write-after-write without a path between the two. Mailbox data is ordered by its words."""
    graph = launch_graph(config, Shard(config=config, tp=8 if config is K3 else 1), rows, q)[:120]
    order = happens_before(graph)
    assert nx.is_directed_acyclic_graph(order)
    reach = {node: nx.descendants(order, node) for node in order}
    checked = 0
    for first, second in itertools.combinations(graph, 2):
        shared = (first.writes & (second.reads | second.writes)) | (first.reads & second.writes)
        if shared:
            checked += 1
            assert second.id in reach[first.id], f"{first.id} and {second.id} share {sorted(shared)} unordered"
    assert checked > len(graph)


def test_the_check_above_sees_a_missing_join():
    graph = launch_graph(NANO, None, 8)
    cut = [x for x in graph if x.op != "latent_reduce"]  # the launch where the side stream joins
    order = happens_before(cut)
    down = next(x for x in cut if x.op == "shared_down")
    assert all(order.nodes[n] is not None for n in order)
    later = {x.id for x in cut if x.stream == MAIN}
    assert not later & nx.descendants(order, down.id)


def test_every_input_has_a_writer_earlier_in_the_step():
    graph = launch_graph(NANO, None, 16)
    written: set[str] = set()
    for launch in graph:
        for operand in launch.contract.operands:
            bound = launch.bindings[operand.name]
            if operand.role is Role.INPUT or (operand.role is Role.MAILBOX and operand.access is Access.READ_WRITE):
                assert set(bound) <= written, f"{launch.id}.{operand.name} reads {bound} before any write"
        for operand in launch.contract.operands:
            if operand.role is Role.OUTPUT or operand.access is Access.WRITE:
                written.update(launch.bindings[operand.name])


@pytest.mark.parametrize("config", [NANO, K3])
def test_mailbox_parity_alternates_over_layers_and_steps(config):
    shard = Shard(config=config, tp=8 if config is K3 else 1)
    sent: dict[str, list[int]] = {}
    for step in range(3):
        for launch in launch_graph(config, shard, 1, step=step):
            for operand in launch.contract.of_role(Role.MAILBOX):
                if operand.access is Access.WRITE:
                    name, parity = launch.bindings[operand.name][0].rsplit(".", 1)
                    sent.setdefault(name, []).append(int(parity))
    assert len(sent) == 6
    for name, parities in sent.items():
        assert all(a != b for a, b in itertools.pairwise(parities)), name


def test_consumers_rearm_the_other_parity():
    launch = next(x for x in launch_graph(NANO, None, 4) if x.op == "latent_reduce")
    polled = launch.bindings["latent_RTL"][0]
    assert polled in launch.reads
    assert polled not in launch.writes
    assert other_parity(polled) in launch.writes
    assert other_parity(other_parity(polled)) == polled


def test_programmatic_edges_never_cross_streams_and_the_step_starts_on_a_full_edge():
    graph = launch_graph(NANO, None, 8)
    assert not graph[0].pdl
    assert [x.op for x in graph if x.stream == SIDE and not x.pdl] == ["shared_up"] * 7
    for launch in graph:
        if launch.waits_on:
            assert not launch.pdl
    assert len({x.id for x in graph}) == len(graph)


def test_plan_digest_is_rank_uniform_and_sees_every_choice():
    def digest(**more: object) -> str:
        arguments = {"rows": 8, "q": 1, **more}
        shard = Shard(config=NANO, tp=2, rank=int(arguments.pop("rank", 0)))
        return plan_digest(launch_graph(NANO, shard, **arguments))

    assert digest(rank=1) == digest(rank=0)
    variants = [{"rows": 16}, {"q": 2}, {"step": 1, "rows": 7}, {"forced": frozenset({1})}, {"cache_dtype": "float8_e4m3fn"}, {"top_k": 2}]
    assert len({digest(**v) for v in [{}, *variants]}) == 1 + len(variants)


def test_role_of_a_buffer_depends_on_the_launch():
    graph = launch_graph(NANO, None, 8)
    query = next(x for x in graph if x.op == "mla_query")
    pages = query.bindings["pages_STM"][0]
    assert query.role_of(pages) is Role.STATE
    assert query.role_of("proj") is Role.INPUT
    in_proj = next(x for x in graph if x.op == "in_proj")
    assert in_proj.role_of("proj") is Role.OUTPUT
