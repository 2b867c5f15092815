"""Times of captured launches: several subjects interleaved replay by replay, medians of event times.

The order of the subjects is turned round every other time (ABBA), so that a drift hits all alike, and before each of them other memory is
read until nothing of the subject before is left in L2: none may profit from running behind another that reads the same weights. While the
replays run the card's clocks, power and temperature are sampled; a measurement during which it slowed down is discarded and taken again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from perf.kernels.conditions import Card, Watch

ATTEMPTS = 3  # how often a throttled measurement is taken again
SCRUB_BYTES = 192 << 20  # read between subjects: several times the L2
CHUNK = 8  # rounds queued between two looks at the card


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Microseconds a launch: the median of the replays, the first and third quartile, and every sample in order of the rounds."""

    median_us: float
    low_us: float
    high_us: float
    samples_us: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Interleaved times by subject, the card's conditions, and how many throttled attempts were thrown away before."""

    times: Mapping[str, Timed]
    conditions: Mapping[str, Any]
    discarded_count: int

    @property
    def throttled(self) -> tuple[str, ...]:
        """Why even the last attempt may not be shown; empty when it may."""
        return tuple(self.conditions["throttled"])


def timed(samples_us: Sequence[float]) -> Timed:
    """Median and quartiles of samples in order of the rounds."""
    low, median, high = statistics.quantiles(samples_us, n=4)
    return Timed(median_us=median, low_us=low, high_us=high, samples_us=tuple(samples_us))


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


def interleaved(
    graphs: Mapping[str, torch.cuda.CUDAGraph], launches: int, replays: int = 60, card: Card | None = None, watch: Watch | None = None
) -> dict[str, Timed]:
    """Time each graph in turn, `replays` rounds; `launches` is how many units of work a graph holds."""
    events = {
        name: [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)] for name in graphs
    }
    scrubbed = torch.zeros(SCRUB_BYTES // 4, device="cuda")
    total = torch.empty((), device="cuda")
    for graph in graphs.values():
        graph.replay()
        torch.sum(scrubbed, 0, out=total)
    torch.cuda.synchronize()
    order = list(graphs)
    for i in range(replays):
        for name in order if i % 2 == 0 else order[::-1]:
            begin, end = events[name][i]
            torch.sum(scrubbed, 0, out=total)
            begin.record()
            graphs[name].replay()
            end.record()
        if card is not None and watch is not None and i % CHUNK == CHUNK - 1:
            card.sample(watch)
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    found = {}
    for name, pairs in events.items():
        found[name] = timed([1e3 * begin.elapsed_time(end) / launches for begin, end in pairs])
    return found


def measured(graphs: Mapping[str, torch.cuda.CUDAGraph], launches: int, card: Card, replays: int = 56) -> Measured:
    """`interleaved`, with the card watched; taken again up to ATTEMPTS times while the card throttles."""
    discarded = 0
    while True:
        with card.watching() as watch:
            times = interleaved(graphs, launches, replays, card, watch)
        if not watch.throttled or discarded == ATTEMPTS - 1:
            return Measured(times=times, conditions=watch.summary(), discarded_count=discarded)
        discarded += 1


def copy_rate_bytes_per_s(size_bytes: int = 4 << 30) -> float:
    """Bytes read plus written per second of a device-to-device copy: the ceiling of this card, measured now."""
    source = torch.empty(size_bytes, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    a, b = source.view(torch.float32), target.view(torch.float32)
    graphs = {"copy": capture(lambda: target.copy_(source)), "kernel": capture(lambda: torch.neg(a, out=b))}
    return max(2 * size_bytes / (t.median_us * 1e-6) for t in interleaved(graphs, 1, replays=12).values())
