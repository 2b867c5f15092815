"""One OpenAI-compatible server as the suite asks it: typed answers, typed failures, and repetition only where it cannot change a result.

    with Endpoint("http://127.0.0.1:8000", model="kimi-k3") as server:
        server.health()
        reply = server.completion("2 + 2 =", max_tokens=8, logprobs=5)

Every call exists as `name` (blocking, safe from several threads) and `name_async`. What is tried again, with growing pauses: a connection
that was never made, and 429 or 5xx where the same request gives the same answer (GET, greedy, or with a seed). A request that hangs, is cut
off or is answered with nonsense is an error at once: trying again would hide it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import anyio.from_thread
import httpx2
from prometheus_client.parser import text_string_to_metric_families

from evals.serving.answers import Metrics, ModelCard, Reply, Sample, field_of, read_chat, read_completion, read_models
from evals.serving.errors import (
    Dropped,
    HttpStatus,
    Malformed,
    NotThere,
    ServingError,
    TimedOut,
    TooLarge,
    Unauthorised,
    Unreachable,
    excerpt,
)
from validation.core.types import HarnessError

__all__ = ["Endpoint", "Metrics", "ModelCard", "Reply", "ServingError"]

MAX_ANSWER_BYTES = 64 << 20
BUSY = (429, 500, 502, 503, 504)
MAX_PAUSE_S = 30.0
CONNECT_LIMIT_S = 20.0
PROBE_LIMIT_S = 30.0
T = TypeVar("T")
P = ParamSpec("P")


def _blocking(call: Callable[Concatenate[Endpoint, P], Awaitable[T]]) -> Callable[Concatenate[Endpoint, P], T]:
    """The form of an asynchronous call that waits for its answer, with the same arguments."""

    @functools.wraps(call)
    def waiting(self: Endpoint, /, *args: P.args, **options: P.kwargs) -> T:
        return self._wait_for(lambda: call(self, *args, **options))

    return waiting


class Endpoint:
    """`base_url` with or without /v1; `api_key_env` names the variable with the key. `retries` are attempts after the first, `backoff_s` is
    the first pause.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str = "",
        api_key_env: str = "",
        timeout_s: float = 600.0,
        retries: int = 4,
        backoff_s: float = 0.5,
        max_connections: int = 256,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.timeout_s = timeout_s
        self.retries = retries
        self._backoff_s = backoff_s
        self._max_connections = max_connections
        self._max_answer_bytes = max_answer_bytes
        self._headers = _headers(api_key_env)
        self._clients: weakref.WeakKeyDictionary[Any, httpx2.AsyncClient] = weakref.WeakKeyDictionary()
        self._portal_context: Any = None
        self._portal: Any = None

    # ---- life ----
    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    def close(self) -> None:
        """End the connections that blocking calls opened; a second call does nothing."""
        portal, context, self._portal, self._portal_context = self._portal, self._portal_context, None, None
        if context is not None:
            portal.call(self.aclose)
            context.__exit__(None, None, None)

    async def aclose(self) -> None:
        """End the connections of this event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def _wait_for(self, call: Callable[[], Awaitable[T]]) -> T:
        if self._portal is None:
            self._portal_context = anyio.from_thread.start_blocking_portal()
            self._portal = self._portal_context.__enter__()
        made: T = self._portal.call(call)
        return made

    def _client(self) -> httpx2.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            limits = httpx2.Limits(max_connections=self._max_connections, max_keepalive_connections=self._max_connections)
            # Proxies and .netrc of the environment stay out: what is measured is the server that was named.
            self._clients[loop] = httpx2.AsyncClient(headers=self._headers, limits=limits, trust_env=False, timeout=None)
        return self._clients[loop]

    # ---- questions about the server ----
    async def health_async(self, timeout_s: float = PROBE_LIMIT_S, retries: int | None = None) -> None:
        """Returns when /health answers 2xx. Raises ServingError."""
        await self._send("GET", "/health", None, repeatable=True, timeout_s=timeout_s, retries=retries)

    async def models_async(self, timeout_s: float = PROBE_LIMIT_S) -> tuple[ModelCard, ...]:
        body, _, _ = await self._json("GET", "/v1/models", None, repeatable=True, timeout_s=timeout_s)
        return read_models(body)

    async def version_async(self, timeout_s: float = PROBE_LIMIT_S) -> str:
        """What /version says; "" where the server has no such route."""
        try:
            body, _, _ = await self._json("GET", "/version", None, repeatable=True, timeout_s=timeout_s)
        except NotThere:
            return ""
        return str(field_of(body, "version", str, "/version"))

    async def metrics_async(self, timeout_s: float = PROBE_LIMIT_S) -> Metrics:
        data, _, _ = await self._send("GET", "/metrics", None, repeatable=True, timeout_s=timeout_s)
        try:
            families = list(text_string_to_metric_families(data.decode()))
        except (ValueError, UnicodeDecodeError) as error:
            raise Malformed(f"/metrics: got {excerpt(data)!r}, needs the Prometheus text format ({error})") from error
        return Metrics(samples=tuple(Sample(name=s.name, labels=dict(s.labels), value=float(s.value)) for f in families for s in f.samples))

    async def tokenize_async(self, text: str, *, add_special_tokens: bool = True, timeout_s: float = PROBE_LIMIT_S) -> tuple[int, ...]:
        """Token ids of a text by the server's own /tokenize."""
        return await self._tokens({"prompt": text, "add_special_tokens": add_special_tokens}, timeout_s)

    async def tokenize_chat_async(self, messages: Sequence[Mapping[str, str]], timeout_s: float = PROBE_LIMIT_S) -> tuple[int, ...]:
        """Token ids of a conversation as the server's chat template renders it, with the prompt of the next answer."""
        return await self._tokens({"messages": [dict(m) for m in messages], "add_generation_prompt": True}, timeout_s)

    async def _tokens(self, what: Mapping[str, Any], timeout_s: float) -> tuple[int, ...]:
        request = {"model": self.model, **what}
        body, _, _ = await self._json("POST", "/tokenize", request, repeatable=True, timeout_s=timeout_s)
        tokens = field_of(body, "tokens", list, "/tokenize")
        if not all(type(token) is int for token in tokens):
            raise Malformed(f"/tokenize: got {str(tokens)[:80]}, needs whole numbers")
        return tuple(tokens)

    # ---- generation ----
    async def completion_async(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int | None = None,
        logprobs: int | None = None,
        token_ids: bool = True,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """Continue a text or token ids. `extra` goes into the request as it is. Raises ServingError."""
        request = {
            **self._sampling(max_tokens, temperature, top_p, stop, seed, token_ids),
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            **({"logprobs": logprobs, "return_tokens_as_token_ids": True} if logprobs is not None else {}),
            **(extra or {}),
        }
        return await self._generate("/v1/completions", request, read_completion, timeout_s)

    async def chat_async(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int | None = None,
        logprobs: int | None = None,
        token_ids: bool = True,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """Answer a conversation through the server's chat template. `extra` goes into the request as it is. Raises ServingError."""
        request = {
            **self._sampling(max_tokens, temperature, top_p, stop, seed, token_ids),
            "messages": [dict(message) for message in messages],
            **({"logprobs": True, "top_logprobs": logprobs, "return_tokens_as_token_ids": True} if logprobs is not None else {}),
            **(extra or {}),
        }
        return await self._generate("/v1/chat/completions", request, read_chat, timeout_s)

    def _sampling(
        self, max_tokens: int, temperature: float, top_p: float, stop: Sequence[str], seed: int | None, token_ids: bool
    ) -> dict[str, Any]:
        return {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": temperature,
            **({"top_p": top_p} if temperature > 0 else {}),
            **({"stop": list(stop)} if stop else {}),
            **({"seed": seed} if seed is not None else {}),
            **({"return_token_ids": True} if token_ids else {}),
        }

    async def _generate(self, route: str, request: dict[str, Any], read: Callable[[Any], dict[str, Any]], timeout_s: float | None) -> Reply:
        repeatable = request["temperature"] == 0 or request.get("seed") is not None
        body, latency_s, attempts = await self._json("POST", route, request, repeatable=repeatable, timeout_s=timeout_s or self.timeout_s)
        try:
            return Reply(**read(body), latency_s=latency_s, attempts=attempts)
        except ServingError as error:
            error.attempts = attempts
            raise

    # ---- the same, blocking ----
    health = _blocking(health_async)
    models = _blocking(models_async)
    version = _blocking(version_async)
    metrics = _blocking(metrics_async)
    tokenize = _blocking(tokenize_async)
    tokenize_chat = _blocking(tokenize_chat_async)
    completion = _blocking(completion_async)
    chat = _blocking(chat_async)

    # ---- transport ----
    async def _json(
        self, method: str, route: str, request: Mapping[str, Any] | None, *, repeatable: bool, timeout_s: float
    ) -> tuple[Any, float, int]:
        data, latency_s, attempts = await self._send(method, route, request, repeatable=repeatable, timeout_s=timeout_s)
        try:
            return json.loads(data), latency_s, attempts
        except (ValueError, RecursionError) as error:
            what = "HTML" if data.lstrip()[:1] == b"<" else "no JSON"
            raise Malformed(f"{route}: got {what} ({excerpt(data)!r}), needs an OpenAI-compatible server", attempts) from error

    async def _send(
        self, method: str, route: str, request: Mapping[str, Any] | None, *, repeatable: bool, timeout_s: float, retries: int | None = None
    ) -> tuple[bytes, float, int]:
        """Body, seconds of the attempt that succeeded, attempts. Raises ServingError after the last one."""
        last = self.retries if retries is None else retries
        for attempt in range(last + 1):
            started = time.perf_counter()
            try:
                data = await self._once(method, route, request, timeout_s)
                return data, time.perf_counter() - started, attempt + 1
            except ServingError as error:
                error.attempts = attempt + 1
                again = isinstance(error, Unreachable) or (repeatable and isinstance(error, HttpStatus) and error.status in BUSY)
                if attempt == last or not again:
                    raise
            # Pauses differ between requests, so that they do not all come back at once.
            await asyncio.sleep(min(MAX_PAUSE_S, self._backoff_s * 2**attempt) * random.uniform(0.75, 1.25))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _once(self, method: str, route: str, request: Mapping[str, Any] | None, timeout_s: float) -> bytes:
        url = f"{self.base_url}{route}"
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(method, url, route, request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise Unreachable(f"{url}: got {error or type(error).__name__}, needs a running server") from error
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise TimedOut(f"{url}: got no whole answer within {timeout_s:g} s") from error
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
            raise Unreachable(f"{url}: got {error}, needs http(s)://host[:port]") from error
        except httpx2.TransportError as error:
            raise Dropped(f"{url}: got a connection that ended early ({type(error).__name__}: {error})") from error
        except httpx2.DecodingError as error:
            raise Malformed(f"{url}: got a body that cannot be decoded ({error})") from error

    async def _exchange(self, method: str, url: str, route: str, request: Mapping[str, Any] | None) -> bytes:
        # A bare NaN is no JSON; json.dumps would write one.
        content = None if request is None else json.dumps(request, allow_nan=False).encode()
        headers = {"Content-Type": "application/json"} if content is not None else {}
        timeout = httpx2.Timeout(None, connect=CONNECT_LIMIT_S)
        async with self._client().stream(method, url, content=content, headers=headers, timeout=timeout) as response:
            body = bytearray()
            async for block in response.aiter_bytes():
                body += block
                if len(body) > self._max_answer_bytes:
                    raise TooLarge(f"{url}: got more than {self._max_answer_bytes} bytes; the rest was not read")
            data = bytes(body)
            if not response.is_success:
                raise _status_error(response.status_code, url, route, data)
            return data


def _headers(api_key_env: str) -> dict[str, str]:
    if not api_key_env:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise HarnessError(f"api_key_env: got {api_key_env}, which is not set, needs the variable with the server's key")
    return {"Authorization": f"Bearer {key}"}


def _status_error(status: int, url: str, route: str, body: bytes) -> HttpStatus:
    told = excerpt(body)
    if status in (401, 403):
        return Unauthorised(status, f"{url}: got HTTP {status} ({told}), needs a valid key; set api_key_env")
    if status == 404:
        return NotThere(status, f"{url}: got HTTP 404 ({told}), needs the route {route} and the model by its served name")
    return HttpStatus(status, f"{url}: got HTTP {status} ({told})")
