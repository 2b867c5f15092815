"""`fasttrack policy`: is the process coherent? Every rule has an id, a sentence, a check and a test; every claim of the RFC has checks.

A check is one that a lane registers, or a condition of the gate (`gate.freshness`). A pattern counts when at least one check matches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from validation.claims import CLAIMS
from validation.core import jsonio, registry
from validation.core.types import EXIT_CODES, Claim, HarnessError, Status
from validation.gate.conditions import CONDITIONS
from validation.policy import DEFAULT_POLICY, REPOSITORY, Policy, load_policy

RFC = REPOSITORY / "rfc" / "0001-kimi-k3.md"
RULE_ID = re.compile(r"P-[A-Z]{3,5}-[0-9]+")
CLAIM_ROW = re.compile(r"^\| (C-[A-Z]+(?:-\d+)?) \|", re.M)
app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`kind`: rule | claim | lane. A `lane` problem is a claim whose lane this checkout does not have: nothing can prove it here."""

    kind: str
    where: str
    message: str


def known_checks(modules: Sequence[tuple[str, str]] | None = None) -> tuple[set[str], list[str]]:
    """Ids of every check of the installed lanes, in every profile, and conditions of the gate; and the lanes that are not installed."""
    found = {f"gate.{name}" for name in CONDITIONS}
    absent = []
    for lane, module in registry.every_lane_module() if modules is None else modules:
        if registry.lane_exists(module):
            found |= {check.id for check in registry.load_checks(lane, module)}
        else:
            absent.append(lane)
    return found, absent


def rule_problems(policy: Policy, checks: Iterable[str], root: Path = REPOSITORY) -> list[Problem]:
    known = set(checks)
    found = []
    for rule in policy.rules:
        told = [] if RULE_ID.fullmatch(rule.id) else [f"the id needs the form {RULE_ID.pattern}"]
        if len(rule.sentence.split()) < 4 or not rule.sentence.endswith("."):
            told.append("needs a whole sentence")
        if not any(fnmatchcase(check, rule.check) for check in known):
            told.append(f"no check is called {rule.check!r}")
        test = root / rule.test
        if not test.resolve().is_relative_to(root.resolve()) or not test.is_file():
            told.append(f"no test at {rule.test!r}")
        found += [Problem(kind="rule", where=rule.id, message=text) for text in told]
    if not policy.rules:
        found.append(Problem(kind="rule", where=policy.name, message="has no rule"))
    return found


def claim_problems(claims: Sequence[Claim], rfc_text: str, checks: Iterable[str], absent_lanes: Sequence[str]) -> list[Problem]:
    known, ids = set(checks), {claim.id for claim in claims}
    written = set(CLAIM_ROW.findall(rfc_text))
    found = [Problem(kind="claim", where=name, message="stands in the RFC, but no check carries it") for name in sorted(written - ids)]
    found += [Problem(kind="claim", where=name, message="has checks, but is no claim of the RFC") for name in sorted(ids - written)]
    for claim in claims:
        missing = [pattern for pattern in claim.checks if not any(fnmatchcase(check, pattern) for check in known)]
        kind = "lane" if claim.lane in absent_lanes else "claim"
        found += [Problem(kind=kind, where=claim.id, message=f"no check matches {pattern!r}") for pattern in missing]
    return found


def problems(policy: Policy, claims: Sequence[Claim] = CLAIMS, rfc: Path = RFC) -> list[Problem]:
    """Everything incoherent. Raises HarnessError when a lane cannot be loaded or the RFC cannot be read."""
    try:
        text = rfc.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise HarnessError(f"policy: got {error}, needs the RFC at {rfc}") from None
    checks, absent = known_checks()
    return rule_problems(policy, checks) + claim_problems(claims, text, checks, absent)


@app.command()
def policy(path: Annotated[Path, typer.Option("--policy", help="Policy file.")] = DEFAULT_POLICY) -> None:
    """Check that every rule and every claim has its check and its test (seconds). Exit code 2: only a lane is missing."""
    read = load_policy(path)
    found = problems(read)
    table = Table("rule", "sentence", "check", "test", title=f"{read.name}, digest {read.digest[:12]}")
    for rule in read.rules:
        table.add_row(rule.id, rule.sentence, rule.check, rule.test)
    err = Console(stderr=True, markup=False)
    err.print(table, markup=False)
    for problem in found:
        err.print(f"{problem.kind} {problem.where}: {problem.message}", markup=False, soft_wrap=True)
    status = Status.PASS if not found else Status.NOT_PROVEN if all(p.kind == "lane" for p in found) else Status.FAIL
    print(jsonio.dumps({"verdict": status, "policy_digest": read.digest, "rules": len(read.rules), "problems": found}), flush=True)
    raise SystemExit(EXIT_CODES[status])
