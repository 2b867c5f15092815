"""Listening on an address, saying when, and stopping cleanly: shared by the server and the faulty proxy."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from validation.core.types import HarnessError

GRACE_S = 3  # for replies in flight when the server is told to stop


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises HarnessError when it is taken or wrong."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        raise HarnessError(f"port: got {host}:{port} ({error}), needs an address that is free; use --port 0 for any") from error
    return bound


def address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._ready()


def run_app(app: Any, bound: socket.socket, ready: Callable[[], None], *, access_log: bool = False) -> None:
    """Serve an ASGI application until SIGTERM or SIGINT; returns then."""
    config = uvicorn.Config(app, log_config=None, access_log=access_log, lifespan="on", timeout_graceful_shutdown=GRACE_S)
    server = _Server(config, ready)

    def stop(*_: Any) -> None:
        # uvicorn raises a caught signal again after it has stopped; the command line would take that for an interruption.
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server.run(sockets=[bound])
