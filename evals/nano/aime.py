"""aime25_nano: integer-answer problems (recurrences and powers modulo m, gcd, series), worked, closed with `\\boxed{n}`."""

from __future__ import annotations

import random

from evals.nano.difficulty import ContestLevel
from evals.nano.items import Item


def _recurrence(rng: random.Random, level: ContestLevel) -> tuple[str, list[str], int]:
    modulus = rng.randint(level.size * 2 // 3, level.size)
    factor, shift, value = rng.randint(2, 9), rng.randint(1, 9), rng.randint(1, modulus - 1)
    problem = f"Let a(0)={value} and a(n+1)={factor}*a(n)+{shift} mod {modulus}. Find a({level.steps})."
    lines = []
    for _ in range(level.steps):
        product = factor * value
        result = (product + shift) % modulus
        lines.append(f"{factor}*{value}={product}+{shift}={product + shift}>{result}")
        value = result
    return problem, lines, value


def _power(rng: random.Random, level: ContestLevel) -> tuple[str, list[str], int]:
    modulus, base = rng.randint(level.size // 2, level.size), rng.randint(2, 12)
    problem = f"Find the remainder of {base}^{level.steps} divided by {modulus}."
    value, lines = base % modulus, []
    for _ in range(level.steps - 1):
        product = value * base
        lines.append(f"{value}*{base}={product}>{product % modulus}")
        value = product % modulus
    return problem, lines, value


def _gcd(rng: random.Random, level: ContestLevel) -> tuple[str, list[str], int]:
    while True:
        low = rng.randint(6, level.size // 2)
        a, b = rng.randint(low + 1, level.size), low
        problem, lines = f"Find gcd({a},{b}).", []
        while b:
            lines.append(f"{a}-{a // b}*{b}={a % b}")
            a, b = b, a % b
        if len(lines) == level.steps:
            return problem, lines, a


def _series(rng: random.Random, level: ContestLevel) -> tuple[str, list[str], int]:
    first, difference = rng.randint(1, level.size), rng.randint(2, 9)
    problem = f"Find the sum of the first {level.steps} terms of {first}, {first + difference}, {first + 2 * difference}, ..."
    term = total = first
    lines = []
    for _ in range(level.steps - 1):
        term += difference
        lines.append(f"{total}+{term}={total + term}")
        total += term
    return problem, lines, total


FAMILIES = {"recurrence": _recurrence, "power": _power, "gcd": _gcd, "series": _series}


def make(rng: random.Random, level: ContestLevel) -> Item:
    """One problem of the level; `fields["target"]` is the integer in the box."""
    problem, lines, value = FAMILIES[level.family](rng, level)
    return Item(
        suite="aime25_nano",
        level=level.name,
        prompt=f"Problem: {problem}\nAnswer:",
        answer=f" {', '.join(lines)}. \\boxed{{{value}}}",
        key=f"{level.family}|{problem}",
        fields={"problem": problem, "target": str(value)},
    )
