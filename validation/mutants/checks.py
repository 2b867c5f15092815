"""The mutants lane: one case a mutant, so that each has its evidence. A survivor, or a control that dies, breaks a limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from validation.core.types import Case, Check, Limit, Measurement, Target

if TYPE_CHECKING:
    from validation.mutants.model import Mutant

CHECK = "mutants.kill_table"


@dataclass(frozen=True, kw_only=True)
class _Narrowed:
    ids: tuple[str, ...] | None = None
    eval_rows: int | None = None  # None: as the catalogue says for a whole table, none for a narrowed one

    def rows_of(self, mutant: Mutant) -> int:
        """Eval items to decode with a mutant."""
        from validation.mutants.catalogue import DECODED, DECODED_ROWS
        from validation.mutants.model import PATH

        if self.eval_rows is None:
            return DECODED_ROWS if self.ids is None and mutant.id in DECODED else 0
        return self.eval_rows if mutant.kind == PATH or mutant.id in DECODED else 0


_plan = [_Narrowed()]


@contextmanager
def narrowed(ids: Sequence[str] | None, eval_rows: int | None = None) -> Iterator[None]:
    """Plan only these mutants (None: all) for the time of the context; with `eval_rows`, wrong paths decode that many eval items.

    A narrowed run proves the claim for no more than it measured.
    """
    _plan.append(_Narrowed(ids=None if ids is None else tuple(ids), eval_rows=eval_rows))
    try:
        yield
    finally:
        _plan.pop()


@dataclass(frozen=True, kw_only=True)
class KillTableCheck:
    """Each mutant against the check that must kill it and the cheap cases of others."""

    id: str = CHECK
    claim: str = "C-MUT-1"
    roles: tuple[str, ...] = ("oracle", "stock")
    must_kill: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ("embedded", "gpu")
    time_limit_s: float = 600.0

    def cases(self) -> Iterable[Case]:
        from validation.mutants.catalogue import all_mutants

        found, plan = all_mutants(), _plan[-1]
        chosen = {name: plan.rows_of(found[name]) for name in (found if plan.ids is None else plan.ids)}
        return [Case(subject=name, params={"eval_rows": rows} if rows else {}) for name, rows in chosen.items()]

    def limits(self, case: Case) -> tuple[Limit, ...]:
        from validation.mutants.catalogue import all_mutants

        mutant = all_mutants()[case.subject]
        some = Limit(measurement="cases", op=">=", bound=1, unit="count", why="a mutant that met no check has not been tried")
        if mutant.control:
            return (some, Limit(measurement="breaches", op="==", bound=0, unit="count", why="what is right must live"))
        why = f"{mutant.sentence}: must be killed by {mutant.killed_by}"
        return (some, Limit(measurement="killed_by_named", op="==", bound=1, unit="count", why=why))

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from validation.mutants.catalogue import all_mutants
        from validation.mutants.trial import plain_value, run_trial

        trial = run_trial(all_mutants()[case.subject], targets, eval_rows=int(case.params.get("eval_rows", 0)))
        counts = {
            "cases": trial.measured_cases,
            "breaches": len(trial.breaches),
            "killed_by_named": int(trial.killed_by_named),
            "killed": int(bool(trial.breaches)),
        }
        mutant = trial.mutant
        seen = [s for s in (trial.named, *trial.others) if s is not None]
        details = {
            "fault": mutant.fault,
            "kind": mutant.kind,
            "sentence": mutant.sentence,
            "claim": mutant.claim,
            "control": mutant.control,
            "named": mutant.killed_by,
            "lanes": trial.lanes(),
            "killed_by": sorted({breach.check for breach in trial.breaches}),
            "first": [
                {"check": b.check, "case": b.case, "measurement": b.measurement, "value": plain_value(b.value), "rule": b.rule}
                for b in trial.breaches[:6]
            ],
            "errors": [f"{s.check}: {s.error}" for s in seen if s.error],
        }
        measured = [Measurement(name=name, value=value, unit="count") for name, value in counts.items()]
        return (*measured, Measurement(name="seconds", value=trial.seconds, unit="s")), details


def checks() -> list[Check]:
    return [KillTableCheck()]
