"""Starts one server, says when it answers, tells why it did not, and ends it with everything it started.

server = StartedServer(side, role="stock", folder=..., poll_s=1.0)
server.wait_until_ready()      # raises StartFailed with the cause and the end of the log
server.death()                 # "" while it runs, else how it ended
server.stop()                  # also on exit, interrupt and exception of the owner: the keeper sees the pipe close
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evals.serving.client import Endpoint
from evals.serving.config import Side
from evals.serving.errors import ServingError
from validation.core.settings import PROJECT_ROOT

LOG_TAIL_LINES = 12
LOG_TAIL_BYTES = 64 << 10
KEEPER_GRACE_S = 15.0
# What a server's last words mean; the first match counts.
CAUSES: tuple[tuple[str, str], ...] = (
    (r"CUDA out of memory|OutOfMemoryError|MemoryError|[Cc]annot allocate memory|std::bad_alloc", "out of memory"),
    (r"No available memory for the cache|KV cache is (larger|needed).*memory", "no memory is left for its cache"),
    (r"[Aa]ddress already in use|EADDRINUSE", "its port is in use"),
    (r"unrecognized arguments|No such option|invalid choice", "it does not know an option of its command"),
    (r"No module named|ModuleNotFoundError|ImportError", "a Python module is missing"),
    (r"[Nn]o such file or directory|not a valid model identifier|RepositoryNotFound", "a file or model is missing"),
    (r"CUDA error|NCCL error|RuntimeError: CUDA", "a CUDA or NCCL error"),
)


class StartFailed(Exception):
    """A server did not come up; the text holds the cause and the end of its log."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def filled(text: str, port: int) -> str:
    """A word of a command with its places filled; other braces stay (JSON options have them)."""
    return text.replace("{port}", str(port)).replace("{python}", sys.executable)


def cause_of(returncode: int | None, tail: str) -> str:
    """Why a server ended, from its exit code and the end of its log; "" when nothing is known."""
    known = next((words for pattern, words in CAUSES if re.search(pattern, tail)), "")
    if known:
        return known
    if returncode is not None and returncode == -signal.SIGKILL:
        return "killed, as the kernel does when memory runs out"
    return ""


def log_path(folder: Path, role: str) -> Path:
    return folder / f"{role}.log"


class StartedServer:
    """One process tree. `folder` gets the log and the keeper's status file."""

    def __init__(self, side: Side, *, role: str, folder: Path, poll_s: float = 1.0) -> None:
        self.side, self.role = side, role
        self._poll_s = poll_s
        folder.mkdir(parents=True, exist_ok=True)
        self.log = log_path(folder, role)
        self._status = folder / f"{role}.status.json"
        self._status.unlink(missing_ok=True)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self.port = side.port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        setup = {
            "command": [filled(word, self.port) for word in side.command],
            "cwd": str(PROJECT_ROOT / side.cwd),
            "log": str(self.log),
            "status": str(self._status),
            "stop_timeout_s": side.stop_timeout_s,
        }
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "evals.serving.keeper", json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=PROJECT_ROOT,
            # Not in the setup: arguments are for everybody to see.
            env={**os.environ, "PYTHONUNBUFFERED": "1", **{key: filled(value, self.port) for key, value in side.env.items()}},
            start_new_session=True,
        )

    def wait_until_ready(self, giving_up: threading.Event | None = None) -> None:
        """Returns when /health answers and the model list holds the served name. Raises StartFailed; the server is then stopped.

        `giving_up` ends the wait early.
        """
        giving_up = giving_up or threading.Event()
        deadline = time.monotonic() + self.side.startup_timeout_s
        last = "no answer yet"
        with Endpoint(self.base_url, api_key_env=self.side.api_key_env, retries=0) as probe:
            while time.monotonic() < deadline and not giving_up.is_set():
                ended = self.death()
                if ended:
                    self.stop()
                    raise StartFailed(f"{self.role}: the server {ended}")
                try:
                    probe.health(timeout_s=max(5.0, self._poll_s))
                    require_model(probe, self.side)
                    return
                except WrongModel as error:
                    self.stop()
                    raise StartFailed(f"{self.role}: {error}") from error
                except ServingError as error:
                    last = error.reason
                giving_up.wait(self._poll_s)
        self.stop()
        if giving_up.is_set():
            raise StartFailed(f"{self.role}: the run ended while the server was starting")
        limit = f"{self.side.startup_timeout_s:g} s (startup_timeout_s)"
        raise StartFailed(f"{self.role}: the server was not ready within {limit}: {last}; it was stopped; {self._last_words()}")

    def status(self) -> Mapping[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            made: Mapping[str, Any] = json.loads(self._status.read_text())
            return made
        return {}

    def death(self) -> str:
        """ "" while the server runs, else how and why it ended, with the end of its log."""
        state = self.status()
        if "error" in state:
            return f"could not be started: {state['error']}"
        if "returncode" not in state:
            return "lost its keeper" if self._keeper.poll() is not None and "returncode" not in self.status() else ""
        code = int(state["returncode"])
        how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        cause = cause_of(code, self.log_tail())
        return f"{how}{f' ({cause})' if cause else ''}; {self._last_words()}"

    def _last_words(self) -> str:
        tail = self.log_tail()
        return f"the end of its log: {tail}" if tail else "its log is empty"

    def log_tail(self) -> str:
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            size = self.log.stat().st_size
            file.seek(max(self._log_start, size - LOG_TAIL_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
            return " | ".join(lines[-LOG_TAIL_LINES:])
        return ""

    def stop(self) -> None:
        """End the whole tree and wait for it; a second call does nothing."""
        if self._keeper.stdin is not None and not self._keeper.stdin.closed:
            self._keeper.stdin.close()
        try:
            self._keeper.wait(self.side.stop_timeout_s + KEEPER_GRACE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # its child ends with it
            self._keeper.wait()


class WrongModel(Exception):
    """The server answers, but does not serve the name that requests will carry."""


def require_model(endpoint: Endpoint, side: Side) -> None:
    """Raises WrongModel, or ServingError when the list cannot be read."""
    names = [card.id for card in endpoint.models()]
    if side.name not in names:
        raise WrongModel(f"{endpoint.base_url} serves {names}, needs {side.name!r}; set served_name")
