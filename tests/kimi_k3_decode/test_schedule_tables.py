"""Schedules cover 1..64 rows exactly once, and say everything that is wrong at once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3_decode.ops.contract import ContractError
from kimi_k3_decode.ops.in_proj.schedule import SPLIT_K
from kimi_k3_decode.ops.mla.schedule import CONTEXT_SPLITS
from kimi_k3_decode.ops.schedule import MAX_ROWS, Row, Schedule, SplitK


def rows(*bounds: tuple[int, int]) -> tuple[Row[int], ...]:
    return tuple(Row(rows=range(a, b), value=i) for i, (a, b) in enumerate(bounds))


def test_gaps_overlaps_empty_and_strange_ranges_are_reported_together():
    table = (*rows((1, 9), (8, 17), (20, 20), (40, 65)), Row(rows=range(17, 30, 2), value=9), Row(rows=range(64, 70), value=1))
    with pytest.raises(ContractError) as error:
        Schedule("a choice", table)
    text = "\n".join(error.value.reasons)
    assert "overlap: got row counts 8..8" in text
    assert "overlap: got row counts 64..64" in text
    assert "gap: got row counts 18..18" in text
    assert "gap: got row counts 30..39" in text
    assert "empty range" in text
    assert "step 2" in text
    assert "out of scope: got row counts 65..69" in text


@given(st.lists(st.integers(2, MAX_ROWS), unique=True, max_size=6))
def test_any_partition_is_accepted_and_looked_up(cuts):
    edges = [1, *sorted(cuts), MAX_ROWS + 1]
    schedule = Schedule("x", rows(*itertools.pairwise(edges)))
    for count in range(1, MAX_ROWS + 1):
        index = schedule.at(count)
        assert edges[index] <= count < edges[index + 1]
    with pytest.raises(ContractError, match="larger steps run stock"):
        schedule.at(MAX_ROWS + 1)


@given(st.lists(st.integers(2, MAX_ROWS), unique=True, min_size=2, max_size=6), st.data())
def test_any_missing_part_is_a_gap(cuts, data):
    edges = [1, *sorted(cuts), MAX_ROWS + 1]
    parts = list(itertools.pairwise(edges))
    lost = data.draw(st.integers(0, len(parts) - 1))
    with pytest.raises(ContractError, match="gap"):
        Schedule("x", rows(*parts[:lost], *parts[lost + 1 :]))


def test_shipped_schedules():
    assert SPLIT_K.at(1).of(7168) == 1
    assert SPLIT_K.at(64).of(7168) > 1
    assert SplitK(splits=4).of(64) == 1
    assert CONTEXT_SPLITS.at(1) >= CONTEXT_SPLITS.at(64)
