"""Edges of what data may hold: exact ties in the router, NaN that must show, bit patterns that must not break a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kimi_k3_decode.cache import Caches, KdaLayerCache, MlaLayerCache
from kimi_k3_decode.weights import ModelWeights
from validation.core.types import Case, Measurement
from validation.numerics import probes
from validation.numerics.errors import ratio
from validation.numerics.slices import change_moe, draw_tokens, prefilled, rows_that_differ, slice_model

Result = tuple[tuple[Measurement, ...], Mapping[str, Any]]
Routing = dict[int, torch.Tensor]


def counts(**values: int) -> tuple[Measurement, ...]:
    return tuple(Measurement(name=name, value=value, unit="count") for name, value in values.items())


def seed_of(case: Case, targets: Mapping[str, Any]) -> int:
    return int(case.seed + 1000 * targets["stock"].settings.seed)


def sliced(targets: Mapping[str, Any]) -> ModelWeights:
    return slice_model(targets["stock"].weights)


def non_finite(*tensors: torch.Tensor) -> int:
    return sum(int((~torch.isfinite(tensor)).sum()) for tensor in tensors)


# ---- the scale of the routing weights ----
def small_experts(moe: Any) -> Any:
    """The MoE with its routed output 2^-14 times as large (exact in the E8M0 scales of `w2`), and without the shared experts.

    The RMSNorm on the routed latent takes out any common factor of a row's routing weights; only its eps lets the factor through. With so
    small an output the norm is nearly linear, so a sum of weights that is not one shows in full.
    """
    scales = (moe.w2.scales_EOG.int() - 14).clamp(min=0).to(torch.uint8)
    shared = replace(moe.shared, down_DF=torch.zeros_like(moe.shared.down_DF))
    return replace(moe, w2=replace(moe.w2, scales_EOG=scales), shared=shared)


def measure_routing_scale(case: Case, targets: Mapping[str, Any]) -> Result:
    """One MoE layer as a probe with small expert outputs, 64 rows with the oracle's choice of experts."""
    from validation.core.worker import Refused

    stock = targets["stock"]
    weights, layer, seed = stock.weights, int(case.params["layer"]), seed_of(case, targets)
    config = weights.config
    if layer >= config.n_layers or not config.is_moe(layer):
        raise Refused((f"layer: got {layer}, needs one with experts in the checkpoint {config.name}",))
    tokens = draw_tokens(weights, (config.hidden_size,), seed).tolist()
    inputs = probes.capture_inputs(stock.prefiller, tokens)["mlp_in", layer]
    probe = probes.build_probe(change_moe(weights, small_experts), layer, probes.MLP, inputs)
    result = probes.run_probe(probe, targets, "wide")
    oracle = result.outputs["oracle"]
    errors = {role: probes.relative_error(result.outputs[role], oracle) for role in ("candidate", "stock")}
    return (
        Measurement(name="error_ratio", value=ratio(errors["candidate"], errors["stock"]), unit="1"),
        Measurement(name="candidate_error", value=errors["candidate"], unit="1"),
        Measurement(name="stock_error", value=errors["stock"], unit="1"),
        *counts(non_finite=result.non_finite, rows=oracle.shape[0]),
    ), {"layer": layer}


# ---- ties ----
def measure_ties(case: Case, targets: Mapping[str, Any]) -> Result:
    """Routers made to tie; the expected ids follow from the rule alone."""
    weights, tie, seed = sliced(targets), case.params["tie"], seed_of(case, targets)
    config = weights.config
    experts, top_k = config.n_experts, config.n_experts_per_token
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(seed))
    pairs_E = (order // 2).float() / 16  # two experts share each value

    def change(moe: Any) -> Any:
        router, bias = moe.router_ED, moe.router_bias_E
        if tie == "twin_experts":
            half = experts // 2
            return replace(moe, router_ED=torch.cat((router[:half], router[:half])), router_bias_E=torch.cat((bias[:half], bias[:half])))
        if tie == "zero_rows":
            return replace(moe, router_bias_E=torch.zeros_like(bias))
        return replace(moe, router_ED=torch.zeros_like(router), router_bias_E=pairs_E.to(bias) if tie == "bias_pairs" else bias * 0)

    changed = change_moe(weights, change)
    if tie == "zero_rows":  # a zero norm weight makes every input of the MLP a row of zeros
        changed = replace(changed, layers=tuple(replace(layer, post_norm=torch.zeros_like(layer.post_norm)) for layer in changed.layers))
    n = 9
    caches = prefilled(changed, [4 + i for i in range(n)], q_max=1, seed=seed)
    out = targets["candidate"].build(changed).step(caches.batch(draw_tokens(weights, (n, 1), seed + 1)), caches)
    fixed = pairs_E if tie == "bias_pairs" else torch.zeros(experts)
    expected = torch.sort(fixed, descending=True, stable=True).indices[:top_k]
    wrong = 0
    for ids_TK in (out.routing or {}).values():
        for row in ids_TK.tolist():
            wrong += _breaks_twins(row, experts // 2) if tie == "twin_experts" else row != expected.tolist()
    rows = sum(len(ids) for ids in (out.routing or {}).values())
    return counts(wrong_ids=wrong, non_finite=non_finite(out.logits_BQV), rows=rows), {"tie": tie}


def _breaks_twins(row: Sequence[int], half: int) -> bool:
    """True when an upper twin was chosen without its lower one, or before it."""
    late = (e >= half and (e - half not in row or row.index(e - half) > place) for place, e in enumerate(row))
    return any(late) or len(set(row)) < len(row)


# ---- non-finite data and bit patterns ----
def measure_nonfinite(case: Case, targets: Mapping[str, Any]) -> Result:
    """NaN planted where one request reads it, or in one column of the head; or rows of -0.0 and of the sentinel's bit pattern."""
    weights, form, seed = sliced(targets), case.params["form"], seed_of(case, targets)
    n, planted = 5, 2
    base = prefilled(weights, [9 + 20 * i for i in range(n)], q_max=1, seed=seed)
    tokens = draw_tokens(weights, (n, 1), seed + 1)
    clean = base.fork()
    build = targets["candidate"].build
    if form == "patterns":
        return _measure_patterns(weights, base, tokens, build)
    given, caches = weights, base.fork()
    if form == "nan_head":
        given = replace(weights, lm_head_VD=weights.lm_head_VD.clone())
        given.lm_head_VD[7, 3] = torch.nan
    else:
        _plant(caches, planted, form)
    want = build(weights).step(clean.batch(tokens), clean)
    try:
        got = build(given).step(caches.batch(tokens), caches, routing=want.routing)
    except Exception as error:
        return counts(swallowed=0, leaked=0, broken=1, minus_zero_differs=0, rows=n), {"error": f"{type(error).__name__}: {error}"}
    forced = base.fork()
    again = build(weights).step(forced.batch(tokens), forced, routing=want.routing).logits_BQV[:, 0]
    logits = got.logits_BQV[:, 0]
    if form == "nan_head":
        swallowed, others = int(torch.isfinite(logits[:, 7]).sum()), [v for v in range(logits.shape[1]) if v != 7]
        leaked = rows_that_differ(logits[:, others], again[:, others])
    else:
        swallowed = int(torch.isfinite(logits[planted]).all())
        others = [r for r in range(n) if r != planted]
        leaked = rows_that_differ(logits[others], again[others])
    return counts(swallowed=swallowed, leaked=leaked, broken=0, minus_zero_differs=0, rows=n), {"form": form}


def _plant(caches: Caches, request: int, form: str) -> None:
    """One NaN in what a request reads: an element of its recurrent state, or of its newest cached latent."""
    for cache in caches.layers:
        if form == "nan_state" and isinstance(cache, KdaLayerCache):
            cache.state_SHVK[caches.slots_RQ[request][0], 0, 3, 5] = torch.nan
            return
        if form == "nan_page" and isinstance(cache, MlaLayerCache):
            last = caches.lengths_R[request] - 1
            cache.pages_PTC[caches.pages_R[request][last // caches.page_tokens], last % caches.page_tokens, 1] = torch.nan
            return


def _measure_patterns(weights: ModelWeights, base: Caches, tokens: torch.Tensor, build: Callable[[ModelWeights], Any]) -> Result:
    """Row 1 is all -0.0, row 3 holds NaN of the pattern 0xFFFF; the others must not notice, and no message may get lost."""
    embed = weights.embed_VD.clone()
    embed[4], embed[5] = -0.0, 0.0
    embed[6].view(torch.int16).fill_(-1)
    given = replace(weights, embed_VD=embed)
    runs: dict[str, Any] = {}
    broken = 0
    for name, (row1, row3) in {"zero": (5, 7), "minus": (4, 7), "pattern": (4, 6)}.items():
        changed = tokens.clone()
        changed[1], changed[3] = row1, row3
        routing = runs["zero"].routing if runs else None
        path = build(given)
        try:
            for _ in range(2):  # twice: what a broken message leaves behind shows in the step after
                caches = base.fork()
                runs[name] = path.step(caches.batch(changed), caches, routing=routing)
        except Exception:
            broken += 1
            break
        if name == "zero":
            caches = base.fork()
            runs[name] = build(given).step(caches.batch(changed), caches, routing=runs["zero"].routing)
    if broken:
        return counts(swallowed=0, leaked=0, broken=broken, minus_zero_differs=0, rows=len(tokens)), {"ran": sorted(runs)}
    zero, minus, pattern = (runs[name].logits_BQV[:, 0] for name in ("zero", "minus", "pattern"))
    measured = counts(
        swallowed=int(torch.isfinite(pattern[3]).all()),
        leaked=rows_that_differ(pattern[[0, 1, 2, 4]], minus[[0, 1, 2, 4]]),
        broken=0,
        minus_zero_differs=int((zero != minus).any(1).sum()),
        rows=len(tokens),
    )
    return measured, {"form": "patterns"}
