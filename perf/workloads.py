"""Two workloads beside pure decode, small, on the nano engine, timed as adversaries are: prefill mixed in, and an agentic trace.

Each side runs in a process of its own on fresh inputs, the clock is here, and every timed reply is checked against the FP64 oracle
(`perf.adversary`). Decode alone is the whole trace less its prefill, which is timed by itself in the same way. A test of the machinery; its
numbers say nothing about a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from perf.adversary import Comparison, Subject, Workload, compare
from perf.cpu_engine import ERROR_LIMIT, conditions

SEED = 5
PAIRS = 4  # interleaved replays of a mixed trace; conversations of the agentic one are half as many
LONG_TOKENS = 4096  # of a prompt that takes seconds; the published workload has 32768, minutes on a processor, so it is asked for by name


def interactivity_p90(rates: Sequence[float]) -> float:
    """Tokens per second of a user that nine turns in ten reach or exceed, from request to last token.

    Raises:
        ValueError: no turn, or a rate that is no positive number.
    """
    found = np.asarray(rates, dtype=float)
    if not found.size or not (np.isfinite(found) & (found > 0)).all():
        raise ValueError(f"interactivity: got {list(rates)[:3]}, needs at least one turn, each with a positive rate")
    return float(np.percentile(found, 10))


def measure(candidate: str = "specialized", *, pairs: int = PAIRS, prompt_tokens: int | None = None) -> dict[str, Any]:
    """Both workloads on both sides. `prompt_tokens`: only mixed prefill, a prompt of that length arriving while another user decodes.

    Returns:
        per workload: settings, and per side tokens a second for decode alone, end to end and (agentic) the P90 of turns; what was objected;
        the worst error of a timed reply; the number of pairs. A side that is objected to has no numbers.

    Raises:
        HarnessError: a subject died or hung.
    """
    from perf.traces import Agentic, Mixed, oracle

    mixed = Mixed() if prompt_tokens is None else Mixed(users=2, prompt_tokens=prompt_tokens, earlier_prompt_tokens=min(64, prompt_tokens))
    alone = replace(mixed, between=0, after=0)
    # Prefill hardly scatters, so fewer pairs of it alone will do; a long prompt is its own warm-up.
    warm_ups, pairs_alone = (1, max(2, pairs // 2)) if mixed.prompt_tokens < LONG_TOKENS else (0, 1)
    limit_s = 60.0 + 0.02 * mixed.users * mixed.prompt_tokens
    reference = oracle()
    made: dict[str, Any] = {"source": "cpu_engine", "candidate": candidate, "conditions": conditions()}
    here = "perf.traces"
    with (
        Subject("stock", f"{here}:stock", {}, limit_s=limit_s) as stock,
        Subject("candidate", f"{here}:candidate", {"candidate": candidate}, limit_s=limit_s) as other,
    ):

        def timed(inputs: Any, n: int, warm_ups: int) -> Comparison:
            work = Workload(inputs=inputs, oracle=reference, error_limit=ERROR_LIMIT)
            return compare(stock, other, work, pairs=n, warm_ups=warm_ups, seed=SEED)

        whole, prefill = timed(mixed.inputs, pairs, warm_ups), timed(alone.inputs, pairs_alone, warm_ups)
        made["mixed_prefill"] = _mixed_row(mixed, whole, prefill)
        if prompt_tokens is None:
            agentic = Agentic()
            made["agentic"] = _agentic_row(agentic, timed(agentic.requests(), agentic.turns * max(1, pairs // 2), agentic.turns))
    return made


def _mixed_row(mixed: Any, whole: Comparison, prefill: Comparison) -> dict[str, Any]:
    sides = {}
    for name in ("stock", "candidate"):
        end_to_end_s = 1e-6 * statistics.median(getattr(whole, name).samples_us)
        prefill_s = 1e-6 * statistics.median(getattr(prefill, name).samples_us)
        if end_to_end_s > prefill_s:
            sides[name] = {
                "decode_alone_tokens_per_s": mixed.decoded_tokens / (end_to_end_s - prefill_s),
                "end_to_end_tokens_per_s": mixed.decoded_tokens / end_to_end_s,
            }
    settings = {"users": mixed.users, "prompt_tokens": mixed.prompt_tokens, "decoded_tokens": mixed.decoded_tokens}
    return _row(settings, sides, (whole, prefill))


def _agentic_row(agentic: Any, found: Comparison) -> dict[str, Any]:
    sides = {}
    for name in ("stock", "candidate"):
        rates = [agentic.answer_tokens / (1e-6 * us) for us in getattr(found, name).samples_us]
        sides[name] = {
            "end_to_end_tokens_per_s": agentic.users * statistics.median(rates),
            "p90_tokens_per_s_per_user": interactivity_p90(rates),
        }
    settings = {
        "users": agentic.users, "turns": agentic.turns, "tool_tokens": agentic.tool_tokens,
        "decoded_tokens": agentic.users * agentic.answer_tokens * len(found.candidate.samples_us),
    }  # fmt: skip
    return _row(settings, sides, (found,))


def _row(settings: Mapping[str, Any], sides: Mapping[str, Any], found: Sequence[Comparison]) -> dict[str, Any]:
    reasons = [reason for one in found for reason in one.reasons]
    errors = sorted((side.worst_error for one in found for side in (one.stock, one.candidate)), key=lambda e: (e != e, e))
    row: dict[str, Any] = {
        **settings,
        "sides": {} if reasons else dict(sides),
        "reasons": reasons,
        "worst_error": errors[-1],
        "pairs": len(found[0].stock.samples_us),
    }
    if not reasons:
        ratio = found[0].speed_up
        row |= {"speed_up": ratio.value, "speed_up_low": ratio.low, "speed_up_high": ratio.high}
    return row
