"""Planted faults in the project's own launch plan: each is one edit of a sound graph, and the graph check must find a race in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from validation.ordering.graph_order import Edge, EdgeKind, Node, StepGraph, Use, Waits
from validation.ordering.launch_graph import find_races
from validation.ordering.model import Role

Edit = Callable[[StepGraph], StepGraph]


@dataclass(frozen=True, kw_only=True)
class Planted:
    name: str
    found: bool
    chain: tuple[str, ...] = ()


def try_faults() -> list[Planted]:
    """Plant each fault in nano's step on two ranks and look for it."""
    from validation.ordering.driver import plan_graphs

    sound = plan_graphs({}, {})[1]
    planted = []
    for name, edit in FAULTS.items():
        races = find_races(edit(sound))
        planted.append(Planted(name=name, found=bool(races), chain=races[0].chain if races else ()))
    return planted


def _nodes(graph: StepGraph, change: Callable[[Node], Node]) -> StepGraph:
    return replace(graph, nodes=tuple(change(node) for node in graph.nodes))


def _uses(node: Node, change: Callable[[Use], Use]) -> Node:
    return replace(node, uses=tuple(change(use) for use in node.uses))


def _waits(op: str, waits: Waits) -> Edit:
    return lambda graph: _nodes(graph, lambda node: replace(node, waits=waits) if node.op == op else node)


def _early(op: str, operand: str) -> Edit:
    def change(node: Node) -> Node:
        return _uses(node, lambda use: replace(use, early=True) if use.operand == operand else use) if node.op == op else node

    return lambda graph: _nodes(graph, change)


def _without_events(graph: StepGraph) -> StepGraph:
    return replace(graph, edges=tuple(edge for edge in graph.edges if edge.why != "event"))


def _first_launch_programmatic(graph: StepGraph) -> StepGraph:
    """The first kernel follows the refill of the tables by a programmatic edge only, and reads its table early."""
    first = {node.id for node in graph.nodes if node.op == "embedding"}

    def change(edge: Edge) -> Edge:
        return replace(edge, kind=EdgeKind.PROGRAMMATIC) if edge.target in first else edge

    return _early("embedding", "tokens_T")(replace(graph, edges=tuple(change(edge) for edge in graph.edges)))


def _one_parity(graph: StepGraph) -> StepGraph:
    """Every mailbox loses its second buffer."""

    def change(use: Use) -> Use:
        name, dot, parity = use.buffer.rpartition(".")
        return replace(use, buffer=f"{name}.0") if dot and parity == "1" and use.role is Role.MAILBOX else use

    return _nodes(graph, lambda node: _uses(node, change))


def _shared_scratch(graph: StepGraph) -> StepGraph:
    """The side stream's hidden activations take the main stream's buffer."""

    def change(use: Use) -> Use:
        return replace(use, buffer="expert_hidden") if use.buffer == "shared_hidden" else use

    return _nodes(graph, lambda node: _uses(node, change))


FAULTS: dict[str, Edit] = {
    "projection never waits": _waits("in_proj", Waits.NONE),
    "attention leaves early on some path": _waits("kda", Waits.SOME),
    "activation read before the wait": _early("o_proj", "a_TC"),
    "saved block read before the wait": _early("attn_res", "blocks_NTD"),
    "side stream without events": _without_events,
    "first launch made programmatic": _first_launch_programmatic,
    "one buffer for both parities": _one_parity,
    "one buffer for two streams": _shared_scratch,
}
