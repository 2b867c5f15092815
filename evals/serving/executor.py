"""Keeps the requested number of requests in flight until the last one is handed out, and measures whether it did.

Requests come in windows from a generator that builds prompts (in a thread, a little ahead); answers go to `take` one by one. Memory holds
the requests in flight and the look-ahead, whatever the size of the suite. Very long prompts are bounded by `max_characters` too, and then
fewer than `concurrency` are in flight, which the measured share shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from evals.serving.asking import UNREACHABLE, WORKER, Answer, Ask, Asker, WorkerLost
from validation.core.types import HarnessError

DOWN_AFTER = 3  # answers "unreachable" in a row before a server is left alone
LOST_WORKERS_MAX = 3  # workers that may die over one request before it is recorded as failed
SWITCH_S = 0.001  # prompts are built and records written by other threads: none may keep the interpreter while a slot stands empty
MAX_CHARACTERS = 192 << 20  # of prompts in flight, and again of prompts built ahead


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What one pass did. Shares are over the time from the first hand-out to the last one (NaN: fewer requests than slots)."""

    concurrency: int
    answered: int
    failed: Mapping[str, int]  # by kind
    moved: int  # requests asked again elsewhere, because a server or worker was gone
    tried_again: int  # answers that took the client more than one attempt
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    in_flight_share: float  # mean requests in flight over `concurrency`
    full_share: float  # share of the time with all of them in flight
    peak_rss_bytes: int
    by_endpoint: Mapping[str, int]
    stopped: str = ""  # why it ended before everything was asked

    @property
    def asked(self) -> int:
        return self.answered + sum(self.failed.values())


class Meter:
    """Time-weighted count of what is in flight, up to the latest hand-out.

    A request is in flight from its hand-out until its answer is here. The server holds it for less: sending, reading and decoding on both
    machines is no time in its hands. Its own count of requests is therefore this share times (time in its hands / time in flight): nearly
    the same where answers take seconds, as those of suites do, and well below it where they take a few tenths on a busy machine. More slots
    would not mend that; they would ask for another concurrency than the one that is recorded.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots, self._clock = slots, clock
        self._flying, self._entered = 0, 0
        self._start = self._last = math.nan
        self._area = self._full = 0.0
        self._at_hand_out = (0.0, 0.0, 0.0)

    def enter(self) -> None:
        """A request is handed out."""
        self._advance()
        self._flying += 1
        self._entered += 1
        self._at_hand_out = (self._last - self._start, self._area, self._full)

    def leave(self) -> None:
        self._advance()
        self._flying -= 1

    def _advance(self) -> None:
        now = self._clock()
        if math.isnan(self._start):
            self._start = self._last = now
        passed = now - self._last
        self._area += passed * min(self._flying, self._slots)
        self._full += passed if self._flying >= self._slots else 0.0
        self._last = now

    @property
    def shares(self) -> tuple[float, float]:
        """Mean share of the slots in use, and share of the time with all in use; NaN when there was no queue behind the slots."""
        seconds, area, full = self._at_hand_out
        if self._entered <= self._slots or seconds <= 0:
            return math.nan, math.nan
        return area / (seconds * self._slots), full / seconds


@dataclass
class _Lane:
    """One asker as the executor sees it."""

    asker: Asker
    flying: int = 0
    unreachable: int = 0
    down: bool = False


@dataclass
class _Tally:
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    tried_again: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    by_endpoint: Counter[str] = field(default_factory=Counter)

    def add(self, answer: Answer) -> None:
        if answer.failure:
            self.failed[answer.failure] += 1
        else:
            self.answered += 1
        self.tried_again += answer.attempts > 1
        self.prompt_tokens += answer.prompt_tokens or 0
        self.completion_tokens += answer.completion_tokens or 0
        self.by_endpoint[answer.endpoint] += 1


class Executor:
    """One pass over the requests of one side. `take(ask, answer)` is called in the event loop's thread and must be quick."""

    def __init__(
        self,
        askers: Sequence[Asker],
        concurrency: int,
        take: Callable[[Ask, Answer], None],
        *,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        if not askers or concurrency < 1:
            raise HarnessError(f"executor: got {len(askers)} endpoints and concurrency {concurrency}, needs at least one of each")
        self._lanes = [_Lane(asker) for asker in askers]
        self._concurrency = concurrency
        self._take = take
        self._max_characters = max_characters
        self._meter = Meter(concurrency)
        self._tally = _Tally()
        self._backlog: deque[Ask] = deque()
        self._again: deque[Ask] = deque()
        self._losses: Counter[tuple[str, int]] = Counter()
        self._backlog_characters = self._flying_characters = self._flying = 0
        self._waiting = 0
        self._primed = False  # nothing is sent before there is a prompt for every slot
        self._exhausted = False
        self._stopped = ""
        self._error: BaseException | None = None

    async def run(self, windows: Iterator[Sequence[Ask]]) -> Throughput:
        """Ask everything the windows hold. Raises what building a window raises, and HarnessError of an asker."""
        self._signal = asyncio.Event()
        started = time.monotonic()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        with ThreadPoolExecutor(1, thread_name_prefix="prompts") as pool:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._feed(windows, pool))
                    for _ in range(self._concurrency):
                        group.create_task(self._slot())
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None  # the first one ended the others
            finally:
                sys.setswitchinterval(interval)
        if self._error is not None:
            raise self._error
        mean, full = self._meter.shares
        return Throughput(
            **{name: value for name, value in vars(self._tally).items() if name not in ("failed", "by_endpoint")},
            failed=dict(sorted(self._tally.failed.items())),
            by_endpoint=dict(sorted(self._tally.by_endpoint.items())),
            concurrency=self._concurrency,
            seconds=time.monotonic() - started,
            in_flight_share=mean,
            full_share=full,
            peak_rss_bytes=peak_rss_bytes(),
            stopped=self._stopped,
        )

    # ---- hand-out ----
    def _wake(self) -> None:
        if self._waiting:
            signal, self._signal = self._signal, asyncio.Event()
            signal.set()

    async def _wait(self) -> None:
        self._waiting += 1
        await self._signal.wait()
        self._waiting -= 1

    async def _feed(self, windows: Iterator[Sequence[Ask]], pool: ThreadPoolExecutor) -> None:
        """Build ahead: twice as many requests as slots, within the bound of characters."""
        loop = asyncio.get_running_loop()
        while not self._stopped:
            if len(self._backlog) >= 2 * self._concurrency or self._backlog_characters >= self._max_characters:
                await self._wait()
                continue
            window = await loop.run_in_executor(pool, next, windows, None)
            if window is None:
                break
            self._backlog.extend(window)
            self._backlog_characters += sum(len(ask.prompt) for ask in window)
            self._primed = self._primed or len(self._backlog) >= self._concurrency or self._backlog_characters >= self._max_characters
            self._wake()
        self._exhausted = self._primed = True
        self._wake()

    async def _next(self) -> Ask | None:
        """The next request, or None when nothing can come any more."""
        while not self._stopped:
            queue = self._again or self._backlog
            if self._primed and queue and (not self._flying or self._flying_characters + len(queue[0].prompt) <= self._max_characters):
                ask = queue.popleft()
                if queue is self._backlog:
                    self._backlog_characters -= len(ask.prompt)
                    self._wake()
                return ask
            if not queue and self._exhausted and not self._flying:
                break
            await self._wait()
        return None

    async def _slot(self) -> None:
        loop = asyncio.get_running_loop()
        while (ask := await self._next()) is not None:
            lane = min((lane for lane in self._lanes if not lane.down), key=lambda lane: lane.flying)
            self._flying += 1
            self._flying_characters += len(ask.prompt)
            lane.flying += 1
            self._meter.enter()
            try:
                answer = await lane.asker.answer(ask)
            except WorkerLost as error:
                answer = Answer(endpoint=lane.asker.name, failure=WORKER, message=str(error))
            finally:
                self._meter.leave()
                lane.flying -= 1
                self._flying -= 1
                self._flying_characters -= len(ask.prompt)
            if answer.failure:
                self._settle(ask, answer, lane)
            else:  # the next request leaves first
                loop.call_soon(self._settle_later, ask, answer, lane)
        self._wake()

    # ---- outcome ----
    def _settle_later(self, ask: Ask, answer: Answer, lane: _Lane) -> None:
        try:
            self._settle(ask, answer, lane)
        except BaseException as error:  # nobody awaits a callback: `run` raises it
            self._error = self._error or error
            self._stopped = self._stopped or f"{type(error).__name__}: {error}"
            self._wake()

    def _settle(self, ask: Ask, answer: Answer, lane: _Lane) -> None:
        """Record the answer, or put the request back when nobody was there to take it."""
        lane.unreachable = lane.unreachable + 1 if answer.failure == UNREACHABLE else 0
        if answer.failure == WORKER or lane.unreachable >= DOWN_AFTER:
            lane.down = True
        others = any(not other.down for other in self._lanes)
        if not others and not self._stopped:
            self._stopped = f"no endpoint is left: {answer.message}"
        if answer.failure in (UNREACHABLE, WORKER):
            self._losses[ask.item, ask.repeat] += 1
            if others and self._losses[ask.item, ask.repeat] < max(LOST_WORKERS_MAX, len(self._lanes)):
                self._again.append(ask)
                self._tally.moved += 1
                self._wake()
                return
        named = answer if answer.endpoint else replace(answer, endpoint=lane.asker.name)
        self._tally.add(named)
        self._take(ask, named)
        self._wake()


def peak_rss_bytes() -> int:
    """Highest resident memory of this process so far. Linux counts it a program; `getrusage` would start with that of the parent."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
