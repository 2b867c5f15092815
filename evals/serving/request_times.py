"""Times the same requests on both servers, at the same concurrency: stock, the candidate, and stock again.

Every request is a piece of real text of `prompt_tokens` tokens; the first few are drawn anew for each pass, so that no prefix cache
serves one pass from another. It is answered with exactly `new_tokens` tokens; an answer of another length counts as lost. Servers that
run side by side are asked in turn, wave by wave; on one set of GPUs stock is asked before and after the candidate. Each replica of the
candidate is timed against one of stock, never several as one: a slow one among good ones must not vanish in the mean.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from evals.records import digest
from evals.serving.client import Endpoint
from evals.serving.config import PerfConfig
from evals.serving.config_rules import LEAST_WAVES
from evals.serving.errors import ServingError
from evals.serving.launch import StartFailed
from evals.serving.pace import Slowdown, slowdown
from evals.serving.passes import CHARACTERS_A_TOKEN, TOKENIZE_LIMIT_S, long_text
from evals.serving.targets import Live, ServedTarget
from validation.core.types import Case, Measurement
from validation.core.worker import Refused

Found = tuple[tuple[Measurement, ...], Mapping[str, Any]]
PASSES = {"stock": "stock", "candidate": "candidate", "again": "stock"}  # pass -> side
FRESH_TOKENS = 8  # at the beginning of each prompt, drawn anew for each pass
TEXT_TOKENS = 1 << 14
STRIDE = 97  # tokens between the beginnings of two prompts in the text


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One pass: seconds of each request, wave by wave (NaN: lost), and what became of the lost ones."""

    waves: tuple[tuple[float, ...], ...]
    losses: tuple[str, ...]

    @property
    def seconds(self) -> list[float]:
        return [one for wave in self.waves for one in wave if math.isfinite(one)]


@dataclass(frozen=True, kw_only=True)
class Load:
    """One case: `concurrency` requests at once, the candidate's replica `replica` (from 1) against one of stock."""

    concurrency: int
    replica: int = 1


def measure_times(case: Case, targets: Mapping[str, ServedTarget], limit: float) -> Found:
    """`limit`: the largest slow-down, as a share. Raises Refused where the file asks for none or a server cannot be asked."""
    perf = targets["stock"].config.perf
    if not perf.waves:
        raise Refused(("request times: got waves = 0 in [perf], needs some to be timed",))
    load = Load(concurrency=int(case.params["concurrency"]), replica=int(case.params.get("replica", 1)))
    timing = Timing(perf, targets)
    passes = timing.collect()[load]
    return _found(load, passes, slowdown(*(passes[name].waves for name in PASSES), in_turn=timing.side_by_side), limit)


def loads(targets: Mapping[str, ServedTarget]) -> list[Load]:
    config = targets["stock"].config
    replicas = max(1, len(config.candidate.base_url))
    return [Load(concurrency=c, replica=k) for c in config.evals.concurrency for k in range(1, replicas + 1)]


class Timing:
    """All passes of a run, each a file of its own below the lane's scratch folder; what is there is not asked again."""

    def __init__(self, perf: PerfConfig, targets: Mapping[str, ServedTarget]) -> None:
        self._perf, self._targets = perf, targets
        self._config = targets["stock"].config
        self.facts = targets["stock"].link.require_alike()
        told = [int(facts["max_model_len"]) for facts in self.facts.values() if facts.get("max_model_len", "").isdigit()]
        if told and perf.prompt_tokens + perf.new_tokens > min(told):
            needed = f"{perf.prompt_tokens} prompt_tokens and {perf.new_tokens} new_tokens"
            raise Refused((f"request times: got {needed}, needs both within the {min(told)} tokens that are served; lower them in [perf]",))
        identity = [targets[role].live_fingerprint(self.facts[role])[:16] for role in sorted(targets)]
        plan = [identity, perf.waves, perf.prompt_tokens, perf.new_tokens, self._config.numerics.text]
        self._folder = Path(os.environ.get("FASTTRACK_SCRATCH") or tempfile.mkdtemp()) / "times" / digest(plan)
        self._text: list[int] = []

    def collect(self) -> dict[Load, dict[str, Timed]]:
        """Every load's passes. With one set of GPUs each side is up once for all loads, and stock a second time."""
        wanted = loads(self._targets)
        groups = [tuple(PASSES)] if self.side_by_side else [(name,) for name in PASSES]
        for group in groups:
            for load in wanted:
                if any(not self._path(load, name).is_file() for name in group):
                    self._time(load, group)
        return {load: {name: self._read(load, name) for name in PASSES} for load in wanted}

    @property
    def side_by_side(self) -> bool:
        """Whether both sides answer at the same time, so that waves can take turns."""
        return self._config.servers.together or all(self._config.side(role).base_url for role in ("stock", "candidate"))

    def _time(self, load: Load, group: Sequence[str]) -> None:
        lives = {name: self._up(PASSES[name]) for name in group}
        for name, timed in asyncio.run(self._ask(load, lives)).items():
            self._keep(load, name, timed)

    def _up(self, role: str) -> Live:
        try:
            return self._targets[role].up()
        except StartFailed as error:
            raise Refused((str(error),)) from error

    async def _ask(self, load: Load, lives: Mapping[str, Live]) -> dict[str, Timed]:
        """The passes named, a wave of each in turn; the first wave opens connections and is thrown away."""
        async with AsyncExitStack() as stack:
            ends = {}
            for name, live in lives.items():
                target, url = self._targets[PASSES[name]], live.base_urls[(load.replica - 1) % len(live.base_urls)]
                # Not tried again: a repetition would hide the time of the attempt that failed.
                end = target.endpoint(url, timeout_s=self._config.evals.request_timeout_s, retries=0, max_connections=load.concurrency + 8)
                ends[name] = await stack.enter_async_context(end)
            self._text = self._text or await self._tokens(next(iter(ends.values())))
            waves: dict[str, list[tuple[float, ...]]] = {name: [] for name in lives}
            losses: dict[str, list[str]] = {name: [] for name in lives}
            order = list(lives)
            for number in range(-1, self._perf.waves):
                for name in order:
                    asked = await self._wave(ends[name], load.concurrency, number)
                    if number >= 0:
                        waves[name].append(tuple(seconds for seconds, _ in asked))
                        losses[name] += [words for _, words in asked if words]
                order.append(order.pop(0))  # nobody is always first
        return {name: Timed(waves=tuple(waves[name]), losses=tuple(losses[name])) for name in lives}

    async def _wave(self, end: Endpoint, size: int, number: int) -> list[tuple[float, str]]:
        return list(await asyncio.gather(*(self._one(end, (number + 1) * size + place) for place in range(size))))

    async def _one(self, end: Endpoint, item: int) -> tuple[float, str]:
        """Seconds and "", or NaN and what went wrong."""
        perf, text = self._perf, self._text
        begin = item * STRIDE % (len(text) - perf.prompt_tokens)
        fresh = [text[secrets.randbelow(len(text))] for _ in range(min(FRESH_TOKENS, perf.prompt_tokens))]
        prompt = [*fresh, *text[begin + len(fresh) : begin + perf.prompt_tokens]]
        try:
            reply = await end.completion_async(prompt, max_tokens=perf.new_tokens, extra={"ignore_eos": True})
        except ServingError as error:
            return math.nan, error.reason
        if reply.completion_tokens != perf.new_tokens:
            return math.nan, f"got {reply.completion_tokens} tokens, needs {perf.new_tokens} (ignore_eos)"
        return reply.latency_s, ""

    async def _tokens(self, end: Endpoint) -> list[int]:
        wanted = max(TEXT_TOKENS, 2 * self._perf.prompt_tokens)
        text = long_text(self._config.numerics.text, wanted * CHARACTERS_A_TOKEN, 0, 1)
        try:
            ids = list(await end.tokenize_async(text, timeout_s=TOKENIZE_LIMIT_S))[:wanted]
        except ServingError as error:
            raise Refused((f"request times: the server cannot tokenize the text ({error})",)) from error
        if len(ids) <= self._perf.prompt_tokens:
            raise Refused((f"request times: got {len(ids)} tokens of text, needs more than {self._perf.prompt_tokens} prompt_tokens",))
        return ids

    # ---- files ----
    def _path(self, load: Load, name: str) -> Path:
        return self._folder / f"c{load.concurrency}-r{load.replica}-{name}.json"

    def _keep(self, load: Load, name: str, timed: Timed) -> None:
        path = self._path(load, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.draft")
        waves = [[None if math.isnan(one) else one for one in wave] for wave in timed.waves]
        draft.write_text(json.dumps({"waves": waves, "losses": timed.losses}))
        draft.replace(path)

    def _read(self, load: Load, name: str) -> Timed:
        body = json.loads(self._path(load, name).read_text())
        waves = tuple(tuple(math.nan if one is None else float(one) for one in wave) for wave in body["waves"])
        return Timed(waves=waves, losses=tuple(body["losses"]))


# ---- what is recorded ----
def _found(load: Load, passes: Mapping[str, Timed], told: Slowdown, limit: float) -> Found:
    # Where stock lost the answers of whole waves, the rest gives no interval: left out, the claim stays open and blames nobody.
    enough = told.candidate.waves >= LEAST_WAVES
    lost = {role: sum(len(passes[name].losses) for name, side in PASSES.items() if side == role) for role in ("stock", "candidate")}
    measured = [
        Measurement(name="request_time_ratio", value=told.candidate.ratio, unit="1"),
        Measurement(name="request_time_ratio_low", value=told.candidate.low, unit="1"),
        Measurement(name="request_time_ratio_high", value=told.candidate.high, unit="1"),
        Measurement(name="stock_time_ratio", value=told.stock.ratio, unit="1"),
        Measurement(name="lost_requests", value=float(lost["candidate"]), unit="count"),
        Measurement(name="lost_requests_stock", value=float(lost["stock"]), unit="count"),
        Measurement(name="waves" if enough else "waves_too_few", value=float(told.candidate.waves), unit="count"),
    ]
    for name, timed in passes.items():
        if timed.seconds:
            measured.append(Measurement(name=f"request_time_{name}", value=median(timed.seconds), unit="s", samples=tuple(timed.seconds)))
    if enough and not math.isnan(told.low):
        measured.append(Measurement(name="slowdown_low", value=told.low, unit="share"))
    # An interval that reaches beyond the limit proves neither: left out, the claim stays open.
    if enough and told.high <= limit:
        measured.append(Measurement(name="slowdown_high", value=told.high, unit="share"))
    told_of = [_words(load, told, limit), *(f"{name}: {words}" for name, timed in passes.items() for words in timed.losses[:2])]
    table = {**_table(load, passes, told), "note": f"{'; '.join(told_of)}."}
    return tuple(measured), {"reasons": told_of, "tables": [table]}


def _words(load: Load, told: Slowdown, limit: float) -> str:
    found = told.candidate
    if found.waves < LEAST_WAVES:
        what = f"open, for only {found.waves} waves have answers on both sides and {LEAST_WAVES} are needed"
    else:
        what = "slower than stock" if told.low > limit else "as fast as stock" if told.high <= limit else "open"
    spread = f"95 % interval {found.low:.3f} to {found.high:.3f}; stock against itself {told.stock.ratio:.3f}; allowed {1 + limit:.2f}"
    who = f"With {load.concurrency} at once, replica {load.replica} of the candidate"
    return f"{who} takes {found.ratio:.3f} times as long as stock for the same requests ({spread}): {what}"


def _table(load: Load, passes: Mapping[str, Timed], told: Slowdown) -> dict[str, Any]:
    rows = []
    for name, timed in passes.items():
        ratio = {"stock": "–", "candidate": f"{told.candidate.ratio:.3f}", "again": f"{told.stock.ratio:.3f}"}[name]
        spread = f"{median(timed.seconds):.4f}" if timed.seconds else "–"
        rows.append([name, PASSES[name], len(timed.seconds), len(timed.losses), spread, ratio])
    columns = ["pass", "side", "requests", "lost", "median s", "times stock's first pass (candidate: both passes)"]
    return {"title": f"The same requests, {load.concurrency} at once", "columns": columns, "rows": rows}
