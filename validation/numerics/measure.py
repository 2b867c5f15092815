"""Measures the cases of `checks.py` in a worker. What is expensive and shared by cases (a long prefill, a captured layer) is kept here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kimi_k3_decode.cache import Caches
from validation.core.types import Case, Measurement
from validation.core.worker import Refused
from validation.numerics import checks, probes
from validation.numerics.contexts import FAR, FarContexts, NearContexts, Window
from validation.numerics.decode import FORCED, FREE, Compared, compare_paths, join
from validation.numerics.errors import (
    TokenErrors,
    drift,
    geometric_mean,
    largest,
    ratio,
    ratio_low,
    root_mean_square,
    worst_tokens,
)
from validation.numerics.textsource import tokens_ending_at

Result = tuple[tuple[Measurement, ...], Mapping[str, Any]]
PROMPT_TOKENS = 384  # of an end-to-end case; the texts of all requests differ
WIDE_PROMPT_TOKENS = 96  # with more than eight requests
DECODED_TOKENS = 96  # at least, over all requests and steps of an end-to-end case
FLIPS_SHOWN = 20


@dataclass
class _Shared:
    """What cases of one worker share, for one set of targets and one seed."""

    inputs: dict[tuple[str, int], torch.Tensor] | None = None
    near: NearContexts | None = None
    far: FarContexts | None = None
    windows: dict[str, tuple[Window, dict[str, Compared]]] = field(default_factory=dict)


_shared: dict[tuple[str, ...], _Shared] = {}


def _shared_of(targets: Mapping[str, Any], seed: int) -> _Shared:
    key = (*(target.fingerprint() for target in targets.values()), str(seed))
    if key not in _shared:
        _shared.clear()  # another candidate or seed: the old caches are not needed again
        _shared[key] = _Shared()
    return _shared[key]


def _seed(case: Case, targets: Mapping[str, Any]) -> int:
    return int(case.seed + 1000 * targets["stock"].settings.seed)


# ---- sublayers ----
def measure_sublayer(case: Case, targets: Mapping[str, Any]) -> Result:
    """One probe. Raises Refused where the checkpoint has no such layer."""
    stock = targets["stock"]
    config, layer, part = stock.weights.config, int(case.params["layer"]), case.subject
    if layer >= config.n_layers or part not in probes.parts_of(config, layer):
        raise Refused((f"layer: got {layer} with part {part}, needs one the checkpoint {config.name} has",))
    seed = _seed(case, targets)
    shared = _shared_of(targets, seed)
    if shared.inputs is None:
        tokens = tokens_ending_at([config.hidden_size], seed, bos=config.bos_token_id, vocab_size=config.vocab_size)
        shared.inputs = probes.capture_inputs(stock.prefiller, tokens)
    inputs = shared.inputs["mlp_in" if part == probes.MLP else "attn_in", layer]
    result = probes.run_probe(probes.build_probe(stock.weights, layer, part, inputs), targets, str(case.params["shape"]))
    oracle = result.outputs["oracle"]
    of_candidate = probes.relative_error(result.outputs["candidate"], oracle)
    of_stock = probes.relative_error(result.outputs["stock"], oracle)
    measurements = (
        Measurement(name="error_ratio", value=ratio(of_candidate, of_stock), unit="1"),
        Measurement(name="candidate_error", value=of_candidate, unit="1"),
        Measurement(name="stock_error", value=of_stock, unit="1"),
        Measurement(name="non_finite", value=result.non_finite, unit="count"),
        Measurement(name="rows", value=oracle.shape[0], unit="count"),
    )
    return measurements, {"layer": layer, "part": part, "kind": "KDA" if config.is_kda(layer) else "MLA"}


# ---- end to end ----
def measure_end_to_end(case: Case, targets: Mapping[str, Any]) -> Result:
    """A batch of different texts, prefilled by stock, decoded by all paths."""
    n_requests, q = int(case.params["requests"]), int(case.params["q"])
    n_steps = -(-DECODED_TOKENS // (n_requests * q))
    prefiller = targets["stock"].prefiller
    config = prefiller.config
    n_decoded = n_steps * q
    seeds = [_seed(case, targets) * 100 + r for r in range(n_requests)]
    n_prompt = PROMPT_TOKENS if n_requests <= 8 else WIDE_PROMPT_TOKENS
    texts = [tokens_ending_at([PROMPT_TOKENS], s, bos=config.bos_token_id, vocab_size=config.vocab_size)[-n_prompt:] for s in seeds]
    caches = Caches.allocate(config, n_requests, n_prompt, q_max=q)
    requests = [caches.acquire() for _ in range(n_requests)]
    prefiller.prefill([text[:-n_decoded] for text in texts], caches, requests)
    steps = [torch.tensor([text[len(text) - n_decoded + i * q :][:q] for text in texts]) for i in range(n_steps)]
    positions = [len(text) - n_decoded + i * q + t for i in range(n_steps) for text in texts for t in range(q)]
    by_role = {role: caches if targets[role].dtype == caches.dtype else caches.fork(targets[role].dtype) for role in targets}
    window = Window(caches=by_role, requests=requests, steps_BQ=steps, positions=positions, tokens=texts[0], first_position=0)
    return _result(window, compare_paths(targets, by_role, requests, steps), show_text=n_requests == 1)


# ---- long contexts ----
def _near_window(targets: Mapping[str, Any], seed: int, context_tokens: int) -> tuple[Window, dict[str, Compared]]:
    shared = _shared_of(targets, seed)
    name = f"near-{context_tokens}"
    if name not in shared.windows:
        if shared.near is None:
            shared.near = NearContexts(targets["stock"].prefiller, seed, checks.NEAR_TOKENS)
        window = shared.near.window(context_tokens)
        found = compare_paths(targets, window.caches, window.requests, window.steps_BQ, (FORCED, FREE))
        shared.windows[name] = (_without_caches(window), found)
    return shared.windows[name]


def _far_window(targets: Mapping[str, Any], seed: int, position: int) -> tuple[Window, dict[str, Compared]]:
    shared = _shared_of(targets, seed)
    name = f"far-{position}"
    if name not in shared.windows:
        shared.near = None  # its caches are large and no far case needs them
        if shared.far is None:
            shared.far = FarContexts(targets["stock"].prefiller, seed)
        window = shared.far.window(FAR[position], seed)
        found = compare_paths(targets, window.caches, window.requests, window.steps_BQ, (FORCED,))
        shared.windows[name] = (_without_caches(window), found)
    return shared.windows[name]


def _without_caches(window: Window) -> Window:
    return Window(**{**window.__dict__, "caches": {}})


def measure_near(case: Case, targets: Mapping[str, Any]) -> Result:
    """One context of the growing prefill."""
    window, found = _near_window(targets, _seed(case, targets), int(case.params["context_tokens"]))
    return _result(window, found, show_text=True)


def measure_far(case: Case, targets: Mapping[str, Any]) -> Result:
    """One far position over synthetic caches."""
    window, found = _far_window(targets, _seed(case, targets), int(case.params["position"]))
    return _result(window, found, show_text=False)


def measure_overall(case: Case, targets: Mapping[str, Any]) -> Result:
    """All windows of one kind as one; those measured by this worker already are not decoded again."""
    seed = _seed(case, targets)
    if case.subject == "near":
        parts = [_near_window(targets, seed, n) for n in checks.NEAR_TOKENS]
    else:
        parts = [_far_window(targets, seed, n) for n in checks.FAR_TOKENS]
    positions = [p for window, _ in parts for p in window.positions]
    joined = {routing: join([found[routing] for _, found in parts]) for routing in parts[0][1]}
    forced = joined[FORCED]
    aging = drift(positions, forced.candidate, forced.stock)
    measurements = [
        *_measurements(joined),
        Measurement(name="drift", value=aging.value, unit="1/doubling"),
        Measurement(name="drift_low", value=aging.low, unit="1/doubling"),
        Measurement(name="drift_high", value=aging.high, unit="1/doubling"),
        Measurement(name="agreement_loss", value=_share(forced.stock.agrees) - _share(forced.candidate.agrees), unit="share"),
    ]
    return tuple(measurements), {"windows": [window.positions[-1] for window, _ in parts]}


# ---- what is made of a comparison ----
def _result(window: Window, found: Mapping[str, Compared], *, show_text: bool) -> Result:
    details: dict[str, Any] = {"per_token": _per_token(window.positions, found)}
    details["flips"] = {routing: _flips(window, compared.candidate) for routing, compared in found.items()}
    if show_text:
        worst = worst_tokens(found[FORCED].candidate, window.tokens, window.positions)
        details["worst_tokens"] = worst
        rows = [[w["position"], w["before"], w["rms_nats"], w["kl_nats"], w["margin_nats"], w["agrees"]] for w in worst]
        columns = ["position", "text up to the token", "RMS error, nats", "KL, nats", "oracle's margin, nats", "same choice"]
        details["tables"] = [{"title": "Worst tokens (forced routing)", "columns": columns, "rows": rows}]
    return tuple(_measurements(found)), details


def _measurements(found: Mapping[str, Compared]) -> list[Measurement]:
    made = []
    for routing, compared in found.items():
        candidate, stock = compared.candidate, compared.stock
        error = geometric_mean(candidate.rms), geometric_mean(stock.rms)
        rms = root_mean_square(candidate.rms), root_mean_square(stock.rms)
        kl = float(candidate.kl.mean()), float(stock.kl.mean())
        most = largest(candidate.largest), largest(stock.largest)
        rows: list[tuple[str, float, str]] = [
            ("error_ratio", ratio(*error), "1"),
            ("rms_ratio", ratio(*rms), "1"),
            ("rms_ratio_low", math.sqrt(ratio_low(candidate.rms.square(), stock.rms.square())), "1"),
            ("kl_ratio", ratio(*kl), "1"),
            ("kl_ratio_low", ratio_low(candidate.kl.clamp(min=0.0), stock.kl.clamp(min=0.0)), "1"),
            ("largest_ratio", ratio(*most), "1"),
            ("outlier_share", _share(~(candidate.rms <= checks.OUTLIER_FACTOR * stock.rms)), "share"),  # NaN is an outlier
            ("candidate_rms", rms[0], "nats"),
            ("stock_rms", rms[1], "nats"),
            ("candidate_kl", kl[0], "nats"),
            ("stock_kl", kl[1], "nats"),
            ("candidate_largest_error", most[0], "nats"),
            ("stock_largest_error", most[1], "nats"),
            ("candidate_agreement", _share(candidate.agrees), "share"),
            ("stock_agreement", _share(stock.agrees), "share"),
            ("worst_flip", largest(candidate.lead_lost), "nats"),
        ]
        made += [Measurement(name=f"{routing}_{name}", value=value, unit=unit) for name, value, unit in rows]
        for name, value, errors in (("candidate_error", error[0], candidate), ("stock_error", error[1], stock)):
            made.append(Measurement(name=f"{routing}_{name}", value=value, unit="nats", samples=tuple(errors.rms.tolist())))
    bad = sum(compared.candidate.non_finite + compared.candidate_non_finite_cache for compared in found.values())
    return [
        *made,
        Measurement(name="stock_error", value=root_mean_square(found[FORCED].stock.rms), unit="nats"),
        Measurement(name="non_finite", value=bad, unit="count"),
        Measurement(name="tokens", value=found[FORCED].stock.rms.numel(), unit="count"),
    ]


def _share(flags: torch.Tensor) -> float:
    return float(flags.double().mean())


def _per_token(positions: Sequence[int], found: Mapping[str, Compared]) -> dict[str, Any]:
    """Columns of equal length for figures: position, and per routing the errors of both paths in nats."""
    columns: dict[str, Any] = {"position": list(positions)}
    for routing, compared in found.items():
        for name, errors in (("candidate", compared.candidate), ("stock", compared.stock)):
            columns[f"{routing}_{name}_rms_nats"] = errors.rms.tolist()
            columns[f"{routing}_{name}_kl_nats"] = errors.kl.tolist()
            columns[f"{routing}_{name}_agrees"] = errors.agrees.tolist()
    columns["oracle_margin_nats"] = found[FORCED].stock.margin.tolist()
    return columns


def _flips(window: Window, errors: TokenErrors) -> list[dict[str, Any]]:
    """Tokens on which the candidate's choice is not the oracle's, widest margin first."""
    places = [i for i, agrees in enumerate(errors.agrees.tolist()) if not agrees]
    places.sort(key=lambda i: -float(errors.margin[i]))
    return [
        {"position": window.positions[i], "margin_nats": float(errors.margin[i]), "lead_lost_nats": float(errors.lead_lost[i])}
        for i in places[:FLIPS_SHOWN]
    ]
