"""Times of captured launches: cold weights rotated past L2, several subjects interleaved replay by replay, medians of event times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Microseconds a launch: the median of the replays, the first and third quartile, and every sample."""

    median_us: float
    low_us: float
    high_us: float
    samples_us: tuple[float, ...]


def capture(work: Callable[[], object], warmups: int = 2) -> torch.cuda.CUDAGraph:
    """Run `work` on a side stream a few times (loads modules), then capture it once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def interleaved(graphs: Mapping[str, torch.cuda.CUDAGraph], launches: int, replays: int = 60) -> dict[str, Timed]:
    """Time each graph in turn, `replays` times round robin; `launches` is how many units of work a graph holds."""
    events = {
        name: [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)] for name in graphs
    }
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    for i in range(replays):
        for name, graph in graphs.items():
            begin, end = events[name][i]
            begin.record()
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    found = {}
    for name, pairs in events.items():
        samples = tuple(1e3 * begin.elapsed_time(end) / launches for begin, end in pairs)
        low, median, high = statistics.quantiles(samples, n=4)
        found[name] = Timed(median_us=median, low_us=low, high_us=high, samples_us=samples)
    return found


def copy_rate_bytes_per_s(size_bytes: int = 4 << 30) -> float:
    """Bytes read plus written per second of a device-to-device copy: the ceiling of this card, measured now."""
    source = torch.empty(size_bytes, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    a, b = source.view(torch.float32), target.view(torch.float32)
    graphs = {"copy": capture(lambda: target.copy_(source)), "kernel": capture(lambda: torch.neg(a, out=b))}
    return max(2 * size_bytes / (t.median_us * 1e-6) for t in interleaved(graphs, 1, replays=12).values())
