"""Which path decoded: from the server's log, from its metrics, or from a profiler's trace. What was not found proves nothing.

    log      a line that `proof_log` matches, in what the server wrote during this run
    metrics  counters that `proof_metrics` matches and that grew while requests were decoded, at each concurrency
    trace    kernels that `proof_kernels` matches, in a chrome trace that holds decode steps

The same looking is done on stock: a sign that stock shows as well does not tell the two apart.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.serving.client import Endpoint
from evals.serving.config import Side
from evals.serving.counters import Growth, counters_of, growth, key_of
from evals.serving.errors import ServingError
from evals.serving.identity import lines_of
from validation.core.settings import PROJECT_ROOT

PROBE_TOKENS = 24
PROBE_ROUNDS = 2
PROBE_LIMIT_S = 600.0
MAX_TRACE_BYTES = 1 << 30
# Servers print the options they were started with: that an option was given does not show that it did anything.
ECHO = re.compile(r"non-default args|args: Namespace\(|[Cc]ommand line:")
SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What one way of looking found: how often, examples, and where. `looked` is False where there was nothing to look at (an unreadable
    log is no clean bill); `reason` says why nothing was found.
    """

    way: str
    count: float
    shown: tuple[str, ...]
    where: str
    reason: str = ""
    looked: bool = True

    def row(self, role: str) -> list[str]:
        return [role, self.way, f"{self.count:g}", "; ".join(self.shown) or self.reason or "nothing", self.where]


def log_sign(pattern: str, log: Path | None) -> Sign:
    if log is None or not log.is_file():
        return Sign(way="log", count=0, shown=(), where=str(log or ""), reason="there is no log to read", looked=False)
    wanted, count = re.compile(pattern), 0
    shown: list[str] = []
    for line in lines_of(log):
        if wanted.search(line) and not ECHO.search(line):
            count += 1
            if len(shown) < SHOWN:
                shown.append(line.strip()[:200])
    return Sign(way="log", count=count, shown=tuple(shown), where=log.name)


def metrics_sign(pattern: str, grown: Growth | str) -> Sign:
    """`grown`, or why the counters could not be read."""
    if isinstance(grown, str):
        return Sign(way="metrics", count=0, shown=(), where="/metrics", reason=grown, looked=False)
    found = re.compile(pattern)
    hits = {key: value for key, value in grown.by_key.items() if value > 0 and found.search(key)}
    shown = tuple(f"{key} +{value:g}" for key, value in sorted(hits.items())[:SHOWN])
    return Sign(
        way="metrics", count=sum(hits.values()), shown=shown, where="/metrics", reason="" if hits else "no counter of that name grew"
    )


def trace_sign(pattern: str, path: Path) -> Sign:
    """Kernels of a chrome trace by name. The file's digest goes into the record."""
    try:
        kernels, digest = read_trace(path)
    except ValueError as error:
        return Sign(way="trace", count=0, shown=(), where=path.name, reason=str(error), looked=False)
    wanted = re.compile(pattern)
    hits = {name: count for name, count in kernels.items() if wanted.search(name)}
    shown = tuple(f"{name[:100]} x {count}" for name, count in sorted(hits.items(), key=lambda item: -item[1])[:SHOWN])
    reason = "" if hits else f"none of its {sum(kernels.values())} kernel events has such a name"
    return Sign(way="trace", count=sum(hits.values()), shown=shown, where=f"{path.name} sha256 {digest[:16]}", reason=reason)


def read_trace(path: Path) -> tuple[Counter[str], str]:
    """Kernel names with their number of events, and the file's SHA-256. Raises ValueError for what is no chrome trace."""
    try:
        data = path.read_bytes()
        raw = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        if len(raw) > MAX_TRACE_BYTES:
            raise ValueError(f"the trace has {len(raw)} bytes, needs at most {MAX_TRACE_BYTES}; profile fewer steps")
        body = json.loads(raw)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise ValueError(f"the trace cannot be read: {error}") from error
    events = body.get("traceEvents") if isinstance(body, dict) else body
    if not isinstance(events, list):
        raise ValueError("the file has no traceEvents, needs a chrome trace")
    names = Counter(str(e.get("name")) for e in events if isinstance(e, dict) and "kernel" in str(e.get("cat", "")).lower())
    return names, hashlib.sha256(data).hexdigest()


def probe(base_urls: Sequence[str], side: Side, concurrency: int) -> Growth | str:
    """Decode a few replies at a concurrency and read the counters before and after; a reason where that fails."""
    try:
        return asyncio.run(_probe(base_urls, side, concurrency))
    except ServingError as error:
        return f"the probe failed: {error}"


async def _probe(base_urls: Sequence[str], side: Side, concurrency: int) -> Growth:
    async with AsyncExitStack() as stack:
        made = [Endpoint(url, model=side.name, api_key_env=side.api_key_env, timeout_s=PROBE_LIMIT_S) for url in base_urls]
        ends = [await stack.enter_async_context(one) for one in made]
        before = await _counters(ends)
        for turn in range(PROBE_ROUNDS):
            asks = [
                ends[n % len(ends)].completion_async(
                    f"Count on: {turn}, {n}, {n + 1},", max_tokens=PROBE_TOKENS, extra={"ignore_eos": True}
                )
                for n in range(concurrency)
            ]
            await asyncio.gather(*asks)
        return growth(before, await _counters(ends))


async def _counters(ends: Sequence[Endpoint]) -> dict[str, float]:
    found: dict[str, float] = {}
    for end in ends:
        for sample in counters_of(await end.metrics_async()):
            found[key_of(sample)] = found.get(key_of(sample), 0.0) + sample.value
    return found


def signs_of(side: Side, log: Path | None, grown: Growth | str, patterns: Side) -> list[Sign]:
    """Every way of looking that `patterns` (the candidate's table) asks for, applied to one side."""
    found = []
    if patterns.proof_log:
        found.append(log_sign(patterns.proof_log, log))
    if patterns.proof_metrics:
        found.append(metrics_sign(patterns.proof_metrics, grown))
    if patterns.proof_kernels and side.proof_trace:
        found.append(trace_sign(patterns.proof_kernels, PROJECT_ROOT / side.proof_trace))
    return found


def shown_by_stock(candidate: Sequence[Sign], stock: Sequence[Sign]) -> float | None:
    """Signs that stock shows as well. None where no way that showed the candidate's path was looked at on stock: that another way shows
    nothing there does not tell the two apart.
    """
    if not {sign.way for sign in candidate if sign.count} & {sign.way for sign in stock if sign.looked}:
        return None
    return sum(sign.count for sign in stock)


def proof_table(rows: Sequence[list[str]]) -> dict[str, Any]:
    return {"title": "Which path decoded", "columns": ["side", "way", "found", "examples", "where"], "rows": list(rows)}
