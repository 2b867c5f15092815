"""GPQA-Diamond from the user's own access: a local copy (CSV, JSON lines or parquet), or the gated hub data set with the user's token.

The questions are read into memory (198 rows) and not through the cache of `datasets`, so that no second copy of gated text is left on disk.
The order of the choices comes from the question alone (`evals.tasks.docs.gpqa`), never from the process-wide generator.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet

from evals.tasks.loading import local_files, task_config
from validation.core.types import HarnessError

SUITE = "gpqa_diamond_cot_zeroshot"
ROWS = 198
COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
ACCESS = (
    "GPQA is gated: accept its terms on the hub's page of Idavidrein/gpqa, then log in (`hf auth login`, or HF_TOKEN) or name your own "
    f'copy of gpqa_diamond as .csv, .jsonl or .parquet: [evals.data] {SUITE} = "…", or gpqa/gpqa_diamond.csv below K3_EVAL_DATA'
)


def gpqa_rows(data: Path | None = None) -> datasets.Dataset:
    """The questions, from `data` (file or folder), from the public-data folder, or from the hub. Raises HarnessError that says how."""
    if data is not None and not data.exists():
        raise HarnessError(f"gpqa: got no file at {data}, needs your own copy; {ACCESS}")
    files = local_files({"train": ["gpqa/gpqa_diamond.jsonl", "gpqa/gpqa_diamond.csv", "gpqa/*diamond*.parquet"]}, data, "train")
    rows = list(_checked(_read(Path(files["train"][0])), files["train"][0])) if files is not None else list(_checked(_hub(), "the hub"))
    if len(rows) != ROWS:
        print(f"gpqa: {len(rows)} rows, where the published set has {ROWS}: this is a part of it", file=sys.stderr)
    return datasets.Dataset.from_list(rows)


def _hub() -> Iterable[Mapping[str, Any]]:
    config = task_config(SUITE)
    try:
        made = datasets.load_dataset("Idavidrein/gpqa", config.get("dataset_name") or "gpqa_diamond", split="train", streaming=True)
        return list(made)
    except Exception as error:  # no network, no token, terms not accepted: the library has a class for each, the remedy is one
        raise HarnessError(f"gpqa: got {type(error).__name__}: {str(error)[:200]}; {ACCESS}") from error


def _read(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        if path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8-sig") as file:
                return list(csv.DictReader(file))
        if path.suffix == ".parquet":
            rows: list[Mapping[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
            return rows
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError, csv.Error) as error:
        raise HarnessError(f"gpqa: got {type(error).__name__}: {error} in {path}, needs a copy of gpqa_diamond; {ACCESS}") from error


def _checked(rows: Iterable[Mapping[str, Any]], where: str) -> Iterable[dict[str, str]]:
    for number, row in enumerate(rows, start=1):
        absent = [name for name in COLUMNS if not str(row.get(name) or "").strip()]
        if absent:
            raise HarnessError(
                f"gpqa: got row {number} of {where} without {', '.join(absent)}, needs the published columns; use the original file"
            )
        yield {name: str(row[name]) for name in COLUMNS}
