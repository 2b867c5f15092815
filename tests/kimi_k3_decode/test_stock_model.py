"""The stock path against an independent FP64 reading of the equations, and against itself: prefill, verify, slots, forks, padding."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_decode.config import NANO
from kimi_k3_decode.config_io import config_document
from kimi_k3_decode.names import to_tensors
from kimi_k3_decode.stock import StockPath
from kimi_k3_decode.weights import random_weights

sys.path.insert(0, str(Path(__file__).parent))
from models import TINY, decode_all, fp64_caches, oracle, prompt, relative
from naive import NaiveModel

TOLERANCE = 1e-9


def naive_model(weights) -> NaiveModel:
    table = {
        name: tensor.numpy() if tensor.dtype == torch.uint8 else tensor.double().numpy() for name, tensor in to_tensors(weights).items()
    }
    return NaiveModel(config_document(weights.config)["text_config"], table)


@pytest.mark.parametrize(("config", "length", "seed"), [(NANO, 20, 0), (TINY, 90, 1), (TINY, 90, 2)])
def test_logits_equal_the_published_equations(config, length, seed):
    weights = random_weights(config, seed)
    tokens = prompt(length, seed)
    naive = naive_model(weights)
    wanted = torch.from_numpy(naive.logits(tokens))
    path = StockPath(weights.to(torch.float64), torch.float64)
    caches = fp64_caches(config)
    done = path.prefill([tokens], caches, [0], all_logits=True, taps=True)
    assert relative(done.all_logits[0], wanted) < TOLERANCE
    decoded = decode_all(path, fp64_caches(config), 1, tokens)
    assert relative(decoded, wanted) < TOLERANCE
    taps = torch.from_numpy(np.stack([naive.taps[i] for i in config.draft.target_layer_ids]))
    assert relative(done.taps[0][:, -1], taps) < TOLERANCE


def test_naive_and_stock_disagree_when_the_equations_differ():
    """The comparison can fail: another gate bound is seen."""
    weights = random_weights(TINY, 0)
    wrong = replace(weights, config=replace(TINY, gate_lower_bound=-4.0))
    tokens = prompt(40)
    wanted = torch.from_numpy(naive_model(weights).logits(tokens))
    found = StockPath(wrong.to(torch.float64), torch.float64).prefill([tokens], fp64_caches(), [0], all_logits=True)
    assert relative(found.all_logits[0], wanted) > 1e-4


@settings(max_examples=12, deadline=None)
@given(length=st.integers(1, 200), cut=st.integers(0, 199), chunk=st.sampled_from([7, 64, 100, 2048]))
def test_prefill_then_decode_equals_prefill_of_all(length, cut, chunk):
    path, tokens = oracle(), prompt(length)
    cut = max(1, min(cut, length))
    whole = path.prefill([tokens], fp64_caches(), [2], all_logits=True).all_logits[0]
    caches = fp64_caches()
    first = path.prefill([tokens[:cut]], caches, [0], chunk_tokens=chunk, all_logits=True).all_logits[0]
    assert relative(first, whole[:cut]) < TOLERANCE
    if cut < length:
        assert relative(decode_all(path, caches, 0, tokens[cut:]), whole[cut:]) < TOLERANCE


def test_ragged_prompts_prefilled_together_equal_prompts_alone():
    path, prompts = oracle(), [prompt(n, n) for n in (1, 63, 64, 65, 130)]
    together = path.prefill(prompts, fp64_caches(n_requests=5), [4, 2, 0, 1, 3], chunk_tokens=80)
    for row, tokens in zip(together.logits_RV, prompts, strict=True):
        assert relative(row, path.prefill([tokens], fp64_caches(), [0]).logits_RV[0]) < TOLERANCE


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_verify_with_any_accepted_counts_equals_sequential_decode(data):
    """Each verify step brings q tokens of which only `accepted` are the true continuation; logits of those equal plain decode."""
    path, tokens = oracle(), prompt(60, 3)
    wanted = path.prefill([tokens], fp64_caches(), [0], all_logits=True).all_logits[0]
    caches = fp64_caches()
    path.prefill([tokens[:5]], caches, [1])
    at = 5
    while at < 40:
        q = data.draw(st.integers(1, 8))
        accepted = data.draw(st.integers(1, q))
        rows = tokens[at : at + accepted] + [63] * (q - accepted)  # the rest are wrong drafts
        out = path.step(caches.batch([rows], [1]), caches)
        assert relative(out.logits_BQV[0, :accepted], wanted[at : at + accepted]) < TOLERANCE
        caches.advance([1], [accepted])
        at += accepted


def test_slots_may_lie_anywhere_and_null_rows_are_neither_read_nor_written():
    path, tokens = oracle(), prompt(30)
    plain = fp64_caches()
    path.prefill([tokens], plain, [0])
    wanted = path.step(plain.batch([[5, 6, 7]], [0]), plain).logits_BQV
    caches = fp64_caches(n_requests=6, q_max=8)
    caches.slots_RQ[3] = [47, 2, 31, 5, 40, 1, 9, 22]
    caches.slots_RQ[0] = [3, 4, 6, 7, 8, 10, 11, 12]
    path.prefill([tokens], caches, [3])
    null = [(c.conv_SWC, c.state_SHVK) if i in TINY.kda_layers else (c.pages_PTC,) for i, c in enumerate(caches.layers)]
    before = [tuple(tensor[0].clone() for tensor in tensors) for tensors in null]
    padded = path.step(caches.batch([[5, 6, 7]], [3], pad_to=3), caches)
    assert relative(padded.logits_BQV[:1], wanted) < TOLERANCE
    assert torch.isfinite(padded.logits_BQV).all()
    for tensors, held in zip(null, before, strict=True):
        assert all(torch.equal(tensor[0], was) for tensor, was in zip(tensors, held, strict=True))


def test_a_null_slot_inside_a_verify_row_skips_only_that_write():
    path, tokens = oracle(), prompt(20)
    caches = fp64_caches()
    path.prefill([tokens], caches, [0])
    other = caches.fork()
    batch = caches.batch([[5, 6, 7]], [0])
    wanted = path.step(batch, caches).logits_BQV
    gapped = other.batch([[5, 6, 7]], [0])
    skipped = int(gapped.slots_BQ[0, 1])
    gapped.slots_BQ[0, 1] = -1
    for layer in TINY.kda_layers:
        other.kda(layer).state_SHVK[skipped] = 123.0
    assert torch.equal(path.step(gapped, other).logits_BQV, wanted)
    for layer in TINY.kda_layers:
        assert (other.kda(layer).state_SHVK[skipped] == 123.0).all()
        assert torch.equal(other.kda(layer).state_SHVK[gapped.slots_BQ[0, 2]], caches.kda(layer).state_SHVK[batch.slots_BQ[0, 2]])


def test_what_lies_beyond_a_request_is_never_read():
    """NaN in every free page, in the unwritten rows of used ones and in foreign slots changes nothing."""
    path, tokens = oracle(), prompt(70)
    clean, dirty = fp64_caches(), fp64_caches()
    for caches in (clean, dirty):
        path.prefill([tokens, tokens[:9]], caches, [0, 2])
        caches.reserve(0, 71)
        caches.reserve(2, 10)
    mine = {caches.slots_RQ[r][0] for r in (0, 2)}
    for layer, cache in enumerate(dirty.layers):
        if layer in TINY.kda_layers:
            foreign = [s for s in range(1, cache.state_SHVK.shape[0]) if s not in mine]
            cache.state_SHVK[foreign] = torch.nan
            cache.conv_SWC[foreign] = torch.nan
        else:
            cache.pages_PTC[dirty.free_pages] = torch.nan
            cache.pages_PTC[dirty.pages_R[0][1], 6:] = torch.nan
            cache.pages_PTC[dirty.pages_R[2][0], 9:] = torch.nan
    steps = [path.step(c.batch([[5], [6]], [0, 2]), c).logits_BQV for c in (clean, dirty)]
    assert torch.equal(*steps)


def test_forked_caches_are_independent_and_equal():
    path, tokens = oracle(), prompt(80)
    caches = fp64_caches()
    path.prefill([tokens], caches, [0])
    fork = caches.fork()
    wanted = decode_all(path, fork, 0, [9, 8, 7])
    decode_all(path, caches, 0, [20, 21, 22, 23])
    again = caches.fork()
    assert relative(decode_all(path, again, 0, [1]), decode_all(path, caches, 0, [1])) == 0.0
    fresh = fp64_caches()
    path.prefill([tokens], fresh, [1])
    assert relative(decode_all(path, fresh, 1, [9, 8, 7]), wanted) < TOLERANCE


def test_an_adopted_request_continues_like_the_original():
    path, tokens = oracle(), prompt(80)
    pool, own = fp64_caches(), fp64_caches()
    path.prefill([tokens], pool, [2])
    path.step(pool.batch([[5, 6, 7]], [2]), pool)
    pool.advance([2], [2])  # mid-verify: state in the second slot, window offset 1
    own.acquire()
    place = own.adopt(pool, 2, 120)
    assert relative(decode_all(path, own, place, [9, 8]), decode_all(path, pool, 2, [9, 8])) < TOLERANCE


def test_forced_routing_replaces_the_choice_and_not_the_scores():
    path, tokens = oracle(), prompt(30)
    caches = fp64_caches()
    path.prefill([tokens], caches, [0])
    free_caches, forced_caches, other_caches = caches.fork(), caches.fork(), caches.fork()
    free = path.step(free_caches.batch([[5, 6]], [0]), free_caches)
    same = path.step(forced_caches.batch([[5, 6]], [0]), forced_caches, routing=free.routing)
    assert torch.equal(free.logits_BQV, same.logits_BQV)
    moved = {layer: (ids + 1) % TINY.n_experts for layer, ids in free.routing.items()}
    out = path.step(other_caches.batch([[5, 6]], [0]), other_caches, routing=moved)
    assert all(torch.equal(out.routing[layer], moved[layer]) for layer in moved)
    assert relative(out.logits_BQV, free.logits_BQV) > 1e-3


def test_bf16_rounds_and_fp32_hardly_does():
    weights, tokens = random_weights(TINY, 0), prompt(40)
    wanted = oracle().prefill([tokens], fp64_caches(), [0]).logits_RV
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        path = StockPath(weights, dtype)
        caches = type(fp64_caches()).allocate(TINY, 1, 64, 1, dtype)
        errors[dtype] = relative(path.prefill([tokens], caches, [0]).logits_RV, wanted)
    assert errors[torch.float32] < 1e-3
    assert errors[torch.float32] * 10 < errors[torch.bfloat16] < 1.0


def test_observer_sees_every_point_and_may_replace():
    path, tokens = oracle(), prompt(10)
    caches = fp64_caches()
    seen = []
    path.prefill([tokens], caches, [0], observer=lambda point, layer, tensor: seen.append((point, layer)))
    per_layer = {layer: [p for p, i in seen if i == layer] for layer in range(TINY.n_layers + 1)}
    assert per_layer[0] == ["attn_in", "kda_o", "attn_out", "mlp_in", "mlp_out"]
    assert per_layer[TINY.n_layers - 1] == ["attn_in", "attn_out", "mlp_in", "mlp_out"]
    assert per_layer[TINY.n_layers] == ["final_in"]
    out = path.step(caches.batch([[5]], [0]), caches, observer=lambda point, layer, x: torch.zeros_like(x) if point == "final_in" else None)
    assert (out.logits_BQV == 0).all()


def test_prefill_refuses_empty_prompts_and_repeated_requests_in_one_error():
    with pytest.raises(ValueError, match=r"prompt 1: got no tokens.*request_ids"):
        oracle().prefill([[5], []], fp64_caches(), [0, 0])
