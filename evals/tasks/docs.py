"""Rows of the public data sets, brought into the form the tasks ask for. Every function is a pure function of the row.

`load_from_cache_file=False` everywhere: a map's result that is cached under a name that forgets its inputs is how one run gets another's
questions.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import datasets


def _gpqa_text(text: str | None) -> str:
    """The cleaning that lm-eval applies to choices, so that prompts equal its own."""
    if text is None:
        return " "
    return text.strip().replace(" [title]", ". ").replace("  ", " ")


def gpqa(dataset: datasets.Dataset) -> datasets.Dataset:
    """Shuffle the four choices by a seed of the question itself: same row, same prompt, in every process."""

    def shuffled(doc: dict[str, Any]) -> dict[str, Any]:
        right = _gpqa_text(doc["Correct Answer"])
        choices = [*(_gpqa_text(doc[f"Incorrect Answer {i}"]) for i in (1, 2, 3)), right]
        seed = hashlib.sha256(doc["Question"].encode()).digest()
        random.Random(seed).shuffle(choices)
        numbered = {f"choice{i}": choice for i, choice in enumerate(choices, start=1)}
        return {**numbered, "choices": choices, "answer": f"({'ABCD'[choices.index(right)]})"}

    return dataset.map(shuffled, load_from_cache_file=False)


def aime25(dataset: datasets.Dataset) -> datasets.Dataset:
    """Fields `problem` and `answer`, whichever of the published wordings of the columns the file has."""

    def named(doc: dict[str, Any]) -> dict[str, Any]:
        problem = next(doc[k] for k in ("problem", "question") if k in doc)
        answer = next(doc[k] for k in ("answer", "true_answer") if k in doc)
        return {"problem": problem, "answer": str(answer)}

    return dataset.map(named, remove_columns=dataset.column_names, load_from_cache_file=False)


def mrcr(dataset: datasets.Dataset) -> datasets.Dataset:
    """Check each row once, without holding the prompts (up to 5 M characters) in memory."""
    needed = {"prompt", "answer", "random_string_to_prepend"}
    absent = sorted(needed - set(dataset.column_names))
    if absent:
        raise ValueError(f"mrcr rows: got no column {absent}, need {sorted(needed)}; use the published files")
    return dataset


def chat_messages(prompt: str) -> list[dict[str, str]] | None:
    """The messages of a prompt that is a JSON list of chat messages (MRCR), or None for plain text."""
    if not prompt.startswith("["):
        return None
    try:
        messages = json.loads(prompt)
    except ValueError:
        return None
    ok = isinstance(messages, list) and bool(messages) and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages)
    return [{"role": str(m["role"]), "content": str(m["content"])} for m in messages] if ok else None


def transcript(messages: Sequence[Mapping[str, str]]) -> str:
    """Chat messages as plain text for a model without a chat template, ending where the model's reply begins."""
    names = {"user": "User", "assistant": "Bot", "system": "System"}
    turns = [f"{names.get(m['role'], m['role'])}: {m['content']}" for m in messages]
    return re.sub(r"\s+$", "", "\n".join(turns)) + "\nBot:"
