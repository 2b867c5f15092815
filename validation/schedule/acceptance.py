"""Speculation is counted as it happens: greedy output, accepted length, synthetic length, and that every draft row matters.

Drafts are scripted, so what must be accepted is known beforehand; the path is the FP64 oracle, so no near tie depends on rounding. What is
under test is the loop around a path, which performance runs rest on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from validation.core.types import Case, Measurement
from validation.numerics.slices import draw_tokens, prefilled, slice_model

DRAFTS, REQUESTS, TOKENS = 7, 3, 24
SYNTHETIC_LENGTHS = (1.0, 2.5, 3.84, 6.0, 8.0)
SYNTHETIC_DRAWS = 10_000


@dataclass
class ScriptedProposer:
    """Proposes the known continuation with a wrong token at a place that changes from step to step, or right ones only."""

    truth: Sequence[Sequence[int]]
    reached: list[int]
    vocab: int
    n_drafts: int = DRAFTS
    step: int = 0

    def propose(self, requests: Sequence[int], anchor_B: torch.Tensor, sampler: Any) -> Any:
        from kimi_k3_decode.dspark import Proposal

        rows = []
        for request in requests:
            begin = self.reached[request]
            row = list(self.truth[request][begin : begin + self.n_drafts])
            row += [0] * (self.n_drafts - len(row))
            wrong = (self.step + request) % (self.n_drafts + 1)
            if wrong < self.n_drafts:
                row[wrong] = (row[wrong] + 1) % self.vocab
            rows.append(row)
        self.step += 1
        drafts = torch.tensor(rows)
        return Proposal(drafts_BN=drafts, probabilities_BNV=torch.nn.functional.one_hot(drafts, self.vocab).double())

    def observe(self, requests: Sequence[int], taps_IBTD: torch.Tensor, count_B: torch.Tensor) -> None:
        return None


class _WithoutTaps:
    """The path for a proposer that needs no hidden states."""

    def __init__(self, path: Any) -> None:
        self._path = path

    def step(self, batch: Any, caches: Any, *, routing: Any = None, taps: bool = False) -> Any:
        return self._path.step(batch, caches, routing=routing)


def measure_acceptance(case: Case, targets: Mapping[str, Any]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
    """Greedy speculation over scripted drafts against plain greedy decode, and what the counters made of it."""
    from kimi_k3_decode.dspark import SpeculativeDecoder, SyntheticAcceptance

    seed = int(case.seed + 1000 * targets["stock"].settings.seed)
    weights = slice_model(targets["stock"].weights)
    path = targets["oracle"].build(weights)
    base = prefilled(weights, (20, 5, 33), q_max=1 + DRAFTS, seed=seed, room=TOKENS + 4 * DRAFTS).fork(torch.float64)
    anchors = draw_tokens(weights, (REQUESTS,), seed + 1).tolist()
    truth = _plain(path, base.fork(), anchors, TOKENS + 2 * DRAFTS)
    proposer = ScriptedProposer(truth, [0] * REQUESTS, weights.config.vocab_size)
    caches = base.fork()
    decoder = SpeculativeDecoder(_WithoutTaps(path), proposer, caches)
    current, wrong, emitted, steps, expected = list(anchors), 0, 0, 0, 0
    while min(proposer.reached) < TOKENS and steps < TOKENS:
        planned = [(proposer.step + request) % (DRAFTS + 1) for request in range(REQUESTS)]
        advance = decoder.step(range(REQUESTS), current)
        for request, gained in enumerate(advance.tokens):
            begin = proposer.reached[request]
            wrong += gained != truth[request][begin : begin + len(gained)]
            proposer.reached[request] += len(gained)
            current[request] = gained[-1]
        emitted += sum(map(len, advance.tokens))
        expected += sum(planned) + REQUESTS
        steps += 1
    counted = decoder.count.mean_length
    off = [abs(_realised(SyntheticAcceptance(mean_length=n, n_drafts=DRAFTS, seed=seed)) - n) / n for n in SYNTHETIC_LENGTHS]
    measured = (
        Measurement(name="steps_wrong", value=wrong, unit="count"),
        Measurement(name="length_error", value=abs(counted - expected / (steps * REQUESTS)), unit="tokens"),
        Measurement(name="emitted_error", value=abs(counted - emitted / (steps * REQUESTS)), unit="tokens"),
        Measurement(name="synthetic_error", value=sorted(off)[-1] if all(x == x for x in off) else float("nan"), unit="share"),
        Measurement(name="rows_ignored", value=_rows_ignored(path, base, weights, truth, anchors), unit="count"),
        Measurement(name="steps", value=steps, unit="count"),
    )
    return measured, {"mean_length_tokens": counted, "synthetic_lengths_tokens": list(SYNTHETIC_LENGTHS), "synthetic_errors": off}


def _plain(path: Any, caches: Any, anchors: Sequence[int], n_tokens: int) -> list[list[int]]:
    """Greedy tokens after each anchor, one a step."""
    found: list[list[int]] = [[] for _ in anchors]
    current = list(anchors)
    for _ in range(n_tokens):
        logits = path.step(caches.batch([[t] for t in current], range(len(anchors))), caches).logits_BQV[:, 0]
        caches.advance(range(len(anchors)), [1] * len(anchors))
        current = logits.argmax(-1).tolist()
        for tokens, token in zip(found, current, strict=True):
            tokens.append(token)
    return found


def _realised(synthetic: Any) -> float:
    return 1.0 + sum(synthetic.accepted(0, step) for step in range(SYNTHETIC_DRAWS)) / SYNTHETIC_DRAWS


def _rows_ignored(path: Any, base: Any, weights: Any, truth: Sequence[Sequence[int]], anchors: Sequence[int]) -> int:
    """Rows of a verify step whose token can be changed without a change of that row's logits."""
    rows = torch.tensor([[anchors[0], *truth[0][:DRAFTS]]])
    caches = base.fork()
    first = path.step(caches.batch(rows, [0]), caches).logits_BQV[0]
    ignored = 0
    for t in range(1 + DRAFTS):
        changed, caches = rows.clone(), base.fork()
        changed[0, t] = (changed[0, t] + 1) % weights.config.vocab_size
        ignored += int(torch.equal(path.step(caches.batch(changed, [0]), caches).logits_BQV[0, t], first[t]))
    return ignored
