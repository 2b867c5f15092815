"""A proxy with a fault on purpose, in front of a server that works: what the serving lanes must catch and name.

    python -m evals.serving.faults --upstream http://127.0.0.1:8000 --fault swap --port 0

Prints one JSON line with its address when it listens. Only generation requests (completions and chat) are counted and touched: every
`--every`-th one is hit. All other routes are relayed as they are, so that the server looks healthy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from evals.serving.server.listening import address_of, listen, run_app
from validation.core.types import HarnessError

GENERATION = ("/v1/completions", "/v1/chat/completions")
UPSTREAM_LIMIT_S = 600.0
SWAP_WAIT_S = 5.0  # for a second user whose answer can be given to the first
EXIT_DIED = 17
_HOP = {"content-length", "transfer-encoding", "connection", "content-encoding"}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Which fault, how often and how much."""

    upstream: str
    fault: str
    every: int = 1
    delay_s: float = 5.0  # of `slow`
    factor: float = 1.5  # of `drag`: times as long as the server behind
    times: int = 3  # of `http_500`: so many answers fail, then none
    after: int = 3  # of `die`: so many requests are answered before
    size: float = 0.5  # of `perturb`: standard deviation in nats
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Call:
    """One hit request: its number among generation requests, path, decoded body, and the relay to the server behind."""

    number: int
    path: str
    body: dict[str, Any]
    setup: Setup
    forward: Callable[[dict[str, Any]], Awaitable[httpx.Response]]


class Cut(Response):
    """Promises the whole body, sends `kept` bytes of it and hangs up."""

    def __init__(self, content: bytes, kept: int) -> None:
        super().__init__(content, media_type="application/json")
        self._kept = kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body[: self._kept], "more_body": True})
        # Returning now makes the server close the connection: the promised length was not sent.


# ---- the faults ----
async def drop(call: Call) -> Response:
    """Takes the request, hangs up without an answer."""
    return Cut(b"{}" * 500, 0)


async def cut(call: Call) -> Response:
    """Hangs up in the middle of the answer."""
    reply = await call.forward(call.body)
    return Cut(reply.content, len(reply.content) // 2)


async def slow(call: Call) -> Response:
    """Answers, but late."""
    await asyncio.sleep(call.setup.delay_s)
    return _relay(await call.forward(call.body))


async def drag(call: Call) -> Response:
    """Takes `factor` times as long as the server behind: no time-out sees it, only times beside stock's."""
    started = time.perf_counter()
    reply = await call.forward(call.body)
    await asyncio.sleep((call.setup.factor - 1) * (time.perf_counter() - started))
    return _relay(reply)


async def hang(call: Call) -> Response:
    """Never answers, and holds the connection."""
    await asyncio.sleep(24 * 3600)
    return Response(status_code=504)


async def http_500(call: Call) -> Response:
    """The first `times` answers are errors of the server."""
    if call.number // call.setup.every <= call.setup.times:
        body = {"error": {"message": "internal error (a fault on purpose)", "type": "InternalServerError", "param": None, "code": 500}}
        return JSONResponse(body, status_code=500)
    return _relay(await call.forward(call.body))


async def die(call: Call) -> Response:
    """The whole server ends in the middle of a request."""
    if call.number > call.setup.after:
        print("the engine died (a fault on purpose)", file=sys.stderr, flush=True)
        os._exit(EXIT_DIED)
    return _relay(await call.forward(call.body))


async def ignore_forcing(call: Call) -> Response:
    """Does not read what forces tokens, and does not say so, as a server without the plug-in would."""
    kept = {name: value for name, value in call.body.items() if name not in ("vllm_xargs", "allowed_token_ids")}
    return _relay(await call.forward(kept))


async def truncate(call: Call) -> Response:
    """Cuts the text and its tokens in half and calls it finished."""
    return await _edited(call, _halve)


async def empty(call: Call) -> Response:
    """Answers nothing and calls it finished."""
    return await _edited(call, lambda choice: _shorten(choice, 0))


async def nan(call: Call) -> Response:
    """Every second log-probability is NaN, which is no JSON either."""

    def change(choice: dict[str, Any]) -> None:
        _each_logprob(choice, lambda value, place: float("nan") if place % 2 else value)

    return await _edited(call, change)


async def perturb(call: Call) -> Response:
    """Log-probabilities with noise: what a decode path that computes wrong logits would show."""
    noise = random.Random(f"{call.setup.seed}/{call.number}")

    def change(choice: dict[str, Any]) -> None:
        _each_logprob(choice, lambda value, place: min(0.0, value + noise.gauss(0, call.setup.size)))

    return await _edited(call, change)


class Swap:
    """Gives two users each other's answers, as a batch with mixed-up slots would: each keeps its own id and its own prompt's count."""

    def __init__(self) -> None:
        self._held: tuple[dict[str, Any], asyncio.Future[dict[str, Any]]] | None = None

    async def __call__(self, call: Call) -> Response:
        reply = await call.forward(call.body)
        if reply.status_code != 200 or call.body.get("stream"):
            return _relay(reply)
        own = reply.json()
        if self._held is not None:
            other, waiting = self._held
            self._held = None
            if not waiting.done():
                waiting.set_result(own)
                return JSONResponse(_with_answers_of(own, other))
        waiting = asyncio.get_running_loop().create_future()
        self._held = (own, waiting)
        with contextlib.suppress(TimeoutError):
            return JSONResponse(_with_answers_of(own, await asyncio.wait_for(waiting, SWAP_WAIT_S)))
        if self._held is not None and self._held[1] is waiting:
            self._held = None
        return JSONResponse(own)  # nobody else asked meanwhile


def _with_answers_of(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    choices = []
    for mine, theirs in zip(own["choices"], other["choices"], strict=False):
        kept = {name: mine[name] for name in ("index", "prompt_token_ids", "prompt_logprobs") if name in mine}
        choices.append({**theirs, **kept})
    return {**own, "choices": choices}


FAULTS: dict[str, Callable[[], Callable[[Call], Awaitable[Response]]]] = {
    "perturb": lambda: perturb,
    "drop": lambda: drop,
    "cut": lambda: cut,
    "truncate": lambda: truncate,
    "empty": lambda: empty,
    "slow": lambda: slow,
    "drag": lambda: drag,
    "hang": lambda: hang,
    "nan": lambda: nan,
    "swap": Swap,
    "http_500": lambda: http_500,
    "die": lambda: die,
    "ignore_forcing": lambda: ignore_forcing,
    "none": lambda: _healthy,
}


async def _healthy(call: Call) -> Response:
    """No fault: the control."""
    return _relay(await call.forward(call.body))


# ---- editing answers ----
async def _edited(call: Call, change: Callable[[dict[str, Any]], None]) -> Response:
    reply = await call.forward(call.body)
    if reply.status_code != 200 or call.body.get("stream"):
        return _relay(reply)
    body = reply.json()
    for choice in body["choices"]:
        change(choice)
    return Response(json.dumps(body), media_type="application/json")  # json.dumps writes a bare NaN, as broken servers do


def _halve(choice: dict[str, Any]) -> None:
    ids, text = choice.get("token_ids"), _text(choice)
    _shorten(choice, len(ids) // 2 if ids else len(text) // 2, len(text) // 2)


def _text(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"] or "")


def _shorten(choice: dict[str, Any], tokens: int, characters: int = 0) -> None:
    text = _text(choice)[:characters]
    if "text" in choice:
        choice["text"] = text
    else:
        choice["message"]["content"] = text
    if choice.get("token_ids") is not None:
        choice["token_ids"] = choice["token_ids"][:tokens]
    logprobs = choice.get("logprobs") or {}
    for name, values in logprobs.items():
        if isinstance(values, list):
            logprobs[name] = values[:tokens]
    choice["finish_reason"] = "stop"


def _each_logprob(choice: dict[str, Any], change: Callable[[float, int], float]) -> None:
    """Change every log-probability of generated tokens; one token's own and listed values count as one place."""
    logprobs = choice.get("logprobs") or {}
    for place, value in enumerate(logprobs.get("token_logprobs") or []):
        if value is not None:
            logprobs["token_logprobs"][place] = change(value, place)
    for place, top in enumerate(logprobs.get("top_logprobs") or []):
        for token, value in (top or {}).items():
            top[token] = change(value, place)
    for place, item in enumerate(logprobs.get("content") or []):
        for entry in (item, *item.get("top_logprobs", [])):
            entry["logprob"] = change(entry["logprob"], place)


def _relay(reply: httpx.Response) -> Response:
    headers = {name: value for name, value in reply.headers.items() if name.lower() not in _HOP}
    return Response(reply.content, status_code=reply.status_code, headers=headers)


# ---- the proxy ----
@dataclass
class Proxy:
    """The application. `counted` generation requests have arrived, `hit` of them were touched."""

    setup: Setup
    counted: int = 0
    hit: int = 0
    _fault: Callable[[Call], Awaitable[Response]] = field(init=False)
    _client: httpx.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        if self.setup.fault not in FAULTS:
            raise HarnessError(f"fault: got {self.setup.fault!r}, needs one of {sorted(FAULTS)}")
        if self.setup.every < 1:
            raise HarnessError(f"every: got {self.setup.every}, needs at least 1")
        if not self.setup.upstream.startswith(("http://", "https://")):
            raise HarnessError(f"upstream: got {self.setup.upstream!r}, needs http(s)://host[:port] of the server behind")
        for name, value in (("delay-s", self.setup.delay_s), ("times", self.setup.times), ("after", self.setup.after)):
            if not 0 <= value < float("inf"):  # nor NaN
                raise HarnessError(f"{name}: got {value}, needs a number from 0")
        if not 1 <= self.setup.factor < float("inf"):
            raise HarnessError(f"factor: got {self.setup.factor}, needs a number from 1")
        if not 0 <= self.setup.size < float("inf"):
            raise HarnessError(f"size: got {self.setup.size}, needs a number from 0")
        self._fault = FAULTS[self.setup.fault]()

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self.relay, methods=["GET", "POST"])], lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.setup.upstream, timeout=UPSTREAM_LIMIT_S, limits=limits, trust_env=False
        ) as self._client:
            yield

    async def ask(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        """The answer of the server behind to one generation request."""
        return await self._client.post(path, json=body, headers=headers)

    async def relay(self, request: Request) -> Response:
        """One request through the proxy; the server behind being gone is answered with 502."""
        path, content = request.url.path, await request.body()
        try:
            if request.method != "POST" or path not in GENERATION:
                return _relay(await self._client.request(request.method, path, content=content, headers=_forwarded(request)))
            self.counted += 1
            number, body = self.counted, json.loads(content)

            async def forward(changed: dict[str, Any]) -> httpx.Response:
                return await self.ask(path, changed, _forwarded(request))

            call = Call(number=number, path=path, body=body, setup=self.setup, forward=forward)
            if number % self.setup.every:
                return await _healthy(call)
            self.hit += 1
            return await self._fault(call)
        except httpx.TransportError as error:
            body = {"error": {"message": f"upstream: got {type(error).__name__}: {error}, needs a running server", "code": 502}}
            return JSONResponse(body, status_code=502)


def _forwarded(request: Request) -> dict[str, str]:
    kept = ("authorization", "accept", "x-request-id")
    return {name: value for name, value in request.headers.items() if name.lower() in kept} | {"content-type": "application/json"}


command = typer.Typer(add_completion=False)


@command.command()
def main(
    upstream: Annotated[str, typer.Option(help="The server behind, http://host:port.")],
    fault: Annotated[str, typer.Option(help=" | ".join(FAULTS))],
    port: Annotated[int, typer.Option(help="0 takes a free one, which is printed.")] = 0,
    every: Annotated[int, typer.Option(help="Every so many generation requests one is hit.")] = 1,
    delay_s: Annotated[float, typer.Option(help="Of slow, in seconds.")] = 5.0,
    factor: Annotated[float, typer.Option(help="Of drag: times as long as the server behind.")] = 1.5,
    times: Annotated[int, typer.Option(help="Of http_500: answers that fail.")] = 3,
    after: Annotated[int, typer.Option(help="Of die: requests answered before.")] = 3,
    size: Annotated[float, typer.Option(help="Of perturb: standard deviation in nats.")] = 0.5,
) -> None:
    """Relay to a server, with one fault."""
    hit: dict[str, Any] = {"every": every, "delay_s": delay_s, "factor": factor, "times": times, "after": after, "size": size}
    setup = Setup(upstream=upstream.rstrip("/"), fault=fault, **hit)
    proxy = Proxy(setup)
    bound = listen("127.0.0.1", port)
    ready = {"serving": address_of(bound), "upstream": setup.upstream, "fault": fault}
    run_app(proxy.app(), bound, lambda: print(json.dumps(ready), flush=True))
    print(json.dumps({"verdict": "stopped", "requests": proxy.counted, "hit": proxy.hit}), flush=True)


if __name__ == "__main__":
    try:
        command(standalone_mode=False)
    except HarnessError as failure:
        print(f"faults: {failure}", file=sys.stderr)
        sys.exit(3)
