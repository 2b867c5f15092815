"""The forced passes of a run over every context length: stock, stock again, the candidate alone, the candidate among others.

    stock      alone
    stock      again, which measures the noise of the same model: started again where it is ours, with other requests in flight, and with
               the window begun earlier, so that another part of the text comes from the prefill
    candidate  alone, and among other requests

Each replica of the candidate has passes of its own, against the same passes of stock. Stock's are asked of its first replica alone: it is
the yardstick, and a fault of another one could only lengthen it and hide the candidate's.

With one set of GPUs a pass covers all contexts before the next begins, so each side is started as rarely as can be. Every window is a file
of its own; what is there is not asked for again.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.records import digest
from evals.serving.client import Endpoint
from evals.serving.config import NumericsConfig
from evals.serving.errors import ServingError
from evals.serving.forced import ForcedWindow, NotForced, Position, force_window, neighbours
from evals.serving.launch import StartFailed
from evals.serving.targets import Live, ServedTarget
from validation.core.settings import PROJECT_ROOT
from validation.core.types import HarnessError
from validation.core.worker import Refused

CHARACTERS_A_TOKEN = 8  # more than any tokenizer needs for text; what is too much is cut
CHAT_SPARE_TOKENS = 256
MAX_TEXT_BYTES = 64 << 20
NEIGHBOUR_PROMPT_TOKENS = 256
TOKENIZE_LIMIT_S = 300.0
STARTED = time.time()


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One way to run a side over all windows."""

    name: str
    role: str
    again: bool = False  # on a server started again
    mixed: bool = False  # with other requests in flight
    earlier: bool = False  # with decoding begun a window's length earlier


STOCK, NOISE = Pass(name="stock", role="stock"), Pass(name="noise", role="stock", again=True, mixed=True, earlier=True)
CANDIDATE, MIXED = Pass(name="candidate", role="candidate"), Pass(name="mixed", role="candidate", mixed=True)
PASSES = (STOCK, NOISE, CANDIDATE, MIXED)


@dataclass(frozen=True, kw_only=True)
class Place:
    """One window: the last `window_tokens` of a context of `context_tokens`, in text number `text`."""

    context_tokens: int
    text: int

    @property
    def name(self) -> str:
        return f"{self.context_tokens}-{self.text}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is stored for a place in a pass: the window, or why there is none. `refused`: the server cannot, as opposed to failed."""

    window: ForcedWindow | None
    reason: str = ""
    refused: bool = False


class Passes:
    """Windows of all passes in `folder`; `collect` fills what is missing. `replica` of the candidate counts from 1."""

    def __init__(self, config: NumericsConfig, targets: Mapping[str, ServedTarget], folder: Path, replica: int = 1) -> None:
        self._config, self._targets, self._folder, self.replica = config, targets, folder, replica
        self._texts: dict[int, list[int]] = {}
        self.restarted = False  # whether the noise pass ran on a server started again
        self.facts = targets["stock"].link.require_alike()
        self._identity = {role: targets[role].live_fingerprint(self.facts[role])[:16] for role in targets}

    @property
    def places(self) -> list[Place]:
        return [Place(context_tokens=n, text=t) for n in self._config.bins for t in range(self._config.windows)]

    @property
    def neighbours(self) -> int:
        return self._config.neighbours

    @property
    def earlier_tokens(self) -> int:
        """How much earlier the noise pass begins to decode: what precedes the window then comes from decode steps, not from the prefill."""
        return self._config.window_tokens

    def served_maximum(self, role: str = "candidate") -> int:
        """Tokens of the longest context that a side serves; 0 where nobody tells."""
        told = self.facts[role].get("max_model_len", "")
        return int(told) if told.isdigit() else 0

    def positions(self, one: Pass, place: Place) -> tuple[Position, ...]:
        """The distributions of a stored window. Raises RuntimeError where there is none."""
        found = self.outcome(one, place)
        if found is None or found.window is None:
            raise RuntimeError(f"{one.name} {place.name}: got no window, needs one; {found.reason if found else 'never asked'}")
        return found.window.positions

    def outcome(self, one: Pass, place: Place) -> Outcome | None:
        """What is stored; None when the place was not asked yet."""
        try:
            return _from_json(json.loads(self._path(one, place).read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _path(self, one: Pass, place: Place) -> Path:
        asked = digest([self._identity[one.role], _plain(self._config)])
        replica = self._replica_of(one)
        name = one.name if replica == 1 else f"{one.name}-r{replica}"
        return self._folder / asked / name / f"{place.name}.json"

    def _replica_of(self, one: Pass) -> int:
        return self.replica if one.role == "candidate" else 1

    def collect(self) -> None:
        """Ask for every window that is missing, pass by pass. A side that cannot be started leaves its windows missing, with the reason."""
        for one in PASSES:
            missing = [place for place in self.places if self._is_missing(one, place)]
            if not missing:
                continue
            try:
                live = self._targets[one.role].up(fresh=one.again and self._config.restart)
            except StartFailed as error:
                raise Refused((str(error),)) from error
            self.restarted |= one.again and live.starts > 1
            asyncio.run(self._ask_all(one, missing, live))

    def _is_missing(self, one: Pass, place: Place) -> bool:
        """Never asked, or failed for a passing reason in an earlier attempt at this run; within one attempt a failure stands."""
        found = self.outcome(one, place)
        if found is None:
            return True
        return found.window is None and not found.refused and self._path(one, place).stat().st_mtime < STARTED

    async def _ask_all(self, one: Pass, places: Sequence[Place], live: Live) -> None:
        async with AsyncExitStack() as stack:
            target = self._targets[one.role]
            url = live.base_urls[self._replica_of(one) - 1]
            endpoint = await stack.enter_async_context(target.endpoint(url, timeout_s=self._config.request_timeout_s))
            for text in sorted({place.text for place in places} - self._texts.keys()):
                self._texts[text] = await _tokens_of(endpoint, self._config, text)
            if one.mixed:
                prompts = [self._texts[places[0].text][n * 16 : n * 16 + NEIGHBOUR_PROMPT_TOKENS] for n in range(self._config.neighbours)]
                if prompts:
                    await stack.enter_async_context(neighbours(endpoint, prompts, len(prompts), self._config.request_timeout_s))
            for place in places:
                self._keep(one, place, await self._ask(endpoint, one, place))

    async def _ask(self, endpoint: Endpoint, one: Pass, place: Place) -> Outcome:
        config, n = self._config, place.context_tokens
        most = self.served_maximum(one.role)
        early = self.earlier_tokens if one.earlier else 0
        tokens, begin = self._texts[place.text], n - config.window_tokens - 1 - early
        if most and n > most:
            return Outcome(window=None, reason=f"{one.role}: serves {most} tokens, the context needs {n}", refused=True)
        if begin < 1 or len(tokens) < n:
            reason = f"got {len(tokens)} tokens of text and a window of {config.window_tokens}, needs text for {n} and a shorter window"
            return Outcome(window=None, reason=f"context of {n}: {reason}", refused=True)
        try:
            window = await force_window(
                endpoint,
                tokens[:begin],
                tokens[begin:n],
                method=config.method,
                logprobs=config.logprobs,
                timeout_s=config.request_timeout_s,
            )
        except NotForced as error:
            return Outcome(window=None, reason=f"{one.role}: {error}", refused=True)
        except (ServingError, ExceptionGroup) as error:
            first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            return Outcome(window=None, reason=f"{one.role}: {first}", refused=isinstance(first, NotForced))
        return Outcome(window=window)

    def _keep(self, one: Pass, place: Place, outcome: Outcome) -> None:
        path = self._path(one, place)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.draft")
        draft.write_text(json.dumps(_to_json(outcome)))
        draft.replace(path)


def _plain(config: NumericsConfig) -> list[Any]:
    """What decides a window's content."""
    return [config.text, config.window_tokens, config.logprobs, config.method, config.neighbours, config.restart]


def _to_json(outcome: Outcome) -> dict[str, Any]:
    if outcome.window is None:
        return {"reason": outcome.reason, "refused": outcome.refused}
    window = outcome.window
    rows = [[p.token, _number(p.logprob), {str(k): _number(v) for k, v in p.top.items()}] for p in window.positions]
    return {"context_tokens": window.context_tokens, "method": window.method, "positions": rows}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _from_json(body: Mapping[str, Any]) -> Outcome:
    if "positions" not in body:
        return Outcome(window=None, reason=body["reason"], refused=body["refused"])
    positions = tuple(
        Position(token=token, logprob=float(logprob), top={int(k): float(v) for k, v in top.items()})
        for token, logprob, top in body["positions"]
    )
    return Outcome(window=ForcedWindow(context_tokens=body["context_tokens"], method=body["method"], positions=positions))


# ---- text ----
async def _tokens_of(endpoint: Endpoint, config: NumericsConfig, number: int) -> list[int]:
    """Token ids of text `number` by the server's own tokenizer, enough for the longest context. Raises Refused."""
    wanted = max(config.bins)
    text = long_text(config.text, wanted * CHARACTERS_A_TOKEN, number, config.windows)
    try:
        return list(await endpoint.tokenize_async(text, timeout_s=TOKENIZE_LIMIT_S))[:wanted]
    except ServingError as error:
        raise Refused((f"text: the server cannot tokenize it ({error})",)) from error


def long_text(source: str, characters: int, number: int, of: int) -> str:
    """About `characters` of real text, a different part for each `number` of `of`.

    `source`: a file; "chat", the generator of the embedded lane; or "" for the sources of Python's standard library, which every machine
    has and which are as long as any context. Raises HarnessError for a file that cannot be read.
    """
    if source == "chat":
        from validation.numerics.textsource import tokens_ending_at

        size = characters // CHARACTERS_A_TOKEN + CHAT_SPARE_TOKENS  # a character is a token there
        return "".join(map(chr, tokens_ending_at([size], number, bos=10, vocab_size=128)[1:]))
    text = _standard_library(characters * of) if not source else _read_text(PROJECT_ROOT / source)
    begin = len(text) * number // max(of, 1)
    part = text[begin : begin + characters]
    return part if len(part) == characters else part + text[: min(begin, characters - len(part))]


def _read_text(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.read(MAX_TEXT_BYTES)
    except OSError as error:
        raise HarnessError(f"text: got {error}, needs a readable file") from error


def _standard_library(characters: int) -> str:
    """Its sources one after the other, until there are enough."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(folder.rglob("*.py")) if "site-packages" not in path.parts and "test" not in path.parts]
    parts, size = [], 0
    for path in files:
        parts.append(path.read_text(errors="replace"))
        size += len(parts[-1])
        if size > min(characters, MAX_TEXT_BYTES):
            break
    return "".join(parts)
