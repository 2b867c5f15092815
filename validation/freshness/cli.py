"""`fasttrack status`: which published evidence still holds, and what renews the rest."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from validation.core import jsonio
from validation.core.settings import named_folder
from validation.core.types import EXIT_CODES, Status
from validation.freshness import published
from validation.policy import DEFAULT_POLICY, load_policy

app = typer.Typer(add_completion=False)

Root = Annotated[Path, typer.Option("--published", help="Folder of published runs.")]


@app.command()
def status(
    root: Root = published.PUBLISHED,
    policy: Annotated[Path, typer.Option(help="Policy file.")] = DEFAULT_POLICY,
    every: Annotated[bool, typer.Option("--all", help="List fresh cells too.")] = False,
) -> None:
    """Say which published evidence is stale, why, and the command that renews it (seconds, no GPU)."""
    if root != published.PUBLISHED:
        named_folder("--published", root)
    found = published.freshness(root, load_policy(policy))
    err = Console(stderr=True, markup=False)
    if not found.cells:
        err.print(f"Nothing published below {root}: no GPU claim has evidence.", markup=False)
    shown = found.cells if every else found.stale
    if shown:
        table = Table(
            "state", "check", "GPU", "cells", "first", "why", title=f"{len(found.stale)} of {len(found.cells)} published cells are stale"
        )
        groups = Counter((cell.state, cell.check, cell.gpu, cell.reasons) for cell in shown)
        for (state, check, gpu, reasons), count in groups.items():
            first = next(c for c in shown if (c.state, c.check, c.gpu, c.reasons) == (state, check, gpu, reasons))
            table.add_row(state, check, gpu, str(count), f"{first.evidence} {first.case}", "; ".join(reasons))
        err.print(table, markup=False)
    elif found.cells:
        err.print(f"All {len(found.cells)} published cells are fresh.", markup=False)
    for pattern in found.missing:
        err.print(f"Missing: no published evidence of {pattern}.", markup=False)
    for command in found.renew:
        err.print(f"Renew with: {command}", markup=False, soft_wrap=True)
    verdict = Status.NOT_PROVEN if found.problems or found.stale else Status.PASS
    print(jsonio.dumps({"verdict": verdict, **published.summary(found)}), flush=True)
    raise SystemExit(EXIT_CODES[verdict])
