"""A small OpenAI-compatible server for tests, over asyncio streams: scripted answers, latencies and faults, and a log of what it was asked.

In a thread (`CannedServer(...)`, a context manager) tests read `log` directly; `CannedProcess` runs it in a process of its own, which also
answers GET /log and GET /load (time-weighted mean of the requests in its hands).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass, field


def unit(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    return int.from_bytes(hashlib.sha256("|".join(map(str, parts)).encode()).digest()[:6], "big") / (1 << 48)


@dataclass
class Script:
    """`answers` maps a piece of the prompt's last lines to the right reply. A fault is a share of prompts, drawn from the prompt alone."""

    answers: dict = field(default_factory=dict)
    default: str = "I do not know."
    accuracy: float = 1.0
    name: str = "canned"
    latency: tuple = (0.0, 0.0)  # seconds, uniform
    reasoning: str = ""  # as reasoning_content
    inline_reasoning: bool = False  # as <think>…</think> in the content
    fail_500: float = 0.0
    drop: float = 0.0
    truncate: float = 0.0
    swap_every: int = 0
    prompt_tokens_off: float = 0.0  # share of prompts that the server cuts
    own_luck: bool = False  # whether an answer is right depends on the server too; else equal servers give equal answers to equal seeds
    refuse_after: int = 0  # requests until connections are refused


class CannedServer:
    def __init__(self, script: Script, port: int = 0):
        self.script, self._port = script, port
        self.log: list[dict] = []
        self.flying = self.most = 0
        self._area, self._at, self._first = 0.0, 0.0, 0.0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._writers = set()

    # ---- life ----
    def __enter__(self):
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *error):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def _run(self):
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self._port, limit=1 << 26, backlog=512)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    # ---- HTTP ----
    async def _connection(self, reader, writer):
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, route, _ = head.split(b" ", 2)
                length = next((int(h.split(b":")[1]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")), 0)
                body = await reader.readexactly(length) if length else b""
                status, answer = await self._answer(method.decode(), route.decode(), body)
                if status == 0:
                    writer.transport.abort()
                    return
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                writer.write(
                    f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, method, route, body):
        if method == "GET":
            known = {"/health": {}, "/v1/models": {"object": "list", "data": [{"id": "canned", "max_model_len": 1 << 20}]}}
            known |= {"/log": self.log, "/load": self.load()}
            return (200, known[route]) if route in known else (404, {"error": route})
        request = json.loads(body)
        if route == "/tokenize":
            text = request["prompt"]
            return 200, {"tokens": list(range(len(text.split()))), "count": len(text.split()), "max_model_len": 1 << 20}
        self.log.append({"route": route, "request": request} if len(body) < 1 << 16 else {"route": route, "bytes": len(body)})
        self._enter()
        try:
            return await self._generate(route, request)
        finally:
            self._leave()

    # ---- load ----
    def _enter(self):
        now = time.monotonic()
        self._first = self._first or now
        self._at = self._at or now
        self._area += self.flying * (now - self._at)
        self._at = now
        self.flying += 1
        self.most = max(self.most, self.flying)
        self.entered = (self._area, now - self._first)

    def _leave(self):
        now = time.monotonic()
        self._area += self.flying * (now - self._at)
        self._at = now
        self.flying -= 1

    def load(self):
        """Mean in flight until the last request came in."""
        area, seconds = getattr(self, "entered", (0.0, 0.0))
        return {"mean": area / seconds if seconds else 0.0, "most": self.most, "requests": len(self.log)}

    # ---- replies ----
    async def _generate(self, route, request):
        script = self.script
        chat = route.endswith("chat/completions")
        prompt = json.dumps(request["messages"], ensure_ascii=False) if chat else request["prompt"]
        prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str) else [prompt]
        low, high = script.latency
        if high:
            await asyncio.sleep(low + (high - low) * unit("latency", script.name, prompt, request.get("seed")))
        if script.refuse_after and len(self.log) > script.refuse_after:
            self._stop.set()
            return 0, b""
        if unit("drop", prompts[0]) < script.drop:
            return 0, b""
        if unit("500", prompts[0]) < script.fail_500:
            return 500, {"error": "planted"}
        choices = [self._choice(text, request, chat, i) for i, text in enumerate(prompts)]
        used = len(str(prompts[0]).split()) - (5 if unit("cut", prompts[0]) < script.prompt_tokens_off else 0)
        count = sum(len(c["token_ids"]) for c in choices)
        return 200, {"id": "x", "model": "canned", "choices": choices, "usage": {"prompt_tokens": used, "completion_tokens": count}}

    def text_for(self, prompt, seed=None):
        script = self.script
        tail = prompt if len(prompt) < 6000 else prompt[-6000:]
        found = max(((tail.rfind(key), key) for key in script.answers), default=(-1, ""))
        if found[0] < 0:
            return f"{script.default} ({hashlib.sha256(prompt.encode()).hexdigest()[:8]})"
        right = unit("right", found[1], seed, script.name if script.own_luck else "") < script.accuracy
        return script.answers[found[1]] if right else f"{script.default} ({unit(found[1], seed):.9f})"

    def _choice(self, prompt, request, chat, index):
        script = self.script
        text = self.text_for(str(prompt), request.get("seed"))
        finish = "stop"
        if unit("truncate", prompt) < script.truncate:
            text, finish = text[: len(text) // 2], "length"
        if len(text) > 4 * request.get("max_tokens", 1 << 30):
            text, finish = text[: 4 * request["max_tokens"]], "length"
        for mark in request.get("stop") or []:
            if mark in text:
                text = text[: text.index(mark)]
        if script.inline_reasoning:
            text = f"<think>{script.reasoning}</think>\n{text}"
        choice = {"index": index, "finish_reason": finish, "token_ids": [ord(c) % 1000 for c in text]}
        if chat:
            message = {"role": "assistant", "content": text}
            if script.reasoning and not script.inline_reasoning:
                message["reasoning_content"] = script.reasoning
            return {**choice, "message": message}
        return {**choice, "text": text}


def main(path: str) -> None:
    with open(path) as file:
        script = Script(**json.load(file))
    server = CannedServer(script)
    with server:
        print(server.url, flush=True)
        sys.stdin.read()  # until whoever started us closes the pipe


class CannedProcess:
    """The server in a process of its own."""

    def __init__(self, script: Script, folder):
        self._path = folder / f"script-{script.name}.json"
        self._path.write_text(json.dumps(asdict(script)))

    def __enter__(self):
        import subprocess

        self.process = subprocess.Popen(
            [sys.executable, __file__, str(self._path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http")
        return self

    def __exit__(self, *error):
        self.process.stdin.close()
        self.process.wait(10)

    def ask(self, route):
        import urllib.request

        with urllib.request.urlopen(self.url + route, timeout=10) as answer:
            return json.load(answer)


if __name__ == "__main__":
    main(sys.argv[1])
