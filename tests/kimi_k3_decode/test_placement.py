"""Which ranks may share a device, and which devices may hold ranks at all."""

from __future__ import annotations

import pytest
import torch

from kimi_k3_decode.placement import co_residency_reasons, placement_reasons


@pytest.mark.parametrize(
    ("ranks", "rows", "fits"), [(1, 64, True), (2, 64, True), (4, 16, True), (4, 32, False), (4, 64, False), (8, 16, False)]
)
def test_spinning_grids_must_leave_room(ranks, rows, fits) -> None:
    assert (co_residency_reasons(ranks, rows, processors=132) == ()) is fits


def test_every_reason_at_once(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    reasons = placement_reasons([torch.device("cuda:0"), torch.device("cuda:1")], tp=4)
    assert len(reasons) == 3
    assert "got 2, needs one for each of 4 ranks" in reasons[0]
    assert "cuda:1 and cuda:0 without peer access" in reasons[2]


def test_ranks_of_one_device_need_no_peer_access() -> None:
    assert placement_reasons([torch.device("cuda:0")] * 4, tp=4) == ()
