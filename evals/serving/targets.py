"""The two sides as a lane's checks see them. A worker holds no server: it asks the run's own process for one (`evals.serving.broker`)."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from evals.serving.broker import BrokerClient, config_of
from evals.serving.client import Endpoint
from evals.serving.config import ServingConfig, Side
from evals.serving.identity import compare, refusals
from evals.serving.launch import StartFailed
from evals.serving.names import SIDES
from validation.core import jsonio
from validation.core.settings import Settings
from validation.core.types import Case, HarnessError
from validation.core.worker import Refused


@dataclass(frozen=True, kw_only=True)
class Live:
    """A side that answers now. `starts` counts our starts of it (0: it ran already)."""

    role: str
    base_urls: tuple[str, ...]
    starts: int
    facts: Mapping[str, str]
    log: Path | None

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together; 0 where nobody tells."""
        told = self.facts.get("max_model_len", "")
        return int(told) if told.isdigit() else 0


class Link:
    """One worker's connection, opened on first use: planning and fingerprints need none."""

    def __init__(self, config: ServingConfig) -> None:
        self.config = config

    @cached_property
    def _broker(self) -> BrokerClient:
        return BrokerClient(Path(os.environ.get("FASTTRACK_SCRATCH") or "."))

    def up(self, role: str, *, fresh: bool = False) -> Live:
        """Raises StartFailed with the cause."""
        told = self._broker.up(role, fresh=fresh)
        log = Path(told["log"]) if told["log"] else None
        return Live(role=role, base_urls=tuple(told["base_urls"]), starts=int(told["starts"]), facts=dict(told["facts"]), log=log)

    def state(self) -> Mapping[str, Mapping[str, Any]]:
        """Per side: addresses, starts, deaths, failed starts, log and facts."""
        return self._broker.state()

    def say(self, text: str) -> None:
        """A line for whoever watches the run; never an error."""
        with contextlib.suppress(StartFailed):
            self._broker.say(text)

    def require_alike(self) -> dict[str, Mapping[str, str]]:
        """The facts of both sides. Raises Refused when they differ in what the file does not accept: then nothing is worth measuring."""
        facts = self.facts()
        comparison = compare(facts["stock"], facts["candidate"], self.config.candidate.accept_differences)
        if comparison.refused:
            raise Refused(refusals(comparison))
        return facts

    def facts(self) -> dict[str, Mapping[str, str]]:
        """Of both sides; a side that has not answered yet is started. Raises Refused where it cannot be."""
        known = {role: dict(told["facts"]) for role, told in self.state().items()}
        reasons = []
        for role in reversed(SIDES):  # the candidate first, so that stock, which is measured first, is up afterwards
            try:
                known[role] = known[role] or dict(self.up(role).facts)
            except StartFailed as error:
                reasons.append(str(error))
        if reasons:
            raise Refused(tuple(reasons))
        return {role: known[role] for role in SIDES}


@dataclass(frozen=True, kw_only=True)
class ServedTarget:
    """One side. `fingerprint` covers what the file says; what the server itself says is read when it answers, and recorded."""

    name: str
    role: str
    side: Side
    settings: Settings
    link: Link

    @property
    def config(self) -> ServingConfig:
        return self.link.config

    def fingerprint(self) -> str:
        """Hex SHA-256 over the side's table."""
        return hashlib.sha256(jsonio.dumps(self.side, sort_keys=True).encode()).hexdigest()

    def live_fingerprint(self, facts: Mapping[str, str]) -> str:
        """Hex SHA-256 over the table and the server's own facts: replies of another server never count as this one's."""
        return hashlib.sha256((self.fingerprint() + jsonio.dumps(dict(facts), sort_keys=True)).encode()).hexdigest()

    def unsupported(self, case: Case) -> tuple[str, ...]:
        return ()

    def run(self, case: Case) -> Mapping[str, str]:
        """The server's facts; raises StartFailed."""
        return self.link.up(self.role).facts

    def up(self, *, fresh: bool = False) -> Live:
        """Raises StartFailed with the cause."""
        return self.link.up(self.role, fresh=fresh)

    def endpoint(self, base_url: str, *, timeout_s: float, retries: int = 4, max_connections: int = 256) -> Endpoint:
        options: dict[str, Any] = {"timeout_s": timeout_s, "retries": retries, "max_connections": max_connections}
        return Endpoint(base_url, model=self.side.name, api_key_env=self.side.api_key_env, **options)


class ServedTargets:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._link = Link(config_of(settings))

    def get(self, role: str) -> ServedTarget:
        if role not in SIDES:
            raise HarnessError(f"role: got {role!r}, needs one of {list(SIDES)} in the serving profile; this is a bug in a lane")
        side = self._link.config.side(role)
        return ServedTarget(name=side.name, role=role, side=side, settings=self._settings, link=self._link)


def open_targets(settings: Settings) -> ServedTargets:
    """Called by the worker; no server is asked yet."""
    return ServedTargets(settings)
