"""How far repeats are topped up: looks are planned before their data are seen, written down, and replayed when a run is continued.

A look spends part of alpha (`evals.stats.sequential`). Whether a look is the last one, which spends all that is left, must not depend on
its result, so it is decided from repeats and time alone; and a continued run must not get a second chance, so past looks are taken from the
file.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from validation.core.types import HarnessError


@dataclass(frozen=True, kw_only=True)
class Look:
    """One planned look: repeats an item in all, and whether no further one will follow."""

    repeats: int
    last: bool


@dataclass(frozen=True, kw_only=True)
class Budget:
    """`max_minutes` of asking, both sides together; 0: no limit. No new look is begun that would not fit."""

    first: int
    max_repeats: int
    max_minutes: float = 0.0

    def plan(self, past: list[Look], seconds: float) -> Look:
        """The look after `past`, when asking has taken `seconds` up to now and its own data are complete."""
        repeats = min(self.first if not past else 2 * past[-1].repeats, self.max_repeats)
        return Look(repeats=repeats, last=repeats >= self.max_repeats or not self._fits(repeats, seconds))

    def _fits(self, repeats: int, seconds: float) -> bool:
        """Whether twice the repeats would still be within the minutes, at the pace so far."""
        if not self.max_minutes:
            return True
        extra = min(2 * repeats, self.max_repeats) - repeats
        return seconds + extra * seconds / repeats <= 60 * self.max_minutes


class LookFile:
    """The looks made so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.looks = [Look(**one) for one in json.loads(path.read_text())] if path.is_file() else []
        except (ValueError, TypeError) as error:
            raise HarnessError(f"looks: got {error} in {path}, needs the file as written; restore it or start in a new folder") from error

    def next_repeats(self, budget: Budget, made: int) -> int:
        """Repeats of look number `made`, recorded or to come."""
        if made < len(self.looks):
            return self.looks[made].repeats
        return budget.plan(self.looks, math.inf if made else 0.0).repeats

    def settle(self, budget: Budget, made: int, seconds: float) -> Look:
        """Look number `made`: as recorded, or decided now and recorded."""
        if made == len(self.looks):
            self.looks.append(budget.plan(self.looks, seconds))
            draft = self._path.with_suffix(f".{os.getpid()}.draft")
            draft.write_text(json.dumps([asdict(look) for look in self.looks]))
            draft.replace(self._path)
        return self.looks[made]
