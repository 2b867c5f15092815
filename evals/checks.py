"""The evals lane: one check a suite, and one over all of them. Importing this module loads neither torch nor lm-eval."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from validation.core.types import Case, Check, Limit, Measurement
from validation.policy import load_policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from evals.generation import PairedSession
    from evals.run import SuiteResult

CLAIM = "C-EVAL-1"
ROLES = ("candidate", "stock")
# Gross faults of the recurrence. Small ones (one expert, the router) move few answers: the numerics lane is there to see them.
MUST_KILL = ("kda_state_transposed", "conv_taps_shifted")
# What the embedded profile runs, as parameters of the cases (0: all rows), chosen so that both sides together take a few minutes on two
# cores and the gate can still see the margin of the policy. Rows are spread evenly over each file.
EMBEDDED_PLANS: Mapping[str, Mapping[str, int]] = {
    "gsm8k_nano": {"rows": 0},
    "gpqa_diamond_nano": {"rows": 0},
    "aime25_nano": {"rows": 0, "repeats": 4, "max_repeats": 8},
    "mrcr_nano": {"rows": 0},
}


def suite_case(suite: str) -> Case:
    return Case(subject=suite, params=EMBEDDED_PLANS[suite])


@dataclass(frozen=True, kw_only=True)
class SuiteCheck:
    """Both sides on one suite, judged by the paired gate."""

    suite: str
    claim: str = CLAIM
    roles: tuple[str, ...] = ROLES
    must_kill: tuple[str, ...] = MUST_KILL
    profiles: tuple[str, ...] = ("embedded", "gpu")
    time_limit_s: float = 1200.0

    @property
    def id(self) -> str:
        return f"evals.gate.{self.suite}"

    def cases(self) -> Iterable[Case]:
        return (suite_case(self.suite),)

    def limits(self, case: Case) -> tuple[Limit, ...]:
        from evals.limits import limits_of
        from evals.policy import suite_policy

        return limits_of(suite_policy(self.suite, load_policy(), len(EMBEDDED_PLANS)))

    def measure(self, case: Case, targets: Mapping[str, Any]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from evals.measurements import details_of, measurements_of

        with open_session(targets, case) as session:
            result = run_case(case, session, targets)
            _keep_records(session.records.path)
        details = details_of(result.gate, result.pairs)
        details["reported_by_lm_eval"] = {path: dict(scores) for path, scores in result.reported.items()}
        details["generation_seconds"] = result.seconds
        return measurements_of(result.gate, result.pairs), details


@dataclass(frozen=True, kw_only=True)
class FamilyCheck:
    """All suites together: Holm's correction over their tests for a drop. Reads the records that the suites' checks filled."""

    id: str = "evals.gate.family"
    claim: str = CLAIM
    roles: tuple[str, ...] = ROLES
    must_kill: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ("embedded", "gpu")
    time_limit_s: float = 1200.0

    def cases(self) -> Iterable[Case]:
        return (Case(subject="all-suites", params={"suites": len(EMBEDDED_PLANS)}),)

    def limits(self, case: Case) -> tuple[Limit, ...]:
        from evals.limits import FAMILY_LIMITS

        return FAMILY_LIMITS

    def measure(self, case: Case, targets: Mapping[str, Any]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from evals.gate import judge_family
        from evals.measurements import family_details, family_measurements

        gates = []
        for suite in EMBEDDED_PLANS:
            with open_session(targets, suite_case(suite)) as session:
                gates.append(run_case(suite_case(suite), session, targets).gate)
        family = judge_family(gates)
        return family_measurements(family, gates), family_details(family, gates)


def checks() -> list[Check]:
    """The lane's checks, suites first."""
    return [*(SuiteCheck(suite=suite) for suite in EMBEDDED_PLANS), FamilyCheck()]


def run_case(case: Case, session: PairedSession, targets: Mapping[str, Any]) -> SuiteResult:
    """Run the suite that `case` names with the rows and repeats of its parameters."""
    from evals.policy import suite_policy
    from evals.run import SuitePlan, run_suite

    settings = targets["stock"].settings
    policy = suite_policy(case.subject, load_policy(settings.path(settings.policy)), len(EMBEDDED_PLANS))
    plan = SuitePlan(
        limit=case.params.get("rows") or None,
        repeats=case.params.get("repeats"),
        max_repeats=case.params.get("max_repeats"),
    )
    return run_suite(case.subject, session, policy, plan)


@contextmanager
def open_session(targets: Mapping[str, Any], case: Case) -> Iterator[PairedSession]:
    """A session over the embedded engine. A suite's records lie in the run's scratch folder, where an interrupted run finds them again."""
    from evals.embedded import embedded_engine
    from evals.generation import PATHS, PairedSession
    from evals.records import RecordFile

    base_seed = int(targets["stock"].settings.seed) + case.seed
    with tempfile.TemporaryDirectory() as alone:
        folder = Path(os.environ.get("FASTTRACK_SCRATCH") or alone)
        with RecordFile(folder / "evals" / f"{case.subject}-{base_seed}.jsonl") as records:
            fingerprints = {path: targets[path].fingerprint() for path in PATHS}
            yield PairedSession(embedded_engine(targets), records, fingerprints, base_seed=base_seed)


def _keep_records(path: Path) -> None:
    """Leave the per-item records as an artifact of the run."""
    scratch = os.environ.get("FASTTRACK_SCRATCH")
    if scratch:
        folder = Path(scratch) / "artifacts"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / "records.jsonl")
