"""Reads what `vllm bench serve --save-result` and `vllm bench latency --output-json` write, strictly: a missing field is an error."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from validation.core.types import HarnessError

SERVE_REQUIRED = (
    "completed",
    "duration",
    "output_throughput",
    "total_token_throughput",
    "median_tpot_ms",
    "median_ttft_ms",
    "median_itl_ms",
)
MAX_BYTES = 256 * 1024**2


@dataclass(frozen=True, kw_only=True)
class ServeResult:
    """Rates in tokens per second, times in milliseconds. `acceptance_length` is None without speculation."""

    completed: int
    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    median_tpot_ms: float
    median_ttft_ms: float
    median_itl_ms: float
    p99_tpot_ms: float | None
    acceptance_length: float | None
    per_position_acceptance: tuple[float, ...]
    p90_tokens_per_s_per_user: float | None  # nine requests in ten are at least this fast, where the file tells
    raw: dict[str, Any]


def _number(table: dict[str, Any], key: str, problems: list[str], *, required: bool = True) -> float | None:
    value = table.get(key)
    if value is None and not required:
        return None
    try:
        found = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # a whole number beyond any float
        found = math.inf
    if not (math.isfinite(found) and found > 0):
        problems.append(f"{key}: got {str(value)[:60]}, needs a finite number above 0")
        return None
    return found


def read_serve(path: Path) -> ServeResult:
    """Raises HarnessError naming every missing or malformed field, or the file when it is no JSON object."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise HarnessError(f"bench JSON {path}: got {path.stat().st_size} bytes, needs at most {MAX_BYTES}; save without details")
        table = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise HarnessError(f"bench JSON {path}: got {error}, needs the file `vllm bench serve --save-result` writes") from None
    if not isinstance(table, dict):
        raise HarnessError(f"bench JSON {path}: got a {type(table).__name__}, needs one JSON object")
    problems: list[str] = []
    values = {key: _number(table, key, problems) for key in SERVE_REQUIRED}
    p99 = _number(table, "p99_tpot_ms", problems, required=False)
    acceptance = _number(table, "spec_decode_acceptance_length", problems, required=False)
    positions = table.get("spec_decode_per_position_acceptance_rates") or []
    if not isinstance(positions, list) or not all(isinstance(p, int | float) and 0 <= p <= 1 for p in positions):
        problems.append(f"spec_decode_per_position_acceptance_rates: got {positions!r}, needs shares between 0 and 1")
        positions = []
    interactivity = _interactivity_p90(table, problems)
    completed = values.get("completed")
    if completed is not None and not completed.is_integer():
        problems.append(f"completed: got {completed:g}, needs a whole number of finished requests")
    if problems:
        raise HarnessError(f"bench JSON {path}: {len(problems)} problem(s): " + "; ".join(problems))
    number = {key: float(value) for key, value in values.items() if value is not None}
    return ServeResult(
        completed=int(number["completed"]),
        duration_s=number["duration"],
        output_tokens_per_s=number["output_throughput"],
        total_tokens_per_s=number["total_token_throughput"],
        median_tpot_ms=number["median_tpot_ms"],
        median_ttft_ms=number["median_ttft_ms"],
        median_itl_ms=number["median_itl_ms"],
        p99_tpot_ms=p99,
        acceptance_length=acceptance,
        per_position_acceptance=tuple(float(p) for p in positions),
        p90_tokens_per_s_per_user=interactivity,
        raw=table,
    )


def _interactivity_p90(table: dict[str, Any], problems: list[str]) -> float | None:
    """From each request's tokens and times, waiting included (`--save-detailed`); else from the 90th percentile of the time per output
    token (`--metric-percentiles 90`), which leaves the first token out; else None."""
    names = ("output_lens", "ttfts", "itls")
    lists = [one for one in (table.get(name) for name in names) if isinstance(one, list) and one]
    if len(lists) == len(names) and len({len(one) for one in lists}) == 1:
        try:
            rates = [n / (first + sum(gaps)) for n, first, gaps in zip(*lists, strict=True) if n > 0]
            found = sorted(float(rate) for rate in rates)
            if found and math.isfinite(found[0]) and math.isfinite(found[-1]) and found[0] > 0:
                return found[(len(found) - 1) // 10]
            raise ValueError("no request with a positive finite rate")
        except (TypeError, ValueError, ArithmeticError) as error:
            problems.append(f"{', '.join(names)}: got {error}, needs tokens and seconds of each request")
            return None
    slow_ms = _number(table, "p90_tpot_ms", problems, required=False)
    return None if slow_ms is None else 1e3 / slow_ms


@dataclass(frozen=True, kw_only=True)
class LatencyResult:
    """Seconds of a whole batch, prefill included, and the tokens each request generated."""

    average_s: float
    median_s: float
    output_tokens: int


def read_latency(path: Path) -> LatencyResult:
    """`vllm bench latency --output-json`, which records times only: `output_len` must have been added beside them.

    Raises HarnessError naming every missing or malformed field.
    """
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise HarnessError(f"bench JSON {path}: got {error}, needs the file `vllm bench latency --output-json` writes") from None
    if not isinstance(table, dict):
        raise HarnessError(f"bench JSON {path}: got a {type(table).__name__}, needs one JSON object")
    problems: list[str] = []
    average = _number(table, "avg_latency", problems)
    percentiles = table.get("percentiles")
    median = _number({str(k): v for k, v in percentiles.items()} if isinstance(percentiles, dict) else {}, "50", problems)
    tokens = _number(table, "output_len", problems)
    if tokens is not None and not (tokens >= 1 and tokens.is_integer()):
        problems.append(f"output_len: got {tokens:g}, needs a whole number of tokens")
    if problems or average is None or median is None or tokens is None:
        raise HarnessError(f"bench JSON {path}: {len(problems)} problem(s): " + "; ".join(problems))
    return LatencyResult(average_s=average, median_s=median, output_tokens=int(tokens))
