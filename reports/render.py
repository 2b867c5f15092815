"""Writes report.md, report.html, junit.xml and the figures of one run folder. Reads files only; needs no GPU and no torch.

Every file is written beside and renamed, so that an interrupted rendering leaves the earlier report whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2

from reports import escape, junit
from reports.sections import Figure, section_of
from reports.view import MAX_ROWS, View, format_value, json_text, load_view, status_word
from validation.core.store import write_atomically

FIGURES_FOLDER = "figures"

LANE_TITLES = {
    "scope": "Scope",
    "ordering": "Memory ordering",
    "numerics": "Numerics",
    "evals": "Evals",
    "schedule": "Schedule",
    "perf": "Performance",
    "mutants": "Mutants",
}


def _environment(html: bool) -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("reports"),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(cell=escape.cell, code=escape.code, value=format_value, status=status_word, json_text=json_text)
    made.filters.update(ids=escape.ids, shape=escape.shape)
    return made


def titles(view: View) -> dict[str, str]:
    """Headings by lane; a lane of somebody else goes by its name."""
    return {lane.name: LANE_TITLES.get(lane.name, lane.name) for lane in view.lanes}


def _config_of(argv: Sequence[str]) -> str:
    """The settings file of a run; `validate.toml` is what the command line takes by itself."""
    given = [argv[place + 1] for place, word in enumerate(argv[:-1]) if word == "--config"]
    return given[-1] if given else "validate.toml"


def commands(view: View) -> tuple[tuple[str, str], ...]:
    """(what, exact command) of the test plan, as the run was asked for."""
    candidate = view.candidate
    variables = "" if view.run.profile == "embedded" else f" PROFILE={view.run.profile}"
    variables += "" if view.run.profile != "serving" else f" CONFIG={_config_of(view.run.argv)}"
    variables += "" if candidate == "specialized" else f" CANDIDATE={candidate}"
    run = f"reports/runs/{view.run.id}"
    return (
        ("run every lane and write this report", f"make validate{variables}"),
        ("judge the stored evidence again, under the current policy", f"make judge R={run}"),
        ("write the report again", f"make report R={run}"),
        ("check that no record was edited, dropped or added", f"fasttrack verify {run}"),
        ("measure one number again", "make repro E=E-…"),
        ("the tests of the suite itself", "make test"),
    )


def render(run_dir: Path) -> dict[str, Path]:
    """Render one run folder; returns the paths written, by kind.

    Raises:
        HarnessError: a file of the run is missing or unreadable, or the disk is full.
    """
    view = load_view(run_dir)
    sections = {lane.name: section_of(lane) for lane in view.lanes}
    figures = [figure for section in sections.values() for figure in section.figures]
    (run_dir / FIGURES_FOLDER).mkdir(exist_ok=True)
    for figure in figures:
        write_atomically(run_dir / FIGURES_FOLDER / f"{figure.name}.svg", figure.svg.encode())
        write_atomically(run_dir / FIGURES_FOLDER / f"{figure.name}.png", figure.png)
    shared = {
        "view": view,
        "sections": sections,
        "titles": titles(view),
        "commands": commands(view),
        "max_rows": MAX_ROWS,
        "figures_folder": FIGURES_FOLDER,
    }
    paths = {"md": run_dir / "report.md", "html": run_dir / "report.html", "junit": run_dir / "junit.xml"}
    write_atomically(paths["md"], _environment(False).get_template("report.md.j2").render(shared).encode())
    write_atomically(paths["html"], _environment(True).get_template("report.html.j2").render(shared).encode())
    write_atomically(paths["junit"], junit.to_xml(view))
    return paths


__all__ = ["Figure", "render"]
