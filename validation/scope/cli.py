"""`fasttrack scope`: judge a change of any git repository against a policy. Reads files and git only; nothing of the change is imported."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from validation.core import jsonio
from validation.core.store import write_atomically
from validation.core.types import EXIT_CODES, Status
from validation.policy import DEFAULT_POLICY, load_policy
from validation.scope.change import EMPTY_TREE, WORKTREE, read_change
from validation.scope.isolation import judge_change

app = typer.Typer(add_completion=False)


@app.command()
def scope(
    repo: Annotated[Path, typer.Option(help="The git repository to judge.")] = Path(),
    base: Annotated[str, typer.Option(help="Revision the change starts from; 'empty' judges the whole tree.")] = "main",
    head: Annotated[str, typer.Option(help="Revision to judge; default: the files on disk, untracked ones included.")] = WORKTREE,
    policy: Annotated[Path, typer.Option(help="Policy file; rfc/policies/ has starters.")] = DEFAULT_POLICY,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the findings there as JSON.")] = None,
) -> None:
    """Judge a change of a git repository: isolation, imports, the opt-in default and new flags (seconds, no GPU)."""
    rules = load_policy(policy)
    change = read_change(repo, EMPTY_TREE if base == "empty" else base, head)
    found = judge_change(change, rules)
    findings = [finding for group in found.values() for finding in group]
    table = Table("rule", "place", "finding", "fix", title=f"{len(findings)} finding(s) in {len(change.files)} changed file(s)")
    for finding in findings:
        table.add_row(finding.rule, f"{finding.path}:{finding.line}" if finding.line else finding.path, finding.message, finding.fix)
    Console(stderr=True, markup=False).print(table)
    # A change without a file proves nothing about isolation.
    status = Status.FAIL if findings else Status.PASS if change.files else Status.NOT_PROVEN
    body = {
        "verdict": status.value,
        "base": change.base,
        "head": change.head,
        "policy": rules.name,
        "policy_digest": rules.digest,
        "files_changed": len(change.files),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    if json_out is not None:
        write_atomically(json_out, jsonio.dumps(body, indent=1).encode() + b"\n")
    print(jsonio.dumps({**body, "findings": len(findings)}), flush=True)
    raise SystemExit(EXIT_CODES[status])
