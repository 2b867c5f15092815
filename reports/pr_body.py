"""`fasttrack pr-body RUN [--base REV]`: the text of a pull request, from a stored run and the git history.

vLLM's sections: purpose, why it is not a duplicate, test plan, test result, evals, AI-assistance statement, sign-off reminder. A number is
printed only beside the id of the record that measured it. What only a human can say stands as an open item until it is given.
Nothing here believes verdict.json or freshness.json, which no manifest seals: the stored records are judged again.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from reports.render import _environment, titles
from reports.view import FRESHNESS_FILE, Freshness, View, load_view
from validation.claims import CLAIMS
from validation.core import environment, jsonio
from validation.core.settings import PROJECT_ROOT
from validation.core.store import write_atomically
from validation.core.types import Claim, ClaimResult, Finding, HarnessError, Holds, Status
from validation.core.validate import verdict_of
from validation.core.verify import verify
from validation.freshness import published
from validation.gate.rule_changes import rule_changes
from validation.policy import DEFAULT_POLICY, load_policy
from validation.scope.change import WORKTREE, read_change
from validation.scope.isolation import judge_change

app = typer.Typer(add_completion=False)

NOT_SAID = "To be written by the author."
# vLLM asks for an RFC above this many changed lines outside kernels, data, configuration and tests.
RFC_LINES = 500


@dataclass(frozen=True, kw_only=True)
class Statements:
    """What no run can know; empty text leaves the item open."""

    purpose: str = ""
    duplicate: str = ""
    assistance: str = ""


@dataclass(frozen=True, kw_only=True)
class ChangeFacts:
    base: str
    files: int
    findings: int
    product_lines: int
    looser_rules: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        if not self.files:
            return f"no file differs from {self.base}"
        scope = "no finding of the scope rules" if not self.findings else f"{self.findings} finding(s) of the scope rules"
        return f"{self.files} file(s) changed since {self.base}, {scope}"


def change_facts(repository: Path, base: str, policy_file: Path) -> ChangeFacts:
    """Raises HarnessError for an unknown revision or an unreadable policy."""
    policy, change = load_policy(policy_file), read_change(repository, base, WORKTREE)
    findings = sum(len(found) for found in judge_change(change, policy).values())
    lines = sum(
        len(file.added) for file in change.files if file.path.endswith((".py", ".cu", ".cpp")) and not file.path.startswith("tests/")
    )
    root, file = repository.resolve(), policy_file.resolve()
    changes = rule_changes(change, file.relative_to(root).as_posix() if file.is_relative_to(root) else None)
    looser = tuple(str(one) for one in changes if one.loosens)
    return ChangeFacts(base=base, files=len(change.files), findings=findings, product_lines=lines, looser_rules=looser)


def evidence_of(result: ClaimResult) -> str:
    """The records that decide a claim: a violated one, else the first of each check."""
    ids = [f.evidence for f in result.findings if f.holds is Holds.VIOLATED and f.evidence]
    ids = ids or list({f.check: f.evidence for f in reversed(result.findings) if f.evidence}.values())
    more = len(dict.fromkeys(ids)) - 3
    return ", ".join(list(dict.fromkeys(ids))[:3]) + (f" and {more} more" if more > 0 else "") or "none"


def eval_findings(view: View) -> tuple[Finding, ...]:
    lane = view.lane("evals")
    results = lane.claims if lane is not None else ()
    return tuple(f for _, result in results for f in result.findings if f.evidence and f.limit is not None)


def open_items(view: View, change: ChangeFacts, said: Statements) -> list[str]:
    """What stands between this text and a pull request that is ready."""
    found = [] if verify(view.run_dir).intact else ["the run does not verify: `fasttrack verify` says why"]
    found += [f"{name}: {NOT_SAID}" for name, text in vars(said).items() if not text.strip()]
    found += ["the run was measured with uncommitted changes"] if view.run.dirty else []
    if view.run.config.get("code_sha256") != environment.code_digest():
        found.append("the run measured other code than this checkout")
    found += (
        [f"{change.findings} finding(s) of the scope rules; `fasttrack scope --base {change.base}` lists them"] if change.findings else []
    )
    found += [f"a rule that judges this change may be looser: {rule}" for rule in change.looser_rules]
    found += [f"{claim.id}: {result.status.value}" for claim, result in view.claims if result.status is Status.FAIL]
    found += [f"{c.id}: not proven, but required" for c, r in view.claims if r.required and r.status is Status.NOT_PROVEN]
    found += [f"published evidence: {problem}" for problem in (view.freshness.problems if view.freshness else ())]
    if change.product_lines > RFC_LINES:
        found.append(f"{change.product_lines} lines of code outside tests: link the RFC (rfc/0001-kimi-k3.md) and its discussion")
    return found


def commands(view: View) -> list[str]:
    """The exact commands, in order; a line break in an argument cannot end the block they stand in."""
    argv = shlex.join(_one_line(a) for a in view.run.argv) if view.run.argv else "make validate"
    run = view.run.id
    return [
        f"git checkout {_one_line(view.run.commit)}",
        argv.replace("```", "'''"),
        f"fasttrack verify {run}",
        f"fasttrack judge {run}",
        "make repro E=E-…",
        "make mutants",
        "make test",
    ]


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def judged_view(run_dir: Path, policy_file: Path, claims: Sequence[Claim]) -> View:
    """The run under this checkout's policy, claims and published evidence, judged now. Raises HarnessError."""
    verdict = verdict_of(run_dir, policy=policy_file, claims=claims)
    now = published.stored(published.freshness(policy=load_policy(policy_file)))
    return replace(load_view(run_dir, (verdict, tuple(claims))), freshness=jsonio.decode(Freshness, now, FRESHNESS_FILE))


def body(
    run_dir: Path, change: ChangeFacts, said: Statements, *, policy: Path = DEFAULT_POLICY, claims: Sequence[Claim] = CLAIMS
) -> tuple[str, list[str]]:
    """The Markdown text and what is open. Raises HarnessError when the run cannot be read or judged."""
    view = judged_view(run_dir, policy, claims)
    missing = open_items(view, change, said)
    filled = {name: text.strip() or NOT_SAID for name, text in vars(said).items()}
    template = _environment(False).get_template("pr_body.md.j2")
    text = template.render(
        view=view,
        change=change,
        commands=commands(view),
        titles=titles(view),
        evals=eval_findings(view),
        evidence_of=evidence_of,
        missing=missing,
        ready=not missing,
        **filled,
    )
    return text, missing


@app.command()
def pr_body(
    run: Annotated[Path | None, typer.Argument(help="Run folder or id; default: the newest.")] = None,
    base: Annotated[str, typer.Option(help="Revision the change starts from.")] = "main",
    repo: Annotated[Path, typer.Option(help="The checkout.")] = PROJECT_ROOT,
    policy: Annotated[Path, typer.Option(help="Policy file.")] = DEFAULT_POLICY,
    purpose: Annotated[str, typer.Option(help="What the change is for.")] = "",
    duplicate: Annotated[str, typer.Option(help="Why it is not a duplicate, with the pull requests looked at.")] = "",
    assistance: Annotated[str, typer.Option(help="How tools were used, and who answers for the result.")] = "",
    out: Annotated[Path | None, typer.Option(help="Also write the text there.")] = None,
) -> None:
    """Write a pull-request body from a run (seconds). Exit code 0: ready; 1: a claim failed; 2: something is open."""
    folder = _find(run)
    said = Statements(purpose=purpose, duplicate=duplicate, assistance=assistance)
    text, missing = body(folder, change_facts(repo, base, policy), said, policy=policy)
    path = out or folder / "pr_body.md"
    write_atomically(path, text.encode())
    typer.echo(text, err=True)
    failed = any(what.endswith(": fail") for what in missing)
    code = 1 if failed else 2 if missing else 0
    verdict = {0: "pass", 1: "fail", 2: "not_proven"}[code]
    print(jsonio.dumps({"run": folder.name, "verdict": verdict, "report": str(path), "open": missing}), flush=True)
    raise SystemExit(code)


def _find(run: Path | None) -> Path:
    runs = PROJECT_ROOT / "reports" / "runs"
    if run is None:
        judged = sorted(path.parent for path in runs.glob("R-*/verdict.json"))
        if not judged:
            raise HarnessError("pr-body: got no judged run below reports/runs, needs one; `make validate` makes one")
        return judged[-1]
    for folder in (run, runs / run, PROJECT_ROOT / "reports" / "published" / run):
        if folder.is_dir():
            return folder.resolve()
    raise HarnessError(f"pr-body: got {run}, needs a run folder or id; `fasttrack list` shows what there is")
