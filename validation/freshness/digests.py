"""Digests of what a GPU measurement depends on, by part, computed from the checkout alone (no GPU, no compiler, nothing imported).

    kernels/<op>    the kernel, launch and schedule files of one folder of `kimi_k3_decode/ops`, and every project file they import
    contracts/<op>  its operand contract, and every project file that imports
    kernels         all of the first, and the step that launches them
    contracts       all of the second
    config          model dimensions, launch list and plan
    toolchain       the version of the kernel compiler, and the CUDA release of its assembler

A digest covers what Python executes: comments, docstrings and layout do not count, so that a reworded sentence makes no evidence stale.
It is the same under every Python version the project supports.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kimi_k3_decode import toolchain
from validation.core.settings import PROJECT_ROOT
from validation.core.types import HarnessError

PACKAGE = "kimi_k3_decode"
CONFIG_FILES = ("config.py", "launches.py", "plan.py")
STEP_FILES = ("kernels.py", "gpu_step.py")
# Files that only read and write checkpoints: a clearer error for a broken file makes no kernel stale. A version of one counts as the
# one that was measured (first) only when somebody looked at what changed and listed it here; any other version makes evidence stale.
READERS: Mapping[str, tuple[str, ...]] = {
    "kimi_k3_decode/checkpoint.py": (
        "3b2fd74563500796beaa6dee8fcdaf92484cf889e342960689941bcd8c738e28",
        "0b3ffa9e6fe615b114ca15b74602eef08e7358d3ca04514775fff3ba1b40f91c",  # refuses damaged headers and names what is wrong
    ),
    "kimi_k3_decode/config_io.py": (
        "8cb6b78071273db6c362d9e16d583aec30f2f077e53a73307699b13b81d6530a",
        "245a2f02c32fde2a0db9a465dcc577fe6efcebd4e9e836e0924f438fb1c5e914",  # refuses non-finite numbers and names missing keys
    ),
}
_NOT_KERNEL = ("contract.py", "oracle.py", "__init__.py")


def current(root: Path = PROJECT_ROOT) -> dict[str, str]:
    """Every part of this checkout with its digest. Raises HarnessError when a source cannot be parsed or the compiler not be told."""
    package = root / PACKAGE
    if not (package / "ops").is_dir():
        raise HarnessError(f"freshness: got no {PACKAGE}/ops below {root}, needs a checkout of this project")
    tree = _Tree(root)
    folders = sorted(folder for folder in (package / "ops").iterdir() if (folder / "contract.py").exists())
    kernels = {f.name: [p for p in sorted(f.glob("*.py")) if p.name not in _NOT_KERNEL] for f in folders}
    contracts = {f.name: [f / "contract.py"] for f in folders}
    step = [package / name for name in STEP_FILES]
    parts = {f"kernels/{name}": tree.digest(files) for name, files in kernels.items()}
    parts |= {f"contracts/{name}": tree.digest(files) for name, files in contracts.items()}
    parts["kernels"] = tree.digest([p for files in kernels.values() for p in files] + step)
    parts["contracts"] = tree.digest([p for files in contracts.values() for p in files])
    parts["config"] = tree.digest([package / name for name in CONFIG_FILES], follow=False)
    parts["toolchain"] = hashlib.sha256(compiler(root).encode()).hexdigest()
    return parts


def binding(ops: Iterable[str] | None = None, root: Path = PROJECT_ROOT) -> dict[str, str]:
    """The parts a record depends on, for `Evidence.fingerprints`: those of the named folders of `ops`, or of the whole step (None).

    Raises:
        HarnessError: an op that this checkout does not have.
    """
    parts = current(root)
    if ops is None:
        return {name: parts[name] for name in ("kernels", "contracts", "config", "toolchain")}
    names = sorted(set(ops))
    unknown = [name for name in names if f"kernels/{name}" not in parts]
    if unknown or not names:
        known = sorted(name.removeprefix("kernels/") for name in parts if name.startswith("kernels/"))
        raise HarnessError(f"freshness: got the ops {unknown or names}, needs some of {known}; launches are listed in {PACKAGE}/kernels.py")
    wanted = [f"{kind}/{name}" for name in names for kind in ("kernels", "contracts")]
    return {name: parts[name] for name in [*wanted, "config", "toolchain"]}


def compiler(root: Path = PROJECT_ROOT) -> str:
    """The installed kernel compiler with its flavour; where none is installed, the one this checkout pins. Raises HarnessError."""
    try:
        return toolchain.identity(root)
    except toolchain.ToolchainError as error:
        raise HarnessError(f"freshness: {error}") from None


class _Tree:
    """Sources of one checkout with their imports; a file is parsed again only when it changed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def _read(self, path: Path) -> tuple[str, tuple[Path, ...]]:
        state = path.stat()
        return _parse(self._root, path, state.st_mtime_ns, state.st_size)

    def digest(self, files: Iterable[Path], *, follow: bool = True) -> str:
        """Over the given files and, with `follow`, every project file they import, whatever the order."""
        todo, seen = list(files), set()
        while todo:
            path = todo.pop()
            if path in seen or not path.exists():
                continue
            seen.add(path)
            todo += self._read(path)[1] if follow else []
        names = {path.relative_to(self._root).as_posix(): path for path in sorted(seen)}
        lines = [f"{name} {_counts_as(name, self._read(path)[0])}" for name, path in names.items()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _counts_as(name: str, digest: str) -> str:
    """The digest that a file's content stands for: its own, or for a reviewed version of a reader that of the measured version."""
    reviewed = READERS.get(name, ())
    return reviewed[0] if digest in reviewed else digest


@functools.lru_cache(maxsize=4096)
def _parse(root: Path, path: Path, mtime_ns: int, size_bytes: int) -> tuple[str, tuple[Path, ...]]:
    """Digest of what one file executes, and the project files it imports."""
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, ValueError) as error:
        raise HarnessError(f"freshness: got {error} in {path}, needs Python that parses") from None
    text = "".join(_canonical(_without_docstrings(tree)))
    return hashlib.sha256(text.encode()).hexdigest(), tuple(_imported(root, path, tree))


def _imported(root: Path, path: Path, tree: ast.AST) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(path.relative_to(root).parts[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (parent, node.module)))
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name.split(".")[0] == PACKAGE:
                base = root.joinpath(*name.split("."))
                yield from (p for p in (base.with_suffix(".py"), base / "__init__.py") if p.exists())


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                node.body = node.body[1:]
    return tree


def _canonical(node: object) -> Iterator[str]:
    """Text of a syntax tree without positions and empty fields: fields that a newer Python adds are empty for older code."""
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if value is None or value == [] or name in ("ctx", "kind", "type_comment"):
                continue
            yield f" {name}="
            yield from _canonical(value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _canonical(item)
            yield ","
        yield "]"
    else:
        yield repr(node)


def changed(recorded: Mapping[str, str], now: Mapping[str, str], bound_to: Iterable[str]) -> tuple[str, ...]:
    """What separates a record from this checkout, in words; empty when it is fresh. A record that names no digest of a part that the
    policy binds evidence to cannot be shown to be fresh, so it is not."""
    found = []
    for kind in bound_to:
        names = [name for name in recorded if name == kind or name.startswith(f"{kind}/")]
        if not names:
            found.append(f"{kind}: the record carries no digest")
        for name in sorted(names):
            if name not in now:
                found.append(f"{name}: no longer exists")
            elif recorded[name] != now[name]:
                found.append(f"{name} changed")
    return tuple(found)


def main() -> int:
    """Print this checkout's digests as JSON: run it where the measurement runs, and keep it beside the records."""
    import json

    print(json.dumps(current(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
