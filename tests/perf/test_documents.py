"""What the documents say of speed is what the published records say."""

from __future__ import annotations

import re
import subprocess

import pytest

from perf.kernels import tables
from validation.core.settings import PROJECT_ROOT
from validation.core.types import HarnessError


@pytest.fixture(scope="module")
def records():
    return tables.newest()


def test_the_tables_of_the_kernels_are_those_of_the_records(records):
    assert tables.renewed(tables.README.read_text(), records) == tables.README.read_text()


def test_a_changed_number_is_seen(records):
    text = tables.README.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| TP8 | 1 |"))
    forged = text.replace(row, row.replace("| 1 |", "| 2 |", 1))
    assert tables.renewed(forged, records) == text != forged


@pytest.mark.parametrize("text", ["<!-- layers -->\n", "<!-- nothing -->\n<!-- end -->"])
def test_a_table_that_nobody_makes_or_ends_is_an_error(records, text):
    with pytest.raises(HarnessError, match="tables"):
        tables.renewed(text, records)


def test_every_record_that_a_document_names_is_published(records):
    known = {record.id for record in tables.all_records()}
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True).stdout.split()
    named = {(name, found) for name in listed for found in re.findall(r"\bE-[0-9a-f]{12}\b", (PROJECT_ROOT / name).read_text())}
    assert named
    assert {pair for pair in named if pair[1] not in known} == set()
