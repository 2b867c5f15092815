"""The report of a suite as bytes that depend on the answers alone, and the union of records that several hosts made of one suite.

What differs from run to run (times, endpoints, workers, the order of arrival) is not in the report, so the report of one worker and of
many is the same file whenever the answers are the same, as with greedy decoding they are.

    python -m evals.serving.merge HOST-A HOST-B --into FOLDER     # folders of the same suite, asked in shards
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from evals.gate import SuiteGate
from evals.pairing import PairedAnswers
from evals.records import Reply, ReplyKey
from evals.serving.items import ItemStore
from validation.core.types import HarnessError

SCHEMA = 1
SIDES = ("stock", "candidate")
ITEM_COLUMNS = (
    "item",
    "repeat",
    "level_stock",
    "outcome",
    *(
        f"{name}_{side}"
        for name in ("prompt_hash", "score", "tokens", "prompt_tokens", "truncated", "finish_reason", "reply")
        for side in ("stock", "candidate")
    ),
)


def report_bytes(gate: SuiteGate, pairs: PairedAnswers, setting: Mapping[str, Any]) -> bytes:
    """Canonical JSON: keys sorted, NaN as null, items in order. `setting` holds what was asked, nothing of how it was carried."""
    table = pairs.table
    items = {name: [plain(value) for value in table[name]] for name in ITEM_COLUMNS if name in table.columns}
    body = {
        "schema": SCHEMA,
        "suite": gate.suite,
        "setting": plain(setting),
        "gate": plain(asdict(gate)),
        "not_asked": pairs.not_asked,
        "items": items,
    }
    return (json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, default=str) + "\n").encode()


def plain(value: Any) -> Any:
    """JSON values only; NaN and infinity, which JSON lacks, become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()  # a number of numpy
    if value is pd.NA or value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value


def merge_stores(sources: Sequence[Path], target: Path) -> int:
    """Bring the answers of several files of one suite and side into one; returns how many were new.

    An answer beats a failure. Two different answers under one key, which holds prompt, parameters and seed, are kept apart by nothing, so
    they are an error: raises HarnessError and names the item.
    """
    added = 0
    with ItemStore(target) as store:
        for path in sources:
            with ItemStore(path) as source:
                for reply in source.replies():
                    added += _merge_one(store, reply, path)
    return added


def _merge_one(store: ItemStore, reply: Reply, path: Path) -> int:
    known = store.get(reply.key)
    if known is None or (known.text is None and reply.text is not None):
        store.add([reply])
        return 1
    if known.text is not None and reply.text is not None and _content(known) != _content(reply):
        where = _named(reply.key)
        raise HarnessError(f"merge: got two different answers to {where} (the second in {path}), needs one; keep one of the files")
    return 0


def _content(reply: Reply) -> tuple[Any, ...]:
    return reply.text, reply.token_ids, reply.finish_reason


def _named(key: ReplyKey) -> str:
    return f"{key.suite} item {key.item} repeat {key.repeat} of {key.path}"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.command()
def merge(
    sources: Annotated[list[Path], typer.Argument(help="Folders of one suite, as each host wrote it.")],
    into: Annotated[Path, typer.Option(help="Folder of the merged suite; judge it by running the suite there.")],
) -> None:
    """Merge what hosts asked in shards (seconds)."""
    _check_sources(sources, into)
    for side in SIDES:
        files = [folder / f"{side}.jsonl" for folder in sources if (folder / f"{side}.jsonl").is_file()]
        print(f"{side}: {merge_stores(files, into / f'{side}.jsonl')} answers from {len(files)} files")


def _check_sources(sources: Sequence[Path], into: Path) -> None:
    """A host whose folder is misspelt or empty must not be missing silently.

    Reads every file before one is made. Raises HarnessError with every reason, or with the first file that is damaged.
    """
    rule = f"a folder with {' or '.join(f'{side}.jsonl' for side in SIDES)}"
    empty = [folder for folder in sources if not any(_count(folder / f"{side}.jsonl") for side in SIDES)]
    reasons = [f"got {folder} without answers, needs {rule} of that host; leave out a host that had nothing to ask" for folder in empty]
    places = [folder.resolve() for folder in sources]
    if len(set(places)) != len(places):
        reasons.append("got one folder twice, needs each host once")
    if into.resolve() in places:
        reasons.append(f"got --into {into}, which is one of the sources, needs another folder")
    if reasons:
        raise HarnessError("merge: " + "; ".join(reasons))


def _count(path: Path) -> int:
    """Whole answers in a file; none when there is no file."""
    if not path.is_file():
        return 0
    with ItemStore(path) as store:
        return len(store)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; every way to use it wrongly is one line and exit code 3."""
    try:
        app(args=arguments, prog_name="python -m evals.serving.merge", standalone_mode=False)
    except (HarnessError, OSError) as error:
        print(str(error), file=sys.stderr)
        return 3
    except Exception as error:
        if not hasattr(error, "format_message"):  # a usage error of click, of which typer may carry its own copy
            raise
        print(f"merge: {error.format_message()}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
