"""Kernels that dawdle: a seeded `nanosleep` at every wait and every publish, different for each block and warp.

The device helpers are replaced while the kernels are traced, so what runs is the project's own kernels with sleeps in them, recompiled.
A result that depends on who is faster then changes; a correct one may not change by one bit.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SITES = ("grid_wait", "grid_release", "publish_f32x2", "publish_f32x4", "publish_bf16x2", "poll_many", "poll_b128")
LONGEST_NS_BITS = 13  # a sleep is below 2 ** this many nanoseconds


def _sleep(factor: int, offset: int) -> None:
    """Sleep for a hash of block, warp and the site's own numbers."""
    from kimi_k3_decode.device.asm import emit

    code = (
        "{ .reg .u32 b, w, t; mov.u32 b, %ctaid.x; mov.u32 w, %tid.x; shr.u32 w, w, 5; mad.lo.u32 t, b, 40503, w; "
        f"mad.lo.u32 t, t, {factor}, {offset}; shr.u32 t, t, {32 - LONGEST_NS_BITS}; nanosleep.u32 t; }}"
    )
    emit(code, (), (), memory=True)


def _late(function: Callable[..., Any], numbers: random.Random) -> Callable[..., Any]:
    def late(*arguments: Any, **options: Any) -> Any:
        # Drawn at each traced call: every site of every kernel has its own pattern.
        _sleep(numbers.getrandbits(31) * 2 + 1, numbers.getrandbits(31))
        return function(*arguments, **options)

    return late


@contextmanager
def delayed(seed: int) -> Iterator[dict[str, int]]:
    """Within it every kernel that is compiled sleeps at its waits and publishes; compiled kernels from before are set aside.

    Yields how many modules each site was replaced in.
    """
    from kimi_k3_decode import kernels  # noqa: F401 - loads every kernel module
    from kimi_k3_decode.device import launcher, sync

    numbers = random.Random(seed)
    replaced: list[tuple[Any, str, Any]] = []
    counts = dict.fromkeys(SITES, 0)
    before = dict(launcher._CACHE)
    try:
        for site in SITES:
            original = getattr(sync, site)
            late = _late(original, numbers)
            for name, module in list(sys.modules.items()):
                if name.startswith("kimi_k3_decode.") and getattr(module, site, None) is original:
                    replaced.append((module, site, original))
                    setattr(module, site, late)
                    counts[site] += 1
        launcher._CACHE.clear()
        yield counts
    finally:
        for module, site, original in replaced:
            setattr(module, site, original)
        launcher._CACHE.clear()
        launcher._CACHE.update(before)
