"""The project's own kernels under the audit: compiled for every architecture, with roles taken from their operand contracts.

Compilation is shared by worker processes and kept below the cache by the digest of everything that shapes a kernel: the modules that its
operation imports, and the compiler's version. So an edit of one operation compiles that operation again, and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_k3_decode import toolchain
from validation.core.types import HarnessError
from validation.ordering.corpus_build import writable_cache
from validation.ordering.corpus_cases import ARCHITECTURES
from validation.ordering.model import LaunchFacts, Role, RoleEntry, RoleMap

PROJECT_ROOT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT_ROOT / "kimi_k3_decode"
COMPILE_SECONDS = 1800
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
    return _digest(_device_sources(), "")


def plan_digest() -> str:
    """SHA-256 (hex) of everything that decides which binaries there are: the whole package, for a plan may ask anything."""
    paths = [*PACKAGE.glob("*.py"), *(PACKAGE / "device").rglob("*.py"), *(PACKAGE / "ops").rglob("*.py")]
    return _digest(paths, toolchain.identity())


def _device_sources() -> list[Path]:
    parts = [PACKAGE / "config.py", PACKAGE / "kernels.py", *(PACKAGE / "device").rglob("*.py")]
    return parts + [path for path in (PACKAGE / "ops").rglob("*.py") if path.name != "oracle.py"]


def _digest(paths: Sequence[Path], compiler: str) -> str:
    digest = hashlib.sha256(compiler.encode())
    for path in sorted(paths):
        digest.update(f"\0{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes())
    digest.update((Path(__file__).parent / "own_compile.py").read_bytes())
    return digest.hexdigest()


def build_own(scope: str, archs: Sequence[str] = ARCHITECTURES, cache: Path | None = None, jobs: int = 2) -> OwnBuild:
    """Compile every variant of a scope that the cache lacks. Raises HarnessError when a compiler process dies."""
    started = time.perf_counter()
    out = writable_cache(cache) / "own" / "variants"
    requests = [{"scope": scope, "archs": list(archs), "out": str(out), "part": part, "parts": jobs} for part in range(jobs)]
    index = out / f"index-{scope}-{'-'.join(archs)}-{plan_digest()[:12]}.json"
    if index.is_file():
        answers = [json.loads(index.read_text())]
    else:
        with contextlib.ExitStack() as folders:
            # Kernels of one class share a file name, so every worker gets a folder of its own for what the compiler leaves behind.
            running = [_start(request, folders.enter_context(tempfile.TemporaryDirectory(prefix="k3-cubin-"))) for request in requests]
            answers = [_finish(process) for process in running]
    errors = {name: reason for answer in answers for name, reason in answer["errors"].items()}
    names = answers[0]["names"]
    kernels = tuple(_read(out, name) for name in names if (out / f"{name}.json").is_file())
    if not errors and len(kernels) == len(names):
        temporary = index.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"names": names, "errors": {}, "compiled": 0}))
        os.replace(temporary, index)
    return OwnBuild(
        kernels=kernels, errors=errors, compiled=sum(a["compiled"] for a in answers), seconds=time.perf_counter() - started, scope=scope
    )


def _start(request: Mapping[str, Any], scratch: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "CUTE_DSL_DUMP_DIR": scratch, "PYTHONPATH": str(PROJECT_ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "validation.ordering.own_compile", json.dumps(request)]
    # Nothing is compiled in the project's folder: the compiler leaves files where it runs.
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=scratch, env=environment)


def _finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise HarnessError(f"own kernels: got no end within {COMPILE_SECONDS} s, needs a compiler that finishes") from error
    if process.returncode != 0:
        raise HarnessError(f"own kernels: the compiler process ended with {process.returncode}: {err.strip()[-1500:]}")
    answer: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return answer


def _read(folder: Path, name: str) -> OwnKernel:
    table = json.loads((folder / f"{name}.json").read_text())
    return OwnKernel(
        name=name, model=table["model"], op=table["op"], variant=table["variant"], arch=table["arch"], pdl=table["pdl"],
        cubin=folder / f"{name}.cubin", ptx=folder / f"{name}.ptx", params=tuple(table["params"]),
    )  # fmt: skip
