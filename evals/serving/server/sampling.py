"""How one request's next token is chosen from its logits: forced, masked, greedy or drawn from a generator of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kimi_k3_decode.sampling import SamplingParams, choose


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What a request asks of decoding.

    `top_k` 0 keeps all. `seed` None draws one. `allowed` None allows every id. `force` gives the first output tokens, whatever the logits
    say. `logprobs` and `prompt_logprobs` are counts of the largest log-probabilities to report, None for none. Log-probabilities are of
    the raw distribution, before temperature and masks.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    allowed: tuple[int, ...] | None = None
    force: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(kw_only=True, eq=False)
class Chooser:
    """Chooses tokens for one request. With seed s it draws the numbers that the in-process engine draws for seed s."""

    sampling: Sampling
    eos_token_id: int
    _generator: random.Random = field(init=False)
    _law: SamplingParams = field(init=False)

    def __post_init__(self) -> None:
        asked = self.sampling
        self._generator = random.Random(asked.seed)  # None: the operating system's entropy
        self._law = SamplingParams(max_new_tokens=1, temperature=asked.temperature, top_p=asked.top_p)

    @property
    def plain(self) -> bool:
        """Greedy over all ids: rows like this are chosen together."""
        asked = self.sampling
        return asked.temperature == 0 and asked.allowed is None and not asked.force and not asked.min_tokens

    def next(self, logits_V: torch.Tensor, n_before: int) -> int:
        """The token after `n_before` output tokens. Raises ValueError for NaN logits."""
        asked = self.sampling
        if n_before < len(asked.force):
            return asked.force[n_before]
        row = logits_V.unsqueeze(0)
        if asked.allowed is not None:
            row = _only(row, asked.allowed)
        if n_before < asked.min_tokens:
            row = row.clone()
            row[0, [*([] if asked.ignore_eos else [self.eos_token_id]), *asked.stop_token_ids]] = -torch.inf
        if not bool((row > -torch.inf).any()) and not bool(torch.isnan(row).any()):
            raise ValueError("got no token that is allowed, needs one; allowed_token_ids holds only what min_tokens forbids")
        if asked.top_k and asked.temperature > 0 and asked.top_k < row.shape[1]:
            row = row.masked_fill(row < row.topk(asked.top_k, dim=-1).values[:, -1:], -torch.inf)
        return choose(row, self._law, [self._generator])[0]


def _only(row: torch.Tensor, allowed: Sequence[int]) -> torch.Tensor:
    kept = torch.full_like(row, -torch.inf)
    ids = torch.tensor(list(allowed), device=row.device)
    kept[:, ids] = row[:, ids]
    return kept
