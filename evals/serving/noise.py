"""What is made of the forced passes: the candidate's distance from stock over stock's distance from itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from scipy import stats

from evals.serving.differences import position_errors
from evals.serving.noise_rule import BLOCK_TOKENS, TAIL, widened
from evals.serving.passes import CANDIDATE, MIXED, NOISE, PASSES, STOCK, Pass, Passes, Place
from validation.core.types import Measurement
from validation.core.worker import Refused
from validation.numerics.errors import (
    TokenErrors,
    concatenate,
    drift,
    geometric_mean,
    largest,
    ratio,
    root_mean_square,
)

Found = tuple[tuple[Measurement, ...], Mapping[str, Any]]
SHOWN_TOKENS = 8
DRAWS = 4000
RESOLUTION_NATS = 1e-6  # of a log-probability that a server computes in float32 and writes in decimal


def errors_of(passes: Passes, places: Sequence[Place]) -> dict[str, TokenErrors]:
    """Errors against the first stock pass, over the same tokens of every pass. Raises Refused, or RuntimeError where a request failed."""
    outcomes = {one.name: [passes.outcome(one, place) for place in places] for one in PASSES}
    refused = [o.reason for found in outcomes.values() for o in found if o is not None and o.window is None and o.refused]
    if refused:
        raise Refused(tuple(dict.fromkeys(refused)))
    failed = [o.reason if o is not None else "never asked" for found in outcomes.values() for o in found if o is None or o.window is None]
    if failed:
        raise RuntimeError(f"{len(failed)} windows failed, first: {failed[0]}")
    return {one.name: concatenate([_against_stock(passes, one, place) for place in places]) for one in PASSES if one is not STOCK}


def _against_stock(passes: Passes, one: Pass, place: Place) -> TokenErrors:
    """Windows end at the same token; one that began earlier is longer, and its beginning is left out."""
    reference = passes.positions(STOCK, place)
    return position_errors(reference, passes.positions(one, place)[-len(reference) :])


def measure_contexts(passes: Passes, contexts: Sequence[int]) -> Found:
    """Ratios of one or several context lengths, with the candidate alone and among other requests."""
    places = [place for place in passes.places if place.context_tokens in contexts]
    errors = errors_of(passes, places)
    noise, count = errors[NOISE.name], len(places)
    measured = [*ratios("", errors[CANDIDATE.name], noise, count), *ratios("mixed_", errors[MIXED.name], noise, count), *_sound(errors)]
    return tuple(measured), _details(passes, places, errors)


def measure_overall(passes: Passes, covered: float, outlier_factor: float) -> Found:
    """All contexts: overall ratios, drift with the position, agreement and outliers; `covered_share` is left out below `covered`."""
    errors = errors_of(passes, passes.places)
    noise, candidate = errors[NOISE.name], errors[CANDIDATE.name]
    slope = drift(
        [place.context_tokens for place in passes.places], *(_by_window(found, len(passes.places)) for found in (candidate, noise))
    )
    level = root_mean_square(noise.rms)
    wild = ~(candidate.rms <= outlier_factor * level)  # NaN is wild
    loss = max(0.0, _agreement(noise) - _agreement(candidate))
    most = passes.served_maximum()
    share = max(place.context_tokens for place in passes.places) / most if most else math.nan
    measured = [
        *ratios("", candidate, noise, len(passes.places)),
        *_sound(errors),
        Measurement(name="agreement_loss", value=loss, unit="share"),
        Measurement(name="outlier_share", value=float(wild.double().mean()), unit="share"),
        Measurement(name="longest_context", value=float(max(p.context_tokens for p in passes.places)), unit="tokens"),
        Measurement(name="served_maximum", value=float(most) if most else math.nan, unit="tokens"),
    ]
    # With one context length there is no slope, and short of the maximum nothing is known about it: open, not violated.
    if not math.isnan(slope.low):
        measured.append(Measurement(name="drift_low", value=slope.low, unit="1/doubling"))
    if share >= covered:
        measured.append(Measurement(name="covered_share", value=share, unit="share"))
    return tuple(measured), _details(passes, passes.places, errors)


def _by_window(errors: TokenErrors, n_windows: int) -> TokenErrors:
    """One RMS a window: single tokens may coincide to the last bit, and then have no logarithm."""
    rms = errors.rms.reshape(n_windows, -1).square().mean(-1).sqrt().clamp(min=RESOLUTION_NATS)
    return replace(errors, rms=rms)


def _typical(errors: TokenErrors) -> float:
    """Geometric mean of the RMS errors, none counted as smaller than what a server's numbers can show."""
    return geometric_mean(errors.rms.clamp(min=RESOLUTION_NATS))


def ratios(prefix: str, candidate: TokenErrors, noise: TokenErrors, windows: int) -> list[Measurement]:
    """The candidate's errors over stock's noise, both over the same tokens of `windows` windows, one after the other and of one length.

    Left out where stock shows no noise at all: the question is open then, unless the candidate is exact as well.
    """
    level = root_mean_square(noise.rms)
    reported = [
        Measurement(name=f"{prefix}error", value=_typical(candidate), unit="nats"),
        Measurement(name=f"{prefix}error_rms", value=root_mean_square(candidate.rms), unit="nats", samples=tuple(candidate.rms.tolist())),
        Measurement(name=f"{prefix}error_largest", value=largest(candidate.largest), unit="nats"),
        Measurement(name=f"{prefix}agreement", value=_agreement(candidate), unit="share"),
    ]
    if not level > RESOLUTION_NATS:
        return reported

    low = {
        f"{prefix}noise_ratio_low": _low_of_typical(candidate.rms, noise.rms, windows),
        f"{prefix}rms_noise_ratio_low": math.sqrt(_low_of_sums(candidate.rms.square(), noise.rms.square(), windows)),
        f"{prefix}kl_noise_ratio_low": _low_of_sums(candidate.kl, noise.kl, windows),
    }
    enough = len(blocks(noise.rms, windows)) > 1  # else there is no interval, and the question is open
    return [
        *reported,
        Measurement(name=f"{prefix}noise_ratio", value=ratio(_typical(candidate), _typical(noise)), unit="1"),
        Measurement(name=f"{prefix}rms_noise_ratio", value=ratio(root_mean_square(candidate.rms), level), unit="1"),
        *(Measurement(name=name, value=value, unit="1") for name, value in low.items() if enough),
    ]


def blocks(values_N: torch.Tensor, windows: int) -> torch.Tensor:
    """[N] -> [blocks, BLOCK_TOKENS]: runs of tokens that lie side by side in one window. A window's last one is filled up with zeros."""
    values_WT = values_N.reshape(windows, -1)
    missing = -values_WT.shape[1] % BLOCK_TOKENS
    return torch.nn.functional.pad(values_WT, (0, missing)).reshape(-1, BLOCK_TOKENS)


def _low_of_typical(ours_N: torch.Tensor, theirs_N: torch.Tensor, windows: int) -> float:
    """Low end of the interval of the ratio of geometric means, over blocks in pairs (Student's t)."""
    logs = ours_N.clamp(min=RESOLUTION_NATS).log() - theirs_N.clamp(min=RESOLUTION_NATS).log()
    off = blocks(logs - logs.mean(), windows).sum(-1)  # of each block, from the mean over all tokens
    count = len(off)
    if count < 2:
        return math.nan
    spread = math.sqrt(float(off.square().sum()) * count / (count - 1)) / len(logs)
    return math.exp(float(logs.mean()) - float(stats.t.ppf(1 - TAIL, count - 1)) * spread)


def _low_of_sums(ours_N: torch.Tensor, theirs_N: torch.Tensor, windows: int) -> float:
    """Low end of the interval of a ratio of sums, over blocks drawn again in pairs; NaN if any value is NaN."""
    ours, theirs = blocks(ours_N.double(), windows).sum(-1), blocks(theirs_N.double(), windows).sum(-1)
    count = len(ours)
    if count < 2 or bool(ours.isnan().any()) or bool(theirs.isnan().any()):
        return math.nan
    drawn = torch.randint(count, (DRAWS, count), generator=torch.Generator().manual_seed(count))
    sums = ours[drawn].sum(-1), theirs[drawn].sum(-1)
    ratios_D = torch.where(sums[1] > 0, sums[0] / sums[1], torch.where(sums[0] > 0, math.inf, 1.0))
    return float(ratios_D.quantile(widened(TAIL, count), interpolation="lower"))


def _sound(errors: Mapping[str, TokenErrors]) -> list[Measurement]:
    noise = errors[NOISE.name]
    found = [
        Measurement(name="non_finite", value=float(sum(errors[one.name].non_finite for one in (CANDIDATE, MIXED))), unit="count"),
        Measurement(name="tokens", value=float(len(noise.rms)), unit="count"),
        Measurement(name="noise_rms", value=root_mean_square(noise.rms), unit="nats", samples=tuple(noise.rms.tolist())),
        Measurement(name="noise_agreement", value=_agreement(noise), unit="share"),
    ]
    if not root_mean_square(noise.rms) > RESOLUTION_NATS:
        return found
    return [*found, Measurement(name="noise_floor", value=_typical(noise), unit="nats")]


def _agreement(errors: TokenErrors) -> float:
    return float(errors.agrees.double().mean()) if len(errors.agrees) else math.nan


def _details(passes: Passes, places: Sequence[Place], errors: Mapping[str, TokenErrors]) -> dict[str, Any]:
    rows = []
    for one in PASSES:
        methods = sorted({o.window.method for place in places if (o := passes.outcome(one, place)) is not None and o.window is not None})
        found = errors.get(one.name)
        numbers = ["–"] * 4 if found is None else [
            f"{_typical(found):.3g}", f"{root_mean_square(found.rms):.3g}", f"{float(found.kl.mean()):.3g}",
            f"{_agreement(found):.4f}",
        ]  # fmt: skip
        rows.append([one.name, one.role, ", ".join(methods), *numbers])
    columns = ["pass", "side", "forced by", "typical error (nats)", "RMS error (nats)", "mean KL (nats)", "agreement"]
    return {
        "tables": [{"title": "Teacher-forced decode on the servers, against the first stock pass", "columns": columns, "rows": rows}],
        "noise": {"restarted": passes.restarted, "neighbours": passes.neighbours, "earlier_tokens": passes.earlier_tokens},
        "worst": _worst(passes, places, errors[CANDIDATE.name]),
    }


def _worst(passes: Passes, places: Sequence[Place], errors: TokenErrors) -> list[dict[str, Any]]:
    """The tokens where the candidate is furthest off; NaN counts as furthest."""
    per_place = len(errors.rms) // len(places)
    order = sorted(range(len(errors.rms)), key=lambda i: -math.inf if math.isnan(float(errors.rms[i])) else -float(errors.rms[i]))
    shown = []
    for i in order[:SHOWN_TOKENS]:
        place = places[i // per_place]
        shown.append(
            {
                "context_tokens": place.context_tokens,
                "text": place.text,
                "position": place.context_tokens - per_place + i % per_place,
                "token": passes.positions(STOCK, place)[i % per_place].token,
                "rms_nats": float(errors.rms[i]),
                "agrees": bool(errors.agrees[i]),
                "margin_nats": float(errors.margin[i]),
            }
        )
    return shown
