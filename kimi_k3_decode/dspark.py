"""Speculation around a decode path: propose up to 7 tokens, verify 1 + n rows in one step, keep a prefix, go on from there.

AL, the mean accepted length, is 1 + accepted drafts / verify steps; the anchor does not count as accepted there. In the caches'
`accepted` it does (see cache.py).

Sources: speculative sampling, Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318); block verification, Sun et al.
(arXiv 2403.10444), algorithm 2.

Axes: B requests, Q = 1 + N rows of a verify step, N drafts, V vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kimi_k3_decode.cache import Caches, StepBatch, StepOutput
from kimi_k3_decode.config import Unsupported
from kimi_k3_decode.draft_model import DraftCache, draft_config, draft_step, markov_correct
from kimi_k3_decode.weights import ModelWeights

METHODS = ("greedy", "rejection", "block", "synthetic")


class DecodePath(Protocol):
    """What a verify step needs of a path: stock and specialised both have it."""

    def step(
        self, batch: StepBatch, caches: Caches, *, routing: dict[int, torch.Tensor] | None = None, taps: bool = False
    ) -> StepOutput: ...


# ---- acceptance rules: pure functions ----
@dataclass(frozen=True, kw_only=True)
class Verified:
    """Per request: how many drafts were accepted (0..N) and the token that follows them, drawn from the target."""

    accepted_B: torch.Tensor
    next_B: torch.Tensor


def verify_greedy(logits_BQV: torch.Tensor, drafts_BN: torch.Tensor) -> Verified:
    """Accept drafts while each equals the target's arg-max before it; the next token is the arg-max after the last accepted."""
    best_BQ = lowest_argmax(logits_BQV)
    agrees_BN = (best_BQ[:, :-1] == drafts_BN).long()
    accepted_B = agrees_BN.cumprod(1).sum(1)
    return Verified(accepted_B=accepted_B, next_B=best_BQ.gather(1, accepted_B.unsqueeze(1)).squeeze(1))


def lowest_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Arg-max over the last axis; equal logits go to the lowest id (torch.argmax promises no order)."""
    return (logits == logits.amax(-1, keepdim=True)).to(torch.int8).argmax(-1)


def acceptance_probabilities(target_BQV: torch.Tensor, draft_BNV: torch.Tensor, drafts_BN: torch.Tensor) -> torch.Tensor:
    """min(1, p(x) / q(x)) of each draft, [B, N]. A draft that its own distribution cannot produce (q = 0) is an error of the caller."""
    ids = drafts_BN.unsqueeze(-1)
    p_BN, q_BN = target_BQV[:, :-1].gather(-1, ids).squeeze(-1), draft_BNV.gather(-1, ids).squeeze(-1)
    if bool((q_BN <= 0).any()):
        raise ValueError("draft probabilities: got 0 for a proposed token, need > 0; pass the distribution that the drafts were drawn from")
    return (p_BN / q_BN).clamp(max=1.0)


def residual(target: torch.Tensor, draft: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """max(scale · p − q, 0), normalised over the last axis; where nothing is left (p = q), p itself."""
    left = (target * scale - draft).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / torch.where(total > 0, total, 1.0), target)


def verify_rejection(target_BQV: torch.Tensor, draft_BNV: torch.Tensor, drafts_BN: torch.Tensor, generator: torch.Generator) -> Verified:
    """Token-by-token rejection sampling: the output has exactly the target's distribution. Inputs are probabilities."""
    accept_BN = acceptance_probabilities(target_BQV, draft_BNV, drafts_BN)
    coins_BN = torch.rand(accept_BN.shape, generator=generator, dtype=accept_BN.dtype)
    accepted_B = (coins_BN < accept_BN).long().cumprod(1).sum(1)
    return _draw_next(target_BQV, draft_BNV, accepted_B, torch.ones_like(accept_BN[:, 0]), generator)


def block_weights(target_BQV: torch.Tensor, draft_BNV: torch.Tensor, drafts_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(w [B, N + 1], h [B, N + 1]) of block verification: w_i = min(1, w_{i−1} p/q), h_i the chance that prefix i passes its own test."""
    ids = drafts_BN.unsqueeze(-1)
    p_BN, q_BN = target_BQV[:, :-1].gather(-1, ids).squeeze(-1), draft_BNV.gather(-1, ids).squeeze(-1)
    weights, passes = [torch.ones_like(p_BN[:, 0])], []
    n_drafts = drafts_BN.shape[1]
    for i in range(n_drafts + 1):
        if i:
            weights.append((weights[-1] * p_BN[:, i - 1] / q_BN[:, i - 1]).clamp(max=1.0))
        w_B = weights[-1]
        if i < n_drafts:
            left_B = (target_BQV[:, i] * w_B.unsqueeze(-1) - draft_BNV[:, i]).clamp(min=0).sum(-1)
            rest_B = left_B + 1 - w_B
            passes.append(torch.where(rest_B > 0, left_B / torch.where(rest_B > 0, rest_B, 1.0), 1.0))
        else:
            passes.append(w_B)
    return torch.stack(weights, dim=1), torch.stack(passes, dim=1)


def verify_block(target_BQV: torch.Tensor, draft_BNV: torch.Tensor, drafts_BN: torch.Tensor, generator: torch.Generator) -> Verified:
    """Block verification: the same output distribution as rejection sampling, never fewer accepted drafts on average."""
    acceptance_probabilities(target_BQV, draft_BNV, drafts_BN)  # the same precondition
    weights, passes = block_weights(target_BQV, draft_BNV, drafts_BN)
    coins = torch.rand(passes[:, 1:].shape, generator=generator, dtype=passes.dtype)
    length_N = torch.arange(1, drafts_BN.shape[1] + 1)
    accepted_B = ((coins < passes[:, 1:]).long() * length_N).amax(1)  # the longest prefix that passes; 0 when none does
    scale_B = weights.gather(1, accepted_B.unsqueeze(1)).squeeze(1)
    return _draw_next(target_BQV, draft_BNV, accepted_B, scale_B, generator)


def _draw_next(
    target_BQV: torch.Tensor, draft_BNV: torch.Tensor, accepted_B: torch.Tensor, scale_B: torch.Tensor, generator: torch.Generator
) -> Verified:
    """The token after the accepted prefix: from the residual at the first rejected place, from the target when all were accepted."""
    rows, n_drafts = torch.arange(len(accepted_B)), draft_BNV.shape[1]
    target_BV = target_BQV[rows, accepted_B]
    corrected_BV = residual(target_BV, draft_BNV[rows, accepted_B.clamp(max=n_drafts - 1)], scale_B.unsqueeze(-1))
    chosen_BV = torch.where((accepted_B == n_drafts).unsqueeze(-1), target_BV, corrected_BV)
    return Verified(accepted_B=accepted_B, next_B=torch.multinomial(chosen_BV, 1, generator=generator).squeeze(1))


# ---- synthetic acceptance ----
@dataclass(frozen=True, kw_only=True)
class SyntheticAcceptance:
    """Accepts a given mean length whatever the drafts are: how performance runs pin AL.

    Draft i is accepted with one probability r after the drafts before it, so that 1 + Σ r^i = `mean_length` (1 .. 1 + n_drafts).
    A draw depends on seed, request and step only, so it is the same on every rank and in every batch.
    """

    mean_length: float
    n_drafts: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1.0 <= self.mean_length <= 1.0 + self.n_drafts:
            raise ValueError(f"mean_length: got {self.mean_length}, needs 1..{1 + self.n_drafts} for {self.n_drafts} drafts")

    def expected_length(self, rate: float) -> float:
        return 1.0 + sum(rate**i for i in range(1, self.n_drafts + 1))

    @functools.cached_property
    def rate(self) -> float:
        """r by bisection; the expected length rises with it."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.expected_length(middle) < self.mean_length else (low, middle)
        return high

    def accepted(self, request: int, step: int) -> int:
        """Accepted drafts (0..n_drafts) of one verify step."""
        digest = hashlib.sha256(f"{self.seed}/{request}/{step}".encode()).digest()
        coin = (int.from_bytes(digest[:7], "big") + 0.5) / 2**56
        # P(at least i) = r^i: one uniform number decides how many powers of r lie above it.
        rate, reached = self.rate, 0
        while reached < self.n_drafts and coin < rate ** (reached + 1):
            reached += 1
        return reached


@dataclass
class AcceptanceCount:
    """Verify steps (one a request) and accepted drafts, counted over a run."""

    verify_steps: int = 0
    accepted_drafts: int = 0

    def add(self, accepted: Sequence[int]) -> None:
        self.verify_steps += len(accepted)
        self.accepted_drafts += sum(accepted)

    @property
    def mean_length(self) -> float:
        """AL in tokens a verify step. Raises ValueError when nothing was verified: there is no default for no data."""
        if not self.verify_steps:
            raise ValueError("mean accepted length: got 0 verify steps, needs at least 1")
        return 1.0 + self.accepted_drafts / self.verify_steps


# ---- proposing ----
@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafts of a batch: ids [B, N] and, unless greedy, the probabilities [B, N, V] they were drawn from."""

    drafts_BN: torch.Tensor
    probabilities_BNV: torch.Tensor | None = None


class Proposer(Protocol):
    """Proposes after `anchor_B`; `observe` hands it the target's taps of committed positions, `probabilities` turns logits into a law."""

    n_drafts: int

    def propose(self, requests: Sequence[int], anchor_B: torch.Tensor, sampler: Sampler | None) -> Proposal: ...

    def observe(self, requests: Sequence[int], taps_IBTD: torch.Tensor, count_B: torch.Tensor) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How non-greedy tokens are drawn, for drafts and target alike: temperature, then an optional top-k."""

    generator: torch.Generator
    temperature: float = 1.0
    top_k: int = 0

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities over the last axis, float64 so that ratios and residuals carry no rounding of their own."""
        scaled = logits.double() / self.temperature
        if self.top_k:
            floor = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < floor, -torch.inf)
        return scaled.softmax(-1)

    def draw(self, probabilities_BV: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(probabilities_BV, 1, generator=self.generator).squeeze(1)


class DsparkProposer:
    """The DSpark drafter over its own cache of context latents: one pass for all drafts, then the Markov head token by token."""

    def __init__(self, weights: ModelWeights, n_requests: int, max_tokens: int, *, n_drafts: int | None = None) -> None:
        if weights.draft is None:
            raise Unsupported("drafter", ("weights.draft: got None, needs the drafter's weights; this checkpoint has none",))
        limit = draft_config(weights.config).n_drafts
        self.n_drafts = limit if n_drafts is None else n_drafts
        if not 1 <= self.n_drafts <= limit:
            raise Unsupported("drafter", (f"n_drafts: got {n_drafts}, needs 1..{limit}",))
        self.weights, self.draft, self.config = weights, weights.draft, weights.config
        self.cache = DraftCache.allocate(weights.config, n_requests, max_tokens, weights.draft.fc.dtype)

    def clear(self, request: int) -> None:
        self.cache.lengths_B[request] = 0

    def observe(self, requests: Sequence[int], taps_IBTD: torch.Tensor, count_B: torch.Tensor) -> None:
        """Commit the first `count_B[b]` positions of the taps [I, B, T, D] to the drafter's context."""
        self.cache.append(self.draft, self.config, taps_IBTD, count_B, torch.as_tensor(list(requests)))

    def propose(self, requests: Sequence[int], anchor_B: torch.Tensor, sampler: Sampler | None) -> Proposal:
        """Greedy without a sampler, else drawn from the corrected logits."""
        rows = torch.as_tensor(list(requests))
        lengths_B = self.cache.lengths_B[rows]
        context_LBTC = self.cache.context_LBTC[:, rows, : int(lengths_B.max())]
        w = self.weights
        base_BNV = draft_step(self.draft, self.config, w.embed_VD, w.lm_head_VD, context_LBTC, lengths_B, anchor_B)
        previous_B, ids, laws = anchor_B, [], []
        for base_BV in base_BNV[:, : self.n_drafts].unbind(1):
            logits_BV = markov_correct(self.draft, base_BV, previous_B)
            if sampler is None:
                previous_B = lowest_argmax(logits_BV)
            else:
                laws.append(sampler.probabilities(logits_BV))
                previous_B = sampler.draw(laws[-1])
            ids.append(previous_B)
        return Proposal(drafts_BN=torch.stack(ids, dim=1), probabilities_BNV=torch.stack(laws, dim=1) if laws else None)


# ---- the loop ----
@dataclass(frozen=True, kw_only=True)
class Advance:
    """One verify step: the tokens each request gained (accepted drafts, then the next anchor) and the step's raw output."""

    tokens: list[list[int]]
    accepted: list[int]
    output: StepOutput


class SpeculativeDecoder:
    """Drives `path` by draft and verify. The caches must hold every token before the anchor, the proposer their taps.

    method: "greedy", "rejection" or "block" (need a sampler), "synthetic" (needs `synthetic`; the next token is the arg-max).
    """

    def __init__(
        self,
        path: DecodePath,
        proposer: Proposer,
        caches: Caches,
        *,
        method: str = "greedy",
        sampler: Sampler | None = None,
        synthetic: SyntheticAcceptance | None = None,
    ) -> None:
        reasons = []
        if method not in METHODS:
            reasons.append(f"method: got {method!r}, needs one of {METHODS}")
        if (method in ("rejection", "block")) != (sampler is not None):
            reasons.append(f"sampler: got {sampler}, needs one exactly for 'rejection' and 'block'")
        if (method == "synthetic") != (synthetic is not None):
            reasons.append(f"synthetic: got {synthetic}, needs one exactly for 'synthetic'")
        if synthetic is not None and synthetic.n_drafts != proposer.n_drafts:
            reasons.append(f"synthetic.n_drafts: got {synthetic.n_drafts}, needs the proposer's {proposer.n_drafts}")
        if caches.q_max < 1 + proposer.n_drafts:
            reasons.append(f"caches.q_max: got {caches.q_max}, needs {1 + proposer.n_drafts}, an anchor and its drafts")
        if reasons:
            raise Unsupported("speculation", tuple(reasons))
        self.path, self.proposer, self.caches = path, proposer, caches
        self.method, self.sampler, self.synthetic = method, sampler, synthetic
        self.count = AcceptanceCount()
        self._steps: dict[int, int] = {}
        self._rules: dict[str, Callable[..., Verified]] = {"rejection": verify_rejection, "block": verify_block}

    def step(self, requests: Sequence[int], anchors: Sequence[int]) -> Advance:
        """Propose after each anchor, verify in one step of 1 + n rows a request, commit what was accepted."""
        anchor_B = torch.as_tensor(list(anchors), dtype=torch.int64)
        proposal = self.proposer.propose(requests, anchor_B, self.sampler)
        rows_BQ = torch.cat((anchor_B.unsqueeze(1), proposal.drafts_BN), dim=1)
        output = self.path.step(self.caches.batch(rows_BQ, requests), self.caches, taps=True)
        verified = self._verify(output.logits_BQV, proposal, requests)
        kept_B = verified.accepted_B + 1
        if output.taps_IBQD is not None:
            self.proposer.observe(requests, output.taps_IBQD, kept_B)
        self.caches.advance(requests, kept_B.tolist())
        accepted = verified.accepted_B.tolist()
        self.count.add(accepted)
        gained = [
            [*drafts[:n], following]
            for drafts, n, following in zip(proposal.drafts_BN.tolist(), accepted, verified.next_B.tolist(), strict=True)
        ]
        return Advance(tokens=gained, accepted=accepted, output=output)

    def _verify(self, logits_BQV: torch.Tensor, proposal: Proposal, requests: Sequence[int]) -> Verified:
        if self.sampler is not None:
            target_BQV = self.sampler.probabilities(logits_BQV)
            return self._rules[self.method](target_BQV, proposal.probabilities_BNV, proposal.drafts_BN, self.sampler.generator)
        if self.synthetic is None:
            return verify_greedy(logits_BQV, proposal.drafts_BN)
        accepted = []
        for request in requests:
            number = self._steps.get(request, 0)
            self._steps[request] = number + 1
            accepted.append(self.synthetic.accepted(request, number))
        accepted_B = torch.tensor(accepted, dtype=torch.int64)
        next_B = lowest_argmax(logits_BQV).gather(1, accepted_B.unsqueeze(1)).squeeze(1)
        return Verified(accepted_B=accepted_B, next_B=next_B)
