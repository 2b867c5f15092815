"""Which devices may hold the ranks of one process: peer access between them, and room for ranks that share one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

CLUSTER_BLOCKS = 8  # of the largest cluster a kernel launches


def placement_reasons(places: Sequence[torch.device], tp: int) -> tuple[str, ...]:
    """Why these devices cannot hold `tp` ranks: their number, and pairs without peer access."""
    reasons = [] if len(places) == tp else [f"devices: got {len(places)}, needs one for each of {tp} ranks"]
    distinct = list(dict.fromkeys(places))
    for a in distinct:
        for b in distinct:
            if a != b and not torch.cuda.can_device_access_peer(a, b):
                reasons.append(f"devices: got {a} and {b} without peer access, needs it; mailboxes are written by the peer")
    return tuple(reasons)


def co_residency_reasons(ranks: int, rows: int, processors: int) -> tuple[str, ...]:
    """Why `ranks` sharing one device could wait for each other for ever: a grid that polls has a block a row and a cluster of eight more,
    and while all ranks but one spin, the last one's cluster and its neighbour need processors that no spinner holds.

    A launch that starts early behind a spinner would hold them too, so between ranks that share a device those are no programmatic ones.
    """
    spinning, room = (ranks - 1) * (rows + CLUSTER_BLOCKS), processors - 2 * CLUSTER_BLOCKS
    if ranks < 2 or spinning <= room:
        return ()
    return (f"ranks on one device: got {ranks} with {rows} rows, whose waiting grids hold {spinning} processors, needs <= {room}",)


def enable_peers(places: Sequence[torch.device]) -> None:
    """Let every device of `places` write to every other (a copy between two devices makes torch switch it on, once a process)."""
    for a in places:
        for b in places:
            if a != b:
                torch.ones(1, device=a).to(b)
                torch.cuda.synchronize(b)
