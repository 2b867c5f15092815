"""Which compiler builds the kernels: nvidia-cutlass-dsl's version, and which CUDA release its libraries come from (their flavour).

The package comes with the assembler of CUDA 12 or of CUDA 13, and their machine code differs. Both can lie side by side: the package then
loads the newest that the GPU's driver can run, and without a driver the newest. This project compiles with CUDA 13's everywhere, so that
the binaries that are audited are those that are timed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

PACKAGE = "nvidia-cutlass-dsl"
FLAVOUR = "cu13"
ROOT = Path(__file__).resolve().parents[1]
_LIBRARY = re.compile(r"^_cutlass_ir\.cu(\d+)\..*\.(?:so|pyd)$")
_LOADED = "cutlass._mlir._mlir_libs._cutlass_ir"


class ToolchainError(RuntimeError):
    """The compiler that is installed cannot be told, or is not the project's."""


def identity(root: Path = ROOT) -> str:
    """The compiler in words, e.g. "nvidia-cutlass-dsl 4.8.1 cu13": part of every digest of what a binary depends on.

    Needs no GPU and imports nothing. Where no compiler is installed, the one that `root` pins: records can be judged there all the same.

    Raises:
        ToolchainError: the compiler has no libraries, or those of which it is unclear which it would load.
    """
    folder = _libraries()
    if folder is None:
        return f"{PACKAGE} {_pinned(root) or 'unknown'} {FLAVOUR}"
    found = flavour(folder)
    return f"{PACKAGE} {_version(found) or _pinned(root) or 'unknown'} {found}"


def require() -> None:
    """Refuses to compile with another flavour than the project's. Raises ToolchainError."""
    folder = _libraries()
    found = flavour(folder) if folder is not None else "no compiler"
    if found != FLAVOUR:
        raise ToolchainError(f'compiler: got {found}, needs the libraries of {FLAVOUR}; install "{PACKAGE}[{FLAVOUR}]" (make setup does)')


def flavour(folder: Path) -> str:
    """The flavour that is loaded, else the one of `folder` (the package's compiled libraries) that would be. Raises ToolchainError."""
    loaded = _LIBRARY.match(Path(getattr(sys.modules.get(_LOADED), "__file__", None) or "").name)
    if loaded is not None:
        return f"cu{loaded[1]}"
    releases = sorted(int(match[1]) for path in folder.iterdir() if (match := _LIBRARY.match(path.name)))
    if not releases:
        raise ToolchainError(f'compiler: got no libraries in {folder}, needs those of {FLAVOUR}; install "{PACKAGE}[{FLAVOUR}]"')
    driver = driver_release()
    if driver is not None and driver < releases[-1] and len(releases) > 1:
        names = " and ".join(f"cu{release}" for release in releases)
        raise ToolchainError(
            f"compiler: got the libraries of {names} beside a driver of CUDA {driver}, with which the older ones would compile; "
            f"needs a driver of CUDA {releases[-1]}, or none; update it"
        )
    return f"cu{releases[-1]}"


@functools.cache
def driver_release() -> int | None:
    """The CUDA release (its first number) that this machine's driver runs; None without a driver."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000


def _libraries() -> Path | None:
    """Where the package's compiled libraries lie, installed or only unpacked on the path; None without the package."""
    spec = importlib.util.find_spec("cutlass")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "_mlir" / "_mlir_libs"
    return folder if folder.is_dir() else None


def _version(found: str) -> str | None:
    """The installed version: of the libraries themselves, for an unpacked compiler has no other metadata, and may have none at all."""
    for name in (f"{PACKAGE}-libs-{found}", PACKAGE, f"{PACKAGE}-libs-base"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _pinned(root: Path) -> str | None:
    path = root / "pyproject.toml"
    match = re.search(rf'"{PACKAGE}(?:\[\w+\])?==([^"]+)"', path.read_text()) if path.is_file() else None
    return match[1] if match else None
