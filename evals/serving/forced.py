"""Teacher-forced decoding on a server: the log-probabilities of the decode path at every token of a given text.

    logits_processor  one request: the shipped plug-in forces each next token (`vllm_xargs: {"force_ids": [...]}`) while the answer's
                      log-probabilities are still the model's own. Servers that speculate refuse such plug-ins.
    one_token         one request a token: `allowed_token_ids` with two tokens to generate. The first is computed by the prefill, the second
                      by a decode (or verify) step: its distribution is the one that counts.

Position 0 of a window comes from the prefill in both and is left out. A server that does not know an argument ignores it silently, so the
returned token ids prove that forcing happened; without them nothing was measured (`NotForced`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from evals.serving.answers import Reply, TokenLogprob
from evals.serving.client import Endpoint
from evals.serving.errors import HttpStatus, ServingError

LOGITS_PROCESSOR, ONE_TOKEN = "logits_processor", "one_token"
NEIGHBOUR_TOKENS = 256
ONE_TOKEN_IN_FLIGHT = 4


class NotForced(Exception):
    """The server did not generate the tokens that were forced, or did not say which it generated."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """The distribution before one forced token: its own log-probability and the most likely tokens', in nats."""

    token: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, kw_only=True)
class ForcedWindow:
    """Positions 1... of a window after `context_tokens` tokens; `method` says how they were forced."""

    context_tokens: int
    method: str
    positions: tuple[Position, ...]


async def force_window(
    endpoint: Endpoint, context: Sequence[int], window: Sequence[int], *, method: str, logprobs: int, timeout_s: float
) -> ForcedWindow:
    """Force `window` after `context` (token ids). "auto" takes the plug-in where the server has it. Raises ServingError, NotForced."""
    if method in ("auto", LOGITS_PROCESSOR):
        try:
            return await _with_plugin(endpoint, context, window, logprobs, timeout_s)
        except (NotForced, HttpStatus) as error:
            if method == LOGITS_PROCESSOR or (isinstance(error, HttpStatus) and error.status != 400):
                raise
    return await _token_by_token(endpoint, context, window, logprobs, timeout_s)


async def _with_plugin(endpoint: Endpoint, context: Sequence[int], window: Sequence[int], logprobs: int, timeout_s: float) -> ForcedWindow:
    extra = {"vllm_xargs": {"force_ids": list(window)}, "ignore_eos": True}
    reply = await endpoint.completion_async(context, max_tokens=len(window), logprobs=logprobs, extra=extra, timeout_s=timeout_s)
    _require(reply, tuple(window), len(context))
    positions = tuple(_position(token, told, logprobs) for token, told in zip(window[1:], reply.logprobs[1:], strict=True))
    return ForcedWindow(context_tokens=len(context), method=LOGITS_PROCESSOR, positions=positions)


async def _token_by_token(
    endpoint: Endpoint, context: Sequence[int], window: Sequence[int], logprobs: int, timeout_s: float
) -> ForcedWindow:
    """The first request runs alone, so that a prefix cache can serve the rest; they ask for the position after their forced token."""
    slots = asyncio.Semaphore(ONE_TOKEN_IN_FLIGHT)

    async def ask(place: int) -> Position:
        prompt, token = [*context, *window[:place]], window[place]
        extra = {"allowed_token_ids": [token], "ignore_eos": True, "min_tokens": 2}
        async with slots:
            reply = await endpoint.completion_async(prompt, max_tokens=2, logprobs=logprobs, extra=extra, timeout_s=timeout_s)
        _require(reply, (token, token), len(prompt))
        following, told = window[place + 1], reply.logprobs[1]
        top = _largest(told, logprobs)
        # The mask allowed only `token`: the forced text's own next token is judged where it is among the most likely ones.
        return Position(token=following, logprob=top.get(following, float("-inf")), top=top)

    first = await ask(0)
    async with asyncio.TaskGroup() as group:
        rest = [group.create_task(ask(place)) for place in range(1, len(window) - 1)]
    return ForcedWindow(context_tokens=len(context), method=ONE_TOKEN, positions=(first, *(task.result() for task in rest)))


def _require(reply: Reply, expected: tuple[int, ...], prompt_tokens: int) -> None:
    """The proof: the tokens that were forced came back, each with its distribution, after a prompt of the length that was sent."""
    if reply.token_ids is None:
        raise NotForced("got no token ids in the answer, needs return_token_ids: nothing shows which tokens were generated")
    if reply.token_ids != expected:
        same = next((i for i, (a, b) in enumerate(zip(reply.token_ids, expected, strict=False)) if a != b), len(reply.token_ids))
        raise NotForced(f"got {len(reply.token_ids)} tokens that leave the forced text at place {same}, needs all {len(expected)} of it")
    if len(reply.logprobs) != len(expected) or not all(told.top_ids() for told in reply.logprobs):
        raise NotForced(f"got {len(reply.logprobs)} distributions by token id, needs {len(expected)}; is --max-logprobs large enough?")
    told = reply.usage.get("prompt_tokens", prompt_tokens)
    if told != prompt_tokens:
        raise NotForced(f"got a prompt of {told} tokens, needs the {prompt_tokens} that were sent")


def _position(token: int, told: TokenLogprob, count: int) -> Position:
    return Position(token=token, logprob=told.logprob, top=_largest(told, count))


def _largest(told: TokenLogprob, count: int) -> dict[int, float]:
    """The `count` most likely tokens. Servers list the generated token as well; a forced one may lie anywhere, and the smallest value of
    this list bounds every token that is not in it."""
    return dict(sorted(told.top_ids().items(), key=lambda item: (-item[1], item[0]))[:count])


@asynccontextmanager
async def neighbours(endpoint: Endpoint, texts: Sequence[Sequence[int]], count: int, timeout_s: float) -> AsyncIterator[None]:
    """Keep `count` other requests in flight meanwhile, so that steps hold another mix of requests."""
    running = [asyncio.create_task(_keep_asking(endpoint, texts[n % len(texts)], timeout_s)) for n in range(count)]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        for task in running:
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _keep_asking(endpoint: Endpoint, prompt: Sequence[int], timeout_s: float) -> None:
    while True:
        try:
            await endpoint.completion_async(prompt, max_tokens=NEIGHBOUR_TOKENS, extra={"ignore_eos": True}, timeout_s=timeout_s)
        except ServingError:
            await asyncio.sleep(1.0)  # they are scenery; the window's own requests tell what is wrong
