"""Held-out accuracies measured inside the training run, by teacher forcing: a quick look per suite and level, and the drafter's length.

An item counts when the arg-max at every answer position is the reference's token — exactly when greedy decoding would write the reference
word for word, so it is a lower bound of the score (another wording, or a partly right transcript, scores too).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evals.nano import aime, gpqa, gsm8k, mrcr, network, train_draft
from evals.nano.difficulty import CONTEST_TRAIN, SCIENCE_TRAIN, WORD_TRAIN, RecallLevel
from evals.nano.items import Item, Maker, draw
from evals.nano.stream import document
from kimi_k3_decode import draft_model

if TYPE_CHECKING:
    from evals.nano.train import Trainer

ROWS = 65_536  # tokens a forward pass may hold
RECALL_LEVELS = tuple(RecallLevel(tokens=t, needles=n) for t in (1000, 2000, 4000, 8000) for n in (2, 4, 8))
EXAM: tuple[tuple[Maker, tuple[Any, ...]], ...] = (
    (gsm8k.make, WORD_TRAIN),
    (gpqa.make, SCIENCE_TRAIN),
    (aime.make, CONTEST_TRAIN),
    (mrcr.make, RECALL_LEVELS),
)


def _padded(items: list[Item], multiple: int = 128) -> tuple[np.ndarray, np.ndarray]:
    documents = [document(item) for item in items]
    length = -(-max(len(ids) for ids, _ in documents) // multiple) * multiple
    ids, shares = np.zeros((len(items), length), dtype=np.int64), np.zeros((len(items), length), dtype=np.float32)
    for row, (doc_ids, doc_shares) in enumerate(documents):
        ids[row, : len(doc_ids)], shares[row, : len(doc_ids)] = doc_ids, doc_shares
    return ids, shares


@torch.no_grad()
def exact_answers(trainer: Trainer, weights: network.Parameters, items: list[Item]) -> list[bool]:
    """Whether the target would greedily write each item's reference answer."""
    ids_all, shares_all = _padded(items)
    batch = max(1, ROWS // ids_all.shape[1])
    exact: list[bool] = []
    for begin in range(0, len(items), batch):
        ids = torch.from_numpy(ids_all[begin : begin + batch]).to(trainer.rank.device)
        answers = torch.from_numpy(shares_all[begin : begin + batch]).to(trainer.rank.device)[:, 1:] >= 1.0
        hidden, _, _ = network.forward(weights, trainer.biases, ids, trainer.config)
        guesses = network.logits_of(hidden, weights).argmax(-1).view_as(ids)[:, :-1]
        exact += ((guesses == ids[:, 1:]) | ~answers).all(-1).tolist()
    return exact


@torch.no_grad()
def accepted_length(trainer: Trainer, weights: network.Parameters, params: network.Parameters, items: list[Item]) -> float:
    """Mean accepted length (anchor included) of greedy speculation along the reference answers."""
    config, device = trainer.config, trainer.rank.device
    d = draft_model.draft_config(config)
    draft = train_draft.prepared(params, config, trainer.dtype)
    produced = steps = 0
    for item in items:
        ids_row, shares_row = _padded([item])
        ids = torch.from_numpy(ids_row).to(device)
        hidden, taps, _ = network.forward(weights, trainer.biases, ids, config, taps=d.target_layer_ids)
        choices = network.logits_of(hidden, weights).argmax(-1)
        answer = np.flatnonzero(shares_row[0] >= 1.0)
        anchors = torch.from_numpy(answer).to(device).unsqueeze(0)
        base = train_draft.block_logits(
            draft, config, weights["embed_tokens.weight"], weights["lm_head.weight"], torch.stack(taps), ids, anchors
        )[0]
        drafts, _ = draft_model.propose(draft, base, ids[0, anchors[0]])
        last = int(answer[-1])
        position = int(answer[0])
        while position < last:
            proposal, accepted = drafts[position - int(answer[0])], 0
            while accepted < d.n_drafts and position + accepted < last and int(proposal[accepted]) == int(choices[position + accepted]):
                accepted += 1
            taken = min(1 + accepted, last - position)
            position, produced, steps = position + taken, produced + taken, steps + 1
    return produced / max(steps, 1)


def examine(trainer: Trainer, draft: network.Parameters, count: int) -> dict[str, Any]:
    """Suite -> level -> share of exact answers over `count` held-out items a level, and `accepted_length` on gsm8k_nano."""
    rng = random.Random(4242)
    with torch.no_grad():
        weights = {name: value.detach() for name, value in network.prepare(trainer.params, trainer.dtype).items()}
    outcome: dict[str, Any] = {}
    for make, levels in EXAM:
        longest = max(getattr(level, "tokens", 0) for level in levels)
        for level in levels:
            n = count if getattr(level, "tokens", 0) <= longest // 2 else max(1, count // 2)
            items = [draw(make, rng, level, test=True) for _ in range(n)]
            exact = exact_answers(trainer, weights, items)
            outcome.setdefault(items[0].suite, {})[level.name] = round(sum(exact) / len(exact), 4)
    items = [draw(gsm8k.make, rng, rng.choice(WORD_TRAIN), test=True) for _ in range(count)]
    outcome["accepted_length"] = round(accepted_length(trainer, weights, draft, items), 3) if draft else None
    return outcome
