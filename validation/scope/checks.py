"""The scope lane: the isolation rules on this repository's own change. What the path decides at run time is in `decisions.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from validation.core.types import Case, Check, HarnessError, Limit, Measurement, Target
from validation.policy import REPOSITORY, load_policy
from validation.scope.change import EMPTY_TREE, WORKTREE, Change, read_change
from validation.scope.isolation import RULES

BASES = ("origin/main", "main")
CLAIM = "C-SCO-1"


def own_change(repository: Path = REPOSITORY) -> tuple[Change, str]:
    """The change under judgement and the name of its base: against main, or, on main itself, the whole tree against nothing.

    Raises:
        HarnessError: the folder is not a git repository.
    """
    for base in BASES:
        try:
            change = read_change(repository, base, WORKTREE)
        except HarnessError:
            continue
        if change.files:
            return change, base
    return read_change(repository, EMPTY_TREE, WORKTREE), "the empty tree"


@dataclass(frozen=True, kw_only=True)
class IsolationCheck:
    """One static rule of the policy on this repository's change."""

    id: str
    rule: str
    claim: str = CLAIM
    roles: tuple[str, ...] = ()
    must_kill: tuple[str, ...] = ()

    def cases(self) -> Iterable[Case]:
        return [Case(subject="change")]

    def limits(self, case: Case) -> tuple[Limit, ...]:
        return (
            Limit(measurement="findings", op="==", bound=0, unit="count", why=load_policy().sentence(self.id)),
            Limit(measurement="files_judged", op=">=", bound=1, unit="count", why="a rule that saw no file proves nothing"),
        )

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        change, base = own_change()
        findings = RULES[self.rule](change, load_policy())
        judged = len(change.files) if self.rule in ("scope.isolation", "scope.interface") else len(change.paths_at("head"))
        details: dict[str, Any] = {"base": base, "base_commit": change.base, "files_changed": len(change.files)}
        if findings:
            rows = [[f.rule, f"{f.path}:{f.line}", f.message, f.fix] for f in findings]
            details["tables"] = [{"title": "Scope findings", "columns": ["rule", "place", "finding", "fix"], "rows": rows}]
        return (
            Measurement(name="findings", value=len(findings), unit="count"),
            Measurement(name="files_judged", value=judged, unit="count"),
        ), details


def checks() -> list[Check]:
    from validation.scope.decisions import decision_checks

    isolation: list[Check] = [IsolationCheck(id=name, rule=name) for name in RULES]
    return isolation + decision_checks()
