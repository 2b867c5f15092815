"""`fasttrack gate`: the one command CI blocks on. It reads stored results and the git history; it measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from validation.core import jsonio
from validation.core.settings import PROJECT_ROOT, load_settings, named_folder
from validation.core.store import write_atomically
from validation.core.types import EXIT_CODES, HarnessError, Status
from validation.core.validate import load_claims
from validation.freshness.published import PUBLISHED
from validation.gate import conditions
from validation.gate.runs import of_this_code
from validation.targets.engine import find_candidate

app = typer.Typer(add_completion=False)


@app.command()
def gate(
    base: Annotated[str, typer.Option(help="Revision the change starts from.")] = "main",
    repo: Annotated[Path, typer.Option(help="The checkout to judge.")] = PROJECT_ROOT,
    candidate: Annotated[str, typer.Option(help="The candidate whose runs count.")] = "specialized",
    runs_dir: Annotated[str | None, typer.Option(help="Where run folders are kept.")] = None,
    published: Annotated[Path | None, typer.Option(help="Folder of published runs.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy file; default: the setting.")] = None,
    require: Annotated[str, typer.Option(help="More conditions whose missing evidence is exit code 2, comma-separated.")] = "",
    accept: Annotated[
        list[str] | None, typer.Option(help="KEY=NAME: NAME accepts that the rule KEY becomes looser; may be repeated.")
    ] = None,
    pr_ready: Annotated[bool, typer.Option("--pr-ready", help="Require every condition: what a pull request must show.")] = False,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the results there as JSON.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML settings; default: validate.toml if it exists.")] = None,
) -> None:
    """Judge a change by its stored results: 0 pass, 1 a blocking condition failed, 2 something required is not proven (seconds, no GPU)."""
    asked = tuple(name.strip() for name in require.split(",") if name.strip())
    unknown = sorted(set(asked) - set(conditions.CONDITIONS))
    if unknown:
        raise HarnessError(f"gate: got the conditions {unknown}, needs some of {list(conditions.CONDITIONS)}")
    required = conditions.CONDITIONS if pr_ready else (*conditions.REQUIRED, *asked)
    default = PROJECT_ROOT / "validate.toml"
    settings = load_settings(config or (default if default.exists() else None), {"runs_dir": runs_dir})
    find_candidate(candidate)
    if runs_dir is not None:
        named_folder("--runs-dir", settings.path(settings.runs_dir))
    if published is not None:
        named_folder("--published", published)
    runs, left_out = of_this_code(settings.path(settings.runs_dir), candidate)
    read = conditions.Gate(
        repository=repo,
        base=base,
        policy_file=policy or settings.path(settings.policy),
        claims=load_claims(settings.claims),
        runs=runs,
        left_out=left_out,
        published=published or PUBLISHED,
        accepted=_accepted(accept or ()),
    )
    results = conditions.evaluate(read)
    status = conditions.decide(results, required)
    ready = conditions.decide(results, conditions.CONDITIONS) is Status.PASS
    _show(results, required, status)
    body = {
        "verdict": status,
        "pr_ready": ready,
        "base": base,
        "run": runs[0].run.id if runs else None,
        "required": list(required),
        "accepted": dict(read.accepted),
        "conditions": [jsonio.plain(result) for result in results],
    }
    if json_out is not None:
        write_atomically(json_out, jsonio.dumps(body, indent=1).encode() + b"\n")
    short = {result.name: result.status for result in results}
    print(jsonio.dumps({**body, "conditions": short}), flush=True)
    raise SystemExit(EXIT_CODES[status])


def _accepted(words: Sequence[str]) -> dict[str, str]:
    """KEY=NAME words. Raises HarnessError for one without a key or without a name."""
    pairs = [word.rpartition("=") for word in words]
    bad = [word for word, (key, _, name) in zip(words, pairs, strict=True) if not key.strip() or not name.strip()]
    if bad:
        raise HarnessError(f"gate: got --accept {bad[0]!r}, needs KEY=NAME, the key of a changed rule and who accepts it")
    return {key.strip(): name.strip() for key, _, name in pairs}


def _show(results: list[conditions.Result], required: tuple[str, ...], status: Status) -> None:
    err = Console(stderr=True, markup=False)
    table = Table("condition", "status", "required", "what", "remedy", title=f"Gate: {status.value}")
    for result in results:
        need = "yes" if result.name in required else "no"
        remedy = result.remedy if result.status is not Status.PASS else ""
        table.add_row(result.name, result.status.value, need, result.summary, remedy)
    err.print(table, markup=False)
    for result in results:
        for reason in result.reasons:
            err.print(f"{result.name}: {reason}", markup=False, soft_wrap=True)
