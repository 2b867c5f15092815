"""The HTTP routes: OpenAI's completions and chat, vLLM's tokenizer routes, health, version and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from evals.serving.server.errors import NOT_FOUND, SERVER_FAULT, RequestError
from evals.serving.server.job import Delta, Job
from evals.serving.server.model import CHAT_TEMPLATE, ServedModel
from evals.serving.server.protocol import Asked, Fields, is_ids, parse_chat, parse_completion, read_messages
from evals.serving.server.replies import Choice, Replies
from evals.serving.server.sampling import Chooser
from evals.serving.server.text import TextStream

log = logging.getLogger("fasttrack.serve")

MAX_BODY_BYTES = 64 * 1024**2


class Routes:
    """One served model's routes."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._started = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application. Starting and stopping it starts and stops the worker."""
        get, post = ["GET"], ["POST"]
        return Starlette(
            routes=[
                Route("/health", self.health, methods=get),
                Route("/version", self.version, methods=get),
                Route("/v1/models", self.models, methods=get),
                Route("/metrics", self.metrics, methods=get),
                Route("/v1/completions", self.completions, methods=post),
                Route("/v1/chat/completions", self.chat, methods=post),
                Route("/tokenize", self.tokenize, methods=post),
                Route("/detokenize", self.detokenize, methods=post),
                Route("/tokenizer_info", self.tokenizer_info, methods=get),
            ],
            exception_handlers={RequestError: _refused, HTTPException: _http_error, Exception: _fault},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self.model.scheduler.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.model.scheduler.close)

    # ---- small routes ----
    async def health(self, _request: Request) -> Response:
        return Response()

    async def version(self, _request: Request) -> Response:
        try:
            number = version("kimi-k3-fasttrack")
        except PackageNotFoundError:
            number = "unknown"
        return JSONResponse({"version": number, "server": "fasttrack serve"} | self.model.facts() | {"decode_steps": self.model.steps()})

    async def models(self, _request: Request) -> Response:
        model = self.model
        card = {"id": model.name, "object": "model", "created": self._started, "owned_by": "fasttrack", "root": model.root}
        return JSONResponse({"object": "list", "data": [card | {"parent": None, "max_model_len": model.max_model_len, "permission": []}]})

    async def metrics(self, _request: Request) -> Response:
        return Response(self.model.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenizer_info(self, _request: Request) -> Response:
        config, special = self.model.config, self.model.special
        return JSONResponse(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "chat_template": CHAT_TEMPLATE,
                "bos_token": special(config.bos_token_id),
                "eos_token": special(config.eos_token_id),
                "pad_token": special(config.pad_token_id),
                "model_max_length": self.model.max_model_len,
            }
        )

    async def tokenize(self, request: Request) -> Response:
        model = self.model
        fields = Fields(await _object(request))
        fields.raw("model")
        special, text = fields.flag("add_special_tokens", True), fields.raw("prompt")
        add_prompt, strings = fields.flag("add_generation_prompt", True), fields.flag("return_token_strs")
        messages = fields.raw("messages")
        if messages is not None:
            text = model.render(read_messages(messages, fields.refuse), add_prompt) if isinstance(messages, list) else None
        if not isinstance(text, str):
            fields.refuse("prompt", f"prompt: got {type(text).__name__}, needs a text in prompt or a list of messages")
            text = ""
        fields.finish()
        ids = model.tokenizer.encode(text) if special else model.tokenizer.encode_continuation(text)
        pieces = [model.piece(token) for token in ids] if strings else None
        return JSONResponse({"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": pieces})

    async def detokenize(self, request: Request) -> Response:
        fields = Fields(await _object(request))
        fields.raw("model")
        ids, vocab = fields.raw("tokens"), self.model.config.vocab_size
        if not is_ids(ids) or not all(0 <= token < vocab for token in ids):
            fields.refuse("tokens", f"tokens: got {str(ids)[:60]}, needs a list of token ids 0..{vocab - 1}")
        fields.finish()
        return JSONResponse({"prompt": self.model.tokenizer.decode(ids)})

    # ---- generation ----
    async def completions(self, request: Request) -> Response:
        return await self._generate(request, parse_completion, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, parse_chat, chat=True)

    async def _generate(self, request: Request, parse: Callable[[Any, ServedModel], Asked], *, chat: bool) -> Response:
        body = await _object(request)
        asked = await asyncio.to_thread(parse, body, self.model)  # a long prompt takes a while to encode
        work = _Work(self.model, asked)
        replies = Replies(self.model, asked, chat=chat)
        work.start()
        if asked.stream:
            # The first step decides whether the reply is an error, which a stream can no longer turn into a status.
            first = await _unless_gone(request, work.next(), work)
            if first is None:
                return Response(status_code=499)
            return StreamingResponse(_events(work, replies, asked, first), media_type="text/event-stream")
        done = await _unless_gone(request, work.all(), work)
        return Response(status_code=499) if done is None else JSONResponse(replies.whole(work.choices))


class _Work:
    """The jobs of one HTTP request, and the queue through which the worker's thread reports to the event loop."""

    def __init__(self, model: ServedModel, asked: Asked) -> None:
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        self.choices: list[Choice] = []
        self.jobs: list[Job] = []
        for prompt in asked.prompts:
            for copy in range(asked.n):
                self._add(asked, prompt, copy)
        self._open = len(self.jobs)

    def _add(self, asked: Asked, prompt: tuple[int, ...], copy: int) -> None:
        index, sampling = len(self.jobs), asked.sampling
        if sampling.seed is not None and copy:
            sampling = replace(sampling, seed=sampling.seed + copy)
        eos = self._model.config.eos_token_id
        text = TextStream(self._model.tokenizer, sampling.stop, include_stop=sampling.include_stop)

        def sink(delta: Delta) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped and nobody reads
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, delta))

        self.choices.append(Choice(prompt=prompt, index=index))
        chooser = Chooser(sampling=sampling, eos_token_id=eos)
        self.jobs.append(Job(prompt=prompt, sampling=sampling, sink=sink, text=text, chooser=chooser, eos_token_id=eos))

    def start(self) -> None:
        for job in self.jobs:
            self._model.scheduler.submit(job)

    async def next(self) -> tuple[Choice, Delta] | None:
        """The next thing that happened, None after the last. Raises RequestError when a choice failed."""
        if not self._open:
            return None
        index, delta = await self._queue.get()
        if delta.error is not None:
            raise delta.error
        choice = self.choices[index]
        choice.add(delta)
        self._open -= delta.last
        return choice, delta

    async def all(self) -> bool:
        while await self.next() is not None:
            pass
        return True

    def cancel(self) -> None:
        for job in self.jobs:
            if not job.done:
                self._model.scheduler.cancel(job)


async def _unless_gone(request: Request, waiting: Any, work: _Work) -> Any:
    """The result, or None when the client hung up first; work that nobody waits for is cancelled."""
    task, gone = asyncio.ensure_future(waiting), asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        work.cancel()
        return None
    except BaseException:
        work.cancel()
        raise
    finally:
        task.cancel()
        gone.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(work: _Work, replies: Replies, asked: Asked, first: tuple[Choice, Delta]) -> AsyncIterator[str]:
    """Server-sent events. A failure in the middle is an error event; a client that hangs up cancels the work."""
    try:
        happened: tuple[Choice, Delta] | None = first
        while happened is not None:
            choice, delta = happened
            yield _event(replies.chunk(choice, delta, work.choices))
            happened = await work.next()
        if asked.include_usage:
            yield _event(replies.usage_chunk(work.choices))
        yield "data: [DONE]\n\n"
    except RequestError as error:
        yield _event(error.body())
        yield "data: [DONE]\n\n"
    finally:
        work.cancel()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, allow_nan=False)}\n\n"


async def _object(request: Request) -> dict[str, Any]:
    """The JSON object of a body. Raises RequestError."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise RequestError(f"body: got {declared} bytes, needs at most {MAX_BODY_BYTES}; send fewer prompts at once")
    try:
        raw = await request.body()
        body = json.loads(raw)
        if b"\\ud" in raw.lower():  # half of a surrogate pair is JSON, but no text: it can be neither encoded nor sent back
            json.dumps(body, ensure_ascii=False).encode()
    except ClientDisconnect:  # nobody is there to be told
        raise RequestError("body: got its beginning only, needs the bytes that content-length says") from None
    except UnicodeEncodeError:
        raise RequestError("body: got half of a surrogate pair in a text, needs whole characters; leave it out") from None
    except ValueError as error:
        raise RequestError(f"body: got text that is no JSON ({error}), needs a JSON object") from None
    except RecursionError:
        raise RequestError("body: got JSON nested too deeply, needs a JSON object of this route's fields") from None
    if not isinstance(body, dict):
        raise RequestError(f"body: got a JSON {type(body).__name__}, needs a JSON object")
    return body


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(error.body(), status_code=error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == NOT_FOUND:
        message = f"path: got {path}, needs one of this server's routes, such as /v1/completions"
    else:
        message = f"{request.method} {path}: {error.detail}"
    return JSONResponse(RequestError(message, status=error.status_code).body(), status_code=error.status_code)


async def _fault(_request: Request, error: Exception) -> Response:
    log.error("request failed", exc_info=error)
    message = f"server: got {type(error).__name__}, needs a correction of the server; its log has the details"
    return JSONResponse(RequestError(message, status=SERVER_FAULT).body(), status_code=SERVER_FAULT)
