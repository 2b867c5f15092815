"""What a person sees while a suite is asked, on stderr: bars with the time left and a running score on a terminal, else plain lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINE_EVERY_S = 30.0
LINE_EVERY_SHARE = 0.1


@dataclass
class Tally:
    """Counts of one side of one suite. `scored` may lag behind `done`; the mean is over what was scored."""

    total: int
    known: int  # answered in an earlier run
    done: int = 0
    failed: int = 0
    scored: int = 0
    score_sum: float = 0.0

    def words(self) -> str:
        score = f"score {self.score_sum / self.scored:.3f} of {self.scored}" if self.scored else "no score yet"
        return f"{score}, {self.failed} failed" if self.failed else score


class Display(Protocol):
    """Told about a side's answers as they are recorded, from any thread."""

    def begin(self, title: str, total: int, known: int) -> None:
        """`total` answers are wanted, `known` of them recorded before."""

    def answered(self, title: str, score: float | None, failed: bool) -> None:
        """One more; `score` None when it was not scored."""

    def end(self, title: str) -> None: ...


class _Counting:
    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = {}

    def begin(self, title: str, total: int, known: int) -> None:
        self.tallies[title] = Tally(total=total, known=known)

    def answered(self, title: str, score: float | None, failed: bool) -> None:
        tally = self.tallies[title]
        tally.done += 1
        tally.failed += failed
        if score is not None:
            tally.scored += 1
            tally.score_sum += score

    def end(self, title: str) -> None:
        return None


class Silent(_Counting):
    """Counts and says nothing."""


class Bars(_Counting):
    """One bar a side and suite."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.display = RichProgress(*columns, TextColumn("{task.fields[words]}"), console=console, refresh_per_second=4)
        self._bars: dict[str, Any] = {}

    def begin(self, title: str, total: int, known: int) -> None:
        super().begin(title, total, known)
        if title in self._bars:
            self.display.remove_task(self._bars[title])
        self._bars[title] = self.display.add_task(title, total=total, completed=known, words="")

    def answered(self, title: str, score: float | None, failed: bool) -> None:
        super().answered(title, score, failed)
        self.display.update(self._bars[title], advance=1, words=self.tallies[title].words())


class Lines(_Counting):
    """A line every tenth of a side, and every half minute in between."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._say, self._clock = say, clock
        self._started: dict[str, float] = {}
        self._said: dict[str, tuple[float, int]] = {}

    def begin(self, title: str, total: int, known: int) -> None:
        super().begin(title, total, known)
        now = self._clock()
        self._started[title], self._said[title] = now, (now, 0)
        self._say(f"{title}: {total - known} of {total} to ask")

    def answered(self, title: str, score: float | None, failed: bool) -> None:
        super().answered(title, score, failed)
        tally, now = self.tallies[title], self._clock()
        at, done = self._said[title]
        if now - at >= LINE_EVERY_S or tally.done - done >= LINE_EVERY_SHARE * (tally.total - tally.known):
            self._said[title] = (now, tally.done)
            self._say(self._line(title, now))

    def _line(self, title: str, now: float) -> str:
        tally, passed = self.tallies[title], now - self._started[title]
        rate = tally.done / passed if passed > 0 else float("inf")
        left = (tally.total - tally.known - tally.done) / rate if rate else float("nan")
        reached = tally.known + tally.done
        return f"{title}: {reached}/{tally.total}, {rate:.1f}/s, {duration(left)} left, {tally.words()}"

    def end(self, title: str) -> None:
        if self._said[title][1] != self.tallies[title].done:
            self._say(self._line(title, self._clock()))


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as short as it can be."""
    if not seconds < 1e8:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextlib.contextmanager
def display(quiet: bool = False) -> Iterator[Display]:
    """Bars where standard error is a terminal, else lines; nothing when quiet."""
    if quiet:
        yield Silent()
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(lambda text: print(text, file=sys.stderr, flush=True))
        return
    bars = Bars(console)
    with bars.display:
        yield bars
