"""Compiles every CuTe DSL case for every architecture in one process; a case that does not compile is reported, the rest goes on.

Run as a program: `corpus_dsl.py REQUEST`, where REQUEST is JSON {"folder": sources, "names": [...], "archs": [...], "out": folder}.
Writes NAME.ARCH.cubin and NAME.ARCH.ptx below `out` and prints one JSON object {"errors": {"NAME.ARCH": message}} as its last line.
No GPU is needed: arguments are fake tensors and the target is named explicitly.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def compile_case(name: str, arch: str, out: Path) -> None:
    """Raises whatever the compiler raises."""
    import cutlass.cute as cute

    prelude = importlib.import_module("prelude")
    module = importlib.import_module(name)
    compiled = cute.compile[cute.GPUArch(arch), cute.KeepPTX(), cute.KeepCUBIN()](module.launch, *prelude.arguments())
    cubin, ptx = compiled.__cubin__, compiled.__ptx__
    if not cubin or not ptx:
        raise RuntimeError(f"compiler: got no {'PTX' if cubin else 'cubin'} for {name}, needs both")
    (out / f"{name}.{arch}.cubin").write_bytes(cubin)
    (out / f"{name}.{arch}.ptx").write_text(ptx if isinstance(ptx, str) else ptx.decode())


def main(request: dict[str, Any]) -> dict[str, str]:
    out = Path(request["out"])
    sys.path.insert(0, request["folder"])
    errors = {}
    for name in request["names"]:
        for arch in request["archs"]:
            try:
                compile_case(name, arch, out)
            except Exception as error:
                errors[f"{name}.{arch}"] = f"{type(error).__name__}: {str(error)[:800]}"
    return errors


if __name__ == "__main__":
    found = main(json.loads(sys.argv[1]))
    print(json.dumps({"errors": found}))
