"""Speculation end to end: greedy speculative output equals greedy plain output, whatever is proposed and accepted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kimi_k3_decode.cache import Caches
from kimi_k3_decode.config import NANO, Unsupported
from kimi_k3_decode.dspark import (
    DsparkProposer,
    Proposal,
    Sampler,
    SpeculativeDecoder,
    SyntheticAcceptance,
    lowest_argmax,
)
from kimi_k3_decode.step import SpecializedPath
from kimi_k3_decode.stock.model import StockPath
from kimi_k3_decode.weights import random_weights

LENGTHS = (20, 65, 7)
NEW_TOKENS = 24


class Scripted:
    """Proposes the true continuation, spoiled at a place that walks through 0..n_drafts, so that every accepted count occurs."""

    def __init__(self, truth: list[list[int]], n_drafts: int = 7) -> None:
        self.truth, self.n_drafts = truth, n_drafts
        self.done = [1] * len(truth)
        self.turn = 0

    def propose(self, requests: Sequence[int], anchor_B: torch.Tensor, sampler: Sampler | None) -> Proposal:
        rows = []
        for request in requests:
            coming = (self.truth[request][self.done[request] :] + [9] * self.n_drafts)[: self.n_drafts]
            spoiled = (self.turn + request) % (self.n_drafts + 1)
            rows.append([token if i < spoiled else (token + 1) % NANO.vocab_size for i, token in enumerate(coming)])
        self.turn += 1
        return Proposal(drafts_BN=torch.tensor(rows))

    def observe(self, requests: Sequence[int], taps_IBTD: torch.Tensor, count_B: torch.Tensor) -> None:
        for request, count in zip(requests, count_B.tolist(), strict=True):
            self.done[request] += count


def prompts() -> list[list[int]]:
    g = torch.Generator().manual_seed(4)
    return [torch.randint(4, 120, (n,), generator=g).tolist() for n in LENGTHS]


def prefilled(stock: StockPath) -> tuple[Caches, list[int], list[torch.Tensor]]:
    caches = Caches.allocate(NANO, 3, 256, q_max=8, dtype=stock.dtype)
    out = stock.prefill(prompts(), caches, [0, 1, 2], taps=True)
    return caches, lowest_argmax(out.logits_RV).tolist(), out.taps


def plain(path, caches: Caches, anchors: list[int]) -> list[list[int]]:
    found = [[a] for a in anchors]
    for _ in range(NEW_TOKENS + 8):
        out = path.step(caches.batch([[tokens[-1]] for tokens in found]), caches)
        caches.advance([0, 1, 2], [1, 1, 1])
        for tokens, token in zip(found, lowest_argmax(out.logits_BQV[:, 0]).tolist(), strict=True):
            tokens.append(token)
    return found


def speculate(decoder: SpeculativeDecoder, anchors: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Until every request has NEW_TOKENS; finished requests leave the batch, so its composition changes."""
    found, accepted = [[a] for a in anchors], []
    while active := [r for r in (2, 0, 1) if len(found[r]) < NEW_TOKENS]:
        advance = decoder.step(active, [found[r][-1] for r in active])
        accepted.append(advance.accepted)
        for request, tokens in zip(active, advance.tokens, strict=True):
            found[request] += tokens
    return found, accepted


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["fp64", "fp32"])
def model(request):
    weights = random_weights(NANO, 31).to(request.param)
    stock = StockPath(weights, request.param)
    caches, anchors, taps = prefilled(stock)
    return weights, stock, caches, anchors, taps, plain(stock, caches.fork(), anchors)


@pytest.mark.parametrize("path_name", ["stock", "specialized"])
def test_greedy_speculation_equals_plain_greedy_for_every_accepted_count(model, path_name):
    weights, stock, caches, anchors, _, truth = model
    path = stock if path_name == "stock" else SpecializedPath(weights, stock.dtype)
    decoder = SpeculativeDecoder(path, Scripted(truth), caches.fork())
    found, accepted = speculate(decoder, anchors)
    for got, want in zip(found, truth, strict=True):
        length = min(len(got), len(want))
        assert got[:length] == want[:length]
        assert length >= NEW_TOKENS
    assert {n for step in accepted for n in step} >= set(range(7))
    assert decoder.count.mean_length > 2


def test_greedy_speculation_with_the_drafter_equals_plain_greedy(model):
    weights, stock, caches, anchors, taps, truth = model
    proposer = DsparkProposer(weights, 3, 256)
    for request, rows in enumerate(taps):
        proposer.observe([request], rows.unsqueeze(1), torch.tensor([rows.shape[1]]))
    mine = caches.fork()
    found, _ = speculate(SpeculativeDecoder(SpecializedPath(weights, stock.dtype), proposer, mine), anchors)
    for got, want in zip(found, truth, strict=True):
        assert got[:NEW_TOKENS] == want[:NEW_TOKENS]
    assert proposer.cache.lengths_B.tolist() == mine.lengths_R


def test_bf16_speculation_agrees_up_to_ties():
    """BF16 results may depend on the row count, so tokens may differ where two logits nearly tie; the first flip must be such a place."""
    weights = random_weights(NANO, 31)
    stock = StockPath(weights)
    caches, anchors, _ = prefilled(stock)
    path = SpecializedPath(weights)
    truth = plain(path, caches.fork(), anchors)
    decoder = SpeculativeDecoder(path, Scripted(truth), caches.fork())
    advance = decoder.step([0, 1, 2], anchors)
    logits = advance.output.logits_BQV[:, 0]
    for row, want in zip(logits, (tokens[1] for tokens in truth), strict=True):
        top = row.topk(2).values
        assert int(lowest_argmax(row)) == want or float(top[0] - row[want]) < 1.0
        assert bool(torch.isfinite(top).all())


def test_sampled_speculation_is_seeded_and_in_range(model):
    weights, stock, caches, anchors, taps, _ = model
    runs = []
    for method in ("rejection", "block", "rejection"):
        sampler = Sampler(generator=torch.Generator().manual_seed(7), temperature=0.8)
        proposer = DsparkProposer(weights, 3, 256, n_drafts=3)
        for request, rows in enumerate(taps):
            proposer.observe([request], rows.unsqueeze(1), torch.tensor([rows.shape[1]]))
        decoder = SpeculativeDecoder(stock, proposer, caches.fork(), method=method, sampler=sampler)
        runs.append(speculate(decoder, anchors)[0])
    assert runs[0] == runs[2]
    assert runs[0] != runs[1]
    assert all(0 <= token < NANO.vocab_size for tokens in runs[1] for token in tokens)


def test_synthetic_acceptance_drives_the_loop(model):
    weights, stock, caches, anchors, taps, _ = model
    synthetic = SyntheticAcceptance(mean_length=4.0, n_drafts=7, seed=3)
    proposer = DsparkProposer(weights, 3, 256)
    for request, rows in enumerate(taps):
        proposer.observe([request], rows.unsqueeze(1), torch.tensor([rows.shape[1]]))
    decoder = SpeculativeDecoder(stock, proposer, caches.fork(), method="synthetic", synthetic=synthetic)
    steps: dict[int, int] = {}
    for _ in range(4):
        advance = decoder.step([0, 2], [anchors[0], anchors[2]])
        for request, accepted, tokens in zip([0, 2], advance.accepted, advance.tokens, strict=True):
            assert accepted == synthetic.accepted(request, steps.get(request, 0))
            assert len(tokens) == accepted + 1
            steps[request] = steps.get(request, 0) + 1
    assert decoder.count.verify_steps == 8


def test_all_wrong_settings_are_named_at_once(model):
    _, stock, caches, _, _, truth = model
    small = Caches.allocate(NANO, 1, 64, q_max=2, dtype=stock.dtype)
    with pytest.raises(Unsupported) as error:
        SpeculativeDecoder(stock, Scripted(truth), small, method="rejection", synthetic=SyntheticAcceptance(mean_length=2, n_drafts=3))
    assert len(error.value.reasons) == 4
    with pytest.raises(Unsupported, match="method: got 'hope'"):
        SpeculativeDecoder(stock, Scripted(truth), caches, method="hope")
    with pytest.raises(Unsupported, match=r"needs 1\.\.7"):
        DsparkProposer(random_weights(NANO, 0), 1, 64, n_drafts=8)
