"""gpqa_diamond_nano: four-way science questions with shuffled choices, worked briefly, closed with `The answer is (C)`.

A choice's letter stands after its text. With the letter in front, a model of this size solved the questions and still named letters at
random: finding what *precedes* a match is much harder to learn than finding what follows it (see TRAINING.md).
"""

from __future__ import annotations

import random

from evals.nano.difficulty import ScienceLevel
from evals.nano.items import Item

LETTERS = "ABCD"
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


def _substance(rng: random.Random) -> str:
    return rng.choice(CONSONANTS) + rng.choice(VOWELS) + rng.choice(CONSONANTS)


def _distinct(rng: random.Random, count: int) -> list[str]:
    names: list[str] = []
    while len(names) < count:
        name = _substance(rng)
        if name not in names:
            names.append(name)
    return names


def _reaction(rng: random.Random, level: ScienceLevel) -> tuple[str, str, str, list[str]]:
    """A chain of reactions looked up in a list of facts; wrong choices are other products of the list."""
    names = _distinct(rng, 1 + 2 * level.steps + 3 * level.distractors + 4)
    pool = iter(names)
    current = next(pool)
    facts, added, worked, products = [], [], [], []
    first = current
    for _ in range(level.steps):
        reagent, product = next(pool), next(pool)
        facts.append(f"{current}+{reagent}={product}")
        worked.append(f"{current}+{reagent}={product}")
        added.append(reagent)
        products.append(product)
        current = product
    wrong = products[:-1]
    for _ in range(level.distractors):
        a, b, product = next(pool), next(pool), next(pool)
        # half of the irrelevant facts share a reagent with the chain, so matching one name is not enough
        if rng.random() < 0.5:
            b = rng.choice(added)
        facts.append(f"{a}+{b}={product}")
        wrong.append(product)
    wrong += list(pool)
    rng.shuffle(facts)
    question = f"Reactions: {', '.join(facts)}. To {first} we add {', then '.join(added)}. What is left?"
    return question, ", ".join(worked), current, rng.sample(wrong[:6], 3)


def _decay(rng: random.Random, level: ScienceLevel) -> tuple[str, str, str, list[str]]:
    halvings, period = level.steps, rng.randint(2, 12)
    left = rng.randint(3, max(600, 9 * level.size) >> halvings)
    mass = left << halvings
    masses = [mass >> i for i in range(halvings + 1)]
    element = _substance(rng)
    question = f"{mass} g of {element} has a half-life of {period} h. How many g remain after {period * halvings} h?"
    worked = f"{period * halvings}/{period}={halvings}, " + ">".join(map(str, masses))
    wrong = {left * 2, left * 4, left + period, max(1, left - 1), left + 2, left // 2 + 1} - {left}
    return question, worked, str(left), [str(w) for w in rng.sample(sorted(wrong), 3)]


def _circuit(rng: random.Random, level: ScienceLevel) -> tuple[str, str, str, list[str]]:
    resistors = [rng.randint(1, level.size) for _ in range(level.steps + 1)]
    current, total, worked = rng.randint(2, 9), resistors[0], []
    for resistor in resistors[1:]:
        worked.append(f"{total}+{resistor}={total + resistor}")
        total += resistor
    volts = total * current
    listed = ", ".join(map(str, resistors))
    question = f"Resistors of {listed} ohm in series on {volts} V. What current flows, in A?"
    worked.append(f"{volts}/{total}={current}")
    wrong = rng.sample([c for c in range(1, 14) if c != current], 3)
    return question, ", ".join(worked), str(current), [str(w) for w in wrong]


def _collision(rng: random.Random, level: ScienceLevel) -> tuple[str, str, str, list[str]]:
    """Two carts stick together; with two steps the second one moves as well."""
    while True:
        m1, m2, v1 = rng.randint(1, level.size), rng.randint(1, level.size), rng.randint(2, max(20, level.size))
        v2 = rng.randint(1, max(9, level.size // 2)) if level.steps == 2 else 0
        momentum = m1 * v1 + m2 * v2
        if momentum % (m1 + m2) == 0:
            break
    speed = momentum // (m1 + m2)
    other = f"moving ahead at {v2} m/s" if v2 else "at rest"
    question = f"A {m1} kg cart at {v1} m/s hits a {m2} kg cart {other} and sticks. What is the final speed, in m/s?"
    worked = f"{m1}*{v1}={m1 * v1}"
    if v2:
        worked += f", {m2}*{v2}={m2 * v2}, {m1 * v1}+{m2 * v2}={momentum}"
    worked += f", {m1}+{m2}={m1 + m2}, {momentum}/{m1 + m2}={speed}"
    wrong = rng.sample([s for s in range(max(1, speed - 4), speed + 6) if s != speed], 3)
    return question, worked, str(speed), [str(w) for w in wrong]


def _match(rng: random.Random, level: ScienceLevel) -> tuple[str, str, str, list[str]]:
    """Training only: name the letter of every choice. Four look-ups a problem teach what one a problem does not."""
    if rng.random() < 0.5:
        names = _distinct(rng, 4)
    else:
        names = [str(n) for n in rng.sample(range(1, 10 ** rng.randint(1, 3) + 4), 4)]
    return f"Give the letters of {', '.join(names)}.", "", names[-1], names[:-1]


FAMILIES = {"reaction": _reaction, "decay": _decay, "circuit": _circuit, "collision": _collision, "match": _match}


def make(rng: random.Random, level: ScienceLevel) -> Item:
    """One question of the level; `fields` hold the choices in shown order and the right letter as `target`."""
    question, worked, right, wrong = FAMILIES[level.family](rng, level)
    choices = [right, *wrong]
    rng.shuffle(choices)
    letter = LETTERS[choices.index(right)]
    if level.family == "match":
        worked = ", ".join(f"{name} ({LETTERS[choices.index(name)]})" for name in wrong) + f", {right}"
    shown = "\n".join(f"{choice} ({mark})" for mark, choice in zip(LETTERS, choices, strict=True))
    return Item(
        suite="gpqa_diamond_nano",
        level=level.name,
        prompt=f"Question: {question}\nChoices:\n{shown}\nAnswer:",
        answer=f" {worked} ({letter}). The answer is ({letter})",
        key=f"{level.family}|{'|'.join(sorted(choices)) if level.family == 'match' else worked}",
        fields={"question": question, "choices": choices, "target": f"({letter})"},
    )
