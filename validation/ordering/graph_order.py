"""Happens-before over the launches of one or more steps on one or more ranks.

A launch has five moments: `start` (first instruction), `waited` (its grid wait has returned), `got` (the mailboxes it polls are complete),
`read` (its inputs are consumed, what it publishes depends on them), `sent` (what it publishes is out), and `done` (complete and flushed).

    full edge P -> L            done(P) before start(L)
    programmatic edge P -> L    start(P) before start(L), and done(P) before waited(L) when L waits at all
    waits = "all"               waited(L) before done(L): completion of L implies completion of what it waited for
    mailbox                     sent(publisher, every rank) before got(consumer)

A programmatic edge says nothing about what lies further back: done(P) implies done(P's own predecessor) only if P waited on every path.
That is the whole of transitive overtaking. An access is an interval between two moments; two conflicting accesses must be ordered.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import networkx as nx

from validation.core.types import HarnessError
from validation.ordering.model import Role


class EdgeKind(enum.StrEnum):
    FULL = "full"
    PROGRAMMATIC = "programmatic"


class Waits(enum.StrEnum):
    """On which paths a launch executes the grid wait."""

    ALL = "all"
    SOME = "some"
    NONE = "none"


class Moment(enum.IntEnum):
    START = 0
    WAITED = 1
    GOT = 2
    READ = 3
    SENT = 4
    DONE = 5


MOMENTS = len(Moment)


@dataclass(frozen=True, kw_only=True)
class Use:
    """One operand of a launch: which buffer it touches and how. `early` accesses may happen before the grid wait."""

    operand: str
    buffer: str
    role: Role
    reads: bool = False
    writes: bool = False
    early: bool = False
    publishes: bool = False  # the write is a mailbox message to every rank's copy
    consumes: bool = False  # the read polls this rank's copy until every rank's message is there


@dataclass(frozen=True, kw_only=True)
class Node:
    """One launch (or copy) on one rank. `id` is unique over ranks and steps."""

    id: str
    op: str
    uses: tuple[Use, ...] = ()
    waits: Waits = Waits.ALL
    rank: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Edge:
    source: str
    target: str
    kind: EdgeKind
    why: str  # "stream main", "event", "graph edge", "step boundary"


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """Launches in issue order, and what orders them. `ranks` copies of every mailbox buffer exist, one of any other a rank."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    ranks: int = 1
    notes: tuple[str, ...] = ()
    baked_epochs: tuple[str, ...] = ()  # mailboxes whose expected flag value is fixed at capture

    def checked(self) -> StepGraph:
        """This graph, or HarnessError naming every inconsistency."""
        names = [node.id for node in self.nodes]
        known = set(names)
        reasons = (
            [f"launch {name}: got it twice, needs unique ids" for name in sorted({n for n in names if names.count(n) > 1})]
            if len(known) != len(names)
            else []
        )
        reasons += [
            f"edge {edge.source} -> {edge.target}: got an unknown launch, needs ids of the list"
            for edge in self.edges
            if edge.source not in known or edge.target not in known
        ]
        if reasons:
            raise HarnessError("launch graph: " + "; ".join(reasons))
        return self


@dataclass(frozen=True, kw_only=True)
class Access:
    """One use of one copy of a buffer, as an interval of moments."""

    node: Node
    use: Use
    copy: str  # buffer with the rank whose copy it is
    begin: Moment
    end: Moment
    writes: bool

    @property
    def words(self) -> str:
        return f"{'write' if self.writes else 'read'} of {self.copy} by {self.node.id} ({self.use.operand}, {self.use.role.value})"


def accesses(graph: StepGraph) -> list[Access]:
    """Every access of every launch to every copy of its buffers, in issue order."""
    return [access for node in graph.nodes for use in node.uses for access in _of_use(graph, node, use)]


def _of_use(graph: StepGraph, node: Node, use: Use) -> Iterable[Access]:
    own = f"{use.buffer}@{node.rank}" if graph.ranks > 1 else use.buffer
    publishing = any(item.publishes for item in node.uses)
    if use.publishes:
        for rank in range(graph.ranks):
            copy = f"{use.buffer}@{rank}" if graph.ranks > 1 else use.buffer
            yield Access(node=node, use=use, copy=copy, begin=Moment.READ, end=Moment.SENT, writes=True)
        return
    if use.consumes:
        # A kernel that publishes and polls the same box sends first, so its poll ends with the launch, not with what it sends.
        same = any(item.publishes and item.buffer == use.buffer for item in node.uses)
        yield Access(node=node, use=use, copy=own, begin=Moment.GOT, end=Moment.DONE if same else Moment.READ, writes=False)
    elif use.reads:
        begin = Moment.START if use.early else Moment.WAITED
        end = Moment.READ if publishing and use.role is Role.INPUT else Moment.DONE
        yield Access(node=node, use=use, copy=own, begin=begin, end=end, writes=False)
    if use.writes:
        begin = Moment.START if use.early else Moment.WAITED
        yield Access(node=node, use=use, copy=own, begin=begin, end=Moment.DONE, writes=True)


class Order:
    """Answers `before(a, b)` over the happens-before relation. Raises HarnessError when the launches wait for each other in a circle."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.index = {node.id: number for number, node in enumerate(graph.nodes)}
        successors: list[list[int]] = [[] for _ in range(len(graph.nodes) * MOMENTS)]
        self._inside(successors)
        self._between(successors)
        self._mailboxes(successors)
        self._reach, self._place = _closure(successors, self._name)

    def _moment(self, node: str, moment: Moment) -> int:
        return self.index[node] * MOMENTS + moment

    def _name(self, number: int) -> str:
        return f"{Moment(number % MOMENTS).name.lower()}({self.graph.nodes[number // MOMENTS].id})"

    def _inside(self, successors: list[list[int]]) -> None:
        for node in self.graph.nodes:
            at = {moment: self._moment(node.id, moment) for moment in Moment}
            sends_first = any(u.publishes and any(v.consumes and v.buffer == u.buffer for v in node.uses) for u in node.uses)
            chain = [(Moment.START, Moment.WAITED), (Moment.WAITED, Moment.GOT), (Moment.WAITED, Moment.READ), (Moment.READ, Moment.SENT)]
            chain += [(Moment.SENT, Moment.DONE), (Moment.GOT, Moment.DONE), (Moment.START, Moment.DONE)]
            if not sends_first:
                chain.append((Moment.GOT, Moment.READ))
            if node.waits is not Waits.ALL:
                # Some blocks may run to the end without waiting, so that `done` does not imply `waited`. Accesses still come after it.
                chain = [(a, b) for a, b in chain if a is not Moment.WAITED]
                chain += [(Moment.START, Moment.READ), (Moment.START, Moment.GOT)]
            for a, b in chain:
                successors[at[a]].append(at[b])

    def _between(self, successors: list[list[int]]) -> None:
        waits = {node.id: node.waits for node in self.graph.nodes}
        for edge in self.graph.edges:
            done = self._moment(edge.source, Moment.DONE)
            if edge.kind is EdgeKind.FULL:
                successors[done].append(self._moment(edge.target, Moment.START))
                continue
            successors[self._moment(edge.source, Moment.START)].append(self._moment(edge.target, Moment.START))
            if waits[edge.target] is not Waits.NONE:
                successors[done].append(self._moment(edge.target, Moment.WAITED))

    def _mailboxes(self, successors: list[list[int]]) -> None:
        """The n-th message of each rank into a box is before the n-th consumption of the box, on every rank."""
        sent: dict[str, dict[int, list[str]]] = {}
        taken: dict[str, dict[int, list[str]]] = {}
        for node in self.graph.nodes:
            for use in node.uses:
                for flag, table in ((use.publishes, sent), (use.consumes, taken)):
                    if flag:
                        table.setdefault(use.buffer, {}).setdefault(node.rank, []).append(node.id)
        for buffer, readers in taken.items():
            for writers in sent.get(buffer, {}).values():
                for ids in readers.values():
                    for source, target in zip(writers, ids, strict=False):
                        successors[self._moment(source, Moment.SENT)].append(self._moment(target, Moment.GOT))

    def before(self, first: Access, second: Access) -> bool:
        """True when the whole of `first` happens before any of `second`."""
        moments = [second.begin]
        if second.begin in (Moment.GOT, Moment.READ):
            moments.append(Moment.WAITED)  # who polls or sends has waited, whatever other blocks of the launch do
        return any(self.reaches(first.node.id, first.end, second.node.id, moment) for moment in moments)

    def position(self, access: Access) -> int:
        """A place in one possible order of everything; only a guide to which pairs to look at."""
        return self._place[self._moment(access.node.id, access.end)]

    def reaches(self, source: str, a: Moment, target: str, b: Moment) -> bool:
        return bool(self._reach[self._moment(source, a)] >> self._moment(target, b) & 1)


def _closure(successors: list[list[int]], name: Callable[[int], str]) -> tuple[list[int], list[int]]:
    """Per moment: the set of moments it precedes, as one integer of bits, and its place in one possible order of all."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(successors)))
    graph.add_edges_from((a, b) for a, row in enumerate(successors) for b in row)
    try:
        order = list(nx.topological_sort(graph))
    except nx.NetworkXUnfeasible as error:
        circle = " -> ".join(name(a) for a, _ in nx.find_cycle(graph))
        raise HarnessError(f"launch graph: got a circle {circle}, needs an order; two launches wait for each other") from error
    reach = [0] * len(successors)
    for number in reversed(order):
        bits = 1 << number
        for following in successors[number]:
            bits |= reach[following]
        reach[number] = bits
    place = [0] * len(successors)
    for at, number in enumerate(order):
        place[number] = at
    return reach, place


@dataclass(frozen=True, kw_only=True)
class Race:
    """Two conflicting accesses that nothing orders. `chain` explains, hop by hop, the nearest thing to an order and where it breaks."""

    first: Access
    second: Access
    chain: tuple[str, ...] = ()
    details: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        if self.first.writes and self.second.writes:
            return "write after write"
        return "read after write" if self.first.writes else "write after read"
