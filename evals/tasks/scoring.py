"""Scores of one reply, for tasks that lm-eval does not score or scores in another way. Each takes `(doc, [text])`, as lm-eval calls it.

The MRCR rule is that of the published data set's card (openai/mrcr): a reply that does not start with the required random string scores 0,
otherwise `difflib`'s ratio of matching characters after the string is taken off both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

_BOXED = re.compile(r"\\boxed\{\s*(-?\d+)\s*\}")


def boxed_integer(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    r"""1 when the last `\boxed{n}` of the reply is the target integer."""
    found = _BOXED.findall(results[0])
    return {"exact_match": float(bool(found) and int(found[-1]) == int(doc["target"]))}


def prefixed_ratio(reply: str, answer: str, prefix: str) -> float:
    """MRCR score in [0, 1]; `answer` starts with `prefix`, and so must the reply."""
    if not prefix or not answer.startswith(prefix):
        raise ValueError(f"MRCR answer: got {answer[:40]!r}, needs to start with its prefix {prefix!r}; the data file is damaged")
    if not reply.startswith(prefix):
        return 0.0
    return SequenceMatcher(None, reply.removeprefix(prefix), answer.removeprefix(prefix)).ratio()


def mrcr(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The published rule, without any cleaning of the reply."""
    return {"mrcr_ratio": prefixed_ratio(results[0], doc["answer"], doc["random_string_to_prepend"])}


def mrcr_nano(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The same rule for nano-K3, whose plain-text transcript puts one space before a reply."""
    return {"mrcr_ratio": prefixed_ratio(results[0].strip(), doc["target"], doc["random_string_to_prepend"])}
