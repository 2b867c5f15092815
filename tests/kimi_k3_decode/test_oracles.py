"""Each oracle without rounding against a second formulation: the stock path's FP64 function, or the equation written out naively."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_decode.cache import Caches
from kimi_k3_decode.config import NANO, Shard
from kimi_k3_decode.launches import layer_plan
from kimi_k3_decode.ops.arithmetic import CONTRACT, EXACT
from kimi_k3_decode.ops.attn_res.contract import contract as attn_res_contract
from kimi_k3_decode.ops.attn_res.oracle import mix
from kimi_k3_decode.ops.attn_res.oracle import oracle as attn_res_oracle
from kimi_k3_decode.ops.head.contract import sample
from kimi_k3_decode.ops.head.oracle import sample as sample_oracle
from kimi_k3_decode.ops.kda.oracle import recur
from kimi_k3_decode.ops.route.contract import contract as route_contract
from kimi_k3_decode.ops.route.oracle import oracle as route_oracle
from kimi_k3_decode.stock.model import StockPath
from kimi_k3_decode.weights import random_weights

_spec = importlib.util.spec_from_file_location("layer_tools", Path(__file__).with_name("layer_tools.py"))
assert _spec is not None
assert _spec.loader is not None
tools = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tools)

F64 = torch.float64
TOLERANCE = 1e-11
KDA_LAYER, MLA_LAYER, MOE_LAYER = 1, 3, 1


@pytest.fixture(scope="module")
def weights():
    return random_weights(NANO, 11, F64)


@pytest.fixture(scope="module")
def stock(weights):
    return StockPath(weights, F64)


def filled(stock: StockPath, q_max: int, lengths: tuple[int, ...]) -> Caches:
    caches = Caches.allocate(NANO, len(lengths), 256, q_max=q_max, dtype=F64)
    torch.manual_seed(1)
    stock.prefill([torch.randint(4, 120, (n,)).tolist() for n in lengths], caches, list(range(len(lengths))))
    return caches


def hidden(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, NANO.hidden_size, dtype=F64, generator=torch.Generator().manual_seed(seed))


def assert_same_caches(first: Caches, second: Caches) -> None:
    """Every slot and every page in use; the null slot and the null page are among them and must be untouched too."""
    pages = [0, *(page for pages in first.pages_R for page in pages)]
    for a, b in zip(first.layers, second.layers, strict=True):
        for name, tensor in vars(a).items():
            if isinstance(tensor, torch.Tensor):
                rows = pages if name == "pages_PTC" else slice(None)
                torch.testing.assert_close(tensor[rows], vars(b)[name][rows], rtol=0, atol=TOLERANCE)
                assert not bool(tensor[0].any())


@pytest.mark.parametrize("layer", [KDA_LAYER, MLA_LAYER])
@pytest.mark.parametrize(("q", "accepted"), [(1, (1, 1, 1)), (4, (1, 3, 4)), (3, (2, 1, 3))])
def test_attention_sublayers_equal_stock_over_two_verify_steps(weights, stock, layer, q, accepted):
    """Output and caches, with slots permuted and a padding request in the batch; the second step reads what the first accepted."""
    ours = filled(stock, 4, (70, 3, 130))
    ours.slots_RQ = [[9, 4, 2, 7], [1, 12, 3, 5], [6, 11, 10, 8]]
    ours.layers = filled_like(ours)
    theirs = ours.fork()
    for step in range(2):
        x_TD = hidden(4 * q, step)
        tokens = torch.zeros(3, q, dtype=torch.int64)
        batch = ours.batch(tokens, [2, 0, 1], pad_to=4)
        twin = theirs.batch(tokens, [2, 0, 1], pad_to=4)
        found = tools.run_ops(weights, layer, tools.ATTENTION, {"x_attn": x_TD, **tools.step_buffers(NANO, ours, batch)}, rows=4 * q, q=q)
        box = layer_plan(NANO, None, layer, 4 * q, q)[-9].bindings["delta_RTD"][0]
        want = stock.attention(layer, x_TD.unflatten(0, (4, q)), twin, theirs).flatten(0, 1)
        torch.testing.assert_close(found[box][: 3 * q], want[: 3 * q], rtol=0, atol=TOLERANCE)
        assert_same_caches(ours, theirs)
        for caches in (ours, theirs):
            caches.advance([2, 0, 1], accepted)


def filled_like(caches: Caches) -> list:
    """Random states and windows in every slot, so that a read from a wrong slot shows; pages stay as they are."""
    generator = torch.Generator().manual_seed(5)
    for cache in caches.layers:
        if hasattr(cache, "state_SHVK"):
            cache.state_SHVK[1:] = torch.randn(cache.state_SHVK[1:].shape, generator=generator, dtype=F64)
            cache.conv_SWC[1:] = torch.randn(cache.conv_SWC[1:].shape, generator=generator, dtype=F64)
    return caches.layers


def test_tokens_with_a_null_slot_are_computed_but_not_written(weights, stock):
    """Slots <= 0 inside a real request: the token's output and the later states count, its own slot stays as it was."""
    ours = filled(stock, 4, (6, 7))
    ours.layers = filled_like(ours)
    theirs = ours.fork()
    batches = [caches.batch(torch.zeros(2, 4, dtype=torch.int64)) for caches in (ours, theirs)]
    for batch in batches:
        batch.slots_BQ[0, 1], batch.slots_BQ[0, 3], batch.slots_BQ[1, 2] = 0, -1, 0
    x_TD = hidden(8)
    found = tools.run_ops(weights, KDA_LAYER, tools.ATTENTION, {"x_attn": x_TD, **tools.step_buffers(NANO, ours, batches[0])}, rows=8, q=4)
    want = stock.attention(KDA_LAYER, x_TD.unflatten(0, (2, 4)), batches[1], theirs).flatten(0, 1)
    box = layer_plan(NANO, None, KDA_LAYER, 8, 4)[-9].bindings["delta_RTD"][0]
    torch.testing.assert_close(found[box], want, rtol=0, atol=TOLERANCE)
    assert_same_caches(ours, theirs)


def test_kda_recurrence_equals_the_equation_written_out():
    """S ← exp(g) ⊙ S on rows (key channels); S ← S + (βk)(v − kᵀS)ᵀ; o = qᵀS, per head with S [K, V]."""
    g = torch.Generator().manual_seed(2)
    shape = (2, 3, 5)
    q, k, v = (torch.randn(*shape, generator=g, dtype=F64) for _ in range(3))
    decay, beta = torch.rand(*shape, generator=g, dtype=F64), torch.rand(2, 3, generator=g, dtype=F64)
    state = torch.randn(2, 3, 5, 5, generator=g, dtype=F64)
    updated = state.clone()
    out = recur(updated, q, k, v, decay, beta)
    for b in range(2):
        for h in range(3):
            S = state[b, h].T * decay[b, h].unsqueeze(1)
            S = S + torch.outer(beta[b, h] * k[b, h], v[b, h] - k[b, h] @ S)
            torch.testing.assert_close(updated[b, h], S.T, rtol=0, atol=1e-13)
            torch.testing.assert_close(out[b, h], q[b, h] @ S, rtol=0, atol=1e-13)


@pytest.mark.parametrize("lengths", [(0, 1, 63), (64, 127, 200), (5, 250, 64)])
def test_mla_decode_equals_expanded_softmax_attention(weights, stock, lengths):
    """The absorbed split decode against keys and values expanded per head through kv_b, softmax in one piece, no rotation."""
    caches = Caches.allocate(NANO, 3, 320, q_max=2, dtype=F64)
    g = torch.Generator().manual_seed(3)
    for request, n in enumerate(lengths):
        caches.reserve(request, n)
        caches.lengths_R[request] = n
    for cache in caches.layers:
        if hasattr(cache, "pages_PTC"):
            used = [page for pages in caches.pages_R for page in pages]
            cache.pages_PTC[used] = torch.randn(len(used), 64, NANO.mla_cache_dim, generator=g, dtype=F64)
    batch = caches.batch(torch.zeros(3, 2, dtype=torch.int64))
    found = tools.run_ops(
        weights, MLA_LAYER, tools.ATTENTION, {"x_attn": hidden(6), **tools.step_buffers(NANO, caches, batch)}, rows=6, q=2
    )
    w = weights.layers[MLA_LAYER].attn
    rank, latent, nope, heads = NANO.q_lora_rank, NANO.kv_lora_rank, NANO.qk_nope_head_dim, NANO.mla_heads
    x = hidden(6)
    q_a = x @ w.q_a_RD.T
    q = (q_a * torch.rsqrt(q_a.square().mean(-1, keepdim=True) + 1e-5) * w.q_a_norm_R) @ w.q_b_XR.T
    q = q.view(6, heads, -1)
    gate = torch.sigmoid(x @ w.g_proj_OD.T)
    kv_b = w.kv_b_ZL.view(heads, nope + NANO.v_head_dim, latent)
    pages = caches.mla(MLA_LAYER).pages_PTC
    for b in range(3):
        for t in range(2):
            n = lengths[b] + t + 1
            entries = pages[caches.pages_R[b]].flatten(0, 1)[:n]
            for h in range(heads):
                keys = torch.cat((entries[:, :latent] @ kv_b[h, :nope].T, entries[:, latent:]), dim=1)
                share = torch.softmax(keys @ q[2 * b + t, h] * NANO.qk_head_dim**-0.5, dim=0)
                want = share @ (entries[:, :latent] @ kv_b[h, nope:].T)
                columns = slice(h * NANO.v_head_dim, (h + 1) * NANO.v_head_dim)
                torch.testing.assert_close(found["attn_out"][2 * b + t, columns], want * gate[2 * b + t, columns], rtol=0, atol=1e-11)
    assert rank == found["proj"].shape[1] - NANO.mla_cache_dim - heads * NANO.v_head_dim


@pytest.mark.parametrize("rows", [1, 3, 8, 64])
@pytest.mark.parametrize("forced", [False, True])
def test_moe_sublayer_equals_stock(weights, stock, rows, forced):
    x_TD = hidden(rows, rows)
    ids = torch.stack([torch.randperm(NANO.n_experts, generator=torch.Generator().manual_seed(r))[:4] for r in range(rows)])
    buffers = {"x_mlp": x_TD, "table.live_rows": torch.tensor([rows]), f"table.L{MOE_LAYER:02d}.forced": ids}
    ops = {"moe_front", "route", "experts_up", "experts_down", "shared_up", "shared_down", "latent_reduce", "moe_tail"}
    found = tools.run_ops(weights, MOE_LAYER, ops, buffers, rows=rows, forced=forced)
    want, chosen = stock.mlp(MOE_LAYER, x_TD, {MOE_LAYER: ids} if forced else None)
    box = layer_plan(NANO, None, MOE_LAYER, rows)[-1].bindings["delta_RTD"][0]
    torch.testing.assert_close(found[box], want, rtol=0, atol=TOLERANCE)
    assert torch.equal(found["ids"].long(), chosen)


def test_dense_sublayer_equals_stock(weights, stock):
    found = tools.run_ops(weights, 0, {"dense_up", "dense_down"}, {"x_mlp": hidden(5)}, rows=5)
    box = layer_plan(NANO, None, 0, 5)[-1].bindings["delta_RTD"][0]
    torch.testing.assert_close(found[box], stock.mlp(0, hidden(5))[0], rtol=0, atol=TOLERANCE)


def boundary(operands: dict[str, torch.Tensor], rows: int, arithmetic=EXACT, **modes: object) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(4)
    weights = {"res_score_D": torch.randn(256, generator=g, dtype=F64), "norm_D": torch.randn(256, generator=g, dtype=F64)}
    contract = attn_res_contract(Shard(config=NANO), rows=rows, writer="o_proj", **modes)
    return attn_res_oracle(NANO, contract, {**weights, **operands}, arithmetic)


def test_attn_res_with_no_block_passes_the_prefix_through_exactly():
    prefix = hidden(3)
    out = boundary({"prefix_TD": prefix}, 3, n_blocks=0, delta="none", writes_block=True)
    norm = torch.randn(512, generator=torch.Generator().manual_seed(4), dtype=F64)[256:]
    assert torch.equal(out["block_out_TD"], prefix)
    torch.testing.assert_close(out["x_TD"], prefix / (prefix.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm, rtol=0, atol=1e-12)


def test_attn_res_mixture_equals_the_equation_row_by_row():
    sources, score = torch.stack([hidden(3, s) * 3**s for s in range(4)]), torch.randn(256, dtype=F64) / 8
    got = mix(sources, score, 1e-5)
    for t in range(3):
        logits = [float(score @ x) / math.sqrt(float((x * x).mean()) + 1e-5) for x in sources[:, t]]
        top = max(logits)
        shares = [math.exp(value - top) for value in logits]
        want = sum(share / sum(shares) * x for share, x in zip(shares, sources[:, t], strict=True))
        torch.testing.assert_close(got[t], want, rtol=0, atol=1e-12)


def test_attn_res_restart_uses_the_delta_alone_and_sums_ranks_in_order():
    parts = torch.stack((hidden(2, 1), hidden(2, 2)))
    out = boundary({"delta_RTD": parts, "blocks_NTD": hidden(2, 3).unsqueeze(0)}, 2, n_blocks=1, restart=True)
    torch.testing.assert_close(out["prefix_out_TD"], parts.sum(0), rtol=0, atol=1e-14)
    added = boundary({"prefix_TD": hidden(2, 4), "delta_RTD": parts, "blocks_NTD": hidden(2, 3).unsqueeze(0)}, 2, n_blocks=1)
    torch.testing.assert_close(added["prefix_out_TD"], hidden(2, 4) + parts.sum(0), rtol=0, atol=1e-14)


def test_attn_res_rounding_points():
    """The rank sum is BF16, then prefix + delta is added unrounded and rounded once; a double rounding would give another number."""
    prefix, parts = torch.full((1, 256), 1.0), torch.full((2, 1, 256), 2.0**-9)
    operands = {"prefix_TD": prefix, "delta_RTD": parts, "blocks_NTD": torch.zeros(1, 1, 256)}
    out = boundary(operands, 1, CONTRACT, n_blocks=1)
    # 1 + 2^-8 is half way between BF16 neighbours 1 and 1 + 2^-7: to even, so 1. Added one part at a time it would also be 1,
    # but 1 + 3 · 2^-9 must round up.
    assert torch.equal(out["prefix_out_TD"], prefix)
    operands["delta_RTD"] = torch.stack((parts[0], parts[0], parts[0]))
    assert torch.equal(boundary(operands, 1, CONTRACT, n_blocks=1)["prefix_out_TD"], torch.full((1, 256), 1 + 2.0**-7))


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=24, max_size=24), min_size=1, max_size=5),
    st.lists(st.integers(-2, 2), min_size=24, max_size=24),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_routing_ties_weights_and_lists(logits, bias, data):
    """Few distinct values, so ties abound: falling biased score, then rising id; lists hold every live pair once, grouped."""
    rows = len(logits)
    live = data.draw(st.integers(1, rows))
    logits_TE, bias_E = torch.tensor(logits, dtype=F64), torch.tensor(bias, dtype=F64) / 8
    logits_TE[live:] = torch.nan
    operands = {
        "logits_TE": logits_TE,
        "latent_box_TL": torch.zeros(rows, 128, dtype=F64),
        "bias_E": bias_E,
        "live_rows_N": torch.tensor([live]),
    }
    out = route_oracle(NANO, route_contract(Shard(config=NANO), rows=rows), operands, EXACT)
    pairs, offsets = out["pairs_N"].tolist(), out["offsets_E"].tolist()
    assert offsets[-1] == live * 4
    assert sorted(pairs[: live * 4]) == list(range(live * 4))
    assert set(pairs[live * 4 :]) <= {-1}
    for t in range(live):
        score = torch.sigmoid(logits_TE[t])
        order = sorted(range(24), key=lambda e: (-float(score[e] + bias_E[e]), e))[:4]
        assert out["ids_TZ"][t].tolist() == order
        torch.testing.assert_close(out["weights_TZ"][t], score[order] / score[order].sum(), rtol=1e-12, atol=0)
    for expert in range(24):
        group = pairs[offsets[expert] : offsets[expert + 1]]
        assert group == sorted(group)
        assert all(int(out["ids_TZ"].flatten()[p]) == expert for p in group)
    assert bool((out["ids_TZ"][live:] == -1).all())
    assert not bool(torch.isnan(out["weights_TZ"]).any())


def test_sample_takes_the_lowest_id_among_equals():
    logits = torch.zeros(2, NANO.vocab_size)
    logits[0, [7, 100]], logits[1, [3, 2, 90]] = 1.0, 2.0
    for top_k, want in ((1, [[7], [2]]), (3, [[7, 100, 0], [2, 3, 90]])):
        out = sample_oracle(NANO, sample(Shard(config=NANO), rows=2, top_k=top_k), {"logits_box_TV": logits}, CONTRACT)
        assert out["top_ids_TZ"].tolist() == want
        torch.testing.assert_close(out["top_logits_TZ"], logits.gather(1, out["top_ids_TZ"].long()))


@pytest.mark.parametrize("splits", [2, 3, 4])
def test_split_sums_differ_from_one_sum_only_by_rounding_and_are_ordered(splits):
    g = torch.Generator().manual_seed(splits)
    x, w = torch.randn(5, 256, generator=g), torch.randn(7, 256, generator=g)
    exact = x.double() @ w.double().T
    got = CONTRACT.linear(x, w, splits)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-4)
    width = -(-256 // splits)
    total = torch.zeros(5, 7)
    for begin in range(0, 256, width):
        total = total + x[:, begin : begin + width] @ w[:, begin : begin + width].T
    assert torch.equal(got, total)
    assert torch.equal(EXACT.linear(x, w, splits), exact)


def test_fp8_cache_is_scaled_on_the_way_in_and_out():
    """An FP8 page holds value / scale; the decode sees it back within one E4M3 step."""
    from kimi_k3_decode.ops.mla.oracle import _append, _gather

    pages = torch.zeros(3, 64, NANO.mla_cache_dim, dtype=torch.float8_e4m3fn)
    new = torch.randn(2, NANO.mla_cache_dim, generator=torch.Generator().manual_seed(0)) * 8
    operands = {
        "pages_STM": pages,
        "block_table_BN": torch.tensor([[2], [0]]),
        "lengths_B": torch.tensor([5, 0]),
        "cache_scale": torch.tensor(0.25),
    }
    _append(new, 1, operands)
    position = torch.tensor([[[5]], [[0]]])
    back = _gather(operands, position, torch.tensor([[[True]], [[True]]]), CONTRACT)
    torch.testing.assert_close(back[0, 0, 0], new[0], rtol=2.0**-4, atol=0.25 * 2.0**-9)
    assert float(pages[0].float().abs().max()) == 0.0
