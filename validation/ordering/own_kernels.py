"""The project's own kernels under the audit: compiled for every architecture, with roles taken from their operand contracts.

They are the binaries of `kimi_k3_decode.build`, kept where the kernel table's are: what one compiled, the other finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_k3_decode import build, toolchain
from validation.core.types import HarnessError
from validation.ordering.corpus_build import may_write, writable_cache
from validation.ordering.corpus_cases import ARCHITECTURES
from validation.ordering.model import LaunchFacts, Role, RoleEntry, RoleMap

PROJECT_ROOT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT_ROOT / "kimi_k3_decode"
VARIANTS = "validation.ordering.own_compile:variants"
REASONS = {
    "operand": "contract of {op}: role {role}",
    "other": "other parity of the mailbox, re-armed by its consumer",
    "boxes": "mailbox of a peer rank, written through",
    "health": "sticky health word, polled while waiting",
    "absent": "absent in this mode: must not be touched",
}


@dataclass(frozen=True, kw_only=True)
class OwnKernel:
    """One compiled variant with what the contract says about it."""

    name: str
    model: str
    op: str
    variant: str
    arch: str
    pdl: bool
    cubin: Path
    ptx: Path
    params: tuple[Mapping[str, Any], ...]

    def roles(self, changed: Mapping[str, Role] | None = None) -> RoleMap:
        """Roles by parameter index; `changed` replaces some by operand name (what would be found if the contract said otherwise)."""
        entries: dict[tuple[int, int], RoleEntry] = {}
        index = 0
        for param in self.params:
            pointer = param["kind"] in REASONS
            role = Role(param["role"]) if pointer and param["kind"] != "absent" else Role.UNKNOWN if pointer else Role.SCALAR
            # Neither is a message: the health word is one sticky word, and the re-armed parity is this rank's own until the next exchange.
            role = {"health": Role.STATE, "other": Role.SCRATCH}.get(param["kind"], role)
            role = (changed or {}).get(param["name"], role)
            reason = REASONS.get(param["kind"], "scalar").format(op=self.op, role=role.value)
            for _ in range(param["count"]):
                name = param["name"] + (" (re-armed)" if param["kind"] == "other" else "")
                entries[(index, 0)] = RoleEntry(role=role, reason=reason, name=name)
                index += 1
        return RoleMap(by_index=entries, source="contract")

    def launch(self) -> LaunchFacts:
        """The strictest launch the plan makes of it: programmatic, with nothing ordered beforehand."""
        return LaunchFacts(pdl=True)


@dataclass(frozen=True, kw_only=True)
class OwnBuild:
    kernels: tuple[OwnKernel, ...]
    errors: Mapping[str, str] = field(default_factory=dict)
    compiled: int = 0
    seconds: float = 0.0
    scope: str = ""


def kernels_exist() -> bool:
    """Whether the package has kernels to audit at all."""
    return (PACKAGE / "kernels.py").is_file()


def kernel_sources() -> str:
    """SHA-256 (hex) of the sources alone, whatever compiles them: what a trace of launches belongs to."""
    return build.digest_of(_device_sources(), "")


def _device_sources() -> list[Path]:
    parts = [PACKAGE / "config.py", PACKAGE / "kernels.py", *(PACKAGE / "device").rglob("*.py")]
    return parts + [path for path in (PACKAGE / "ops").rglob("*.py") if path.name != "oracle.py"]


def build_own(scope: str, archs: Sequence[str] = ARCHITECTURES, cache: Path | None = None, jobs: int = 2) -> OwnBuild:
    """Compile every variant of a scope that the cache lacks. Raises HarnessError when a compiler process dies or is not the project's."""
    try:
        made = build.produce(VARIANTS, scope, archs, _folders(cache), jobs)
    except (build.BuildError, toolchain.ToolchainError) as error:
        raise HarnessError(f"own kernels: {error}") from error
    kernels = tuple(own_kernel(entry) for entry in made.entries)
    return OwnBuild(kernels=kernels, errors=made.errors, compiled=made.compiled, seconds=made.seconds, scope=scope)


def own_kernel(entry: build.Entry) -> OwnKernel:
    return OwnKernel(
        name=entry.name,
        model=entry.facts["model"],
        op=entry.op,
        variant=entry.row.kernel,
        arch=entry.row.arch,
        pdl=entry.facts["pdl"],
        cubin=entry.cubin,
        ptx=entry.ptx,
        params=entry.params,
    )


def _folders(cache: Path | None) -> list[Path]:
    """Where binaries are written, then where more may be read: the kernel table's own, or one below `cache`; where the project may not be
    written (a sandbox), one below the temporary folder."""
    if cache is not None:
        return [cache / "own"]
    return [build.CACHE] if may_write(build.CACHE) else [writable_cache(None) / "own", build.CACHE]
