"""Finds the checks of each lane by dotted name, so that this package needs no import of the packages above it (evals, perf).

A lane is a module with `checks() -> list[Check]`. Importing it must be cheap (no torch, no CUDA, no lm-eval at module level): the parent
process imports it to list cases, and only a worker measures. Besides the fields of `Check`, a check may have

    profiles: tuple[str, ...]   profiles it applies to (default: all)
    time_limit_s: float         per case (default: the run's `case_time_limit_s`)
    cases_of(settings)          the cases of a run whose settings decide them (default: `cases()`)

`measure` gets the targets for `roles`; it returns `(measurements, details)`. It may leave files below `$FASTTRACK_SCRATCH/artifacts`; the
parent copies them into the run and notes their digests. `$FASTTRACK_SCRATCH` itself survives an interrupted run and is removed when the
run closes, so a long case can keep partial work there.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from validation.core.types import Case, Check, HarnessError, Limit

LANE_MODULES: Mapping[str, str] = {
    "scope": "validation.scope.checks",
    "ordering": "validation.ordering.checks",
    "numerics": "validation.numerics.checks",
    "schedule": "validation.schedule.checks",
    "evals": "evals.checks",
    "perf": "perf.checks",
    "mutants": "validation.mutants.checks",
}
# `make validate` runs these, the longest first, so that two workers end at about the same time; the others have their own command.
DEFAULT_LANES = ("evals", "numerics", "ordering", "scope", "schedule")
PROFILES = ("embedded", "gpu", "serving")
# Behind two servers a lane asks the same question over HTTP, with checks of its own: there is no oracle and no layer to look at.
PROFILE_MODULES: Mapping[str, Mapping[str, str]] = {
    "serving": {
        "evals": "evals.serving.checks",
        "numerics": "evals.serving.numerics_checks",
        "perf": "evals.serving.perf_checks",
    },
}
PROFILE_LANES: Mapping[str, tuple[str, ...]] = {"serving": ("evals", "numerics", "perf", "scope")}
# What a profile holds while its lanes measure: a module with `session(settings, scratch, say)`, a context manager.
PROFILE_SESSIONS: Mapping[str, str] = {"serving": "evals.serving.broker"}


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """One case to measure, with the limits that will judge it; written to plan.json before the run."""

    lane: str
    module: str
    check: str
    claim: str
    roles: tuple[str, ...]
    case: Case
    limits: tuple[Limit, ...]
    time_limit_s: float


def modules_of(profile: str) -> dict[str, str]:
    """lane -> module, as a profile measures it."""
    return {**LANE_MODULES, **PROFILE_MODULES.get(profile, {})}


def every_lane_module() -> list[tuple[str, str]]:
    """Every lane with each of its modules, over all profiles."""
    return [*LANE_MODULES.items(), *(pair for modules in PROFILE_MODULES.values() for pair in modules.items())]


def lane_exists(module: str) -> bool:
    """True when the module can be found; a lane that is absent leaves its claims unproven."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # no parent package, or no module's name at all
        return False


def load_checks(lane: str, module: str) -> list[Check]:
    """Import a lane and return its checks. Raises HarnessError when the lane is absent, broken, or lists a check twice."""
    if not lane_exists(module):
        raise HarnessError(f"lane {lane}: got no module {module}, needs it installed; leave the lane out of --lanes")
    try:
        checks = list(importlib.import_module(module).checks())
    except Exception as error:
        raise HarnessError(f"lane {lane}: got {type(error).__name__}: {error} while loading {module}, needs a working lane") from error
    names = [check.id for check in checks]
    if len(set(names)) != len(names):
        doubled = sorted({name for name in names if names.count(name) > 1})
        raise HarnessError(f"lane {lane}: got the check ids {doubled} more than once, needs unique ids")
    return checks


def find_check(lane: str, module: str, identity: str) -> Check:
    """One check by id. Raises HarnessError."""
    checks = {check.id: check for check in load_checks(lane, module)}
    if identity not in checks:
        raise HarnessError(f"check: got {identity}, needs one of {sorted(checks)} in lane {lane}; `list` shows all")
    return checks[identity]


def plan_lane(lane: str, module: str, profile: str, default_time_limit_s: float, settings: Any = None) -> list[PlannedCase]:
    """Every case of a lane for a profile, in the order the lane gives. `settings` are for `cases_of`. Raises HarnessError."""
    planned = []
    for check in load_checks(lane, module):
        if profile not in getattr(check, "profiles", PROFILES):
            continue
        try:
            listed = check.cases_of(settings) if settings is not None and hasattr(check, "cases_of") else check.cases()
            cases = [(case, tuple(check.limits(case))) for case in listed]
        except Exception as error:
            raise HarnessError(
                f"check {check.id}: got {type(error).__name__}: {error} while listing cases, needs a working check"
            ) from error
        planned += [
            PlannedCase(
                lane=lane,
                module=module,
                check=check.id,
                claim=check.claim,
                roles=tuple(check.roles),
                case=case,
                limits=limits,
                time_limit_s=float(getattr(check, "time_limit_s", default_time_limit_s)),
            )
            for case, limits in cases
        ]
    _refuse_doubled(planned)
    return planned


def _refuse_doubled(planned: list[PlannedCase]) -> None:
    keys = [(item.check, item.case.id) for item in planned]
    doubled = sorted({key for key in keys if keys.count(key) > 1}) if len(set(keys)) != len(keys) else []
    if doubled:
        raise HarnessError(f"plan: got {doubled} more than once, needs each case once a check")
