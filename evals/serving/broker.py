"""The servers of a run, held by the process that runs it, and how a lane's worker asks for one.

Workers are confined (they may not write outside their scratch folder, and their children inherit that), and servers outlive a worker that
crashes; so the run's own process starts and stops servers. With one set of GPUs it stops one side before it starts the other. A worker
talks to it over a local socket, one JSON object a message:

    {"op": "up", "side": "stock", "fresh": false}  ->  {"base_urls": [...], "starts": 1, "facts": {...}, ...}  or  {"error": "..."}
    {"op": "say", "text": "..."}                   ->  {}, shown to whoever watches the run
    {"op": "state"}                                ->  per side: addresses, starts, deaths, failed starts, log, facts
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from evals.serving.client import Endpoint
from evals.serving.config import ServingConfig, Side
from evals.serving.errors import ServingError
from evals.serving.identity import read_facts
from evals.serving.launch import StartedServer, StartFailed, WrongModel, free_port, log_path, require_model
from evals.serving.names import SIDES
from validation.core import jsonio
from validation.core.settings import Settings
from validation.core.types import HarnessError

ADDRESS_FILE = "servers.json"
MAX_DEATHS = 3  # after so many ends in the middle a side is not started again: the run would never finish
MAX_FAILED_STARTS = 2


@dataclass(kw_only=True)
class _State:
    port: int = 0  # one a run: whoever noted an address finds the server there again after a restart
    starts: int = 0
    deaths: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    server: StartedServer | None = None
    facts: dict[str, str] = field(default_factory=dict)  # of the server that answered last
    facts_of: int = -1  # the start they were read from


class Servers:
    """Both sides. `up` returns addresses that answer; every started server is gone after `close`."""

    def __init__(self, config: ServingConfig, folder: Path, say: Callable[[str], None] = lambda text: None) -> None:
        self._config, self._folder, self.say = config, folder, say
        self._states = {role: _State() for role in SIDES}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._closed = False

    def up(self, role: str, *, fresh: bool = False) -> dict[str, Any]:
        """Addresses of a side that answers now; `fresh` starts it again where it is ours. Raises StartFailed."""
        with self._lock:
            if self._closed:
                raise StartFailed("the run is ending")
            side, state, urls = self._config.side(role), self._states[role], self.addresses(role)
            if side.base_url:
                self._probe(side)
            else:
                self._note_death(role)
                if fresh or state.server is None:
                    self._start(role)
            self._read_facts(role, urls)
            return {"base_urls": urls, "starts": state.starts, "started": not side.base_url, "log": self._log(role), "facts": state.facts}

    def addresses(self, role: str) -> list[str]:
        """Where a side answers once it is up."""
        side, state = self._config.side(role), self._states[role]
        if side.base_url:
            return list(side.base_url)
        state.port = state.port or side.port or free_port()
        return [f"http://127.0.0.1:{state.port}"]

    def state(self) -> dict[str, Any]:
        """What happened to each side so far. Plain JSON."""
        with self._lock:
            for role in SIDES:
                self._note_death(role)
            return {
                role: {
                    "starts": state.starts,
                    "deaths": list(state.deaths),
                    "failed_starts": list(state.failed),
                    "log": self._log(role),
                    "base_urls": self.addresses(role),
                    "facts": dict(state.facts),
                }
                for role, state in self._states.items()
            }

    def close(self) -> None:
        """Stop what was started; safe to call again."""
        self._closing.set()  # a start that is being waited for ends first
        with self._lock:
            self._closed = True
            for role in SIDES:
                self._stop(role)

    def _log(self, role: str) -> str:
        """Path of a side's log: every start of ours appends to one file. "" where nobody has one."""
        side = self._config.side(role)
        return str(log_path(self._folder, role)) if side.command else side.log

    # ---- inside the lock ----
    def _probe(self, side: Side) -> None:
        problems = []
        for url in side.base_url:
            with Endpoint(url, api_key_env=side.api_key_env, retries=2) as endpoint:
                try:
                    endpoint.health()
                    require_model(endpoint, side)
                except (ServingError, WrongModel) as error:
                    problems.append(str(error))
        if problems:
            raise StartFailed("; ".join(problems))

    def _read_facts(self, role: str, urls: Sequence[str]) -> None:
        """What the server is, once a start. Other facts than before mean another server under the same name: nothing may be mixed."""
        side, state = self._config.side(role), self._states[role]
        if state.facts_of == state.starts:
            return
        log = Path(self._log(role)) if self._log(role) else None
        endpoints = [Endpoint(url, model=side.name, api_key_env=side.api_key_env, retries=2) for url in urls]
        try:
            facts = read_facts(endpoints, side, log)
        except (ServingError, ValueError) as error:
            raise StartFailed(f"{role}: {error}") from error
        finally:
            for endpoint in endpoints:
                endpoint.close()
        if state.facts and facts != state.facts:
            changed = sorted(key for key in facts if facts[key] != state.facts.get(key))
            raise StartFailed(f"{role}: got another server than before ({', '.join(changed)} changed), needs the same in one run")
        state.facts, state.facts_of = facts, state.starts

    def _note_death(self, role: str) -> None:
        state = self._states[role]
        ended = state.server.death() if state.server is not None else ""
        if ended:
            state.deaths.append(f"the {role} server {ended}")
            self.say(f"serving: {state.deaths[-1]}")
            self._stop(role)

    def _start(self, role: str) -> None:
        state = self._states[role]
        if len(state.deaths) >= MAX_DEATHS:
            raise StartFailed(f"{role}: ended {len(state.deaths)} times in the middle, last: {state.deaths[-1]}")
        if len(state.failed) >= MAX_FAILED_STARTS:
            raise StartFailed(state.failed[-1])
        self._stop(role)
        if not self._config.servers.together:
            for other in SIDES:
                self._stop(other)
        self.say(f"serving: starting {role}")
        side = dataclasses.replace(self._config.side(role), port=state.port)
        state.server = StartedServer(side, role=role, folder=self._folder, poll_s=self._config.servers.poll_s)
        try:
            state.server.wait_until_ready(self._closing)
        except BaseException as error:
            self._stop(role)
            if isinstance(error, StartFailed):
                state.failed.append(str(error))
            raise
        state.starts += 1
        self.say(f"serving: {role} answers at {state.server.base_url}")

    def _stop(self, role: str) -> None:
        state = self._states[role]
        if state.server is not None:
            state.server.stop()
            state.server = None


# ---- between the run and its workers ----
class Broker:
    """Answers workers from a thread of its own, one at a time."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        # A short path: the address of a local socket has little room.
        self._folder = Path(tempfile.mkdtemp(prefix="fasttrack-"))
        self._key = secrets.token_bytes(32)
        self._listener = Listener(str(self._folder / "s"), family="AF_UNIX", authkey=self._key)
        self._thread = threading.Thread(target=self._accept, name="servers", daemon=True)
        self._thread.start()

    def write_address(self, path: Path) -> None:
        """Readable by this user only: the key lets its holder start commands of the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"address": str(self._folder / "s"), "key": self._key.hex()}, file)

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            except Exception:  # a worker that was killed while it introduced itself
                continue
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError), connection:
            while True:
                request = json.loads(connection.recv_bytes())
                connection.send_bytes(json.dumps(self._answer(request)).encode())

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            if request["op"] == "state":
                return self._servers.state()
            if request["op"] == "say":
                self._servers.say(str(request["text"]))
                return {}
            return self._servers.up(str(request["side"]), fresh=bool(request.get("fresh")))
        except (StartFailed, HarnessError) as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class BrokerClient:
    """A worker's end. Raises StartFailed where the other end says so."""

    def __init__(self, scratch: Path) -> None:
        path = next((folder / ADDRESS_FILE for folder in (scratch, scratch.parent) if (folder / ADDRESS_FILE).exists()), None)
        if path is None:
            raise HarnessError(f"servers: got no {ADDRESS_FILE} near {scratch}, needs a run of the serving profile that holds the servers")
        told = json.loads(path.read_text())
        self._turn = threading.Lock()
        self._connection = Client(told["address"], family="AF_UNIX", authkey=bytes.fromhex(told["key"]))

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            with self._turn:
                self._connection.send_bytes(json.dumps(request).encode())
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise StartFailed(f"the run that holds the servers is gone ({type(error).__name__})") from error
        if "error" in answer:
            raise StartFailed(answer["error"])
        return answer

    def up(self, role: str, *, fresh: bool = False) -> dict[str, Any]:
        return self._ask({"op": "up", "side": role, "fresh": fresh})

    def state(self) -> dict[str, Any]:
        return self._ask({"op": "state"})

    def say(self, text: str) -> None:
        self._ask({"op": "say", "text": text})


def config_of(settings: Settings) -> ServingConfig:
    """The resolved configuration of a run. Raises HarnessError when it has none."""
    if not settings.serving:
        raise HarnessError("serving: got no [baseline] and [candidate], needs --config FILE; `fasttrack init` writes one")
    config: ServingConfig = jsonio.decode(ServingConfig, jsonio.plain(settings.serving), "serving")
    return config


@contextmanager
def session(settings: Settings, scratch: Path, say: Callable[[str], None]) -> Iterator[None]:
    """What `fasttrack run --profile serving` holds while its lanes measure."""
    servers = Servers(config_of(settings), scratch / "servers", say)
    broker = Broker(servers)
    try:
        broker.write_address(scratch / ADDRESS_FILE)
        yield
    finally:
        broker.close()
        servers.close()
