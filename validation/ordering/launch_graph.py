"""MO012: conflicting accesses of a step that nothing orders, found on the launch graph and printed with the chain that fails.

Every pair of accesses to one buffer of which at least one writes must be ordered: read after write, write after write, and write after
read. For each buffer the writes must form a chain; then a read needs an order only against the writes on either side of it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

import networkx as nx

from validation.ordering.graph_order import Access, EdgeKind, Moment, Order, Race, StepGraph, Waits, accesses
from validation.ordering.model import Finding

MAX_RACES_PER_BUFFER = 12
MAX_CHAINS = 100  # of one graph: one broken edge can unorder thousands of pairs, and the first chains tell why


def find_races(graph: StepGraph) -> list[Race]:
    """Every unordered conflict, at most MAX_RACES_PER_BUFFER a buffer (the earliest in issue order). Raises HarnessError on bad input."""
    order = Order(graph.checked())
    by_copy: dict[str, list[Access]] = {}
    for access in accesses(graph):
        by_copy.setdefault(access.copy, []).append(access)
    pairs: list[tuple[Access, Access]] = []
    for _, found in sorted(by_copy.items()):
        if any(access.writes for access in found):
            pairs += itertools.islice(_unordered(found, order), MAX_RACES_PER_BUFFER)
    links = _links(graph) if pairs else nx.DiGraph()
    explained = [tuple(_chain(graph, links, order, a, b)) if number < MAX_CHAINS else () for number, (a, b) in enumerate(pairs)]
    return [Race(first=a, second=b, chain=chain) for (a, b), chain in zip(pairs, explained, strict=True)]


def check_graph(graph: StepGraph, source: str = "") -> tuple[Finding, ...]:
    """Findings of the launch graph: races, and flag values that a replay would see again."""
    findings = [_race_finding(race, source) for race in find_races(graph)]
    for name in graph.baked_epochs:
        findings.append(
            Finding(
                rule="MO012",
                kernel=", ".join(sorted({n.op for n in graph.nodes if any(u.buffer == name and u.consumes for u in n.uses)})),
                arch="",
                message=f"mailbox {name}: its expected value is fixed at capture, so each replay polls for a value seen before",
                parameter=name,
                source_file=source,
                fix="keep the epoch in device memory and advance it inside the graph, or re-arm a sentinel",
            )
        )
    return tuple(findings)


def _unordered(found: Sequence[Access], order: Order) -> Iterator[tuple[Access, Access]]:
    """Conflicting pairs of one buffer copy with no order either way.

    Writes are taken in groups: messages of one round from several ranks fill slots of their own and do not conflict. When the groups are in
    order one after another, a read that is ordered against its neighbouring groups is ordered against all.
    """
    ordered = sorted(found, key=order.position)
    groups = _groups([access for access in ordered if access.writes])
    chained = all(_before(a, b, order) for one, next_one in itertools.pairwise(groups) for a in one for b in next_one)
    starts = [order.position(group[0]) for group in groups]
    for access in ordered:
        if chained and access.writes:
            continue
        if chained:
            place = bisect.bisect_left(starts, order.position(access))
            others = [write for group in groups[max(0, place - 2) : place + 2] for write in group]
        else:
            others = [write for write in ordered if write.writes and (not access.writes or order.position(write) >= order.position(access))]
        for other in others:
            if other.node is access.node or _disjoint(access, other):
                continue
            if not order.before(access, other) and not order.before(other, access):
                yield (access, other) if order.position(access) <= order.position(other) else (other, access)


def _groups(writes: Sequence[Access]) -> list[list[Access]]:
    groups: list[list[Access]] = []
    for write in writes:
        if groups and all(_disjoint(write, other) for other in groups[-1]):
            groups[-1].append(write)
        else:
            groups.append([write])
    return groups


def _before(a: Access, b: Access, order: Order) -> bool:
    return a.node is b.node or order.before(a, b)


def _disjoint(a: Access, b: Access) -> bool:
    """Messages of different ranks fill slots of their own."""
    return a.use.publishes and b.use.publishes and a.node.rank != b.node.rank


# ---- explaining ----
def _links(graph: StepGraph) -> nx.DiGraph:
    """Edges of any kind and messages, for looking up the shortest way between two launches."""
    links = nx.DiGraph()
    for edge in graph.edges:
        links.add_edge(edge.source, edge.target, kind=edge.kind, why=edge.why)
    for sender, taker, buffer in _messages(graph):
        links.add_edge(sender, taker, kind=None, why=f"message in {buffer}")
    return links


def _chain(graph: StepGraph, links: nx.DiGraph, order: Order, first: Access, second: Access) -> list[str]:
    """The shortest way from the first launch to the second over edges of any kind, each hop with what it guarantees."""
    source, target = first.node.id, second.node.id
    try:
        path = nx.shortest_path(links, source, target)
    except (nx.NetworkXNoPath, nx.NodeNotFound):
        return [f"no edge, event or message leads from {source} to {target}"]
    nodes = {name: graph.nodes[order.index[name]] for name in path}
    lines = []
    for a, b in itertools.pairwise(path):
        link = links.edges[a, b]
        if link["kind"] is None:
            lines.append(f"{a} -> {b}: {link['why']}, ordered where {b} polls it")
        elif link["kind"] is EdgeKind.FULL:
            lines.append(f"{a} -> {b}: full edge ({link['why']}), {b} starts when {a} is complete")
        else:
            lines.append(f"{a} -> {b}: programmatic edge ({link['why']}), " + _programmatic_words(nodes[b].waits, b, a))
    # The first hop that does not carry completion of `first` onwards is where the order is lost.
    for number, reached in enumerate(path[1:-1]):
        if not order.reaches(source, first.end, reached, Moment.DONE):
            why = (
                f"{reached} does not wait on every path" if nodes[reached].waits is not Waits.ALL else "nothing carries completion further"
            )
            lines[number] += f"  <-- order lost here: {reached} may be complete before {source} is ({why})"
            return lines
    if second.begin is Moment.START:
        lines[-1] += f"  <-- order lost here: {target} touches {second.copy} before its wait"
    else:
        lines[-1] += f"  <-- order lost here: {target} may touch {second.copy} before {source} is through with it"
    return lines


def _programmatic_words(waits: Waits, target: str, source: str) -> str:
    return {
        Waits.ALL: f"{target} waits for completion of {source}",
        Waits.SOME: f"{target} waits for completion of {source} on some paths only",
        Waits.NONE: f"{target} never waits",
    }[waits]


def _messages(graph: StepGraph) -> Iterator[tuple[str, str, str]]:
    """(sender, taker, buffer) of the n-th message of each rank and the n-th consumption of it."""
    sent: dict[tuple[str, int], list[str]] = {}
    taken: dict[tuple[str, int], list[str]] = {}
    for node in graph.nodes:
        for use in node.uses:
            if use.publishes:
                sent.setdefault((use.buffer, node.rank), []).append(node.id)
            if use.consumes:
                taken.setdefault((use.buffer, node.rank), []).append(node.id)
    for (buffer, _), senders in sent.items():
        for (other, _), takers in taken.items():
            if buffer == other:
                yield from ((a, b, buffer) for a, b in zip(senders, takers, strict=False) if a != b)


def _race_finding(race: Race, source: str) -> Finding:
    first, second = race.first, race.second
    return Finding(
        rule="MO012",
        kernel=second.node.op,
        arch="",
        message=f"{race.kind}: nothing orders the {first.words} and the {second.words}",
        parameter=second.copy,
        role=second.use.role,
        role_reason=f"declared by {second.node.op}.{second.use.operand}",
        source_file=source,
        fix=_fix(race),
        details={"kind": race.kind, "first": first.node.id, "second": second.node.id, "chain": "\n".join(race.chain)},
    )


def _fix(race: Race) -> str:
    if race.second.begin is Moment.START or race.first.begin is Moment.START:
        return "move the early access behind the grid wait, or separate its writer by a full edge"
    if race.first.use.consumes or race.second.use.publishes:
        return "use another parity of the box, or wait for an exchange that every reader takes part in before it is written again"
    if any("order lost here" in line for line in race.chain):
        return "make the launch in between wait on every path, or add a full edge from the writer"
    return "add an edge or an event between the two launches"
