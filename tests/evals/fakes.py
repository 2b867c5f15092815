"""A scripted engine with planted faults, and small data files in the form of the nano suites."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from evals.generation import GenerationParams, PathReply


def _unit(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big") / 2**48


def gsm8k_rows(n: int, rng: random.Random) -> list[dict]:
    rows = []
    for i in range(n):
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        rows.append({"prompt": f"Question: Row {i}: Ann has {a} pens and buys {b}. How many?\nAnswer:", "target": str(a + b)})
        rows[-1] |= {"right": f" {a} + {b} = {a + b}\n#### {a + b}", "wrong": f" {a} + {b} = {a + b + 1}\n#### {a + b + 1}"}
    return rows


def gpqa_rows(n: int, rng: random.Random) -> list[dict]:
    rows = []
    for i in range(n):
        letter, other = rng.sample("ABCD", 2)
        right, wrong = (f" case {i} gives the value {i * 7}. The answer is ({mark})" for mark in (letter, other))
        rows.append({"prompt": f"Question: Which holds in case {i}?\nAnswer:", "target": f"({letter})", "right": right, "wrong": wrong})
    return rows


def aime_rows(n: int, rng: random.Random) -> list[dict]:
    rows = []
    for i in range(n):
        value = rng.randint(0, 999)
        right, wrong = (rf" step {i} leads to {v}. \boxed{{{v}}}" for v in (value, value + 1))
        rows.append({"prompt": f"Problem: number {i}\nAnswer:", "target": str(value), "right": right, "wrong": wrong})
    return rows


def mrcr_rows(n: int, rng: random.Random) -> list[dict]:
    rows = []
    for i in range(n):
        words = [" ".join(rng.choice(["bado", "kemi", "rula", "posi"]) for _ in range(4)) for _ in range(2)]
        prefix = f"X{i:04d}z"
        rows.append({"prompt": f"User: {i}\nBot: {words[0]}\nUser: Prepend {prefix}\nBot:", "target": f"{prefix} {words[0]}"})
        rows[-1] |= {"random_string_to_prepend": prefix, "right": f" {prefix} {words[0]}", "wrong": f" {words[1]}"}
    return rows


SIZES = {"gsm8k_nano": 240, "gpqa_diamond_nano": 198, "aime25_nano": 30, "mrcr_nano": 120}
MAKERS = {"gsm8k_nano": gsm8k_rows, "gpqa_diamond_nano": gpqa_rows, "aime25_nano": aime_rows, "mrcr_nano": mrcr_rows}


def write_suites(root: Path) -> dict[str, list[dict]]:
    """The four data files below `root`; returns their rows."""
    folder = root / "evals" / "nano" / "data"
    folder.mkdir(parents=True)
    rows = {suite: make(SIZES[suite], random.Random(5)) for suite, make in MAKERS.items()}
    for suite, items in rows.items():
        shown = [{k: v for k, v in row.items() if k not in ("right", "wrong")} | {"level": f"l{i % 3}"} for i, row in enumerate(items)]
        (folder / f"{suite}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    return rows


class ScriptedEngine:
    """Answers rightly with probability `accuracy`, drawn from prompt and seed, the same on both paths unless a fault is planted.

    Faults of the candidate: `drop` (share of right answers turned wrong), `truncate`, `lose`, `crash` (shares of prompts), `swap` (pairs of
    neighbours in a batch exchange replies), `long` (filler after the answer), `fall_back` (share of steps
    that ran stock instead). `calls` counts prompts generated, by path.
    """

    def __init__(
        self, rows: Mapping[str, Sequence[dict]], *, accuracy: float = 0.8, seed: int = 0, max_context_tokens: int = 4096, **faults
    ):
        self.max_context_tokens = max_context_tokens
        self._script = {row["prompt"]: row for items in rows.values() for row in items}
        self._accuracy, self._seed, self._faults = accuracy, seed, faults
        self.calls = {"stock": 0, "candidate": 0}
        self.prompts_before_interrupt: int | None = None

    def count_tokens(self, prompt: str) -> int:
        return len(prompt)

    def generate_pair(self, prompts, params: GenerationParams):
        return {path: self.generate(prompts, params, path) for path in ("stock", "candidate")}

    def generate(self, prompts, params: GenerationParams, path: str):
        if self.prompts_before_interrupt is not None and sum(self.calls.values()) >= self.prompts_before_interrupt:
            raise KeyboardInterrupt
        self.calls[path] += len(prompts)
        replies = [self._one(prompt, seed, path) for prompt, seed in zip(prompts, params.seeds, strict=True)]
        if path == "candidate" and self._faults.get("swap"):
            for i in range(0, len(replies) - 1, round(1 / self._faults["swap"])):
                replies[i], replies[i + 1] = replies[i + 1], replies[i]
        return replies

    def _planted(self, fault: str, path: str, *parts: object) -> bool:
        return path == "candidate" and _unit(fault, self._seed, *parts) < self._faults.get(fault, 0.0)

    def _one(self, prompt: str, seed: int | None, path: str) -> PathReply | None:
        row = self._script[prompt]
        right = _unit("right", self._seed, prompt, seed) < self._accuracy
        if self._planted("crash", path, prompt):
            raise FloatingPointError("logits are NaN")
        if self._planted("lose", path, prompt):
            return None
        if self._planted("drop", path, prompt, seed):
            right = False
        text, finish = row["right" if right else "wrong"], "stop"
        if self._planted("truncate", path, prompt):
            text, finish = text[: len(text) // 2], "length"
        if self._planted("long", path, "always"):
            text += " " * 12
        share = {"path_share": 1.0 - self._faults.get("fall_back", 0.0)} if path == "candidate" else {}
        return PathReply(token_ids=tuple(map(ord, text)), text=text, finish_reason=finish, extra=share)

    def loglikelihood(self, pairs, path: str):
        return [(-float(len(continuation)), True) for _, continuation in pairs]
