"""Choosing tokens: greedy with ties to the lowest id, or temperature and top-p from a generator of the request's own.

A request draws one uniform number a token from a generator seeded by itself alone, and inverts the cumulative distribution with it. So
its tokens do not depend on which requests share its batch, and two paths given the same seed see the same numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How prompts are continued. `temperature` 0 is greedy. `seeds` has one entry a prompt (None: the prompt's index), or is empty.

    `logprobs` None records none; k >= 0 records the chosen token's log-probability and the k largest, of the raw distribution, in nats.
    """

    max_new_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seeds: tuple[int | None, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def reasons(self, n_prompts: int) -> list[str]:
        """Everything wrong with the parameters for `n_prompts` prompts."""
        wrong = []
        if self.max_new_tokens < 1:
            wrong.append(f"max_new_tokens: got {self.max_new_tokens}, needs >= 1")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            wrong.append(f"temperature: got {self.temperature}, needs a finite number >= 0")
        if not 0 < self.top_p <= 1:
            wrong.append(f"top_p: got {self.top_p}, needs 0 < top_p <= 1")
        if self.seeds and len(self.seeds) != n_prompts:
            wrong.append(f"seeds: got {len(self.seeds)} for {n_prompts} prompts, needs one a prompt, or none")
        if any(not text for text in self.stop):
            wrong.append("stop: got an empty string, needs text; it would stop everything")
        if self.logprobs is not None and self.logprobs < 0:
            wrong.append(f"logprobs: got {self.logprobs}, needs >= 0 or None")
        return wrong

    def generator(self, index: int) -> random.Random:
        """The generator of prompt `index`."""
        seed = self.seeds[index] if self.seeds else None
        return random.Random(index if seed is None else seed)


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Of one generated token: its log-probability and the largest ones as (token, log-probability), largest first; nats."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def greedy(logits_BV: torch.Tensor) -> torch.Tensor:
    """Arg-max over the vocabulary; equal logits go to the lowest id."""
    return (logits_BV == logits_BV.amax(-1, keepdim=True)).to(torch.int8).argmax(-1)


def probabilities(logits_BV: torch.Tensor, temperature: float, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities, ids), both [B, V] in falling order of probability, float64: the smallest head that reaches `top_p`, renormalised."""
    falling, ids = torch.sort(torch.softmax(logits_BV.double() / temperature, dim=-1), dim=-1, descending=True, stable=True)
    before = falling.cumsum(-1) - falling
    kept = falling.masked_fill((before >= top_p) & (before > 0), 0.0)
    return kept / kept.sum(-1, keepdim=True), ids


def choose(logits_BV: torch.Tensor, params: SamplingParams, generators: Sequence[random.Random]) -> list[int]:
    """One token a row. Raises ValueError for a row with NaN logits: no token is better than a made-up one."""
    if bool(torch.isnan(logits_BV).any()):
        rows = torch.isnan(logits_BV).any(-1).nonzero().flatten().tolist()
        raise ValueError(f"logits: got NaN in rows {rows}, needs numbers; the path is broken or its caches are")
    if params.temperature == 0:
        return greedy(logits_BV).tolist()
    law, ids = probabilities(logits_BV, params.temperature, params.top_p)
    drawn = torch.tensor([[generator.random()] for generator in generators], dtype=torch.float64, device=logits_BV.device)
    cumulative = law.cumsum(-1)
    place = torch.searchsorted(cumulative, drawn * cumulative[:, -1:], right=True)
    last = (law > 0).sum(-1, keepdim=True) - 1
    return ids.gather(1, torch.minimum(place, last)).squeeze(1).tolist()


def logprobs_of(logits_BV: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """TokenLogprob of each row's chosen token."""
    logprobs = torch.log_softmax(logits_BV.double(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits_BV.device).unsqueeze(1)).squeeze(1).tolist()
    largest = torch.topk(logprobs, min(top, logprobs.shape[1]), dim=-1)
    rows = zip(chosen, largest.indices.tolist(), largest.values.tolist(), strict=True)
    return [TokenLogprob(logprob=value, top=tuple(zip(ids, values, strict=True))) for value, ids, values in rows]
