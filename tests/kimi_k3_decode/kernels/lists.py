"""Lists of variants for `build.produce`, which its processes import by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from kimi_k3_decode.config import NANO, Shard
from kimi_k3_decode.device.launcher import KernelSpec
from kimi_k3_decode.kernels import kernel_spec
from kimi_k3_decode.launches import layer_plan


def nano(scope: str) -> Iterator[tuple[KernelSpec, Mapping[str, Any]]]:
    """The launches of nano layer 4 named in `scope`, at one row."""
    for launch in layer_plan(NANO, Shard(config=NANO), 4, 1):
        if launch.op in scope.split(","):
            yield kernel_spec(NANO, launch.contract), {"model": NANO.name, "pdl": launch.pdl}


def few(scope: str) -> Iterator[tuple[KernelSpec, Mapping[str, Any]]]:
    """Two small kernels, whatever the scope."""
    yield from nano("route,kda")


def one_broken(scope: str) -> Iterator[tuple[KernelSpec, Mapping[str, Any]]]:
    """Two variants, the second of which cannot be made."""

    def make() -> Any:
        raise ValueError("tile: got 3, needs a power of two")

    for spec, facts in nano("route"):
        yield spec, facts
        yield dataclasses.replace(spec, variant="broken", make=make), facts
