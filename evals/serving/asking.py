"""One request and its answer, between the suites and whatever carries it: an endpoint in this process, another process, or a Ray actor.

An `Asker` never raises for a request that failed: the failure is an answer with a kind, so that it can be recorded. It raises `WorkerLost`
when the process behind it is gone; the request then belongs to nobody and is asked again elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from typing import Any, Protocol

from evals.generation import Request
from evals.records import Reply
from evals.serving.client import Endpoint
from evals.serving.errors import HttpStatus, ServingError, Unreachable
from validation.core.types import HarnessError

# These failures say nothing about the model: the request never arrived, or nobody was there to send it. With any other kind ("http 500",
# "dropped", "timed out", "malformed", …) the server took the request and gave no usable answer, after the client's own retries.
UNREACHABLE, WORKER = Unreachable.kind, "worker lost"
NOT_ASKED = (UNREACHABLE, WORKER)
WARM_LIMIT_S = 10.0


class WorkerLost(Exception):
    """The process that carried requests has ended."""


@dataclass(frozen=True, kw_only=True)
class Ask(Request):
    """A request that goes to a server.

    `prompt` is plain text, or with `chat` a JSON list of messages for the server's own chat template. `extra` is a JSON object of further
    request fields (top_k, chat_template_kwargs, …), which go to both sides alike.
    """

    chat: bool
    extra: str = "{}"

    @property
    def row(self) -> int:
        return int(self.item)

    @property
    def decoding(self) -> dict[str, Any]:
        return {**super().decoding, "chat": self.chat, "extra": self.extra}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back. `failure` is "" or one of the kinds above, with the reason in `message`; token counts are None where not reported."""

    text: str = ""
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float = 0.0
    endpoint: str = ""
    attempts: int = 1
    failure: str = ""
    message: str = ""


class Asker(Protocol):
    """Carries requests. `name` says where to, in the records."""

    name: str

    async def answer(self, ask: Ask) -> Answer: ...

    async def warm(self) -> None:
        """Make ready, so that the first requests need not wait for it; never fails."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the scored text is read out of a reply: `reasoning` "field" (the server's parser keeps it apart), "tags" (it ends with `end`
    inside the content) or "none".
    """

    reasoning: str = "field"
    end: str = "</think>"

    def split(self, answer: Answer) -> tuple[str, str]:
        """Scored text and reasoning. With tags, a chain of thought that never ended has no answer: empty text, never the raw thoughts."""
        if self.reasoning != "tags":
            return answer.text, answer.reasoning
        head, mark, tail = answer.text.rpartition(self.end)
        begin = self.end.replace("/", "", 1)
        return (tail.lstrip(), head.removeprefix(begin)) if mark else ("", answer.text.removeprefix(begin))


def reply_of(ask: Ask, answer: Answer, path: str, fingerprint: str, reading: Reading) -> Reply:
    """The record of an answer. A failure has no text and so can never have a score."""
    text, reasoning = reading.split(answer)
    extra: dict[str, Any] = {"endpoint": answer.endpoint, "attempts": answer.attempts}
    if answer.failure:
        extra["failure"] = answer.failure
    if reasoning:
        extra["reasoning"] = reasoning
    if answer.completion_tokens is not None:
        extra["completion_tokens"] = answer.completion_tokens
    return Reply(
        key=ask.key(path, fingerprint),
        seed=ask.seed,
        token_ids=answer.token_ids,
        text=None if answer.failure else text,
        finish_reason=f"error: {answer.failure}: {answer.message}"[:400] if answer.failure else answer.finish_reason,
        prompt_tokens=answer.prompt_tokens if answer.prompt_tokens is not None else -1,
        seconds=answer.seconds,
        extra=extra,
    )


def tokens_of(reply: Reply) -> int:
    """Generated tokens: those that the server counted, else those it returned."""
    return int(reply.extra.get("completion_tokens", len(reply.token_ids)))


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One server of a side; data-parallel replicas are several. Picklable: it is opened in the process that asks."""

    base_url: str
    model: str
    api_key_env: str = ""
    timeout_s: float = 3600.0
    retries: int = 4
    backoff_s: float = 0.5

    @property
    def name(self) -> str:
        return self.base_url

    def open(self, concurrency: int) -> Asker:
        endpoint = Endpoint(
            self.base_url,
            model=self.model,
            api_key_env=self.api_key_env,
            timeout_s=self.timeout_s,
            retries=self.retries,
            backoff_s=self.backoff_s,
            max_connections=concurrency + 8,
        )
        return EndpointAsker(endpoint, self.name)


class Opens(Protocol):
    """What a side lists: `Replica`, or anything else that can be pickled and opened."""

    @property
    def name(self) -> str: ...

    def open(self, concurrency: int) -> Asker: ...


def failure_kind(error: ServingError) -> str:
    """The word for the records: the status where there is one, else the error's own kind."""
    return f"http {error.status}" if isinstance(error, HttpStatus) else error.kind


class EndpointAsker:
    """Asks one server in this process."""

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self.name = name
        self._endpoint = endpoint

    async def warm(self) -> None:
        """The first request of a client loads certificates, for most of a second on a busy machine, while every slot waits."""
        with contextlib.suppress(ServingError):
            await self._endpoint.health_async(timeout_s=WARM_LIMIT_S, retries=0)

    async def answer(self, ask: Ask) -> Answer:
        started = time.perf_counter()
        try:
            return await self._ask(ask)
        except ServingError as error:
            return Answer(
                seconds=time.perf_counter() - started,
                endpoint=self.name,
                attempts=error.attempts,
                failure=failure_kind(error),
                message=error.reason,
            )
        except HarnessError:
            raise
        except Exception as error:  # a bug in between must cost this item and be seen in its record, not end a run of hours
            return Answer(endpoint=self.name, failure="client error", message=f"{type(error).__name__}: {error}")

    async def _ask(self, ask: Ask) -> Answer:
        options: dict[str, Any] = {
            "max_tokens": ask.max_new_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "stop": ask.stop,
            "seed": ask.seed,
            "extra": json.loads(ask.extra),
        }
        if ask.chat:
            got = await self._endpoint.chat_async(json.loads(ask.prompt), **options)
        else:
            got = await self._endpoint.completion_async(ask.prompt, **options)
        return Answer(
            text=got.text,
            reasoning=got.reasoning or "",
            token_ids=got.token_ids or (),
            finish_reason=got.finish_reason,
            prompt_tokens=got.usage.get("prompt_tokens", len(got.prompt_token_ids) if got.prompt_token_ids else None),
            completion_tokens=got.completion_tokens,
            seconds=got.latency_s,
            endpoint=self.name,
            attempts=got.attempts,
        )

    async def aclose(self) -> None:
        await self._endpoint.aclose()
