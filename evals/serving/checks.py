"""The evals lane behind two servers: who they are, each suite at each concurrency, which path decoded, and whether they stayed up.

Light to import; the measuring is in `evals.serving.suite_measure` and the modules it uses. A suite, or a concurrency, that the file does
not ask for is planned all the same and refused with that reason: what was left out is not proven.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from evals.serving.broker import config_of
from evals.serving.config import EvalsConfig
from evals.serving.names import NANO_SUITES, REAL_SUITES
from validation.core.settings import Settings
from validation.core.types import Case, Check, Limit, Measurement
from validation.core.worker import Refused
from validation.policy import load_policy

CLAIM = "C-SERVE-1"
ROLES = ("candidate", "stock")
MUST_KILL = ("kda_state_transposed", "conv_taps_shifted")
TIME_LIMIT_S = 7 * 86400.0
Found = tuple[tuple[Measurement, ...], Mapping[str, Any]]


def _limit(name: str, op: str, bound: float, unit: str, why: str) -> Limit:
    return Limit(measurement=name, op=op, bound=bound, unit=unit, why=why)


@dataclass(frozen=True, kw_only=True)
class _Served:
    """What all checks of this lane share."""

    claim: str = CLAIM
    roles: tuple[str, ...] = ROLES
    must_kill: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ("serving",)
    time_limit_s: float = TIME_LIMIT_S


@dataclass(frozen=True, kw_only=True)
class IdentityCheck(_Served):
    """Both servers answer, serve the model that was named, and differ only where the file accepts it."""

    id: str = "evals.serving.identity"

    def cases(self) -> Iterable[Case]:
        return (Case(subject="both-sides"),)

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return (
            _limit("unaccepted_differences", "==", 0, "count", "the sides differ only in what the file accepts"),
            _limit("facts_compared", ">=", 1, "count", "a comparison of nothing proves nothing"),
            _limit("all_facts_told", "==", 1, "1", "model, revision, dtype, parallelism, length, tokenizer and template are known"),
        )

    def measure(self, case: Case, targets: Mapping[str, Any]) -> Found:
        from evals.serving.side_checks import measure_identity

        return measure_identity(targets)


@dataclass(frozen=True, kw_only=True)
class SuiteCheck(_Served):
    """One suite on both servers, judged by the paired gate, at one concurrency a case."""

    suite: str
    must_kill: tuple[str, ...] = MUST_KILL

    @property
    def id(self) -> str:
        return f"evals.serving.{self.suite}"

    def cases(self) -> Iterable[Case]:
        return suite_cases(self.suite, EvalsConfig(suites=(self.suite,)))

    def cases_of(self, settings: Settings) -> Iterable[Case]:
        config = config_of(settings).evals
        kin = NANO_SUITES if set(config.suites) & set(NANO_SUITES) else REAL_SUITES
        return suite_cases(self.suite, config) if self.suite in kin else ()

    def limits(self, case: Case) -> tuple[Limit, ...]:
        from evals.limits import limits_of
        from evals.policy import suite_policy

        gate = limits_of(suite_policy(self.suite, load_policy(), family=4))
        served = [limit for limit in gate if limit.measurement != "path_share"]  # over HTTP: evals.serving.path_proof
        return (*served, _limit("full_size", ">=", 1, "share", "every row of the suite was asked on both sides"))

    def measure(self, case: Case, targets: Mapping[str, Any]) -> Found:
        if case.params.get("asked") == 0:
            raise Refused((f"{self.suite} at concurrency {case.params['concurrency']}: not asked for in [evals]",))
        from evals.serving.suite_measure import measure_suite

        return measure_suite(self.suite, case, targets)


@dataclass(frozen=True, kw_only=True)
class FamilyCheck(_Served):
    """All suites together at the highest concurrency: Holm's correction over their tests for a drop. Reads what the suites recorded."""

    id: str = "evals.serving.family"

    def cases(self) -> Iterable[Case]:
        return (Case(subject="all-suites", params={"suites": len(REAL_SUITES)}),)

    def limits(self, case: Case) -> tuple[Limit, ...]:
        from evals.limits import FAMILY_LIMITS

        return FAMILY_LIMITS

    def measure(self, case: Case, targets: Mapping[str, Any]) -> Found:
        config = targets["stock"].config.evals
        if len(config.suites) < int(case.params["suites"]):
            raise Refused((f"all suites: got {', '.join(config.suites)} in [evals], needs all {case.params['suites']} of one kind",))
        from evals.serving.suite_measure import measure_family

        return measure_family({suite: suite_cases(suite, config)[-1] for suite in config.suites}, targets)


@dataclass(frozen=True, kw_only=True)
class PathProofCheck(_Served):
    """The candidate's path is what decoded, at each concurrency, and stock does not show the same sign."""

    id: str = "evals.serving.path_proof"

    def cases(self) -> Iterable[Case]:
        return proof_cases(EvalsConfig())

    def cases_of(self, settings: Settings) -> Iterable[Case]:
        return proof_cases(config_of(settings).evals)

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return (
            _limit("signs_of_the_path", ">", 0, "count", "log, metrics or trace show the candidate's path"),
            _limit("signs_on_stock", "==", 0, "count", "stock does not show what is taken for the candidate's path"),
        )

    def measure(self, case: Case, targets: Mapping[str, Any]) -> Found:
        from evals.serving.side_checks import measure_path

        return measure_path(int(case.params["concurrency"]), targets)


@dataclass(frozen=True, kw_only=True)
class HealthCheck(_Served):
    """Nothing died under the load of the suites before this; it comes last."""

    id: str = "evals.serving.health"

    def cases(self) -> Iterable[Case]:
        return (Case(subject="both-sides"),)

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return (
            _limit("candidate_deaths", "==", 0, "count", "the candidate's server does not end in the middle of a run"),
            _limit("stock_deaths", "==", 0, "count", "stock's server does not either: else nothing can be said about the candidate's"),
            _limit("sides_that_answered", "==", 2, "count", "both servers answered"),
        )

    def measure(self, case: Case, targets: Mapping[str, Any]) -> Found:
        from evals.serving.side_checks import measure_health

        return measure_health(targets)


def suite_cases(suite: str, config: EvalsConfig) -> list[Case]:
    """One case a concurrency; the claim speaks of 1 and of many, so both are planned whatever the file says."""
    asked = config.concurrency if suite in config.suites else ()
    many = [c for c in asked if c > 1] or [max(EvalsConfig().concurrency)]
    return [_suite_case(suite, c, config, asked=c in asked) for c in (1, *many)]


def _suite_case(suite: str, concurrency: int, config: EvalsConfig, *, asked: bool) -> Case:
    if not asked:
        return Case(subject=suite, params={"concurrency": concurrency, "asked": 0})
    own = config.per_suite.get(suite, {})
    rows = own.get("rows", config.rows)
    if concurrency == 1 and config.rows_at_one:
        rows = min(config.rows_at_one, rows) if rows else config.rows_at_one
    return Case(subject=suite, params={"concurrency": concurrency, "rows": rows})


def proof_cases(config: EvalsConfig) -> list[Case]:
    return [Case(subject="decode", params={"concurrency": c}) for c in config.concurrency]


def checks() -> list[Check]:
    """In the order they are measured: cheap refusals first, health last."""
    suites: list[Check] = [SuiteCheck(suite=suite) for suite in (*REAL_SUITES, *NANO_SUITES)]
    return [IdentityCheck(), *suites, FamilyCheck(), PathProofCheck(), HealthCheck()]
