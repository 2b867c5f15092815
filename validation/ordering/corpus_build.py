"""Compiles the corpus on the spot, in few processes, and keeps the results by (sources, toolchain versions, architecture).

PTX cases of one architecture are one module for one `ptxas` run, CUDA cases one translation unit for one `nvcc` run, and all CuTe DSL
cases of all architectures one Python process. When a unit does not compile, its cases are compiled one by one to find the culprits.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kimi_k3_decode import toolchain as kernel_compiler
from validation.core.types import HarnessError
from validation.ordering import corpus_dsl
from validation.ordering.corpus_cases import ARCHITECTURES, PRELUDE, CorpusCase
from validation.ordering.tools import ToolError, find_tool, run_tool

BUILDER_VERSION = 1
DEFAULT_CACHE = Path(__file__).resolve().parents[2] / ".cache" / "ordering"
PTX_HEADER = ".version 8.8\n.target {arch}\n.address_size 64\n"
CPP_FLAGS = ("-std=c++17", "--ptx")
DSL_SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class Built:
    """One compiled case: the binary and the PTX it was assembled from. Kernels are found in it by `kernel` (a regular expression)."""

    case: str
    arch: str
    cubin: Path
    ptx: Path
    kernel: str


@dataclass(frozen=True, kw_only=True)
class Build:
    built: Mapping[tuple[str, str], Built]  # (case, arch)
    errors: Mapping[tuple[str, str], str] = field(default_factory=dict)
    toolchain: Mapping[str, str] = field(default_factory=dict)
    compiled_units: int = 0  # the rest came from the cache
    seconds: float = 0.0


@functools.cache
def toolchain() -> Mapping[str, str]:
    """Versions of everything that shapes a binary. Raises ToolError when nvcc or ptxas is missing."""
    versions = {}
    for name in ("nvcc", "ptxas"):
        found = re.search(r"V(\d[\d.]+)", run_tool(name, "--version"))
        versions[name] = found.group(1) if found else "unknown"
    package, version = kernel_compiler.identity().split(" ", 1)
    versions[package] = version
    try:
        versions["nvidia-nvvm"] = importlib.metadata.version("nvidia-nvvm")
    except importlib.metadata.PackageNotFoundError:
        versions["nvidia-nvvm"] = "absent"
    return versions


def build(cases: Sequence[CorpusCase], archs: Iterable[str] = ARCHITECTURES, cache: Path | None = None, jobs: int = 2) -> Build:
    """Compile what the cache does not hold. Safe to run in several processes at once. Raises HarnessError when a tool is missing."""
    started = time.perf_counter()
    archs = tuple(archs)
    try:
        versions = toolchain()
        find_tool("nvcc")
    except ToolError as error:
        raise HarnessError(f"corpus build: {error}") from error
    cache = writable_cache(cache)
    units = [_Unit(family, arch, tuple(c for c in cases if c.family == family)) for family in ("ptx", "twins", "cuda") for arch in archs]
    units += [_Unit("cutedsl", arch, tuple(c for c in cases if c.family == "cutedsl")) for arch in archs]
    units = [unit for unit in units if unit.cases]
    folders = {unit: cache / "corpus" / f"{unit.family}-{unit.arch}-{unit.key(versions)[:24]}" for unit in units}
    missing = [unit for unit in units if not (folders[unit] / "built.json").is_file()]
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        dsl = [unit for unit in missing if unit.family == "cutedsl"]
        work = [pool.submit(_compile_dsl, dsl, folders)] if dsl else []
        work += [pool.submit(_compile_unit, unit, folders[unit]) for unit in missing if unit.family != "cutedsl"]
        for item in work:
            item.result()
    return _collect(units, folders, versions, len(missing), time.perf_counter() - started)


def writable_cache(cache: Path | None) -> Path:
    """`cache`, the project's own, or (where that may not be written, as in a sandbox) one below the temporary folder."""
    wanted = cache or DEFAULT_CACHE
    if may_write(wanted):
        return wanted
    fallback = Path(tempfile.gettempdir()) / "ordering-cache"
    _copy_tree(wanted / "corpus", fallback / "corpus")
    return fallback


def may_write(folder: Path) -> bool:
    """Whether files can be made in the folder, which is created when needed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _copy_tree(source: Path, target: Path) -> None:
    if source.is_dir() and not target.exists():
        shutil.copytree(source, target)
    target.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, eq=False)
class _Unit:
    family: str
    arch: str
    cases: tuple[CorpusCase, ...]

    def key(self, versions: Mapping[str, str]) -> str:
        digest = hashlib.sha256(json.dumps([BUILDER_VERSION, self.arch, dict(versions), CPP_FLAGS, PTX_HEADER]).encode())
        for case in self.cases:
            digest.update(f"\0{case.name}\0".encode() + case.source.read_bytes())
        if self.family == "cutedsl":
            digest.update((self.cases[0].source.parent / PRELUDE).read_bytes() + Path(corpus_dsl.__file__).read_bytes())
        return digest.hexdigest()


def _compile_unit(unit: _Unit, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent if folder.parent.is_dir() else None, prefix="build-") as scratch_name:
        scratch = Path(scratch_name)
        errors: dict[str, str] = {}
        try:
            _assemble(unit, unit.cases, scratch, "all")
        except ToolError as error:
            for case in unit.cases:
                try:
                    _assemble(unit, (case,), scratch, case.name)
                except ToolError as single:
                    errors[case.name] = str(single)
            if not errors:
                raise HarnessError(f"corpus build: the {unit.family} cases compile one by one but not together: {error}") from error
        whole = (scratch / "all.cubin").is_file()
        files = {case.name: ("all" if whole else case.name) for case in unit.cases if case.name not in errors}
        _publish(scratch, folder, files, errors)


def _assemble(unit: _Unit, cases: Sequence[CorpusCase], scratch: Path, stem: str) -> None:
    ptx = scratch / f"{stem}.ptx"
    if unit.family == "cuda":
        source = scratch / f"{stem}.cu"
        blocks = [f'namespace case_{case.name} {{\n#include "{case.source}"\n}}\n' for case in cases]
        source.write_text("#include <cuda_runtime.h>\n" + "".join(blocks))
        run_tool("nvcc", f"-arch={unit.arch}", *CPP_FLAGS, "-o", str(ptx), str(source), cwd=scratch)
    else:
        ptx.write_text(PTX_HEADER.format(arch=unit.arch) + "".join(case.source.read_text() for case in cases))
    cubin = scratch / f"{stem}.cubin"
    run_tool("ptxas", f"-arch={unit.arch}", "-o", str(cubin), str(ptx), cwd=scratch)


def _compile_dsl(units: Sequence[_Unit], folders: Mapping[_Unit, Path]) -> None:
    cases, parent = units[0].cases, folders[units[0]].parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix="build-") as scratch_name:
        scratch = Path(scratch_name)
        request = {
            "folder": str(cases[0].source.parent),
            "names": [case.name for case in cases],
            "archs": [unit.arch for unit in units],
            "out": str(scratch),
        }
        environment = {**os.environ, "CUTE_DSL_DUMP_DIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, corpus_dsl.__file__, json.dumps(request)],
            capture_output=True, text=True, cwd=scratch, env=environment, timeout=DSL_SECONDS, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise HarnessError(f"corpus build: the CuTe DSL compiler process ended with {done.returncode}: {done.stderr.strip()[-1500:]}")
        errors = json.loads(done.stdout.strip().splitlines()[-1])["errors"]
        for unit in units:
            part = scratch / unit.arch
            part.mkdir()
            for case in unit.cases:
                for suffix in ("cubin", "ptx"):
                    made = scratch / f"{case.name}.{unit.arch}.{suffix}"
                    if made.is_file():
                        made.rename(part / f"{case.name}.{suffix}")
            failed = {case.name: errors[key] for case in unit.cases if (key := f"{case.name}.{unit.arch}") in errors}
            _publish(part, folders[unit], {c.name: c.name for c in unit.cases if c.name not in failed}, failed)


def _publish(scratch: Path, folder: Path, files: Mapping[str, str], errors: Mapping[str, str]) -> None:
    """Move a finished unit into place at once; a racing process that was faster wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=folder.parent, prefix="staged-"))
    for stem in sorted(set(files.values())):
        for suffix in ("cubin", "ptx"):
            shutil.copyfile(scratch / f"{stem}.{suffix}", staged / f"{stem}.{suffix}")
    (staged / "built.json").write_text(json.dumps({"files": dict(files), "errors": dict(errors)}, indent=1, sort_keys=True))
    try:
        os.rename(staged, folder)
    except OSError:
        shutil.rmtree(staged, ignore_errors=True)
        if not (folder / "built.json").is_file():
            raise


def _collect(units: Sequence[_Unit], folders: Mapping[_Unit, Path], versions: Mapping[str, str], compiled: int, seconds: float) -> Build:
    built, errors = {}, {}
    for unit in units:
        folder = folders[unit]
        record = json.loads((folder / "built.json").read_text())
        errors.update({(name, unit.arch): message for name, message in record["errors"].items()})
        for name, stem in record["files"].items():
            kernel = rf"kernel_cutlass_{name}_tensor.*" if unit.family == "cutedsl" else name
            built[(name, unit.arch)] = Built(
                case=name, arch=unit.arch, cubin=folder / f"{stem}.cubin", ptx=folder / f"{stem}.ptx", kernel=kernel
            )
    return Build(built=built, errors=errors, toolchain=versions, compiled_units=compiled, seconds=seconds)
