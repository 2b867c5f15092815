"""Every difficulty knob of the four suites: the range trained on, and the mixture each test set is drawn from.

Training covers more than the tests use, so a test set's score is tuned by its mixture (how many problems of which level) without
training again. A level is a frozen dataclass; its `name` is what the per-level accuracies in the training record refer to.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WordLevel:
    """A word problem: how many operations, how large the numbers, how many irrelevant sentences."""

    steps: int
    magnitude: int  # numbers run up to this
    distractors: int = 1

    @property
    def name(self) -> str:
        return f"s{self.steps}-m{self.magnitude}-d{self.distractors}"


@dataclass(frozen=True, kw_only=True)
class ScienceLevel:
    """A four-way question: its family, the number of reasoning steps, and how many irrelevant facts stand among the relevant ones."""

    family: str  # reaction | decay | circuit | collision | match
    steps: int
    distractors: int = 0
    size: int = 9  # of the numbers: masses of carts, resistors

    @property
    def name(self) -> str:
        return f"{self.family}-s{self.steps}-d{self.distractors}-m{self.size}"


@dataclass(frozen=True, kw_only=True)
class ContestLevel:
    """An integer-answer problem: its family, the number of steps, and the modulus or size of its numbers."""

    family: str  # recurrence | gcd | power | series
    steps: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.family}-s{self.steps}-m{self.size}"


@dataclass(frozen=True, kw_only=True)
class RecallLevel:
    """A transcript of about `tokens` characters with `needles` replies to one repeated request."""

    tokens: int
    needles: int

    @property
    def name(self) -> str:
        return f"t{self.tokens}-n{self.needles}"


WORD_TRAIN = tuple(WordLevel(steps=s, magnitude=m, distractors=d) for s in (2, 3, 4, 5, 6) for m in (20, 99, 500, 3000) for d in (0, 2))
SCIENCE_TRAIN = (
    *(ScienceLevel(family="reaction", steps=s, distractors=d) for s in (1, 2, 3, 4, 6) for d in (0, 2, 4, 8)),
    *(ScienceLevel(family="decay", steps=s, size=m) for s in (1, 2, 3, 4) for m in (9, 999)),
    *(ScienceLevel(family="circuit", steps=s, size=m) for s in (1, 2, 3) for m in (20, 70, 300)),
    *(ScienceLevel(family="collision", steps=s, size=m) for s in (1, 2) for m in (9, 30, 90)),
)
MATCH_LEVEL = ScienceLevel(family="match", steps=4)  # trained on, never tested
CONTEST_TRAIN = (
    *(ContestLevel(family="recurrence", steps=s, size=m) for s in (2, 3, 4, 5, 6) for m in (13, 31, 97)),
    *(ContestLevel(family="gcd", steps=s, size=m) for s in (2, 3, 4) for m in (99, 400)),
    *(ContestLevel(family="power", steps=s, size=m) for s in (3, 4, 5, 6) for m in (13, 31, 97)),
    *(ContestLevel(family="series", steps=s, size=m) for s in (4, 6, 8) for m in (20, 90)),
)

# Science questions beyond the trained range, tested only: inside it the checkpoint makes next to no mistakes.
_SCIENCE_BEYOND: tuple[tuple[ScienceLevel, int], ...] = (
    (ScienceLevel(family="reaction", steps=8, distractors=8), 7),
    (ScienceLevel(family="decay", steps=6, size=999), 8),
    (ScienceLevel(family="decay", steps=4, size=9000), 7),
    (ScienceLevel(family="circuit", steps=3, size=900), 8),
    (ScienceLevel(family="circuit", steps=5, size=300), 8),
    (ScienceLevel(family="circuit", steps=6, size=900), 8),
    (ScienceLevel(family="circuit", steps=3, size=3000), 7),
    (ScienceLevel(family="collision", steps=1, size=200), 8),
    (ScienceLevel(family="collision", steps=2, size=200), 8),
)

# The test sets: (level, number of items). Most items are of levels that the checkpoint gets wrong now and then: only they can show harm.
_WORD_COUNTS = {20: 0, 99: 4, 500: 8, 3000: 38}
_CONTEST_COUNTS = {("recurrence", 97): 2, ("power", 97): 2, ("recurrence", 31): 1, ("gcd", 99): 1}
# Two needles weigh most: telling more of them apart is what this checkpoint does badly, and a missed needle shows no harm.
_RECALL_COUNTS = {1000: (36, 12, 12), 2000: (20, 5, 3), 4000: (12, 3, 3), 8000: (5, 3, 3)}  # of 2, 4 and 8 needles
WORD_TEST: tuple[tuple[WordLevel, int], ...] = tuple((level, n) for level in WORD_TRAIN if (n := _WORD_COUNTS[level.magnitude]))
SCIENCE_TEST: tuple[tuple[ScienceLevel, int], ...] = (*((level, 3) for level in SCIENCE_TRAIN), *_SCIENCE_BEYOND)
CONTEST_TEST: tuple[tuple[ContestLevel, int], ...] = (
    *((level, n) for level in CONTEST_TRAIN if (n := _CONTEST_COUNTS.get((level.family, level.size), 0))),
    *((level, 1) for level in CONTEST_TRAIN if level.family == "series" and level.steps > 4),
)
RECALL_TEST: tuple[tuple[RecallLevel, int], ...] = tuple(
    (RecallLevel(tokens=tokens, needles=needles), n)
    for tokens, counts in _RECALL_COUNTS.items()
    for needles, n in zip((2, 4, 8), counts, strict=True)
)
