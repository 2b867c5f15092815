"""gsm8k_nano: short word problems about one quantity that changes, solved line by line and closed with `#### n`."""

from __future__ import annotations

import random

from evals.nano.difficulty import WordLevel
from evals.nano.items import Item

NAMES = (
    ("Tom", "He"), ("Ann", "She"), ("Raj", "He"), ("Mia", "She"), ("Leo", "He"), ("Zoe", "She"), ("Ken", "He"), ("Ida", "She"),
    ("Sam", "He"), ("Eva", "She"), ("Max", "He"), ("Lin", "She"), ("Ben", "He"), ("Ada", "She"), ("Jon", "He"), ("Uma", "She"),
)  # fmt: skip
THINGS = ("apples", "cards", "coins", "shells", "stamps", "beads", "pens", "books", "eggs", "pears", "marbles", "cups")
GAINS = ("buys {n} more", "finds {n} more", "gets {n} from {other}", "wins {n} more")
LOSSES = ("gives {n} to {other}", "loses {n}", "sells {n}", "drops {n}")
TIMES = ("then has {n} times as many", "trades to get {n} times as many")
SHARES = ("splits them into {n} equal piles and keeps one", "shares them equally among {n} people and keeps one part")
ASIDES = ("{other} has {n} {stuff}.", "{other} saw {n} {stuff} at home.", "The shop has {n} {stuff}.")
LARGEST_VALUE, LARGEST_VALUE_HARD = 999, 30_000  # the second from magnitude 1000 up


def _operation(rng: random.Random, value: int, level: WordLevel) -> tuple[str, int, int]:
    """A legal next operation on `value`: (symbol, operand, result)."""
    largest = LARGEST_VALUE if level.magnitude < 1000 else LARGEST_VALUE_HARD
    while True:
        symbol = rng.choice("++--*/")
        if symbol == "+":
            n = rng.randint(2, level.magnitude)
            result = value + n
        elif symbol == "-":
            n = rng.randint(2, max(2, min(level.magnitude, value - 1)))
            result = value - n
        elif symbol == "*":
            n = rng.randint(2, 9 if level.magnitude > 20 else 5)
            result = value * n
        else:
            divisors = [d for d in range(2, 10) if value % d == 0]
            if not divisors:
                continue
            n = rng.choice(divisors)
            result = value // n
        if 1 <= result <= largest:
            return symbol, n, result


def _aside(rng: random.Random, level: WordLevel, thing: str, others: list[str]) -> str:
    """A sentence with a number that must be ignored."""
    stuff = rng.choice([other for other in THINGS if other != thing])
    return rng.choice(ASIDES).format(n=rng.randint(2, level.magnitude), other=rng.choice(others), stuff=stuff)


def make(rng: random.Random, level: WordLevel) -> Item:
    """One problem of the level; `fields["target"]` is the final integer."""
    name, pronoun = rng.choice(NAMES)
    others = [other for other, _ in NAMES if other != name]
    thing = rng.choice(THINGS)
    value = rng.randint(2, level.magnitude)
    events, lines = [], []
    phrases = {"+": GAINS, "-": LOSSES, "*": TIMES, "/": SHARES}
    for _ in range(level.steps):
        symbol, n, result = _operation(rng, value, level)
        events.append(rng.choice(phrases[symbol]).format(n=n, other=rng.choice(others)))
        lines.append(f"{value} {symbol} {n} = {result}")
        value = result
    sentences, asides = [f"{name} has {lines[0].split()[0]} {thing}."], sorted(rng.randrange(level.steps) for _ in range(level.distractors))
    for index, event in enumerate(events):
        subject = pronoun
        for _ in range(asides.count(index)):
            sentences.append(_aside(rng, level, thing, others))
            subject = name  # after someone else's sentence a pronoun would be ambiguous
        sentences.append(f"{subject} {event}.")
    question = f"{' '.join(sentences)} How many {thing} does {name} have now?"
    worked = "\n".join(lines) + f"\n#### {value}"
    return Item(
        suite="gsm8k_nano",
        level=level.name,
        prompt=f"Question: {question}\nAnswer:",
        answer=f" {worked}",
        key="\n".join(lines),
        fields={"question": question, "target": str(value)},
    )
