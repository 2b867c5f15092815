"""The perf lane behind two servers: the same requests timed on both, and `vllm bench serve` against each into the matrix.

Light to import.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from evals.serving.broker import config_of
from evals.serving.config import EvalsConfig
from evals.serving.config_rules import LEAST_WAVES
from validation.core.settings import Settings
from validation.core.types import Case, Check, Limit, Measurement
from validation.policy import load_policy

CLAIM = "C-SERVE-3"
ROLES = ("candidate", "stock")


@dataclass(frozen=True, kw_only=True)
class RequestTimesCheck:
    """A candidate that answers the same requests more slowly than stock, at one concurrency and on one of its replicas a case."""

    id: str = "perf.serving.request_times"
    claim: str = CLAIM
    roles: tuple[str, ...] = ROLES
    must_kill: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ("serving",)
    time_limit_s: float = 7 * 86400.0

    def cases(self) -> Iterable[Case]:
        return _time_cases(EvalsConfig().concurrency, 1)

    def cases_of(self, settings: Settings) -> Iterable[Case]:
        config = config_of(settings)
        return _time_cases(config.evals.concurrency, len(config.candidate.base_url))

    def limits(self, case: Case) -> tuple[Limit, ...]:
        allowed = _allowed()
        low = "above the policy's slow-down even at the low end of its 95 % interval, beyond what stock differs from itself: proven slower"
        high = "the whole 95 % interval, widened by what stock differs from itself, lies within the policy's slow-down"
        return (
            Limit(measurement="slowdown_low", op="<=", bound=allowed, unit="share", why=low),
            Limit(measurement="slowdown_high", op="<=", bound=allowed, unit="share", why=high),
            Limit(measurement="lost_requests", op="==", bound=0, unit="count", why="every request is answered, with the tokens asked for"),
            Limit(measurement="waves", op=">=", bound=LEAST_WAVES, unit="count", why="fewer with answers give no interval"),
        )

    def measure(self, case: Case, targets: Mapping[str, Any]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from evals.serving.request_times import measure_times

        return measure_times(case, targets, _allowed())


def _allowed() -> float:
    return load_policy().limit("perf", "slowdown_max")


def _time_cases(concurrency: Iterable[int], replicas: int) -> list[Case]:
    return [
        Case(subject="requests", params={"concurrency": c, **({"replica": k} if k > 1 else {})})
        for c in concurrency
        for k in range(1, max(1, replicas) + 1)
    ]


@dataclass(frozen=True, kw_only=True)
class BenchCheck:
    """Both sides under the same load. It states speeds; how much faster a path must be is for the cells that were timed on a GPU."""

    id: str = "perf.serving.bench"
    claim: str = CLAIM
    roles: tuple[str, ...] = ROLES
    must_kill: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ("serving",)
    time_limit_s: float = 86400.0

    def cases(self) -> Iterable[Case]:
        return (Case(subject="both-sides"),)

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return (
            Limit(measurement="objections", op="==", bound=0, unit="count", why="both results belong to their cells and lost no request"),
            Limit(measurement="completed_requests", op=">=", bound=1, unit="count", why="a load of nothing measures nothing"),
        )

    def measure(self, case: Case, targets: Mapping[str, Any]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from evals.serving.bench import measure_bench

        return measure_bench(targets)


def checks() -> list[Check]:
    return [RequestTimesCheck(), BenchCheck()]
