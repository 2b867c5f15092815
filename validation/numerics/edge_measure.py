"""Measures the cases of `edges.py` in a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kimi_k3_decode.cache import Caches, KdaLayerCache, StepBatch
from kimi_k3_decode.weights import ModelWeights
from validation.core.types import Case, Measurement
from validation.numerics import edge_values
from validation.numerics.edge_values import Result, Routing, counts, non_finite, seed_of, sliced
from validation.numerics.errors import ratio
from validation.numerics.slices import (
    cached_bits,
    digest_of,
    draw_tokens,
    poison_unused,
    prefilled,
    rows_that_differ,
)

LENGTHS = (70, 5, 130)
PROBE_ROWS = 8  # of the row-count check
VERIFY_TOKENS, VERIFY_LENGTHS = 8, (40, 7, 66, 20)

_kept: dict[str, tuple[tuple[str, ...], Any]] = {}


def _shared(name: str, targets: Mapping[str, Any], roles: Sequence[str], seed: int, make: Callable[[], Any]) -> Any:
    """What several cases of one worker use: made once for these targets and this seed, dropped for the next."""
    key = (*(targets[role].fingerprint() for role in roles), targets["stock"].fingerprint(), str(seed))
    if name not in _kept or _kept[name][0] != key:
        _kept[name] = (key, make())
    return _kept[name][1]


def _rms(path: torch.Tensor, oracle: torch.Tensor) -> float:
    """Relative RMS error; NaN stays NaN."""
    return float((path.double() - oracle.double()).square().mean().sqrt() / oracle.double().square().mean().sqrt())


# ---- padding ----
def measure_padding(case: Case, targets: Mapping[str, Any]) -> Result:
    """The same steps twice: with clean padding, and with NaN in the padding token's embedding, unused pages, slots and taps.

    bucket: nine requests, which a path with prepared row counts pads itself; rows: padding requests in the batch, with the experts
    forced so that both runs group rows alike; verify: five requests of four tokens.
    """
    weights, form, seed = sliced(targets), case.params["form"], seed_of(case, targets)
    n, q = {"bucket": (9, 1), "rows": (3, 1), "verify": (5, 4)}[form]
    pad_to = {"bucket": 0, "rows": 7, "verify": 0}[form]
    poisoned = replace(weights, embed_VD=weights.embed_VD.clone())
    poisoned.embed_VD[0] = torch.nan  # the token of padding rows
    base = prefilled(weights, [3 + 7 * i for i in range(n)], q_max=max(q, 4), seed=seed)
    outputs, kept, untouched = [], [], 0
    for given in (weights, poisoned):
        caches = base.fork()
        if given is poisoned:
            poison_unused(caches, torch.nan)
        nulls = _null_parts(caches)
        path, found = targets["candidate"].build(given), []
        for step in range(3):
            tokens = draw_tokens(weights, (n, q), seed + step)
            batch = caches.batch(tokens, range(n), pad_to=pad_to)
            routing = _any_routing(weights, batch, seed + step) if form == "rows" else None
            found.append(path.step(batch, caches, routing=routing).logits_BQV[:n].flatten(0, 1))
            caches.advance(range(n), [q] * n)
        untouched += sum(digest_of(a) != b for a, b in zip(_null_tensors(caches), nulls, strict=True))
        outputs.append(torch.cat(found))
        kept.append(cached_bits(caches, range(n)))
    padding = pad_to - n if pad_to else _bucket_padding(n, q)
    measured = counts(
        rows_changed=rows_that_differ(*outputs),
        cache_changed=sum(kept[0][name] != kept[1][name] for name in kept[0]),
        null_written=untouched,
        rows=outputs[0].shape[0],
        padding_rows=padding,
    )
    return measured, {"form": form}


def _bucket_padding(requests: int, q: int) -> int:
    from kimi_k3_decode.plan import padded_requests

    return (padded_requests(requests, q) - requests) * q


def _any_routing(weights: ModelWeights, batch: StepBatch, seed: int) -> Routing:
    config, g = weights.config, torch.Generator().manual_seed(seed)
    scores = torch.rand(batch.rows, config.n_experts, generator=g)
    ids = scores.topk(config.n_experts_per_token).indices
    return {layer: ids for layer in range(config.n_layers) if config.is_moe(layer)}


def _null_tensors(caches: Caches) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for cache in caches.layers:
        found += [cache.conv_SWC[0], cache.state_SHVK[0]] if isinstance(cache, KdaLayerCache) else [cache.pages_PTC[0]]
    return found


def _null_parts(caches: Caches) -> list[str]:
    return [digest_of(tensor) for tensor in _null_tensors(caches)]


# ---- slots ----
def measure_slots(case: Case, targets: Mapping[str, Any]) -> Result:
    """Verify and plain steps with slots in order, and with the same requests on other slots; every other slot is hashed before and after.

    null: some tokens of the second run have slots <= 0, so their states are not kept; nobody may see a difference.
    """
    weights, form, seed = sliced(targets), case.params["form"], seed_of(case, targets)
    q, n = 4, len(LENGTHS)
    base = prefilled(weights, LENGTHS, q_max=q, seed=seed, spare=5)
    moved = _moved(base, form, seed)
    runs = []
    for caches in (base.fork(), moved):
        foreign = _foreign_slots(caches, n)
        before = [_slot_digests(caches, slot) for slot in foreign]
        path, found = targets["candidate"].build(weights), []
        states: dict[str, str] = {}
        read = (1,) * n
        for step, (width, accepted) in enumerate(((q, (2, 4, 1)), (q, (4, 1, 3)), (1, (1, 1, 1)))):
            batch = caches.batch(draw_tokens(weights, (n, width), seed + step), range(n))
            if form == "null" and caches is moved and width > 1:
                batch.slots_BQ = _with_nulls(batch.slots_BQ, read, accepted)
            read = accepted
            found.append(path.step(batch, caches).logits_BQV.flatten(0, 1))
            caches.advance(range(n), accepted)
            states |= {f"{step}.{name}": value for name, value in cached_bits(caches, range(n)).items()}
        written = sum(_slot_digests(caches, slot) != was for slot, was in zip(foreign, before, strict=True))
        runs.append((torch.cat(found), states, written, len(foreign)))
    measured = counts(
        rows_changed=rows_that_differ(runs[0][0], runs[1][0]),
        slots_changed=runs[0][2] + runs[1][2],
        states_changed=sum(runs[0][1][name] != runs[1][1][name] for name in runs[0][1]),
        rows=runs[0][0].shape[0],
        slots=runs[0][3] + runs[1][3],
    )
    return measured, {"slots": moved.slots_RQ[:n]}


def _moved(base: Caches, form: str, seed: int) -> Caches:
    """A fork whose requests own other slots; what nobody owns holds seeded noise."""
    caches, q = base.fork(), base.q_max
    n_slots = 1 + base.n_requests * q
    order = (torch.randperm(n_slots - 1, generator=torch.Generator().manual_seed(seed + 3)) + 1).tolist()
    if form == "gapped":
        order = sorted(order[: len(LENGTHS) * q], reverse=True)
    for request in range(len(LENGTHS)):
        own = base.slots_RQ[request] if form == "null" else order[request * q : (request + 1) * q]
        caches.slots_RQ[request] = list(own)
    g = torch.Generator().manual_seed(seed + 4)
    for cache, source in zip(caches.layers, base.layers, strict=True):
        if isinstance(cache, KdaLayerCache) and isinstance(source, KdaLayerCache):
            cache.state_SHVK.copy_(torch.randn(cache.state_SHVK.shape, generator=g))
            cache.conv_SWC.copy_(torch.randn(cache.conv_SWC.shape, generator=g))
            for request in range(len(LENGTHS)):
                cache.state_SHVK[caches.slots_RQ[request][0]] = source.state_SHVK[base.slots_RQ[request][0]]
                cache.conv_SWC[caches.slots_RQ[request][0]] = source.conv_SWC[base.slots_RQ[request][0]]
    return caches


def _with_nulls(slots_BQ: torch.Tensor, read: Sequence[int], accepted: Sequence[int]) -> torch.Tensor:
    """Slots nobody reads become 0 or -1; those of the window, of the state this step reads and of the one the next step reads stay."""
    changed = slots_BQ.clone()
    for request, in_use in enumerate(zip(read, accepted, strict=True)):
        for t in range(1, slots_BQ.shape[1]):
            if t + 1 not in in_use:
                changed[request, t] = -(t % 2)
    return changed


def _foreign_slots(caches: Caches, n: int) -> list[int]:
    kda = next(cache for cache in caches.layers if isinstance(cache, KdaLayerCache))
    owned = {slot for slots in caches.slots_RQ[:n] for slot in slots}
    return [slot for slot in range(kda.state_SHVK.shape[0]) if slot not in owned]


def _slot_digests(caches: Caches, slot: int) -> list[str]:
    return [
        digest_of(part[slot]) for cache in caches.layers if isinstance(cache, KdaLayerCache) for part in (cache.conv_SWC, cache.state_SHVK)
    ]


# ---- verify steps against one token at a time ----
def _sequential(targets: Mapping[str, Any], weights: ModelWeights, seed: int) -> dict[str, Any]:
    """The oracle over 16 tokens of four requests, one token a step: logits, routing, states and kept taps after each."""
    q, n = VERIFY_TOKENS, len(VERIFY_LENGTHS)
    base = prefilled(weights, VERIFY_LENGTHS, q_max=q, seed=seed)
    tokens = draw_tokens(weights, (n, 2 * q), seed)
    caches, path = base.fork(torch.float64), targets["oracle"].build(weights)
    found: dict[str, Any] = {"base": base, "tokens": tokens, "logits": [], "routing": [], "states": [], "windows": []}
    for t in range(2 * q):
        out = path.step(caches.batch(tokens[:, t : t + 1], range(n)), caches)
        caches.advance(range(n), [1] * n)
        found["logits"].append(out.logits_BQV[:, 0])
        found["routing"].append(out.routing)
        found["states"].append(_states(caches, [caches.slots_RQ[r][0] for r in range(n)]))
        found["windows"].append(_windows(caches, [1] * n))
    return found


def measure_verify(case: Case, targets: Mapping[str, Any]) -> Result:
    """A verify step of eight of which `accepted` are right and kept, then another: both paths against an oracle going token by token."""
    weights, accepted, seed = sliced(targets), int(case.params["accepted"]), seed_of(case, targets)
    q, n = VERIFY_TOKENS, len(VERIFY_LENGTHS)
    oracle = _shared("verify", targets, ("stock", "oracle"), seed, lambda: _sequential(targets, weights, seed))
    right, wrong = oracle["tokens"], draw_tokens(weights, (n, q), seed + 77)
    first, second = torch.cat((right[:, :accepted], wrong[:, accepted:]), dim=1), right[:, accepted : accepted + q]
    window = slice(accepted, accepted + q)
    expected = (torch.stack(oracle["logits"][window], 1), torch.stack(oracle["states"][window], 1), oracle["windows"][accepted + q - 1])
    before = _stacked([*oracle["routing"][:accepted], *oracle["routing"][:1] * (q - accepted)])  # rejected drafts may go anywhere
    forced = _stacked(oracle["routing"][window])
    errors, bad = {}, 0
    for role in ("stock", "candidate"):
        caches = oracle["base"].fork()
        path = targets[role].build(weights)
        path.step(caches.batch(first, range(n)), caches, routing=before)
        caches.advance(range(n), [accepted] * n)
        out = path.step(caches.batch(second, range(n)), caches, routing=forced)
        caches.advance(range(n), [q] * n)
        states = torch.stack([_states(caches, [caches.slots_RQ[r][t] for r in range(n)]) for t in range(q)], 1)
        got = (out.logits_BQV, states, _windows(caches, [q] * n))
        errors[role] = [_rms(mine, wanted) for mine, wanted in zip(got, expected, strict=True)]
        bad = non_finite(*got)  # the candidate's, which comes last
    return _error_measurements(errors, ("error_ratio", "state_ratio", "window_ratio"), bad, n * q), {}


def _stacked(routings: Sequence[Routing]) -> Routing:
    """Routing [B, k] of single steps as the routing [B * q, k] of one verify step."""
    return {layer: torch.stack([routing[layer] for routing in routings], 1).flatten(0, 1) for layer in routings[0]}


def _states(caches: Caches, slots: Sequence[int]) -> torch.Tensor:
    found = [cache.state_SHVK[list(slots)].double().flatten(1) for cache in caches.layers if isinstance(cache, KdaLayerCache)]
    return torch.cat(found, 1)


def _windows(caches: Caches, accepted: Sequence[int]) -> torch.Tensor:
    rows = []
    for request, count in enumerate(accepted):
        slot = caches.slots_RQ[request][0]
        parts = [c.conv_SWC[slot, count - 1 : count + 2].double().flatten() for c in caches.layers if isinstance(c, KdaLayerCache)]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def _error_measurements(errors: Mapping[str, Sequence[float]], names: Sequence[str], bad: int, rows: int) -> tuple[Measurement, ...]:
    pairs = zip(names, errors["candidate"], errors["stock"], strict=True)
    return (
        *(Measurement(name=name, value=ratio(candidate, stock), unit="1") for name, candidate, stock in pairs),
        Measurement(name="candidate_error", value=errors["candidate"][0], unit="1"),
        Measurement(name="stock_error", value=errors["stock"][0], unit="1"),
        *counts(non_finite=bad, rows=rows),
    )


# ---- row counts ----
def _crowd(targets: Mapping[str, Any], weights: ModelWeights, seed: int) -> tuple[Caches, torch.Tensor, Any]:
    """64 short requests, one token for each, and the oracle's step over them."""
    base = prefilled(weights, [6 + i % 9 for i in range(64)], q_max=1, seed=seed)
    tokens = draw_tokens(weights, (64, 1), seed + 1)
    caches = base.fork(torch.float64)
    return base, tokens, targets["oracle"].build(weights).step(caches.batch(tokens), caches)


def measure_row_count(case: Case, targets: Mapping[str, Any]) -> Result:
    """Eight probe rows, each decoded in a step of `rows` rows among others, against the oracle and against the same row alone."""
    weights, m, seed = sliced(targets), int(case.params["rows"]), seed_of(case, targets)
    base, tokens, oracle = _shared("crowd", targets, ("stock", "oracle"), seed, lambda: _crowd(targets, weights, seed))
    want = oracle.logits_BQV[:PROBE_ROWS, 0]
    errors, spread, bad = {}, {}, 0
    for role in ("stock", "candidate"):
        path = _shared(f"path-{role}", targets, (role,), seed, partial(targets[role].build, weights))
        alone = _shared(f"alone-{role}", targets, (role,), seed, partial(_decode_in_groups, path, base, tokens, oracle.routing, 1))
        rows = alone if m == 1 else _decode_in_groups(path, base, tokens, oracle.routing, m)
        errors[role] = (_rms(rows, want),)
        spread[role] = _rms(rows - alone + want, want)
        bad = non_finite(rows)
    measured = (
        *_error_measurements(errors, ("error_ratio",), bad, PROBE_ROWS),
        Measurement(name="spread_ratio", value=ratio(spread["candidate"], errors["stock"][0]), unit="1"),
        Measurement(name="candidate_spread", value=spread["candidate"], unit="1"),
        Measurement(name="stock_spread", value=spread["stock"], unit="1"),
    )
    return measured, {"rows": m}


def _decode_in_groups(path: Any, base: Caches, tokens: torch.Tensor, routing: Routing, m: int) -> torch.Tensor:
    """Logits [PROBE_ROWS, V] of the probe rows, decoded `m` rows a step; probes beyond a full group meet fillers."""
    found: dict[int, torch.Tensor] = {}
    caches = base.fork()  # each probe is decoded once; what a filler's caches hold matters to no probe
    for begin in range(0, PROBE_ROWS, m):
        probes = list(range(begin, min(begin + m, PROBE_ROWS)))
        requests = probes + list(range(PROBE_ROWS, PROBE_ROWS + m - len(probes)))
        forced = {layer: ids[requests] for layer, ids in routing.items()}
        out = path.step(caches.batch(tokens[requests], requests), caches, routing=forced)
        found |= {request: out.logits_BQV[place, 0] for place, request in enumerate(probes)}
    return torch.stack([found[request] for request in range(PROBE_ROWS)])


# ---- layout of the state ----
def measure_state_layout(case: Case, targets: Mapping[str, Any]) -> Result:
    """States and windows of seeded noise, which no transposition leaves alike; one step and the states after it."""
    weights, q, seed = sliced(targets), int(case.params["q"]), seed_of(case, targets)
    n = 4
    base = prefilled(weights, (30, 11, 64, 3), q_max=q, seed=seed)
    g = torch.Generator().manual_seed(seed + 9)
    for cache in base.layers:
        if isinstance(cache, KdaLayerCache):
            size = cache.state_SHVK.square().mean().sqrt() + 0.05
            cache.state_SHVK[1:] = torch.randn(cache.state_SHVK[1:].shape, generator=g) * size
    tokens = draw_tokens(weights, (n, q), seed + 1)
    runs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    routing = None
    for role in ("oracle", "stock", "candidate"):
        caches = base.fork(targets[role].dtype)
        out = targets[role].build(weights).step(caches.batch(tokens), caches, routing=routing)
        routing = out.routing if routing is None else routing
        slots = [slot for r in range(n) for slot in caches.slots_RQ[r][:q]]
        runs[role] = (out.logits_BQV, _states(caches, slots))
    errors = {role: [_rms(a, b) for a, b in zip(runs[role], runs["oracle"], strict=True)] for role in ("stock", "candidate")}
    states = runs["candidate"][1].float()
    coarse = float((states.bfloat16().float() == states).double().mean())
    measured = _error_measurements(errors, ("error_ratio", "state_ratio"), non_finite(*runs["candidate"]), n * q)
    return (*measured, Measurement(name="coarse_share", value=coarse, unit="share")), {"q": q}


MEASURES: Mapping[str, Callable[[Case, Mapping[str, Any]], Result]] = {
    "numerics.padding": torch.inference_mode()(measure_padding),
    "numerics.slots": torch.inference_mode()(measure_slots),
    "numerics.verify": torch.inference_mode()(measure_verify),
    "numerics.row_count": torch.inference_mode()(measure_row_count),
    "numerics.routing_scale": torch.inference_mode()(edge_values.measure_routing_scale),
    "numerics.ties": torch.inference_mode()(edge_values.measure_ties),
    "numerics.nonfinite": torch.inference_mode()(edge_values.measure_nonfinite),
    "numerics.state_layout": torch.inference_mode()(measure_state_layout),
}
