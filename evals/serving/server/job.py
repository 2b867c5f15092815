"""One request in flight: its prompt, what it has produced, and how it tells the route about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from evals.serving.server.errors import RequestError
from evals.serving.server.sampling import Chooser, Sampling
from evals.serving.server.text import TextStream
from kimi_k3_decode.sampling import TokenLogprob

LENGTH, STOP = "length", "stop"


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What a step added to a reply. The last one has `finish_reason`, or `error` when the request failed.

    `prompt_logprobs` comes with the first one when asked for: an entry a prompt token, None for the first.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    text: str = ""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: RequestError | None = None

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(kw_only=True, eq=False)
class Job:
    """`sink` is called from the worker's thread with every Delta. `fed` counts prompt tokens that are in the caches."""

    prompt: tuple[int, ...]
    sampling: Sampling
    sink: Callable[[Delta], None]
    text: TextStream
    chooser: Chooser
    eos_token_id: int
    place: int = -1
    fed: int = 0
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    cancelled: bool = False
    done: bool = False
    arrived_s: float = field(default_factory=time.monotonic)
    latest_s: float = 0.0  # when its latest tokens were made
    _new: list[int] = field(default_factory=list)
    _new_logprobs: list[TokenLogprob] = field(default_factory=list)
    _new_text: str = ""

    @property
    def total(self) -> int:
        return len(self.prompt) + self.sampling.max_new_tokens

    @property
    def pending(self) -> int:
        """The newest token, which no step has seen yet."""
        return self.tokens[-1]

    def take(self, token: int, logprob: TokenLogprob | None) -> tuple[str, str | int | None] | None:
        """Append an output token; (finish_reason, stop_reason) when it ends the reply. The token that ends it is part of the ids."""
        self.tokens.append(token)
        self._new.append(token)
        if logprob is not None:
            self._new_logprobs.append(logprob)
        asked = self.sampling
        enough = len(self.tokens) >= max(asked.min_tokens, 1)
        if token == self.eos_token_id and not asked.ignore_eos and enough:
            return STOP, None
        if token in asked.stop_token_ids and enough:
            return STOP, token
        shown, stop = self.text.push(token)
        self._new_text += shown
        if stop is not None:
            return STOP, stop
        return (LENGTH, None) if len(self.tokens) >= asked.max_new_tokens else None

    def emit(self, finished: tuple[str, str | int | None] | None) -> None:
        """Hand over what is new; with `finished` the reply is complete."""
        text = self._new_text
        if finished is not None:
            self.done = True
            text += "" if isinstance(finished[1], str) else self.text.flush()
        first = len(self.tokens) == len(self._new)
        wanted = self.sampling.prompt_logprobs is not None and first
        delta = Delta(
            token_ids=tuple(self._new),
            logprobs=tuple(self._new_logprobs),
            text=text,
            prompt_logprobs=tuple(self.prompt_logprobs) if wanted else None,
            finish_reason=None if finished is None else finished[0],
            stop_reason=None if finished is None else finished[1],
        )
        self._new, self._new_logprobs, self._new_text = [], [], ""
        self.sink(delta)

    def fail(self, error: RequestError) -> None:
        if not self.done:
            self.done = True
            self.sink(Delta(error=error))
