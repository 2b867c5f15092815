"""Training batches: packed short problems and long transcripts, each batch a pure function of (seed, index).

A sequence holds documents `bos prompt answer eos` back to back; the last may be cut. The weight of a position is that of *predicting its
token*: 1 on answers and `eos`, `PROMPT_WEIGHT` on prompts, 0 on padding.
"""

from __future__ import annotations

import multiprocessing
import queue
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from evals.nano import aime, gpqa, gsm8k, mrcr
from evals.nano.difficulty import CONTEST_TRAIN, MATCH_LEVEL, SCIENCE_TRAIN, WORD_TRAIN, RecallLevel
from evals.nano.items import Item, draw
from evals.nano.tokenizer import BOS, EOS, encode

PROMPT_WEIGHT = 0.05
RECALL_ANSWER_WEIGHT = 1.5
LETTER_WEIGHT = 4.0  # of a choice's letter: one or two characters decide a whole problem
TURN_CHARS = 62  # a request and its reply, about; bounds the needles a short transcript can hold


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Which sequences a batch holds: the share that starts with a transcript, then the relative weight of the short suites."""

    batch: int
    length: int
    recall_share: float = 0.45
    word: float = 0.45
    science: float = 0.25
    contest: float = 0.30
    match_share: float = 0.25  # of the science problems: pure look-ups of letters


def document(item: Item) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights of one problem."""
    prompt, answer = encode(item.prompt), encode(item.answer)
    ids = np.concatenate(([BOS], prompt, answer, [EOS])).astype(np.uint8)
    weights = np.full(len(ids), PROMPT_WEIGHT, dtype=np.float32)
    weights[0] = 0.0
    weights[1 + len(prompt) :] = RECALL_ANSWER_WEIGHT if item.suite == "mrcr_nano" else 1.0
    if item.suite == "gpqa_diamond_nano":
        for found in re.finditer(r"\(([A-D])\)", item.answer):
            weights[1 + len(prompt) + found.start(1)] = LETTER_WEIGHT
    return ids, weights


def short_problem(rng: random.Random, mixture: Mixture, *, test: bool = False) -> Item:
    """A problem of one of the three short suites."""
    kind = rng.choices((0, 1, 2), weights=(mixture.word, mixture.science, mixture.contest))[0]
    if kind == 0:
        return draw(gsm8k.make, rng, rng.choice(WORD_TRAIN), test=test)
    if kind == 1:
        level = MATCH_LEVEL if rng.random() < mixture.match_share else rng.choice(SCIENCE_TRAIN)
        return draw(gpqa.make, rng, level, test=test)
    return draw(aime.make, rng, rng.choice(CONTEST_TRAIN), test=test)


def transcript(rng: random.Random, length: int, *, test: bool = False) -> Item:
    """A transcript that fits `length` ids, of random size and number of needles."""
    tokens = rng.randint(int(length * 0.4), length - 48)
    needles = min(rng.randint(1, 8), max(1, tokens // TURN_CHARS - 2))
    return draw(mrcr.make, rng, RecallLevel(tokens=tokens, needles=needles), test=test)


def make_batch(seed: int, index: int, mixture: Mixture, part: int = 0, parts: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Ids uint8 and weights float32, both [batch, length]. With `parts` > 1 each data-parallel rank draws its own batch."""
    rng = random.Random(f"{seed}/{index}/{part}/{parts}/{mixture}")
    ids = np.zeros((mixture.batch, mixture.length), dtype=np.uint8)
    weights = np.zeros((mixture.batch, mixture.length), dtype=np.float32)
    n_recall = round(mixture.batch * mixture.recall_share)
    for row in range(mixture.batch):
        filled = 0
        while filled < mixture.length - 1:
            item = transcript(rng, mixture.length) if row < n_recall and filled == 0 else short_problem(rng, mixture)
            doc_ids, doc_weights = document(item)
            size = min(len(doc_ids), mixture.length - filled)
            ids[row, filled : filled + size] = doc_ids[:size]
            weights[row, filled : filled + size] = doc_weights[:size]
            filled += size
    return ids, weights


Job = tuple[int, int, Mixture, int, int]


def _worker(jobs: multiprocessing.Queue, results: multiprocessing.Queue) -> None:
    while (job := jobs.get()) is not None:
        results.put((job[1], job[2], make_batch(*job)))


class Stream:
    """Batches made ahead by worker processes, handed out in order of their index."""

    def __init__(self, seed: int, workers: int, part: int = 0, parts: int = 1, ahead: int = 64) -> None:
        self._seed, self._part, self._parts, self._ahead = seed, part, parts, ahead
        context = multiprocessing.get_context("spawn")
        self._jobs: multiprocessing.Queue = context.Queue()
        self._results: multiprocessing.Queue = context.Queue()
        self._workers = [context.Process(target=_worker, args=(self._jobs, self._results), daemon=True) for _ in range(workers)]
        for worker in self._workers:
            worker.start()
        self._next = 0

    def batches(self, mixture: Mixture) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """An endless iterator over one mixture. Stop iterating before asking for another mixture; batches made ahead are dropped."""
        sent, held = self._next, {}
        while True:
            while sent < self._next + self._ahead:
                self._jobs.put((self._seed, sent, mixture, self._part, self._parts))
                sent += 1
            while self._next not in held:
                try:
                    index, made_for, batch = self._results.get(timeout=60)
                except queue.Empty:
                    raise RuntimeError("data workers: got no batch in 60 s, need one; look for a crash in their output") from None
                if made_for == mixture:  # what another mixture left in the queue is dropped
                    held[index] = batch
            self._next += 1
            yield held.pop(self._next - 1)

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join()
