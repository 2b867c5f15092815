"""The faulty proxy in a thread of the test, in front of a real server."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
import uvicorn

from evals.serving.faults import Proxy, Setup
from evals.serving.server.listening import address_of, listen


@dataclass(frozen=True)
class Faulty:
    url: str
    proxy: Proxy


class Remembering(Proxy):
    """Asks the server behind once for each greedy request, however many faults are put before the answer."""

    memory: ClassVar[dict[str, httpx.Response]] = {}

    async def ask(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        key = json.dumps([self.setup.upstream, path, body], sort_keys=True)
        if body.get("temperature") != 0 or body.get("stream"):
            return await super().ask(path, body, headers)
        if key not in self.memory:
            self.memory[key] = await super().ask(path, body, headers)
        return self.memory[key]


@contextlib.contextmanager
def faulty(upstream: str, fault: str, **options: object) -> Iterator[Faulty]:
    """A proxy with one fault on a free port; stopped at the end."""
    proxy = Remembering(Setup(upstream=upstream, fault=fault, **options))  # type: ignore[arg-type]
    bound, listening = listen("127.0.0.1", 0), threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets=None) -> None:  # type: ignore[no-untyped-def]
            await super().startup(sockets=sockets)
            listening.set()

    server = Server(uvicorn.Config(proxy.app(), log_level="critical", lifespan="on", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        assert listening.wait(20)
        yield Faulty(url=address_of(bound), proxy=proxy)
    finally:
        server.should_exit = True
        thread.join(10)
