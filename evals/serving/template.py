"""`fasttrack init`: a commented validate.toml for two servers."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from validation.core import jsonio
from validation.core.settings import PROJECT_ROOT
from validation.core.types import HarnessError

FOLDER = Path(__file__).resolve().parent / "templates"
app = typer.Typer(add_completion=False)


def templates() -> dict[str, Path]:
    """Name -> file of every template that is shipped."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


@app.command()
def init(
    template: Annotated[str, typer.Option(help="k3-tp8 | k3-tp16 | nano | generic")] = "k3-tp8",
    output: Annotated[Path, typer.Option(help="Where to write it.")] = PROJECT_ROOT / "validate.toml",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a commented validate.toml. Raises HarnessError instead of replacing a file."""
    known = templates()
    if template not in known:
        raise HarnessError(f"template: got {template!r}, needs one of {sorted(known)}")
    text = known[template].read_text()
    if output.is_dir():
        raise HarnessError(f"init: got {output}, which is a folder, needs a file to write; give --output {output / 'validate.toml'}")
    draft = output.with_name(f"{output.name}.{os.getpid()}.draft")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        if not force:
            output.touch(exist_ok=False)  # takes the name, or says that somebody has it
        draft.replace(output)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if isinstance(error, FileExistsError) and output.parent.is_dir():
            raise HarnessError(f"init: got {output}, which is there already, needs another --output, or --force to replace it") from None
        raise HarnessError(f"init: got {error}, needs a writable place; give another --output") from error
    print(jsonio.dumps({"verdict": "written", "template": template, "path": str(output)}), flush=True)
