"""What a person sees while a run works: bars on a terminal, plain lines elsewhere, nothing but the end in quiet mode. All on stderr."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from validation.core.registry import PlannedCase
from validation.core.runner import Progress
from validation.core.types import Evidence, Outcome


class Bars(Progress):
    """One bar a lane; a record that is no measurement gets a line of its own. A context manager."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.fields[lane]:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = RichProgress(*columns, TextColumn("{task.description}"), console=Console(stderr=True), transient=False)
        self._tasks: dict[str, object] = {}

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def lane_started(self, lane: str, done: int, total: int) -> None:
        self._tasks[lane] = self._bars.add_task("", total=total, completed=done, lane=lane)

    def case_started(self, lane: str, case: PlannedCase) -> None:
        self._bars.update(self._tasks[lane], description=f"{case.check} {case.case.id}")  # type: ignore[arg-type]

    def recorded(self, lane: str, record: Evidence) -> None:
        self._bars.advance(self._tasks[lane])  # type: ignore[arg-type]
        if record.outcome is not Outcome.MEASURED:
            self._bars.console.print(_words(record), style="yellow", markup=False, highlight=False)


class Lines(Progress):
    """One line per lane and per record, for logs; with `quiet`, only records that are no measurement. A context manager."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def lane_started(self, lane: str, done: int, total: int) -> None:
        self._say(f"{lane}: {total - done} of {total} cases to measure")

    def case_started(self, lane: str, case: PlannedCase) -> None:
        return None

    def recorded(self, lane: str, record: Evidence) -> None:
        if record.outcome is not Outcome.MEASURED or not self._quiet:
            print(_words(record), file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)


def choose(*, quiet: bool) -> Bars | Lines:
    return Bars() if not quiet and sys.stderr.isatty() else Lines(quiet=quiet)


def _words(record: Evidence) -> str:
    why = "" if not record.reasons else ": " + "; ".join(record.reasons)[:300]
    return f"{record.id} {record.outcome.value} {record.check} {record.case.id} ({record.seconds:.1f} s){why}"
