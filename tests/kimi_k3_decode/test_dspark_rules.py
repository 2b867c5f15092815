"""Acceptance rules: exact preservation of the target's distribution (enumerated and sampled), synthetic acceptance, counting."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from kimi_k3_decode.dspark import (
    AcceptanceCount,
    Sampler,
    SyntheticAcceptance,
    acceptance_probabilities,
    block_weights,
    lowest_argmax,
    residual,
    verify_block,
    verify_greedy,
    verify_rejection,
)

F64 = torch.float64
VOCAB, DRAFTS = 3, 2


def laws(seed: int) -> tuple[dict, dict]:
    """Target and draft laws over the next token given the tokens before, for every prefix of up to DRAFTS tokens."""
    g = torch.Generator().manual_seed(seed)

    def table(depth: int) -> dict[tuple[int, ...], torch.Tensor]:
        prefixes = [p for n in range(depth + 1) for p in itertools.product(range(VOCAB), repeat=n)]
        return {p: torch.softmax(2.0 * torch.randn(VOCAB, generator=g, dtype=F64), 0) for p in prefixes}

    return table(DRAFTS), table(DRAFTS - 1)


def along(target: dict, draft: dict, drafts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of the rules for one draft sequence, batch of one."""
    p = torch.stack([target[drafts[:i]] for i in range(DRAFTS + 1)]).unsqueeze(0)
    q = torch.stack([draft[drafts[:i]] for i in range(DRAFTS)]).unsqueeze(0)
    return p, q, torch.tensor([drafts])


def enumerate_rule(target: dict, draft: dict, rule: str) -> dict[tuple[int, ...], float]:
    """Exact law of the emitted tokens extended to DRAFTS + 1 by sampling the target, by summing over drafts and acceptance."""
    law: dict[tuple[int, ...], float] = {}
    for drafts in itertools.product(range(VOCAB), repeat=DRAFTS):
        p, q, ids = along(target, draft, drafts)
        chance = math.prod(float(q[0, i, drafts[i]]) for i in range(DRAFTS))
        if rule == "rejection":
            accept = acceptance_probabilities(p, q, ids)[0].tolist()
            scales = [1.0] * (DRAFTS + 1)
            lengths = [math.prod(accept[:n]) * (1 - accept[n] if n < DRAFTS else 1) for n in range(DRAFTS + 1)]
        else:
            weights, passes = block_weights(p, q, ids)
            scales, chances = weights[0].tolist(), passes[0].tolist()
            # The longest prefix that passes its own independent test.
            lengths = [(chances[n] if n else 1.0) * math.prod(1 - c for c in chances[n + 1 :]) for n in range(DRAFTS + 1)]
        assert sum(lengths) == pytest.approx(1, abs=1e-12)
        for n, reach in enumerate(lengths):
            following = p[0, n] if n == DRAFTS else residual(p[0, n], q[0, n], scales[n])
            for token in range(VOCAB):
                start = (*drafts[:n], token)
                for rest in itertools.product(range(VOCAB), repeat=DRAFTS + 1 - len(start)):
                    whole = (*start, *rest)
                    more = math.prod(float(target[whole[:i]][whole[i]]) for i in range(len(start), DRAFTS + 1))
                    law[whole] = law.get(whole, 0.0) + chance * reach * float(following[token]) * more
    return law


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_output_law_is_the_targets_exactly(rule, seed):
    target, draft = laws(seed)
    law = enumerate_rule(target, draft, rule)
    for whole in itertools.product(range(VOCAB), repeat=DRAFTS + 1):
        want = math.prod(float(target[whole[:i]][whole[i]]) for i in range(DRAFTS + 1))
        assert law[whole] == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_block_verification_accepts_at_least_as_many(seed):
    target, draft = laws(seed)
    means = {"rejection": 0.0, "block": 0.0}
    for drafts in itertools.product(range(VOCAB), repeat=DRAFTS):
        p, q, ids = along(target, draft, drafts)
        chance = math.prod(float(q[0, i, drafts[i]]) for i in range(DRAFTS))
        accept = acceptance_probabilities(p, q, ids)[0].tolist()
        means["rejection"] += chance * sum(math.prod(accept[: n + 1]) for n in range(DRAFTS))
        passes = block_weights(p, q, ids)[1][0].tolist()
        means["block"] += chance * sum(1 - math.prod(1 - c for c in passes[n:]) for n in range(1, DRAFTS + 1))
    assert means["block"] >= means["rejection"] - 1e-12


@pytest.mark.parametrize("rule", [verify_rejection, verify_block])
def test_sampled_first_token_follows_the_target(rule):
    """Chi-square of the first emitted token over many requests, drafts drawn from their own law; threshold at 1e-6."""
    n = 20_000
    target, draft = laws(3)
    g = torch.Generator().manual_seed(17)
    first = torch.multinomial(draft[()].expand(n, -1), 1, generator=g)
    table = torch.stack([draft[(i,)] for i in range(VOCAB)])
    second = torch.multinomial(table[first[:, 0]], 1, generator=g)
    drafts = torch.cat((first, second), dim=1)
    after_one = torch.stack([target[(i,)] for i in range(VOCAB)])
    after_two = torch.stack([torch.stack([target[(i, j)] for j in range(VOCAB)]) for i in range(VOCAB)])
    p = torch.stack((target[()].expand(n, -1), after_one[drafts[:, 0]], after_two[drafts[:, 0], drafts[:, 1]]), dim=1)
    q = torch.stack((draft[()].expand(n, -1), table[drafts[:, 0]]), dim=1)
    verified = rule(p, q, drafts, g)
    emitted = torch.where(verified.accepted_B > 0, drafts[:, 0], verified.next_B)
    observed = torch.bincount(emitted, minlength=VOCAB).numpy()
    assert stats.chisquare(observed, (target[()] * n).numpy()).pvalue > 1e-6
    # The same statistic must reject the draft's law, or it could not fail.
    assert stats.chisquare(observed, (draft[()] * n).numpy()).pvalue < 1e-6


def test_rejection_with_equal_laws_accepts_all_and_with_disjoint_laws_none():
    p = torch.tensor([[[0.5, 0.5, 0.0]] * 3], dtype=F64)
    q = p[:, :2]
    g = torch.Generator().manual_seed(0)
    drafts = torch.tensor([[0, 1]])
    assert all(int(verify_rejection(p, q, drafts, g).accepted_B) == 2 for _ in range(50))
    assert all(int(verify_block(p, q, drafts, g).accepted_B) == 2 for _ in range(50))
    disjoint = torch.tensor([[[0.0, 0.0, 1.0]] * 2], dtype=F64)
    for rule in (verify_rejection, verify_block):
        verified = rule(p, disjoint, torch.tensor([[2, 2]]), g)
        assert int(verified.accepted_B) == 0
        assert int(verified.next_B) in (0, 1)
    with pytest.raises(ValueError, match="got 0 for a proposed token"):
        verify_rejection(p, disjoint, drafts, g)


@given(st.lists(st.integers(0, 3), min_size=6, max_size=6), st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_greedy_accepts_the_common_prefix(best, drafts):
    logits = torch.nn.functional.one_hot(torch.tensor([best]), 4).double()
    verified = verify_greedy(logits, torch.tensor([drafts]))
    want = next((i for i in range(5) if best[i] != drafts[i]), 5)
    assert int(verified.accepted_B) == want
    assert int(verified.next_B) == best[want]


def test_equal_logits_go_to_the_lowest_id():
    assert lowest_argmax(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]


@given(st.floats(1.0, 8.0), st.integers(0, 100))
@example(1.0000118718994064, 0)  # no draft is accepted in 2000 steps
@settings(max_examples=25, deadline=None)
def test_synthetic_acceptance_realises_its_mean_length(mean_length, seed):
    """Inside Bernstein's bound for 2000 steps; its expected length solves the equation; the same seed gives the same draws."""
    synthetic = SyntheticAcceptance(mean_length=mean_length, n_drafts=7, seed=seed)
    assert synthetic.expected_length(synthetic.rate) == pytest.approx(mean_length, abs=1e-9)
    steps = 2000
    accepted = [synthetic.accepted(request, step) for request in range(4) for step in range(steps // 4)]
    count = AcceptanceCount()
    count.add(accepted)
    # Bernstein 1924, at odds of 1e-9: the law's own variance, since a sample without a single accepted draft has none.
    survival = [synthetic.rate**k for k in range(1, 8)]
    variance = max(0.0, sum((2 * k - 1) * s for k, s in enumerate(survival, 1)) - sum(survival) ** 2)
    odds = math.log(2e9)
    assert abs(count.mean_length - mean_length) <= math.sqrt(2 * variance * odds / steps) + 7 * odds / (3 * steps)
    assert accepted == [
        SyntheticAcceptance(mean_length=mean_length, n_drafts=7, seed=seed).accepted(r, s) for r in range(4) for s in range(500)
    ]


def test_synthetic_acceptance_edges():
    assert {SyntheticAcceptance(mean_length=1.0, n_drafts=7).accepted(0, s) for s in range(100)} == {0}
    assert {SyntheticAcceptance(mean_length=8.0, n_drafts=7).accepted(0, s) for s in range(100)} == {7}
    draws = [tuple(SyntheticAcceptance(mean_length=4.0, n_drafts=7, seed=k).accepted(0, s) for s in range(40)) for k in range(5)]
    assert len(set(draws)) == 5
    with pytest.raises(ValueError, match=r"needs 1\.\.8"):
        SyntheticAcceptance(mean_length=8.5, n_drafts=7)


def test_mean_length_counts_drafts_only_and_needs_data():
    count = AcceptanceCount()
    with pytest.raises(ValueError, match="got 0 verify steps"):
        _ = count.mean_length
    count.add([7, 0, 2])
    assert count.mean_length == 4.0


def test_sampler_temperature_and_top_k():
    sampler = Sampler(generator=torch.Generator().manual_seed(0), temperature=0.5, top_k=2)
    got = sampler.probabilities(torch.tensor([[1.0, 2.0, 3.0]]))
    assert float(got[0, 0]) == 0.0
    assert float(got[0, 2] / got[0, 1]) == pytest.approx(math.exp(2.0))
