"""Contract execution of whole steps: the plan equals stock in FP64, ranks and their order do not matter, padding reaches nobody."""

from __future__ import annotations

import pytest
import torch

from kimi_k3_decode.cache import Caches, KdaLayerCache
from kimi_k3_decode.config import NANO, Unsupported
from kimi_k3_decode.launches import launch_graph
from kimi_k3_decode.ops.contract import ContractError
from kimi_k3_decode.ops.registry import ORACLES
from kimi_k3_decode.step import SpecializedPath
from kimi_k3_decode.stock.model import StockPath
from kimi_k3_decode.weights import random_weights

F64 = torch.float64
LENGTHS = (70, 5, 130)


@pytest.fixture(scope="module")
def bf16():
    return random_weights(NANO, 21)


@pytest.fixture(scope="module")
def f64(bf16):
    return bf16.to(F64)


@pytest.fixture(scope="module")
def stock64(f64):
    return StockPath(f64, F64)


def prefilled(stock: StockPath, q_max: int = 4, lengths: tuple[int, ...] = LENGTHS) -> Caches:
    caches = Caches.allocate(NANO, len(lengths), 256, q_max=q_max, dtype=stock.dtype)
    g = torch.Generator().manual_seed(8)
    stock.prefill([torch.randint(4, 120, (n,), generator=g).tolist() for n in lengths], caches, list(range(len(lengths))))
    return caches


def tokens(requests: int, q: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 120, (requests, q), generator=torch.Generator().manual_seed(seed))


def states(caches: Caches) -> list[torch.Tensor]:
    found = []
    for cache in caches.layers:
        if isinstance(cache, KdaLayerCache):
            found += [cache.state_SHVK, cache.conv_SWC]
        else:
            found.append(cache.pages_PTC[[0, *(page for pages in caches.pages_R for page in pages)]])
    return found


def assert_states(first: Caches, second: Caches, atol: float) -> None:
    for a, b in zip(states(first), states(second), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def rollout(path, caches: Caches, *, taps: bool = False) -> list:
    """Plain, full verify, shorter verify, plain; every accepted count occurs."""
    outputs = []
    for number, (q, accepted) in enumerate(((1, (1, 1, 1)), (4, (1, 4, 2)), (3, (3, 1, 2)), (1, (1, 1, 1)))):
        outputs.append(path.step(caches.batch(tokens(3, q, number), [2, 0, 1]), caches, taps=taps))
        caches.advance([2, 0, 1], accepted)
    return outputs


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"tp": 2, "order_seed": 5}, {"checked": True}])
def test_fp64_plan_equals_stock(f64, stock64, options):
    caches = prefilled(stock64)
    twin = caches.fork()
    want = rollout(stock64, twin, taps=True)
    got = rollout(SpecializedPath(f64, F64, **options), caches, taps=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.logits_BQV, b.logits_BQV, rtol=0, atol=1e-9)
        torch.testing.assert_close(a.taps_IBQD, b.taps_IBQD, rtol=0, atol=1e-9)
        assert a.routing.keys() == b.routing.keys()
        assert all(torch.equal(a.routing[layer], b.routing[layer]) for layer in a.routing)
    assert_states(caches, twin, 1e-9)


def test_virtual_ranks_agree_at_the_rounding_points_whatever_their_order(bf16):
    """One and two ranks differ only where FP32 partial sums are split; two ranks in any interleaving are bit-identical."""
    stock = StockPath(bf16)
    base = prefilled(stock)
    runs = []
    for options in ({}, {"tp": 2}, {"tp": 2, "order_seed": 1}, {"tp": 2, "order_seed": 2}):
        caches = base.fork()
        runs.append((rollout(SpecializedPath(bf16, **options), caches), caches))
    for outputs, caches in runs[2:]:
        for a, b in zip(outputs, runs[1][0], strict=True):
            assert torch.equal(a.logits_BQV, b.logits_BQV)
        for a, b in zip(states(caches), states(runs[1][1]), strict=True):
            assert torch.equal(a, b)
    first_one, first_two = runs[0][0][0], runs[1][0][0]
    assert float((first_one.logits_BQV - first_two.logits_BQV).pow(2).mean().sqrt()) < 0.3


def error_rms(path, bf16, stock64, base: Caches, routing: dict[int, torch.Tensor], batch_tokens: torch.Tensor, want: torch.Tensor) -> float:
    caches = base.fork(torch.bfloat16)
    out = path.step(caches.batch(batch_tokens), caches, routing=routing)
    return float((out.logits_BQV.double() - want).square().mean().sqrt())


def test_contract_rounding_is_no_worse_than_stock(bf16, stock64):
    """Against the FP64 oracle with its routing forced on all: one step from identical caches, error at most 1.5 times stock's."""
    base = prefilled(stock64, lengths=(40, 50, 60, 30, 20, 70, 80, 90))
    base = base.fork(torch.bfloat16).fork(F64)
    batch_tokens = tokens(8, 1, 3)
    oracle_caches = base.fork()
    want = stock64.step(oracle_caches.batch(batch_tokens), oracle_caches)
    measured = [
        error_rms(path, bf16, stock64, base, want.routing, batch_tokens, want.logits_BQV)
        for path in (StockPath(bf16), SpecializedPath(bf16))
    ]
    assert 0 < measured[1] <= 1.5 * measured[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, F64])
def test_nan_in_padding_rows_reaches_no_real_row(bf16, dtype):
    """9 requests run on the graph of 16 rows; every launch's padding rows are set to NaN. Results equal an unpoisoned run bit for bit."""
    weights = bf16.to(dtype)
    stock = StockPath(weights, dtype)
    base = prefilled(stock, lengths=tuple(range(3, 12)))
    results = []
    for checked in (False, True):
        caches = base.fork()
        path = SpecializedPath(weights, dtype, checked=checked)
        outputs = []
        for number in range(3):  # each mailbox parity is used and re-armed
            outputs.append(path.step(caches.batch(tokens(9, 1, number)), caches).logits_BQV)
            caches.advance(range(9), [1] * 9)
        results.append((torch.stack(outputs), states(caches)))
    assert torch.equal(results[0][0], results[1][0])
    assert bool(torch.isfinite(results[0][0]).all())
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, F64])
def test_nan_in_cache_rows_nobody_may_see_reaches_nobody(bf16, dtype):
    """Null slot and page, free pages, rows behind each request's length, slots of earlier drafts: all NaN, same bits out."""
    weights = bf16.to(dtype)
    stock = StockPath(weights, dtype)
    clean = prefilled(stock)
    poisoned = clean.fork()
    for cache in poisoned.layers:
        if isinstance(cache, KdaLayerCache):
            keep = [poisoned.slots_RQ[r][0] for r in range(3)]
            hidden = [slot for slot in range(cache.state_SHVK.shape[0]) if slot not in keep]
            cache.state_SHVK[hidden], cache.conv_SWC[hidden], cache.conv_SWC[:, 3:] = torch.nan, torch.nan, torch.nan
        else:
            seen = torch.zeros(cache.pages_PTC.shape[:2], dtype=torch.bool)
            for request, length in enumerate(LENGTHS):
                for token in range(length):
                    seen[poisoned.pages_R[request][token // 64], token % 64] = True
            cache.pages_PTC[~seen] = torch.nan
    outputs = []
    for caches in (clean, poisoned):
        path = SpecializedPath(weights, dtype)
        outputs.append([path.step(caches.batch(tokens(3, 4)), caches).logits_BQV])
        caches.advance(range(3), [2, 4, 1])
        outputs[-1].append(path.step(caches.batch(tokens(3, 1), pad_to=4), caches).logits_BQV[:3])
    for a, b in zip(*outputs, strict=True):
        assert bool(torch.isfinite(a).all())
        assert torch.equal(a, b)


def test_batch_composition_does_not_matter_in_fp64(f64, stock64):
    caches = prefilled(stock64)
    alone = caches.fork()
    path = SpecializedPath(f64, F64)
    together = path.step(caches.batch(tokens(3, 1)), caches).logits_BQV
    for request in range(3):
        single = path.step(alone.batch(tokens(3, 1)[request : request + 1], [request]), alone).logits_BQV
        torch.testing.assert_close(single[0], together[request], rtol=0, atol=1e-10)
    assert_states(caches, alone, 1e-10)


def test_forced_routing_is_followed_and_absent_layers_choose(f64, stock64):
    caches = prefilled(stock64)
    ids = torch.tensor([[3, 9, 1, 20], [0, 1, 2, 3], [23, 5, 11, 7]])
    twin = caches.fork()
    got = SpecializedPath(f64, F64).step(caches.batch(tokens(3, 1)), caches, routing={2: ids, 5: ids})
    want = stock64.step(twin.batch(tokens(3, 1)), twin, routing={2: ids, 5: ids})
    torch.testing.assert_close(got.logits_BQV, want.logits_BQV, rtol=0, atol=1e-9)
    assert torch.equal(got.routing[2], ids)
    assert torch.equal(got.routing[1], want.routing[1])


def test_executed_launches_are_the_plan(f64, stock64):
    caches = prefilled(stock64)
    for tp in (1, 2):
        path = SpecializedPath(f64, F64, tp=tp)
        path.step(caches.fork().batch(tokens(3, 1)), caches.fork())
        plan = [launch.id for launch in launch_graph(NANO, None, 3)]
        assert sorted(path.executed) == sorted(plan * tp)
        layer = [name for name in path.executed if name.startswith("L01.")]
        assert len(layer) == 13 * tp


def test_greedy_ids_come_from_the_logits(f64, stock64):
    caches = prefilled(stock64)
    path = SpecializedPath(f64, F64, top_k=3)
    out = path.step(caches.batch(tokens(3, 1)), caches)
    assert torch.equal(path.top_ids_TZ.long(), out.logits_BQV[:, 0].topk(3).indices)


def test_outputs_survive_later_steps(f64, stock64):
    """Mailboxes are re-armed two steps later; nothing a step returned may change then."""
    caches = prefilled(stock64)
    path = SpecializedPath(f64, F64)
    first = path.step(caches.batch(tokens(3, 1)), caches, taps=True)
    kept = (first.logits_BQV.clone(), first.taps_IBQD.clone())
    for _ in range(3):
        caches.advance(range(3), [1] * 3)
        path.step(caches.batch(tokens(3, 1)), caches)
    assert torch.equal(first.logits_BQV, kept[0])
    assert torch.equal(first.taps_IBQD, kept[1])


def test_steps_of_changing_shape_share_mailboxes_by_row_count(f64, stock64):
    """Row counts and q alternate irregularly; parities run on per row count, and every step equals stock."""
    caches = prefilled(stock64)
    twin = caches.fork()
    path = SpecializedPath(f64, F64)
    for number, (requests, q) in enumerate(
        (((0, 1, 2), 1), ((1,), 4), ((1, 2), 2), ((0,), 1), ((0, 1, 2), 1), ((2,), 4), ((0,), 1), ((0, 2), 2))
    ):
        given = tokens(len(requests), q, number)
        got = path.step(caches.batch(given, requests), caches).logits_BQV
        want = stock64.step(twin.batch(given, requests), twin).logits_BQV
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
        for mine in (caches, twin):
            mine.advance(requests, [q] * len(requests))


def test_a_failed_step_does_not_spoil_the_next(f64, stock64):
    broken = [True]

    def sometimes(config, contract, operands, arithmetic):
        if broken[0]:
            raise RuntimeError("planted")
        return ORACLES["latent_reduce"](config, contract, operands, arithmetic)

    caches = prefilled(stock64)
    path = SpecializedPath(f64, F64, oracles={"latent_reduce": sometimes})
    with pytest.raises(RuntimeError, match="planted"):
        path.step(caches.fork().batch(tokens(3, 1)), caches.fork())
    broken[0] = False
    twin = caches.fork()
    got = path.step(caches.batch(tokens(3, 1)), caches).logits_BQV
    torch.testing.assert_close(got, stock64.step(twin.batch(tokens(3, 1)), twin).logits_BQV, rtol=0, atol=1e-9)


def test_too_many_rows_and_other_dtypes_are_refused(f64, stock64):
    caches = Caches.allocate(NANO, 17, 64, q_max=4, dtype=F64)
    with pytest.raises(Unsupported, match="needs <= 64"):
        SpecializedPath(f64, F64).step(caches.batch(tokens(17, 4)), caches)
    with pytest.raises(Unsupported, match="dtype"):
        SpecializedPath(f64, torch.float16)
    with pytest.raises(Unsupported):
        SpecializedPath(f64, F64, tp=3)


def test_a_missing_publisher_is_a_named_deadlock_not_a_hang(f64, stock64):
    """Rank 1 loses its o_proj of layer 1: both ranks must report where they wait."""
    path = SpecializedPath(f64, F64, tp=2)
    caches = prefilled(stock64)
    batch = caches.batch(tokens(3, 1))
    graphs = path._graphs_of(3, 1, 0, frozenset())
    graphs[1] = [ready for ready in graphs[1] if ready.launch.id != "L01.o_proj"]
    with pytest.raises(ContractError, match=r"rank 0 waits in L01\.mlp_res.*rank 1 waits in L01\.mlp_res"):
        path.step(batch, caches)


def test_checked_mode_names_a_wrong_shape(f64, stock64):
    def narrow(config, contract, operands, arithmetic):
        return {name: x[:, :-1] for name, x in ORACLES["mla_value"](config, contract, operands, arithmetic).items()}

    path = SpecializedPath(f64, F64, oracles={"mla_value": narrow}, checked=True)
    caches = prefilled(stock64)
    with pytest.raises(ContractError, match=r"out_TC\.shape: got \[3, 127\], needs \[3, 128\]"):
        path.step(caches.batch(tokens(3, 1)), caches)


@pytest.mark.parametrize(
    ("operand", "change"),
    [
        ("L01.kda.conv_weight_CW", lambda x: x.roll(1, 1)),
        ("L03.mla_query.w_uk_HKL", lambda x: x * 1.01),
        ("L04.route.bias_E", lambda x: x.flip(0)),
        ("L05.attn_res.norm_D", lambda x: x * 1.01),
        ("L06.experts_down.w2_scale_ELG", lambda x: x + 1),
        ("final_res.res_score_D", lambda x: -x),
    ],
)
def test_a_change_of_any_weight_operand_shows(f64, stock64, operand, change):
    """Every operand the plan binds is really read from the binding (a planted fault cannot be ignored)."""

    def faulty(rank, bound):
        return {**bound, operand: change(bound[operand])}

    caches = prefilled(stock64)
    twin = caches.fork()
    good = SpecializedPath(f64, F64).step(caches.batch(tokens(3, 1)), caches).logits_BQV
    bad = SpecializedPath(f64, F64, weights_change=faulty).step(twin.batch(tokens(3, 1)), twin).logits_BQV
    assert float((good - bad).abs().max()) > 1e-5
