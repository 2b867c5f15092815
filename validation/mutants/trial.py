"""One mutant against the suite: the check that must kill it first, then the others, to see which lanes notice.

The suite can be weakened on purpose (a lane off, a limit loosened), to show that the kill table notices a weak suite.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from validation.core import registry
from validation.core.judge import with_policy
from validation.core.types import Case, Check, HarnessError, Limit
from validation.mutants.catalogue import case_places
from validation.mutants.model import EVAL, TIMING, Breach, Mutant, Seen
from validation.policy import load_policy

EVALS_MODULE = "evals.mutants"
KILLED, ALIVE, NOT_RUN = "killed", "alive", "not run"
CONTROLS_MEET = {EVAL: "evals.gate", TIMING: "perf.any"}  # for controls that have a subject of their own


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The suite a mutant meets. `off`: lanes that do not run; `loosened`: measurement -> factor on its upper bounds.

    Limits are those that judge a run: a number of the policy takes the place of the check's own, so a loosened policy shows.
    """

    off: frozenset[str] = frozenset()
    loosened: Mapping[str, float] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=lambda: registry.LANE_MODULES)

    policy_limits: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: load_policy().limits)

    def limits(self, check: Check, case: Case) -> tuple[Limit, ...]:
        judged = (with_policy(limit, check.id.split(".")[0], self.policy_limits) for limit in check.limits(case))
        return tuple(
            dataclasses.replace(limit, bound=limit.bound * self.loosened[limit.measurement])
            if limit.op in ("<=", "<") and limit.measurement in self.loosened
            else limit
            for limit in judged
        )

    def check(self, identity: str) -> Check | None:
        """The check by id; None where its lane is off or it does not exist."""
        lane = identity.split(".")[0]
        if lane in self.off or lane not in self.modules or not registry.lane_exists(self.modules[lane]):
            return None
        return {check.id: check for check in importlib.import_module(self.modules[lane]).checks()}.get(identity)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one mutant. `named` is None where the check that must kill it did not run."""

    mutant: Mutant
    named: Seen | None
    others: tuple[Seen, ...]
    seconds: float

    @property
    def killed_by_named(self) -> bool:
        return self.named is not None and self.named.killed

    @property
    def breaches(self) -> tuple[Breach, ...]:
        return tuple(breach for seen in (self.named, *self.others) if seen is not None for breach in seen.breaches)

    @property
    def measured_cases(self) -> int:
        return sum(seen.cases for seen in (self.named, *self.others) if seen is not None and not seen.error)

    def lanes(self) -> dict[str, str]:
        """Lane -> killed, alive or not run."""
        found = dict.fromkeys(registry.LANE_MODULES, NOT_RUN)
        for seen in (self.named, *self.others):
            if seen is not None and not seen.error:
                lane = seen.check.split(".")[0]
                found[lane] = KILLED if seen.killed or found[lane] == KILLED else ALIVE
        found.pop("mutants")
        return found


def run_trial(mutant: Mutant, targets: Mapping[str, Any], suite: Suite | None = None, eval_rows: int = 0) -> Trial:
    """Plant the fault, measure, judge. An error inside a check is noted; it kills nothing.

    eval_rows: of a suite to decode with the wrong path, to see what the evals alone would have said; 0 leaves them out.
    """
    suite = suite or Suite()
    started = time.perf_counter()
    given = _with_candidate(mutant, targets)
    with mutant.plant():
        named = _named(mutant, given, suite)
        others = []
        for identity in mutant.also:
            check = suite.check(identity) if identity != mutant.killed_by else None
            if check is not None:
                others.append(_run_check(mutant, check, given, suite))
        if eval_rows and registry.lane_exists(EVALS_MODULE):
            gate = importlib.import_module(EVALS_MODULE).decode_gate
            others.append(_guarded("evals.gate", lambda: gate(given, eval_rows, mutant.seed)))
    return Trial(mutant=mutant, named=named, others=tuple(others), seconds=time.perf_counter() - started)


def _named(mutant: Mutant, targets: Mapping[str, Any], suite: Suite) -> Seen | None:
    trial = mutant.trial
    if trial is not None:
        name = mutant.killed_by or CONTROLS_MEET.get(mutant.kind, "ordering.any")
        return None if name.split(".")[0] in suite.off else _guarded(name, lambda: trial(targets))
    check = suite.check(mutant.killed_by) if mutant.killed_by else None
    return None if check is None else _run_check(mutant, check, targets, suite)


def _guarded(check: str, run: Any) -> Seen:
    try:
        seen: Seen = run()
        return seen
    except (HarnessError, MemoryError):
        raise
    except Exception as error:
        return Seen(check=check, cases=0, error=f"{type(error).__name__}: {error}"[:400])


def _run_check(mutant: Mutant, check: Check, targets: Mapping[str, Any], suite: Suite) -> Seen:
    return _guarded(check.id, lambda: _measure_cases(mutant, check, targets, suite))


def _measure_cases(mutant: Mutant, check: Check, targets: Mapping[str, Any], suite: Suite) -> Seen:
    """Cases in order, up to the first that breaks a limit; a control runs them all."""
    cases = list(check.cases())
    measured = 0
    for place in case_places(mutant, check.id, len(cases)):
        case = dataclasses.replace(cases[place], seed=cases[place].seed + mutant.seed)
        values, _ = check.measure(case, {role: targets[role] for role in check.roles})
        measured += 1
        found = {m.name: m.value for m in values}
        breaches = tuple(
            Breach(check=check.id, case=case.id, measurement=limit.measurement, value=found[limit.measurement],
                   rule=f"{limit.op} {limit.bound:g} {limit.unit}")
            for limit in suite.limits(check, case)
            if limit.measurement in found and not limit.holds(found[limit.measurement])
        )  # fmt: skip
        if breaches:
            return Seen(check=check.id, cases=measured, breaches=breaches)
    return Seen(check=check.id, cases=measured)


def _with_candidate(mutant: Mutant, targets: Mapping[str, Any]) -> Mapping[str, Any]:
    """The targets with the mutant in the candidate's place. What needs no candidate keeps the specialised path."""
    if mutant.trial is not None:
        return targets
    from validation.targets.engine import find_candidate

    name = mutant.candidate or "specialized"
    build = find_candidate(name)
    stock = targets["stock"]
    path = build(stock.weights)
    candidate = dataclasses.replace(stock, name=name, role="candidate", build=build, path=path)
    return {**targets, "candidate": candidate}


def plain_value(value: float | None) -> float | str | None:
    """A value that JSON can hold."""
    return value if value is None or math.isfinite(value) else str(value)
