"""Compiling ahead of time, with the digest of the machine code that is then launched."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable

from kimi_k3_decode.compile import TABLE
from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.cubin import text_digest
from kimi_k3_decode.device import launcher
from kimi_k3_decode.device.launcher import KernelSpec, placeholders
from kimi_k3_decode.kernels import kernel_spec
from kimi_k3_decode.launches import Launch

_DIGESTS: dict[str, str] = {}


def sass_digest(spec: KernelSpec) -> str:
    """SHA-256 of the machine code of `spec`, compiled once a process; the launcher will run this very binary."""
    if spec.id not in _DIGESTS:
        import cutlass.cute as cute

        function = cute.compile[cute.KeepCUBIN](spec.make(), *placeholders(spec))
        launcher._CACHE[spec.id] = function
        _DIGESTS[spec.id] = text_digest(function.__cubin__)
    return _DIGESTS[spec.id]


@functools.lru_cache(maxsize=1)
def _table() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in json.loads(TABLE.read_text())["kernels"]:
        found.setdefault(row["kernel"], set()).add(row["sass_sha256"])
    return found


def in_table(spec: KernelSpec) -> bool:
    """Whether the committed table has this kernel with this machine code: what ran is then what was audited."""
    return sass_digest(spec) in _table().get(spec.id, set())


def warm(config: ModelConfig, plan: Iterable[Launch]) -> int:
    """Compile whatever `plan` launches, without a GPU where CUTE_DSL_ARCH names the architecture; returns how many kernels there are."""
    specs = {spec.id: spec for spec in (kernel_spec(config, launch.contract) for launch in plan)}
    for spec in specs.values():
        sass_digest(spec)
    return len(specs)
