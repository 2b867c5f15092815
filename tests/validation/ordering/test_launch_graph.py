"""Happens-before: the corpus of graphs, small laws on random graphs, and the project's own plan with faults planted in it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from kimi_k3_decode.config import NANO, Shard
from kimi_k3_decode.launches import launch_graph
from validation.core.types import HarnessError
from validation.ordering import planted
from validation.ordering.corpus_cases import CORPUS
from validation.ordering.corpus_graphs import load_graph_cases
from validation.ordering.graph_inputs import from_captured, from_plan, from_table, read_graph
from validation.ordering.graph_order import Edge, EdgeKind, Moment, Node, Order, StepGraph, Use, Waits
from validation.ordering.launch_graph import check_graph, find_races
from validation.ordering.model import Role

GRAPHS = load_graph_cases(CORPUS)


@pytest.mark.parametrize("case", GRAPHS, ids=lambda case: case.name)
def test_corpus(case) -> None:
    graph = read_graph(case.path)
    assert case.races(find_races(graph), graph.baked_epochs) == case.expected


def test_half_of_the_graphs_are_sound() -> None:
    assert len(GRAPHS) >= 20
    assert 0.4 <= sum(not case.expected for case in GRAPHS) / len(GRAPHS) <= 0.6


def test_overtaking_prints_the_hop_that_fails() -> None:
    finding = check_graph(read_graph(CORPUS / "graph" / "overtaking_after_early_exit.toml"))[0]
    assert finding.rule == "MO012"
    first_hop, second_hop = str(finding.details["chain"]).splitlines()
    assert "order lost here" in first_hop
    assert "some paths only" in first_hop
    assert "order lost" not in second_hop


def test_own_plan_has_no_race_and_planted_faults_are_found() -> None:
    plans = [[launch_graph(NANO, Shard(config=NANO, tp=1), 2, 2, step=step)] for step in range(3)]
    assert find_races(from_plan(plans)) == []
    assert [fault.name for fault in planted.try_faults() if not fault.found] == []


def chain(waits: list[Waits], kinds: list[EdgeKind]) -> StepGraph:
    """n launches in a row; the first writes `a`, the last reads it."""
    nodes = []
    for number, wait in enumerate(waits):
        uses = []
        if number == 0:
            uses.append(Use(operand="out", buffer="a", role=Role.OUTPUT, writes=True))
        if number == len(waits) - 1:
            uses.append(Use(operand="in", buffer="a", role=Role.INPUT, reads=True))
        nodes.append(Node(id=f"k{number}", op=f"k{number}", uses=tuple(uses), waits=wait))
    edges = [Edge(source=a.id, target=b.id, kind=k, why="stream") for (a, b), k in zip(itertools.pairwise(nodes), kinds, strict=True)]
    return StepGraph(nodes=tuple(nodes), edges=tuple(edges))


def sound(waits: list[Waits], kinds: list[EdgeKind]) -> bool:
    """The law written down a second way: completion of the first carries on hop by hop, and the last must be behind it when it reads."""
    complete = True  # "k[n] done implies k0 done", starting with k0 itself
    for number in range(1, len(waits)):
        full, wait = kinds[number - 1] is EdgeKind.FULL, waits[number]
        started_behind = complete and full
        waited_behind = started_behind or (complete and wait is not Waits.NONE)
        if number == len(waits) - 1:
            return waited_behind
        # A full edge further back keeps everything after it behind, because later launches start after this one started.
        if started_behind:
            return True
        complete = complete and wait is Waits.ALL
    return True


def test_chains_follow_the_law() -> None:
    for n in (2, 3, 4):
        for waits in itertools.product(Waits, repeat=n):
            for kinds in itertools.product(EdgeKind, repeat=n - 1):
                found = find_races(chain(list(waits), list(kinds)))
                assert (not found) == sound(list(waits), list(kinds)), (waits, kinds)


def test_order_is_a_strict_partial_order_on_random_graphs() -> None:
    random.seed(17)
    for _ in range(20):
        nodes = tuple(Node(id=f"n{i}", op="n", waits=random.choice(list(Waits))) for i in range(8))
        edges = tuple(
            Edge(source=f"n{a}", target=f"n{b}", kind=random.choice(list(EdgeKind)), why="")
            for a, b in itertools.combinations(range(8), 2)
            if random.random() < 0.3
        )
        order = Order(StepGraph(nodes=nodes, edges=edges))
        moments = [(node.id, moment) for node in nodes for moment in Moment]
        for a, b in itertools.permutations(moments, 2):
            assert not (order.reaches(*a, *b) and order.reaches(*b, *a))
        for a, b, c in random.sample(list(itertools.permutations(moments[::5], 3)), 200):
            if order.reaches(*a, *b) and order.reaches(*b, *c):
                assert order.reaches(*a, *c)


def test_circles_are_refused() -> None:
    nodes = tuple(Node(id=name, op=name) for name in "ab")
    edges = tuple(Edge(source=a, target=b, kind=EdgeKind.FULL, why="event") for a, b in (("a", "b"), ("b", "a")))
    with pytest.raises(HarnessError, match="circle"):
        find_races(StepGraph(nodes=nodes, edges=edges))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[launch]]\nid = 'a'\ncolour = 'red'\n", "colour"),
        ("[[launch]]\nid = 'a'\nafter = ['b']\n", "events from"),
        ("[[launch]]\nid = 'a'\nwaits = 'often'\n", "often"),
        ("[[launch]]\nid = 'a'\n[[launch]]\nid = 'a'\n", "twice"),
        ("title = 'nothing'\n", "0 launches"),
        ("not toml", "readable"),
        ("[[mailbox]]\nname = 'm'\nepoch = 'never'\n[[launch]]\nid = 'a'\n", "never"),
    ],
)
def test_bad_graphs_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "graph.toml"
    path.write_text(text)
    with pytest.raises(HarnessError, match=words):
        read_graph(path)


def test_captured_graph_needs_known_nodes() -> None:
    with pytest.raises(HarnessError, match="unknown launch"):
        from_captured({"nodes": [{"id": "a"}], "edges": [{"from": "a", "to": "b"}]})


def test_ranks_do_not_share_ordinary_buffers() -> None:
    table = {"ranks": 2, "steps": 1, "launch": [{"id": "k", "output": ["x"]}]}
    assert find_races(from_table(table)) == []
