"""GPQA-Diamond from the user's own access."""

import csv
import json
import random
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from evals.serving import gpqa_local
from evals.serving.gpqa_local import COLUMNS, gpqa_rows
from evals.serving.progress import Silent
from evals.serving.sources import SuiteData
from evals.serving.suites import run_suite
from evals.tasks.docs import gpqa as shuffle
from validation.core.types import HarnessError

sys.path.insert(0, str(Path(__file__).parent))
from canned import CannedServer, Script
from suite_parts import gpqa, plan, policy, side

SUITE = gpqa_local.SUITE


@pytest.fixture
def copies(tmp_path):
    """The same invented rows as JSON lines, CSV and parquet."""
    lines = gpqa(tmp_path / "lines")
    rows = [{**json.loads(line), "Record ID": "r", "Writer's Difficulty Estimate": None} for line in lines.read_text().splitlines()]
    sheet = tmp_path / "sheet" / "gpqa_diamond.csv"
    sheet.parent.mkdir()
    with sheet.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    table = tmp_path / "table" / "gpqa_diamond.parquet"
    table.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    return lines, sheet, table


def test_every_format_gives_the_same_rows(copies, capsys):
    made = [gpqa_rows(path).to_list() for path in (*copies, *(path.parent for path in copies[1:]))]
    assert all(one == made[0] for one in made)
    assert set(made[0][0]) == set(COLUMNS)
    assert "12 rows, where the published set has 198" in capsys.readouterr().err


def test_choices_do_not_depend_on_the_process(copies):
    orders = []
    for seed in (1, 2):
        random.seed(seed)
        orders.append([doc["choices"] for doc in shuffle(gpqa_rows(copies[0]))])
    assert orders[0] == orders[1]
    assert len({doc["answer"] for doc in shuffle(gpqa_rows(copies[0]))}) > 1


def test_without_access_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("K3_EVAL_DATA", str(tmp_path))

    def gated(*args, **options):
        raise PermissionError("401: gated")

    monkeypatch.setattr(gpqa_local.datasets, "load_dataset", gated)
    with pytest.raises(HarnessError, match=r"accept its terms.*hf auth login.*\[evals.data\] gpqa_diamond_cot_zeroshot"):
        gpqa_rows()
    with pytest.raises(HarnessError, match="no file at"):
        gpqa_rows(tmp_path / "absent.csv")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"Question": "q", "Correct Answer": ""}\n')
    with pytest.raises(HarnessError, match=r"row 1 of .* without Correct Answer"):
        gpqa_rows(bad)


def test_the_hubs_rows_are_used_with_a_token(tmp_path, monkeypatch, copies):
    monkeypatch.setenv("K3_EVAL_DATA", str(tmp_path / "nothing"))
    rows = [json.loads(line) for line in copies[0].read_text().splitlines()]
    monkeypatch.setattr(gpqa_local.datasets, "load_dataset", lambda *a, **k: iter(rows))
    assert gpqa_rows().to_list() == gpqa_rows(copies[0]).to_list()


def test_questions_stay_out_of_tables_and_reports(copies, tmp_path, monkeypatch):
    monkeypatch.setenv("K3_EVAL_DATA", str(tmp_path / "nothing"))
    answers = {f"Invented {i:03d}": f"The question says Invented {i:03d}. The answer is (A)" for i in range(12)}
    with CannedServer(Script(answers=answers)) as server:
        sides = {role: side(role, server) for role in ("stock", "candidate")}
        served = plan(data=SuiteData(path=copies[1]))
        result = run_suite(SUITE, **sides, policy=policy(SUITE), plan=served, folder=tmp_path / "out", shown=Silent())
    assert 0 < result.gate.stock.mean < 1
    assert b"Invented" not in result.report
    assert not result.pairs.table["text_stock"].str.contains("Invented").any()
    assert result.gate.swapped == 0
