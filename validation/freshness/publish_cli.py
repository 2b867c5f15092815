"""`fasttrack publish`: how evidence of a GPU machine gets where it is committed with the code it measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from validation.core import jsonio
from validation.core.settings import PROJECT_ROOT
from validation.core.store import read_evidence
from validation.core.types import HarnessError
from validation.freshness import imports, published

app = typer.Typer(add_completion=False)


@app.command()
def publish(
    source: Annotated[Path | None, typer.Argument(help="Run folder or id, or a folder of raw *.jsonl; default: the newest run.")] = None,
    root: Annotated[Path, typer.Option("--published", help="Folder of published runs.")] = published.PUBLISHED,
    renew: Annotated[str, typer.Option(help="For raw records: the command that measures them again.")] = "",
) -> None:
    """Put evidence of a GPU machine where it is committed with the code it measured (seconds)."""
    folder = _find(source)
    if (folder / "run.json").exists():
        made = published.publish(folder, root)
    else:
        if not renew:
            raise HarnessError("publish: got raw records without --renew, needs the command that measures them again")
        made = imports.import_raw(folder, root, renew)
    records = sum(1 for _ in read_evidence(made))
    shown = made.relative_to(PROJECT_ROOT) if made.is_relative_to(PROJECT_ROOT) else made
    print(jsonio.dumps({"run": made.name, "verdict": "published", "records": records, "folder": str(shown)}), flush=True)
    raise SystemExit(0)


def _find(source: Path | None) -> Path:
    runs = PROJECT_ROOT / "reports" / "runs"
    if source is None:
        found = sorted(folder for folder in runs.glob("R-*") if folder.is_dir())
        if not found:
            raise HarnessError("publish: got no run below reports/runs, needs one; `make validate PROFILE=gpu` makes one")
        return found[-1]
    for folder in (source, runs / source):
        if folder.is_dir():
            return folder.resolve()
    raise HarnessError(f"publish: got {source}, needs a run folder, a run id, or a folder of raw records")
