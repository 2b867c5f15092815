"""The client against a real socket: every way a server can answer badly is its own typed error, and only what is safe is sent twice."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from evals.serving.client import Endpoint
from evals.serving.errors import Dropped, HttpStatus, Malformed, NotThere, TimedOut, TooLarge, Unauthorised, Unreachable
from validation.core.types import HarnessError

Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any] | None], None]

COMPLETION = {
    "model": "m",
    "choices": [
        {
            "text": " four",
            "finish_reason": "stop",
            "token_ids": [7, 9],
            "logprobs": {
                "tokens": ["token_id:7", "token_id:9"],
                "token_logprobs": [-0.5, None],
                "top_logprobs": [{"token_id:7": -0.5, "token_id:8": -1.5}, None],
            },
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}


def send(handler: BaseHTTPRequestHandler, body: Any, status: int = 200) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[tuple[str, Any, dict[str, str]]]]]:
    """A server whose every request goes to `answer`; yields its address and what it was asked."""
    asked: list[tuple[str, Any, dict[str, str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            request = json.loads(self.rfile.read(length)) if length else None
            asked.append((self.path, request, dict(self.headers)))
            answer(self, request)

        do_GET = do_POST = _any

        def log_message(self, *parts: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


def endpoint(url: str, **options: Any) -> Endpoint:
    return Endpoint(url, model="m", backoff_s=0.01, **{"timeout_s": 5.0, "retries": 2, **options})


def test_a_completion_is_read_whole_and_asked_for_as_documented():
    with serving(lambda h, r: send(h, COMPLETION)) as (url, asked), endpoint(url + "/v1") as server:
        reply = server.completion([1, 2, 3], max_tokens=2, stop=["\n"], logprobs=2, extra={"vllm_xargs": {"a": 1}})
    assert (reply.text, reply.token_ids, reply.finish_reason, reply.attempts) == (" four", (7, 9), "stop", 1)
    assert reply.logprobs[0].top_ids() == {7: -0.5, 8: -1.5}
    assert math.isnan(reply.logprobs[1].logprob)  # null is no number, and never zero
    assert reply.usage == {"prompt_tokens": 3, "completion_tokens": 2}
    path, request, _ = asked[0]
    assert path == "/v1/completions"
    assert request == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 2,
        "temperature": 0.0,
        "stop": ["\n"],
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "vllm_xargs": {"a": 1},
    }


def test_a_chat_reply_keeps_its_reasoning_apart():
    message = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    top = [{"token": "token_id:4", "logprob": -0.1}]
    choice = {
        "message": message,
        "finish_reason": "stop",
        "logprobs": {"content": [{"token": "token_id:4", "logprob": -0.1, "top_logprobs": top}]},
    }
    with serving(lambda h, r: send(h, {"choices": [choice]})) as (url, asked), endpoint(url) as server:
        reply = server.chat([{"role": "user", "content": "2+2"}], max_tokens=8, temperature=0.7, seed=3, logprobs=1)
    assert (reply.text, reply.reasoning, reply.token_ids) == ("4", "two and two", None)
    assert reply.logprobs[0].top_ids() == {4: -0.1}
    assert asked[0][1]["seed"] == 3
    assert asked[0][1]["top_logprobs"] == 1


BAD = [
    (lambda h, r: send(h, b"<html>gateway</html>"), Malformed, "HTML"),
    (lambda h, r: send(h, b"{broken"), Malformed, "no JSON"),
    (lambda h, r: send(h, {"hello": 1}), Malformed, "choices"),
    (lambda h, r: send(h, {"choices": [{"text": 5}]}), Malformed, "text"),
    (lambda h, r: send(h, {"choices": [{"text": "a", "token_ids": ["x"]}]}), Malformed, "token_ids"),
    (lambda h, r: send(h, {"error": "no key"}, 401), Unauthorised, "api_key_env"),
    (lambda h, r: send(h, {"error": "no model z"}, 404), NotThere, "served name"),
    (lambda h, r: send(h, {"error": "too long"}, 400), HttpStatus, "too long"),
]


@pytest.mark.parametrize(("answer", "kind", "words"), BAD)
def test_a_bad_answer_is_its_own_error_and_is_not_asked_for_again(answer, kind, words):
    with serving(answer) as (url, asked), endpoint(url) as server, pytest.raises(kind, match=words) as caught:
        server.completion("x", max_tokens=1)
    assert len(asked) == caught.value.attempts == 1


def test_a_busy_server_is_asked_again_only_where_the_answer_stays_the_same():
    turns = iter([503, 429, 200, 503])
    with serving(lambda h, r: send(h, COMPLETION, next(turns))) as (url, asked), endpoint(url) as server:
        assert server.completion("x", max_tokens=1).attempts == 3
        with pytest.raises(HttpStatus) as caught:
            server.completion("x", max_tokens=1, temperature=1.0)
    assert caught.value.status == 503
    assert len(asked) == 4


def test_a_server_that_stays_busy_ends_in_an_error():
    with serving(lambda h, r: send(h, {}, 500)) as (url, asked), endpoint(url) as server, pytest.raises(HttpStatus) as caught:
        server.completion("x", max_tokens=1, temperature=1.0, seed=1)
    assert len(asked) == caught.value.attempts == 3


def test_nobody_there_is_tried_again_whatever_was_asked():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with endpoint(f"http://127.0.0.1:{port}") as server, pytest.raises(Unreachable) as caught:
        server.completion("x", max_tokens=1, temperature=1.0)
    assert caught.value.attempts == 3


def test_a_hung_request_ends_in_time_and_is_not_repeated():
    release = threading.Event()
    with serving(lambda h, r: release.wait(5) and None) as (url, asked), endpoint(url, timeout_s=0.5) as server:
        with pytest.raises(TimedOut) as caught:
            server.completion("x", max_tokens=1)
        release.set()
    assert caught.value.attempts == 1
    assert len(asked) <= 1


def test_a_dripping_answer_ends_in_time():
    stop = threading.Event()

    def drip(h: BaseHTTPRequestHandler, r: Any) -> None:
        h.send_response(200)
        h.send_header("Content-Length", "1000")
        h.end_headers()
        while not stop.wait(0.02):
            try:
                h.wfile.write(b" ")
            except OSError:
                return

    with serving(drip) as (url, _), endpoint(url, timeout_s=0.3) as server:
        with pytest.raises(TimedOut):
            server.completion("x", max_tokens=1)
        stop.set()


def test_a_request_that_is_dropped_is_not_hidden_by_asking_again():
    with serving(lambda h, r: h.connection.close()) as (url, asked), endpoint(url) as server, pytest.raises(Dropped):
        server.completion("x", max_tokens=1)
    assert len(asked) == 1


def test_an_answer_cut_short_is_an_error():
    def cut(h: BaseHTTPRequestHandler, r: Any) -> None:
        h.send_response(200)
        h.send_header("Content-Length", "5000")
        h.end_headers()
        h.wfile.write(b'{"choices"')
        h.close_connection = True

    with serving(cut) as (url, _), endpoint(url) as server, pytest.raises(Dropped):
        server.completion("x", max_tokens=1)


def test_a_huge_answer_is_not_read_to_its_end():
    big = b"x" * 300_000
    with serving(lambda h, r: send(h, big)) as (url, _), endpoint(url, max_answer_bytes=100_000) as server, pytest.raises(TooLarge):
        server.completion("x", max_tokens=1)


def test_probes_read_models_version_metrics_and_tokens(monkeypatch):
    text = b'# TYPE vllm:x counter\nvllm:x_total{position="0"} 3\nvllm:x_total{position="1"} 2\n'
    answers = {
        "/health": b"",
        "/v1/models": {"data": [{"id": "m", "root": "/weights", "max_model_len": 4096}]},
        "/version": {"version": "0.32.0"},
        "/metrics": text,
        "/tokenize": {"tokens": [1, 2], "count": 2},
    }
    monkeypatch.setenv("SOME_KEY", "secret")
    with serving(lambda h, r: send(h, answers[h.path])) as (url, asked), endpoint(url, api_key_env="SOME_KEY") as server:
        server.health()
        assert [(card.id, card.root, card.max_model_len) for card in server.models()] == [("m", "/weights", 4096)]
        assert server.version() == "0.32.0"
        metrics = server.metrics()
        assert server.tokenize("ab") == (1, 2)
    assert metrics.total("vllm:x_total") == 5
    assert metrics.total("vllm:x_total", position="1") == 2
    assert metrics.total("vllm:absent") is None
    assert all(headers["Authorization"] == "Bearer secret" for _, _, headers in asked)


def test_a_server_of_another_kind_is_told_apart():
    with serving(lambda h, r: send(h, b"<!doctype html>")) as (url, _), endpoint(url) as server:
        with pytest.raises(Malformed, match="HTML"):
            server.models()
        with pytest.raises(Malformed, match="Prometheus"):
            server.metrics()


def test_a_key_that_is_not_set_is_an_error_before_anything_is_sent(monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(HarnessError, match="SOME_KEY"):
        Endpoint("http://127.0.0.1:1", api_key_env="SOME_KEY")


def test_asynchronous_calls_run_side_by_side():
    together = threading.Barrier(4, timeout=5)

    def meet(h: BaseHTTPRequestHandler, r: Any) -> None:
        together.wait()
        send(h, COMPLETION)

    async def ask(url: str) -> list[str]:
        async with endpoint(url) as server:
            replies = await asyncio.gather(*(server.completion_async("x", max_tokens=1) for _ in range(4)))
            return [reply.text for reply in replies]

    with serving(meet) as (url, _):
        assert asyncio.run(ask(url)) == [" four"] * 4
