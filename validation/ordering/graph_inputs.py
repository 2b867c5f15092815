"""Where launch graphs come from: our own launch plan, a TOML description of somebody else's step, or a captured CUDA graph as JSON.

TOML:

    ranks = 2                 # virtual ranks that run the same launches (default 1)
    steps = 2                 # how many times the list runs; a race may need the next step (default 2)
    boundary = "graph"        # between steps: "graph" (all of a step before any of the next) or "stream" (stream order runs on)
    [[launch]]
    id = "attn"               # unique in the step
    op = "attention"          # default: id
    stream = "main"
    pdl = true                # programmatic edge from the launch before it on the stream; false: full edge
    waits = "all"             # on which paths it executes the grid wait: all | some | none
    after = ["other"]         # full edges (events) from launches of the same step
    weight | input | state | table | scratch = [buffers]   read; state and scratch are written too
    output = [buffers]        written
    early = [buffers]         of those, the ones that may be touched before the wait
    publishes, consumes = [mailboxes]
    [[mailbox]]
    name = "box"
    epoch = "device"          # "device" | "sentinel" | "argument" (fixed at capture)

JSON of a captured graph: {"nodes": [{"id", "kernel", "waits", "reads": [...], "writes": [...], "early": [...]}],
"edges": [{"from", "to", "type": "full" | "programmatic"}], "ranks", "steps"}; buffers are names or addresses.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from validation.core.types import HarnessError
from validation.ordering.graph_order import Edge, EdgeKind, Node, StepGraph, Use, Waits
from validation.ordering.model import Role

if TYPE_CHECKING:
    from kimi_k3_decode.launches import Launch

_GRAPH_KEYS = {"ranks", "steps", "boundary", "launch", "mailbox", "title", "note", "faults", "expect"}  # the last four belong to the corpus
_READ_ROLES = (Role.WEIGHT, Role.INPUT, Role.TABLE)
_BOTH_ROLES = (Role.STATE, Role.SCRATCH)
_LAUNCH_KEYS = {"id", "op", "stream", "pdl", "waits", "after", "early", "publishes", "consumes", "output"} | {
    role.value for role in (*_READ_ROLES, *_BOTH_ROLES)
}
HOST = "host refill"


def read_graph(path: Path) -> StepGraph:
    """A TOML or JSON description (by suffix). Raises HarnessError naming everything wrong with it."""
    try:
        text = path.read_text()
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise HarnessError(f"launch graph {path}: got {error}, needs readable TOML or JSON") from error
    if not isinstance(table, dict):
        raise HarnessError(f"launch graph {path}: got {type(table).__name__}, needs a table")
    try:
        return from_captured(table) if path.suffix == ".json" else from_table(table)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HarnessError(f"launch graph {path}: got {type(error).__name__}: {error}, needs the documented form") from error


def from_table(table: Mapping[str, Any]) -> StepGraph:
    """The TOML form, already parsed. Raises HarnessError for unknown keys."""
    unknown = sorted(set(table) - _GRAPH_KEYS) + [
        f"launch {row.get('id', '?')}.{key}" for row in table.get("launch", ()) for key in sorted(set(row) - _LAUNCH_KEYS)
    ]
    unknown += [f"mailbox.{key}" for row in table.get("mailbox", ()) for key in sorted(set(row) - {"name", "epoch"})]
    if unknown or not table.get("launch"):
        raise HarnessError(
            f"launch graph: got the unknown keys {unknown} and {len(table.get('launch', ()))} launches, needs known keys, >= 1"
        )
    epochs = {row["name"]: row.get("epoch", "device") for row in table.get("mailbox", ())}
    strange = {name: epoch for name, epoch in epochs.items() if epoch not in ("device", "sentinel", "argument")}
    if strange:
        raise HarnessError(f"launch graph: got the epochs {strange}, needs device, sentinel or argument")
    ranks, steps = int(table.get("ranks", 1)), int(table.get("steps", 2))
    builder = _Builder(ranks, table.get("boundary", "graph"))
    for step in range(steps):
        for rank in range(ranks):
            for row in table["launch"]:
                builder.add(
                    row["id"], row.get("op", row["id"]), _uses_of_row(row), Waits(row.get("waits", "all")), rank, step,
                    stream=row.get("stream", "main"), pdl=bool(row.get("pdl", False)), after=row.get("after", ()),
                )  # fmt: skip
    baked = tuple(name for name, epoch in epochs.items() if epoch == "argument")
    return builder.graph(baked)


def _uses_of_row(row: Mapping[str, Any]) -> tuple[Use, ...]:
    early = set(row.get("early", ()))
    uses = []
    for role in (*_READ_ROLES, *_BOTH_ROLES, Role.OUTPUT):
        for buffer in row.get(role.value, ()):
            reads, writes = role is not Role.OUTPUT, role not in _READ_ROLES
            is_early = buffer in early or role is Role.WEIGHT
            uses.append(Use(operand=role.value, buffer=buffer, role=role, reads=reads, writes=writes, early=is_early))
    for key in ("publishes", "consumes"):
        for buffer in row.get(key, ()):
            sends = key == "publishes"
            uses.append(
                Use(operand=key, buffer=buffer, role=Role.MAILBOX, reads=not sends, writes=sends, publishes=sends, consumes=not sends)
            )
    return tuple(uses)


class _Builder:
    """Turns launches on streams into nodes and edges."""

    def __init__(self, ranks: int, boundary: str) -> None:
        if boundary not in ("graph", "stream") or ranks < 1:
            raise HarnessError(f"launch graph: got boundary {boundary!r} and {ranks} ranks, needs graph or stream and >= 1")
        self.ranks, self.boundary = ranks, boundary
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self._own: dict[tuple[int, int], dict[str, None]] = {}  # (rank, step) -> launches in order
        self._last: dict[tuple[int, str], tuple[str, int]] = {}  # (rank, stream) -> last launch, its step

    def name(self, launch: str, rank: int, step: int) -> str:
        """Readable and unique: the bare id when there is nothing to tell apart."""
        return f"{launch}#{step}" + (f"@{rank}" if self.ranks > 1 else "")

    def add(
        self,
        launch: str,
        op: str,
        uses: tuple[Use, ...],
        waits: Waits,
        rank: int,
        step: int,
        *,
        stream: str,
        pdl: bool,
        after: Iterable[str] = (),
    ) -> None:
        name = self.name(launch, rank, step)
        own = self._own.setdefault((rank, step), {})
        before = self._last.get((rank, stream))
        after = [self.name(other, rank, step) for other in after]
        missing = [other for other in after if other not in own]
        if missing:
            raise HarnessError(f"launch {launch}: got events from {missing}, needs launches listed before it")
        self.edges += [Edge(source=other, target=name, kind=EdgeKind.FULL, why="event") for other in after]
        if before is not None and (before[1] == step or self.boundary == "stream"):
            kind = EdgeKind.PROGRAMMATIC if pdl else EdgeKind.FULL
            self.edges.append(Edge(source=before[0], target=name, kind=kind, why=f"stream {stream}"))
        elif not after and self.boundary == "graph":
            ends = self._own.get((rank, step - 1), {})
            self.edges += [Edge(source=end, target=name, kind=EdgeKind.FULL, why="step boundary") for end in ends]
        self._last[(rank, stream)] = (name, step)
        own[name] = None
        self.nodes.append(Node(id=name, op=op, uses=uses, waits=waits, rank=rank, step=step))

    def graph(self, baked: tuple[str, ...] = (), notes: tuple[str, ...] = ()) -> StepGraph:
        ordered = sorted(self.nodes, key=lambda node: node.step)  # issue order; ranks run side by side
        return StepGraph(nodes=tuple(ordered), edges=tuple(self.edges), ranks=self.ranks, baked_epochs=baked, notes=notes).checked()


def from_plan(
    plans: Sequence[Sequence[Sequence[Launch]]],
    *,
    waits: Mapping[str, Waits] | None = None,
    early: Mapping[str, frozenset[str]] | None = None,
) -> StepGraph:
    """Our own launch plan: `plans[step][rank]` is a launch list.

    `waits` and `early` come from the audit of the kernels, by op: on which paths it waits, and which operands it touches before. Without
    them, every op waits on every path and touches only weights early, which is what the contracts demand. Tables are refilled, and logits
    read, by the host between steps, in stream order.
    """
    ranks = len(plans[0])
    builder = _Builder(ranks, "graph")
    for step, lists in enumerate(plans):
        for rank, launches in enumerate(lists):
            tables = sorted({b for launch in launches for b in launch.reads if launch.role_of(b).value == Role.TABLE.value})
            refill = tuple(Use(operand="host", buffer=name, role=Role.TABLE, writes=True) for name in tables)
            builder.add(HOST, HOST, refill, Waits.ALL, rank, step, stream="main", pdl=False)
            for launch in launches:
                uses = _uses_of_launch(launch, (early or {}).get(launch.op, frozenset()))
                kind = (waits or {}).get(launch.op, Waits.ALL)
                builder.add(launch.id, launch.op, uses, kind, rank, step, stream=launch.stream, pdl=launch.pdl, after=launch.waits_on)
    return builder.graph()


def _uses_of_launch(launch: Launch, early: frozenset[str]) -> tuple[Use, ...]:
    uses: list[Use] = []
    for operand in launch.contract.operands:
        role = Role(operand.role.value)
        for buffer in launch.bindings[operand.name]:
            is_early = role is Role.WEIGHT or operand.name in early
            if role is not Role.MAILBOX:
                reads, writes = buffer in launch.reads, buffer in launch.writes
                uses.append(Use(operand=operand.name, buffer=buffer, role=role, reads=reads, writes=writes, early=is_early))
                continue
            sends = not operand.reads
            uses.append(
                Use(operand=operand.name, buffer=buffer, role=role, reads=not sends, writes=sends, publishes=sends, consumes=not sends)
            )
            if not sends:  # a consumer re-arms: the launch says which parity
                rearmed = [name for name in launch.writes if name.rsplit(".", 1)[0] == buffer.rsplit(".", 1)[0]]
                uses += [Use(operand=f"{operand.name} (re-arm)", buffer=name, role=role, writes=True) for name in rearmed]
    return tuple(uses)


def from_captured(table: Mapping[str, Any]) -> StepGraph:
    """A captured CUDA graph. Steps are replays: all of one replay is complete before the next starts."""
    steps, ranks = int(table.get("steps", 2)), int(table.get("ranks", 1))
    nodes, edges = [], []
    for step in range(steps):
        for rank in range(ranks):
            tag = f"#{step}" + (f"@{rank}" if ranks > 1 else "")
            for row in table["nodes"]:
                uses = _captured_uses(row)
                name = f"{row['id']}{tag}"
                nodes.append(
                    Node(
                        id=name, op=str(row.get("kernel", row["id"])), uses=uses, waits=Waits(row.get("waits", "all")), rank=rank, step=step
                    )
                )
            edges += [
                Edge(source=f"{row['from']}{tag}", target=f"{row['to']}{tag}", kind=EdgeKind(row.get("type", "full")), why="graph edge")
                for row in table["edges"]
            ]
            if step:
                earlier = tag.replace(f"#{step}", f"#{step - 1}")
                edges += [
                    Edge(source=f"{a['id']}{earlier}", target=f"{b['id']}{tag}", kind=EdgeKind.FULL, why="replay boundary")
                    for a in table["nodes"]
                    for b in table["nodes"]
                    if not any(e["to"] == b["id"] for e in table["edges"])
                ]
    return StepGraph(nodes=tuple(nodes), edges=tuple(edges), ranks=ranks).checked()


def _captured_uses(row: Mapping[str, Any]) -> tuple[Use, ...]:
    early, written = {str(b) for b in row.get("early", ())}, {str(b) for b in row.get("writes", ())}
    read = [str(b) for b in row.get("reads", ())]
    uses = [
        Use(operand=b, buffer=b, role=Role.INPUT if b not in written else Role.STATE, reads=True, writes=b in written, early=b in early)
        for b in read
    ]
    uses += [Use(operand=b, buffer=b, role=Role.OUTPUT, writes=True, early=b in early) for b in sorted(written) if b not in set(read)]
    return tuple(uses)
