"""Two workloads beside pure decode, small, on the nano engine, timed as adversaries are: prefill mixed in, and an agentic trace.

Each side runs in a process of its own on fresh inputs, the clock is here, and every timed reply is checked against the FP64 oracle
(`perf.adversary`). Decode alone is timed request by request, end to end is the sum over a trace. A test of the machinery; its numbers say
nothing about a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from perf.adversary import Comparison, Subject, Workload, compare
from perf.cpu_engine import conditions
from perf.stats import Interval, paired_ratio

SEED = 5
# Relative error of a row of logits on problems that the model knows: BF16 stays within a few hundredths of the oracle, now and then a
# tenth, while the logits of another trace are off by 0.6 and more.
ERROR_LIMIT = 0.4
PAIRS = 4  # interleaved traces; conversations of the agentic one are half as many
LONG_PAIRS = 3
LONG_TOKENS = 4096  # of a prompt that takes seconds: it is its own warm-up, and what is decoded behind it is timed in several stretches
LONG_STRETCHES = 4


def record(found: Mapping[str, Any]) -> dict[str, Any]:
    """`measure`'s answer as a raw record that `fasttrack publish` takes: bound to every launch that the candidate's step executes."""
    from kimi_k3_decode.config import NANO, Shard
    from kimi_k3_decode.launches import launch_graph

    row = found["mixed_prefill"]
    ops = sorted({launch.op for launch in launch_graph(NANO, Shard(config=NANO), row["users"], 1)})
    made = {"case": f"nano-mixed-prefill-{row['prompt_tokens']}", "ops": ops, "workload": dict(found)}
    return made | ({"reasons": row["reasons"]} if row["reasons"] else {})


def interactivity_p90(rates: Sequence[float]) -> float:
    """Tokens per second of a user that nine turns in ten reach or exceed, from request to last token.

    Raises:
        ValueError: no turn, or a rate that is no positive number.
    """
    found = np.asarray(rates, dtype=float)
    if not found.size or not (np.isfinite(found) & (found > 0)).all():
        raise ValueError(f"interactivity: got {list(rates)[:3]}, needs at least one turn, each with a positive rate")
    return float(np.percentile(found, 10))


def measure(candidate: str = "specialized", *, pairs: int | None = None, prompt_tokens: int | None = None) -> dict[str, Any]:
    """Both workloads on both sides. `prompt_tokens`: only mixed prefill, a prompt of that length arriving while another user decodes.

    Returns:
        per workload: settings, and per side tokens a second for decode alone, end to end and (agentic) the P90 of turns; what was objected;
        the worst error of a timed reply; the number of pairs. A side that is objected to has no numbers.

    Raises:
        HarnessError: a subject died or hung.
    """
    from perf.traces import Agentic, Mixed, oracle

    mixed = Mixed() if prompt_tokens is None else Mixed(users=2, prompt_tokens=prompt_tokens, earlier_prompt_tokens=min(64, prompt_tokens))
    long = mixed.prompt_tokens >= LONG_TOKENS
    mixed = replace(mixed, stretches=LONG_STRETCHES) if long else mixed
    n = pairs or (LONG_PAIRS if long else PAIRS)
    reference = oracle()
    what = {"prefill": "counted", "what": "contract execution of the nano model, whole traces, both sides interleaved on a shared machine"}
    made: dict[str, Any] = {"source": "cpu_engine", "candidate": candidate, "conditions": {**conditions(), **what}}
    here, limit_s = "perf.traces", 60.0 + 0.02 * mixed.users * mixed.prompt_tokens
    with (
        Subject("stock", f"{here}:stock", {}, limit_s=limit_s) as stock,
        Subject("candidate", f"{here}:candidate", {"candidate": candidate}, limit_s=limit_s) as other,
    ):

        def timed(inputs: Any, requests: int, n: int, warm_ups: int) -> Comparison:
            work = Workload(inputs=inputs, oracle=reference, error_limit=ERROR_LIMIT, requests=requests)
            return compare(stock, other, work, pairs=n * requests, warm_ups=warm_ups * requests, seed=SEED)

        made["mixed_prefill"] = _mixed_row(mixed, timed(mixed.requests(), len(mixed.decodes), n, 0 if long else 1))
        if prompt_tokens is None:
            agentic = Agentic()
            made["agentic"] = _agentic_row(agentic, timed(agentic.requests(), agentic.turns, max(1, n // 2), 1))
    return made


def _mixed_row(mixed: Any, found: Comparison) -> dict[str, Any]:
    """Times of whole traces and of their decode requests, from those of each request in order."""
    decodes = np.array(mixed.decodes)
    by_trace = {name: np.array(getattr(found, name).samples_us).reshape(-1, decodes.size) for name in ("stock", "candidate")}
    whole = {name: times.sum(1) for name, times in by_trace.items()}
    decoding = {name: times[:, decodes] for name, times in by_trace.items()}
    sides = {
        name: {
            "decode_alone_tokens_per_s": mixed.decoded_tokens / (1e-6 * float(np.median(decoding[name].sum(1)))),
            "end_to_end_tokens_per_s": mixed.decoded_tokens / (1e-6 * float(np.median(whole[name]))),
        }
        for name in by_trace
    }
    settings = {"users": mixed.users, "prompt_tokens": mixed.prompt_tokens, "decoded_tokens": mixed.decoded_tokens}
    row = _row(settings, sides, found, len(whole["stock"]))
    if not row["reasons"]:
        row |= _ratio("speed_up", paired_ratio(whole["stock"].tolist(), whole["candidate"].tolist()))
        alone = paired_ratio(decoding["stock"].ravel().tolist(), decoding["candidate"].ravel().tolist())
        row |= {**_ratio("decode_speed_up", alone), "decode_pairs": alone.n}
    return row


def _ratio(name: str, found: Interval) -> dict[str, float]:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


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
    row = _row(settings, sides, found, len(found.stock.samples_us))
    return row if row["reasons"] else row | _ratio("speed_up", found.speed_up)


def _row(settings: Mapping[str, Any], sides: Mapping[str, Any], found: Comparison, pairs: int) -> dict[str, Any]:
    errors = sorted((side.worst_error for side in (found.stock, found.candidate)), key=lambda e: (e != e, e))
    return {
        **settings,
        "sides": {} if found.reasons else dict(sides),
        "reasons": list(found.reasons),
        "worst_error": errors[-1],
        "pairs": pairs,
    }
