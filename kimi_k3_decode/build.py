"""Compiles kernels ahead of time, with no GPU, into one folder of binaries for the kernel table and the ordering audit alike.

A variant on one architecture is NAME.cubin, NAME.ptx and NAME.json (what was compiled and what it uses). NAME holds a digest of the
variant, the architecture, the compiler and the sources that the operation imports: an edit of one operation compiles that operation again
and nothing else, and what another machine made from the same sources can be copied into the folder.

`produce` shares the work among processes; each runs this module with one REQUEST and prints one JSON object as its last line.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kimi_k3_decode import toolchain
from kimi_k3_decode.cubin import resources, text_digest

if TYPE_CHECKING:
    from kimi_k3_decode.device.launcher import KernelSpec

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
PACKAGE = Path(__file__).resolve().parent
CACHE = PACKAGE.parent / ".cache" / "kernels"
SUFFIXES = (".cubin", ".ptx", ".json")
COMPILE_SECONDS = 1800
# `python -m MODULE REQUEST` with the package's folder first on the path: a worker runs in a folder of its own.
WORKER = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


class BuildError(RuntimeError):
    """A compiler process that died or did not end."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """One kernel on one architecture. Bytes are per thread for `stack_bytes` (spills and
    local arrays), per block for `shared_bytes` (static plus dynamic)."""

    kernel: str
    arch: str
    sass_sha256: str
    registers: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One binary on disk. `facts` is what the list of variants says about it, `params` are the kernel's own parameters in order."""

    name: str
    folder: Path
    row: Built
    op: str
    params: tuple[Mapping[str, Any], ...]
    facts: Mapping[str, Any]

    @property
    def cubin(self) -> Path:
        return self.folder / f"{self.name}.cubin"

    @property
    def ptx(self) -> Path:
        return self.folder / f"{self.name}.ptx"


@dataclass(frozen=True, kw_only=True)
class Production:
    entries: tuple[Entry, ...]
    errors: Mapping[str, str] = field(default_factory=dict)  # "variant architecture" -> what the compiler said
    compiled: int = 0
    seconds: float = 0.0


# ---- what a binary depends on ----
@functools.cache
def _imports(path: Path) -> tuple[str, ...]:
    """Modules that a file may import, by full name; names imported from a package are tried as modules too."""
    package = path.relative_to(PACKAGE.parent).with_suffix("").parts
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, (*package[: -node.level], node.module))) if node.level else node.module or ""
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return tuple(name for name in found if name.split(".")[0] == PACKAGE.name)


def modules_below(*modules: str) -> tuple[Path, ...]:
    """Files of this package that the modules import, directly or not, themselves included; oracles shape no binary."""
    found: set[Path] = set()
    waiting = list(modules)
    while waiting:
        path = PACKAGE.parent.joinpath(*waiting.pop().split(".")).with_suffix(".py")
        if path.is_file() and path not in found and path.name != "oracle.py":
            found.add(path)
            waiting += _imports(path)
    return tuple(sorted(found))


@functools.cache
def sources_of(op: str) -> str:
    """SHA-256 (hex) of the compiler and the sources that shape the kernels of one operation: an edit elsewhere compiles nothing again."""
    from kimi_k3_decode.kernels import SPECS

    module = SPECS[op].__module__
    shared = (f"{PACKAGE.name}.config", f"{PACKAGE.name}.device.launcher")
    files = modules_below(module, module.replace(".launch", ".contract"), *shared)
    return digest_of([*files, PACKAGE / "build.py", PACKAGE / "cubin.py"])


def digest_of(paths: Iterable[Path], compiler: str | None = None) -> str:
    """SHA-256 (hex) of files of this package and of the compiler (default: the installed one)."""
    digest = hashlib.sha256((toolchain.identity() if compiler is None else compiler).encode())
    for path in sorted(paths):
        digest.update(f"\0{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def package_digest() -> str:
    """SHA-256 (hex) of everything that decides which binaries there are: the whole package, for a plan may ask anything."""
    return digest_of([*PACKAGE.glob("*.py"), *(PACKAGE / "device").rglob("*.py"), *(PACKAGE / "ops").rglob("*.py")])


def name_of(spec: KernelSpec, arch: str) -> str:
    """File name of one variant: readable start, then a digest of what it is and of what it is made from."""
    return f"{spec.op}-{arch}-{hashlib.sha256(f'{spec.id} {arch} {sources_of(spec.op)}'.encode()).hexdigest()[:20]}"


# ---- one variant ----
def lower(kernel: Any, arguments: Sequence[Any], archs: Sequence[str], scratch: Path) -> dict[str, tuple[bytes, str]]:
    """(cubin, PTX) of a kernel object for each architecture, from one trace: only the host's messages name the architecture there.

    `scratch` is a folder of this process alone, where the compiler leaves its files. Raises whatever the compiler raises.
    """
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir

    made: dict[str, tuple[bytes, str]] = {}
    kept = ((cute.KeepCUBIN, "cubin"), (cute.KeepPTX, "ptx"))

    def lower_others(compiler: Any, module: Any, name: str) -> None:
        options = compiler.compile_options.options
        for arch in archs[1:]:
            options[cute.GPUArch] = cute.GPUArch(arch)
            pipeline = compiler.preprocess_pipeline(compiler._get_pipeline(None), arch)
            compiler.compiler_provider.compile(SimpleNamespace(operation=module.operation.clone()), pipeline, arch)
            cubin, ptx = (Path(f"{options[kind].dump_path}.{arch}.{suffix}") for kind, suffix in kept)
            made[arch] = (cubin.read_bytes(), ptx.read_text())
        options[cute.GPUArch] = cute.GPUArch(archs[0])

    chosen = (cute.GPUArch(archs[0]), cute.KeepCUBIN(), cute.KeepPTX(), DumpDir(str(scratch)))
    # No engine: nothing is launched here, and linking the host's half costs a seventh of the time.
    function = cute.compile[chosen](kernel, *arguments, trace_finalize_hooks=lower_others, no_jit_engine=True)
    made[archs[0]] = (function.__cubin__, function.__ptx__)
    missing = [arch for arch in archs if not all(made.get(arch, (None, None)))]
    if missing:
        raise RuntimeError(f"compiler: got no cubin or no PTX for {missing}, needs both; its files are in {scratch}")
    return {arch: made[arch] for arch in archs}


def build(spec: KernelSpec, archs: Sequence[str], scratch: Path) -> list[tuple[Built, bytes, str]]:
    """(row, cubin, PTX) of one variant for each architecture."""
    from kimi_k3_decode.device.launcher import placeholders

    kernel = spec.make()
    dynamic = shared_bytes(kernel)
    found = []
    for arch, (cubin, ptx) in lower(kernel, placeholders(spec), archs, scratch).items():
        used = resources(cubin)
        row = Built(
            kernel=spec.id,
            arch=arch,
            sass_sha256=text_digest(cubin),
            registers=used["registers"],
            stack_bytes=used["stack_bytes"],
            shared_bytes=used["shared"] + dynamic,
        )
        found.append((row, cubin, ptx))
    return found


def shared_bytes(kernel: Any) -> int:
    """Dynamic shared memory a kernel object asks for."""
    for holder in (kernel, getattr(kernel, "core", None), getattr(getattr(kernel, "core", None), "t", None), getattr(kernel, "row", None)):
        found = getattr(holder, "shared_bytes", None)
        if isinstance(found, int):
            return found
    return 0


def describe(spec: KernelSpec) -> dict[str, Any]:
    """The operation and the parameters of the kernel itself, in order, as JSON values."""
    params = [{"name": p.name, "kind": p.kind.value, "role": p.role, "bytes": p.bytes, "count": p.count} for p in spec.device_params]
    return {"op": spec.op, "params": params}


# ---- all variants of a list ----
def produce(variants: str, scope: str, archs: Sequence[str], folders: Sequence[Path], jobs: int = 2) -> Production:
    """Every binary of a list of variants, compiling what the folders lack.

    `variants` is "module:function" of a function that takes `scope` and yields (KernelSpec, facts as JSON values). New files go to the
    first folder; the others are only read.

    Raises:
        BuildError: a compiler process died. A variant that does not compile is in `errors` instead.
        ToolchainError: the compiler is not the project's.
    """
    started = time.perf_counter()
    toolchain.require()
    folders[0].mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(f"{variants} {scope} {' '.join(archs)} {package_digest()}".encode())
    digest.update(_file_of(variants).read_bytes())
    index = f"index-{digest.hexdigest()[:20]}.json"
    found = [json.loads((folder / index).read_text()) for folder in folders if (folder / index).is_file()]
    places = [[_folder_of(name, folders) for name, _ in listed] for listed in found[:1]]
    errors: dict[str, str] = {}
    compiled = 0
    if not found or not all(places[0]):
        answers = _compile(variants, scope, archs, folders, jobs)
        found = [answers[0]["names"]]
        places = [[_folder_of(name, folders) for name, _ in found[0]]]
        errors = {name: reason for answer in answers for name, reason in answer["errors"].items()}
        compiled = sum(answer["compiled"] for answer in answers)
        if all(places[0]):
            _write(folders[0] / index, json.dumps(found[0]).encode())
    entries = [_read(place, name, facts) for (name, facts), place in zip(found[0], places[0], strict=True) if place is not None]
    return Production(entries=tuple(entries), errors=errors, compiled=compiled, seconds=time.perf_counter() - started)


def _compile(variants: str, scope: str, archs: Sequence[str], folders: Sequence[Path], jobs: int) -> list[dict[str, Any]]:
    """The answers of `jobs` processes that share the work."""
    with ExitStack() as stack:
        running = []
        for part in range(jobs):
            # Kernels of one class share a file name, so every process gets a folder of its own for what the compiler leaves behind.
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="k3-cubin-"))
            request: dict[str, Any] = {"part": part, "parts": jobs, "scratch": scratch}
            request |= {
                "variants": variants,
                "scope": scope,
                "archs": list(archs),
                "folders": [str(folder.resolve()) for folder in folders],
            }
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-c", WORKER, str(PACKAGE.parent), f"{PACKAGE.name}.build", json.dumps(request)]
            pipe = subprocess.PIPE
            running.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=scratch, env=environment))
        try:
            return [_answer(process) for process in running]
        finally:
            for process in running:
                process.kill()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"build: got no end within {COMPILE_SECONDS} s, needs a compiler that finishes") from error
    if process.returncode != 0:
        raise BuildError(f"build: the compiler process ended with {process.returncode}: {err.strip()[-1500:]}")
    answer: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return answer


def _folder_of(name: str, folders: Sequence[Path]) -> Path | None:
    """The first folder that holds all files of an entry."""
    return next((folder for folder in folders if all((folder / f"{name}{suffix}").is_file() for suffix in SUFFIXES)), None)


def _read(folder: Path, name: str, facts: Mapping[str, Any]) -> Entry:
    table = json.loads((folder / f"{name}.json").read_text())
    return Entry(name=name, folder=folder, row=Built(**table["row"]), op=table["op"], params=tuple(table["params"]), facts=facts)


def _file_of(variants: str) -> Path:
    return PACKAGE.parent.joinpath(*variants.split(":")[0].split(".")).with_suffix(".py")


def _write(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(data)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


# ---- one process ----
def listed(variants: str, scope: str) -> Iterator[tuple[KernelSpec, Mapping[str, Any]]]:
    module, function = variants.split(":")
    yield from getattr(importlib.import_module(module), function)(scope)


def worker(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compile this process's share of a list; answers with the names of the whole list."""
    folders, scratch = [Path(folder) for folder in request["folders"]], Path(request["scratch"])
    names: list[tuple[str, Mapping[str, Any]]] = []
    errors: dict[str, str] = {}
    compiled = 0
    for number, (spec, facts) in enumerate(listed(request["variants"], request["scope"])):
        wanted = {arch: name_of(spec, arch) for arch in request["archs"]}
        names += [(name, facts) for name in wanted.values()]
        if number % request["parts"] != request["part"]:
            continue
        missing = [arch for arch, name in wanted.items() if _folder_of(name, folders) is None]
        if not missing:
            continue
        try:
            made = build(spec, missing, scratch)
        except Exception as error:
            errors[f"{spec.id} {' '.join(missing)}"] = f"{type(error).__name__}: {str(error)[:500]}"
            continue
        for row, cubin, ptx in made:
            stem = folders[0] / wanted[row.arch]
            about = {"row": asdict(row), **describe(spec)}
            for suffix, data in zip(SUFFIXES, (cubin, ptx.encode(), json.dumps(about).encode()), strict=True):
                _write(Path(f"{stem}{suffix}"), data)
            compiled += 1
    return {"names": names, "errors": errors, "compiled": compiled}


if __name__ == "__main__":
    print(json.dumps(worker(json.loads(sys.argv[1]))))
