"""The table of `python -m evals run`: names are printed as they are."""

from __future__ import annotations

import io
from types import SimpleNamespace

from rich.console import Console

from evals import __main__ as commands


def test_names_with_brackets_are_no_markup(monkeypatch) -> None:
    out = io.StringIO()
    made = []

    def console(**options):
        made.append(options)
        return Console(file=out, width=240, **{k: v for k, v in options.items() if k != "stderr"})

    monkeypatch.setattr(commands, "Console", console)
    gate = SimpleNamespace(
        suite="own[/bold]suite", n_items=3, n_repeats=1, stock=SimpleNamespace(mean=0.5), candidate=SimpleNamespace(mean=0.5),
        difference=SimpleNamespace(mean=0.0, se=0.1), one_se=SimpleNamespace(se=0.1, holds=True), detectable_drop=0.2,
        non_inferiority=SimpleNamespace(lower=-0.1), policy=SimpleNamespace(delta=0.2), status=SimpleNamespace(value="pass"),
    )  # fmt: skip
    family = SimpleNamespace(p_drop_holm=[0.5], reasons=("file [red]x[/blue] is missing",))
    commands._show([gate], family, commands._console())
    assert "own[/bold]suite" in out.getvalue()
    assert "file [red]x[/blue] is missing" in out.getvalue()
