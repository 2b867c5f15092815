"""Single stock operations: KDA in two formulations, routing ties, expert groupings, attention in blocks, mixtures."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_decode.cache import Caches, StepBatch
from kimi_k3_decode.stock import basic, kda, kda_chunk, mla, moe
from kimi_k3_decode.stock.attn_res import Residual
from kimi_k3_decode.weights import random_weights

sys.path.insert(0, str(Path(__file__).parent))
from models import TINY, relative


def random_inputs(tokens: int, seed: int, dtype=torch.float64, heads: int = 2, dim: int = 16, lowest: float = -5.0) -> kda.KdaInputs:
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    inputs = kda.KdaInputs(
        q=basic.l2_normalize(draw(tokens, heads, dim)) * dim**-0.5,
        k=basic.l2_normalize(draw(tokens, heads, dim)),
        v=draw(tokens, heads, dim),
        log_decay=lowest * torch.sigmoid(3 * draw(tokens, heads, dim)),
        beta=torch.sigmoid(draw(tokens, heads)),
    )
    return kda.KdaInputs(**{name: getattr(inputs, name).to(dtype) for name in ("q", "k", "v", "log_decay", "beta")})


def literal(inputs: kda.KdaInputs, state_HKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence as written: decay, delta rule, read."""
    out = []
    for t in range(inputs.q.shape[0]):
        q, k, v = inputs.q[t], inputs.k[t], inputs.v[t]
        state_HKV = inputs.log_decay[t].exp().unsqueeze(-1) * state_HKV
        error = v - torch.einsum("hk,hkv->hv", k, state_HKV)
        state_HKV = state_HKV + torch.einsum("hk,hv->hkv", inputs.beta[t].unsqueeze(-1) * k, error)
        out.append(torch.einsum("hk,hkv->hv", q, state_HKV))
    return torch.stack(out), state_HKV


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4), seed=st.integers(0, 999))
def test_chunked_kda_equals_the_recurrence(lengths, seed):
    parts = [random_inputs(n, seed + i) for i, n in enumerate(lengths)]
    start = torch.randn(len(lengths), 2, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    packed = kda.KdaInputs(**{n: torch.cat([getattr(p, n) for p in parts]) for n in ("q", "k", "v", "log_decay", "beta")})
    index = kda_chunk.ChunkIndex.build(lengths, torch.device("cpu"))
    found, states = kda_chunk.chunked(packed, index, start.clone(), -5.0)
    wanted = [literal(part, start[i]) for i, part in enumerate(parts)]
    assert relative(found, torch.cat([o for o, _ in wanted])) < 1e-11
    assert relative(states, torch.stack([s for _, s in wanted])) < 1e-11


@pytest.mark.parametrize("strength", [-50.0, 50.0], ids=["all decays vanish", "all decays at the bound"])
def test_chunked_kda_is_finite_and_accurate_in_fp32_at_both_ends_of_the_gate(strength):
    exact = random_inputs(130, 5)
    exact = replace(exact, log_decay=torch.full_like(exact.log_decay, -5.0 if strength > 0 else -1e-6))
    rounded = kda.KdaInputs(**{n: getattr(exact, n).float() for n in ("q", "k", "v", "log_decay", "beta")})
    index = kda_chunk.ChunkIndex.build([130], torch.device("cpu"))
    start = torch.ones(1, 2, 16, 16, dtype=torch.float64)
    wanted, state = literal(exact, start[0])
    found, after = kda_chunk.chunked(rounded, index, start.float(), -5.0)
    assert relative(found.double(), wanted) < 1e-4
    assert relative(after[0].double(), state) < 1e-4


def test_chunked_kda_refuses_a_bound_that_overflows_fp32():
    index = kda_chunk.ChunkIndex.build([3], torch.device("cpu"))
    with pytest.raises(ValueError, match="gate_lower_bound: got -9"):
        kda_chunk.chunked(random_inputs(3, 0, torch.float32), index, torch.zeros(1, 2, 16, 16), -9.0)


@settings(max_examples=15, deadline=None)
@given(
    slots=st.permutations(list(range(1, 9))).map(lambda p: p[:5]),
    block=st.sampled_from([1, 2 * 2 * 16 * 16 * 8, 1 << 20]),
    spread=st.booleans(),
)
def test_recurrent_kda_equals_the_literal_form_for_any_slots_and_blocks(slots, block, spread):
    slots = [1, 3, 5, 7] if spread else slots  # evenly spaced: updated in place
    inputs = random_inputs(len(slots), 7)
    rows = kda.KdaInputs(**{n: getattr(inputs, n).unsqueeze(1) for n in ("q", "k", "v", "log_decay", "beta")})
    states = torch.randn(9, 2, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = states.clone()
    held, kda.STATE_BLOCK_BYTES = kda.STATE_BLOCK_BYTES, block
    try:
        found = kda.recurrent(rows, states, torch.tensor(slots), torch.tensor(slots).unsqueeze(1))
    finally:
        kda.STATE_BLOCK_BYTES = held
    for row, slot in enumerate(slots):
        one = kda.KdaInputs(**{n: getattr(inputs, n)[row : row + 1] for n in ("q", "k", "v", "log_decay", "beta")})
        wanted, state = literal(one, before[slot].transpose(-1, -2))
        assert relative(found[row, 0], wanted[0]) < 1e-12
        assert relative(states[slot], state.transpose(-1, -2)) < 1e-12
    untouched = [slot for slot in range(9) if slot not in slots]
    assert torch.equal(states[untouched], before[untouched])


def test_router_ties_go_to_the_lower_id_and_weights_ignore_the_bias():
    scores = torch.tensor([[0.5, 0.9, 0.9, 0.5, 0.9]])
    assert moe.choose_experts(scores, torch.zeros(5), 4).tolist() == [[1, 2, 4, 0]]
    assert moe.choose_experts(scores, torch.tensor([1.0, 0, 0, 0.0, 0]), 2).tolist() == [[0, 1]]
    ops = moe.MoeOperands.prepare(random_weights(TINY, 0).layers[1].mlp, TINY, torch.float64)
    x = torch.randn(7, TINY.hidden_size, dtype=torch.float64)
    ids, weights = moe.route(ops, x)
    shifted = replace(ops, router_bias_E=ops.router_bias_E + 3.0)
    assert torch.equal(moe.route(shifted, x)[1], weights)
    assert torch.allclose(weights.sum(-1), torch.ones(7, dtype=torch.float64), rtol=0, atol=1e-15)
    assert torch.equal(moe.route(replace(ops, scaling=2.5), x)[1], weights * 2.5)
    scores = torch.sigmoid(x @ ops.router_ED.T)
    assert torch.allclose(weights * scores.gather(1, ids).sum(-1, keepdim=True), scores.gather(1, ids), rtol=1e-14)


@pytest.mark.parametrize("rows", [1, 3, 40, 700])
def test_expert_groupings_agree(rows):
    """Gathered, padded and one-at-a-time forms give the plain sum over chosen experts."""
    weights = random_weights(TINY, 0).layers[1].mlp
    ops = moe.MoeOperands.prepare(weights, TINY, torch.float64)
    g = torch.Generator().manual_seed(rows)
    z = torch.randn(rows, TINY.moe_latent_size, generator=g, dtype=torch.float64)
    ids = torch.stack([torch.randperm(TINY.n_experts, generator=g)[:2] for _ in range(rows)])
    shares = torch.rand(rows, 2, generator=g, dtype=torch.float64)
    w1, w2, w3 = (stack.dequantize(torch.float64) for stack in (weights.w1, weights.w2, weights.w3))
    wanted = torch.stack(
        [
            sum(s * (w2[e] @ basic.situ(w1[e] @ row, w3[e] @ row, 4.0, 25.0)) for s, e in zip(share, chosen.tolist(), strict=True))
            for row, chosen, share in zip(z, ids, shares, strict=True)
        ]
    )
    assert relative(moe.experts(ops, TINY, z, ids, shares), wanted) < 1e-12


def test_blocked_decode_attention_equals_one_softmax():
    """Running maximum over blocks, ragged lengths, a request that sees nothing."""
    ops = mla.MlaOperands.prepare(random_weights(TINY, 0).layers[3].attn, TINY, torch.float64)
    caches = Caches.allocate(TINY, 3, 300, 1, torch.float64, page_tokens=8)
    cache = caches.mla(3)
    g = torch.Generator().manual_seed(2)
    cache.pages_PTC[1:] = torch.randn(cache.pages_PTC[1:].shape, generator=g, dtype=torch.float64) * 2
    for request, length in enumerate((300, 5, 77)):
        caches.reserve(request, length)
    width = max(len(p) for p in caches.pages_R)
    table = torch.tensor([p + [0] * (width - len(p)) for p in caches.pages_R])
    ints = torch.zeros(3, 1, dtype=torch.int32)
    batch = StepBatch(tokens_BQ=ints.long(), lengths_B=ints[:, 0], block_table_BN=table.int(), slots_BQ=ints, accepted_B=ints[:, 0])
    query = torch.randn(3, 2, TINY.mla_cache_dim, generator=g, dtype=torch.float64)
    visible = torch.tensor([[300, 299], [5, 4], [77, 0]])
    held, mla.DECODE_BLOCK_VALUES = mla.DECODE_BLOCK_VALUES, 1
    try:
        blocked = mla.absorbed_attention(ops, query, visible, batch, cache)
    finally:
        mla.DECODE_BLOCK_VALUES = held
    whole = mla.absorbed_attention(ops, query, visible, batch, cache)
    for b in range(3):
        entries = cache.pages_PTC[table[b]].flatten(0, 1)
        for r in range(2):
            n = int(visible[b, r])
            wanted = torch.softmax(entries[:n] @ query[b, r] * ops.scale, 0) @ entries[:n, : ops.latent]
            for found in (blocked, whole):
                assert torch.allclose(found[b, r], wanted, rtol=1e-12, atol=1e-14)
    assert (whole[2, 1] == 0).all()


def test_residual_without_blocks_is_the_prefix_exactly_and_sources_count_once():
    x = torch.randn(4, 8, dtype=torch.float64)
    residual = Residual(x, 1e-5)
    weight = torch.randn(8, dtype=torch.float64)
    assert torch.equal(residual.mixture(weight), x)
    attention = torch.randn(4, 8, dtype=torch.float64)
    residual.write_block(restart_TD=attention)
    assert residual.n_blocks == 1
    logits = torch.stack([(s * weight).sum(-1) / (s.square().mean(-1) + 1e-5).sqrt() for s in (x, attention)])
    share = logits.softmax(0).unsqueeze(-1)
    assert torch.allclose(residual.mixture(weight), share[0] * x + share[1] * attention, rtol=1e-13, atol=1e-14)


def test_prefix_is_added_in_fp32_and_rounded_once():
    a, b = torch.tensor([[1.0]]).bfloat16(), torch.tensor([[2.0**-8]]).bfloat16()
    residual = Residual(a, 1e-5)
    residual.add(b)
    residual.add(b)
    assert residual.prefix_TD.item() == 1.0  # each addition is rounded, a tie goes to even
    g = torch.Generator().manual_seed(0)
    p, d = (torch.randn(64, 64, generator=g).bfloat16() for _ in range(2))
    residual = Residual(p, 1e-5)
    residual.add(d)
    assert torch.equal(residual.prefix_TD, (p.float() + d.float()).bfloat16())


def test_situ_saturates_where_the_formula_says():
    g = torch.tensor([0.0, 1e4, -1e4, 1.0], dtype=torch.float64)
    u = torch.tensor([3.0, 1e6, 1.0, 25.0], dtype=torch.float64)
    tanh1 = torch.tanh(torch.tensor(1.0, dtype=torch.float64)).item()
    wanted = [0.0, 100.0, 0.0, 4 * torch.tanh(torch.tensor(0.25, dtype=torch.float64)).item() * 0.7310585786300049 * 25 * tanh1]
    assert torch.allclose(basic.situ(g, u, 4.0, 25.0), torch.tensor(wanted, dtype=torch.float64), rtol=1e-14)
