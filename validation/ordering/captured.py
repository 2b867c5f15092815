"""What was recorded on a GPU and is committed beside the audit: a trace of launches and the graph that the driver captured.

Both belong to the kernel sources they were taken from (`sources`); after an edit they say nothing until `observe` has run again.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from validation.ordering.observed import Trace, read_trace
from validation.ordering.own_kernels import kernel_sources

if TYPE_CHECKING:
    from kimi_k3_decode.launches import Launch

FOLDER = Path(__file__).parent / "traces"
Edge = tuple[int, int, str]  # positions in capture order, "full" | "programmatic"


def committed_trace() -> Trace | None:
    """The newest committed trace of the sources as they are, or None when there is none."""
    traces = [read_trace(path) for path in sorted(FOLDER.glob("*.trace.json.gz"))]
    fitting = [trace for trace in traces if trace.sources == kernel_sources()]
    return fitting[-1] if fitting else None


def committed_graphs() -> list[dict[str, Any]]:
    """Captured graphs of the sources as they are."""
    graphs = [json.loads(gzip.decompress(path.read_bytes())) for path in sorted(FOLDER.glob("*.graph.json.gz"))]
    return [graph for graph in graphs if graph.get("sources") == kernel_sources()]


def plan_edges(launches: Sequence[Launch]) -> set[Edge]:
    """Edges that a captured step must have: stream order, programmatic where the plan says so, and a full one for each event."""
    position = {launch.id: number for number, launch in enumerate(launches)}
    last: dict[str, int] = {}
    edges: set[Edge] = set()
    for number, launch in enumerate(launches):
        if launch.stream in last:
            edges.add((last[launch.stream], number, "programmatic" if launch.pdl else "full"))
        edges |= {(position[name], number, "full") for name in launch.waits_on}
        last[launch.stream] = number
    return edges


def captured_edges(graph: Mapping[str, Any]) -> set[Edge]:
    """Edges of a graph that `observe.read_graph_nodes` read from the driver."""
    return {(edge["from"], edge["to"], edge["type"]) for edge in graph["edges"]}
