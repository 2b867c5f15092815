"""The perf lane behind two servers: `vllm bench serve` against each, into the matrix. Light to import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from validation.core.types import Case, Check, Limit, Measurement


@dataclass(frozen=True, kw_only=True)
class BenchCheck:
    """Both sides under the same load. It states speeds; how much faster a path must be is for the cells that were timed on a GPU."""

    id: str = "perf.serving.bench"
    claim: str = "C-SERVE-3"
    roles: tuple[str, ...] = ("candidate", "stock")
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
    return [BenchCheck()]
