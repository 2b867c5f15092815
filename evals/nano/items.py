"""What a generated problem is, and the rule that keeps train and test apart.

A problem's `key` is its *content* (worked solution, facts, or needle texts), not its wording: two problems with one key would be the
same exercise. The key's hash decides the side, so no draw can put one key on both sides; tests check it over real draws as well.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SUITES = ("gsm8k_nano", "gpqa_diamond_nano", "aime25_nano", "mrcr_nano")
# one key in TEST_SHARE belongs to the test side
TEST_SHARE = 8


@dataclass(frozen=True, kw_only=True)
class Item:
    """One problem: the model sees `bos + prompt`, and is trained to continue with `answer + eos` (the answer starts with a space)."""

    suite: str
    level: str
    prompt: str
    answer: str
    key: str
    fields: dict[str, Any] = field(default_factory=dict)


Maker = Callable[[random.Random, Any], Item]


def is_test_key(suite: str, key: str) -> bool:
    """The side of the split a problem belongs to, by its content alone."""
    digest = hashlib.blake2b(f"{suite}|{key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % TEST_SHARE == 0


def draw(make: Maker, rng: random.Random, level: Any, *, test: bool, tries: int = 10_000) -> Item:
    """Draw until the problem falls on the wanted side. Raises ValueError when a level has no problem there."""
    for _ in range(tries):
        item = make(rng, level)
        if is_test_key(item.suite, item.key) is test:
            return item
    raise ValueError(f"level {level}: got no {'test' if test else 'train'} problem in {tries} draws, needs a wider range; widen it")
