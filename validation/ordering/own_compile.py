"""Compiles the project's own kernels for the audit: every variant that the schedules can choose, for every architecture, with no GPU.

Run as a program: `python -m validation.ordering.own_compile REQUEST`, where REQUEST is JSON {"scope", "archs", "out", "part", "parts"}.
Writes ID.cubin, ID.ptx and ID.json (what each parameter is) below `out`, skips what is there, and prints one JSON object as its last line.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3_decode import toolchain

if TYPE_CHECKING:
    from kimi_k3_decode.config import ModelConfig, Shard
    from kimi_k3_decode.device.launcher import KernelSpec
    from kimi_k3_decode.ops.contract import Contract

MAX_Q = 8
# A scope names (model, tensor-parallel degrees, row buckets, tokens a request).
FULL_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
SCOPES: dict[str, tuple[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]] = {
    "full": (("kimi-k3", (8, 16), FULL_ROWS, tuple(range(1, MAX_Q + 1))), ("nano-k3", (1, 2), FULL_ROWS, (1, 4, 8))),
    "deployed": (("kimi-k3", (8,), FULL_ROWS, (1, 4, 8)),),
    "ends": (("kimi-k3", (8,), (1,), (1,)), ("kimi-k3", (8,), (64,), (1,))),  # one variant an operation, fewest and most rows
    "ops": (("kimi-k3", (8,), (8,), (1,)),),  # one variant an operation
}
SAMPLES = ("ends", "ops")  # scopes that stop at one variant an operation and row


def variants(scope: str) -> Iterator[tuple[ModelConfig, KernelSpec, bool]]:
    """Each distinct compiled variant of a scope once, and whether the plan launches it programmatically."""
    from kimi_k3_decode.config import K3, NANO, Shard
    from kimi_k3_decode.kernels import kernel_spec

    configs = {config.name: config for config in (K3, NANO)}
    seen: set[str] = set()
    for number, (model, degrees, buckets, tokens) in enumerate(SCOPES[scope]):
        config = configs[model]
        for tp in degrees:
            contracts: set[str] = set()
            for contract, pdl in _contracts(config, Shard(config=config, tp=tp, rank=0), buckets, tokens):
                identity = f"{contract.op} {sorted(contract.parameters.items(), key=str)}"
                sample = f"{number} {contract.op}"
                if identity in contracts or (scope in SAMPLES and sample in seen):
                    continue
                contracts.add(identity)
                spec = kernel_spec(config, contract)
                key = f"{config.name} {spec.id}"
                if key not in seen:
                    seen |= {key, sample}
                    yield config, spec, pdl


def _contracts(config: ModelConfig, shard: Shard, buckets: tuple[int, ...], tokens: tuple[int, ...]) -> Iterator[tuple[Contract, bool]]:
    """Contracts of one whole step, then of every other row count and q: a layer of each kind and both ends."""
    from kimi_k3_decode.launches import launch_graph, layer_plan
    from kimi_k3_decode.ops.registry import CONTRACTS

    rows = min(buckets)
    yield from ((launch.contract, launch.pdl) for launch in launch_graph(config, shard, rows, 1))
    kinds = {(config.is_moe(layer), config.is_kda(layer)): layer for layer in reversed(range(config.n_layers))}
    for q in tokens:
        for rows in sorted({bucket // q * q for bucket in buckets if bucket >= q}):
            for layer in sorted(kinds.values()):
                yield from ((launch.contract, launch.pdl) for launch in layer_plan(config, shard, layer, rows, q))
            yield CONTRACTS["embedding"](shard, rows=rows), False
            yield CONTRACTS["lm_head"](shard, rows=rows), True
            yield CONTRACTS["sample"](shard, rows=rows, top_k=1), True


PACKAGE = Path(__file__).resolve().parents[2] / "kimi_k3_decode"
_IMPORT = re.compile(r"^\s*from (kimi_k3_decode(?:\.\w+)*) import (\([^)]*\)|[^\n#]+)", re.MULTILINE)


def modules_below(module: str) -> tuple[Path, ...]:
    """Files of this package that a module imports, directly or not, itself included: what the binaries it describes depend on."""
    found: set[Path] = set()
    waiting = [module, "kimi_k3_decode.config", "kimi_k3_decode.device.launcher"]
    while waiting:
        path = _file_of(waiting.pop())
        if path is None or path in found or path.name == "oracle.py":
            continue
        found.add(path)
        for parent, names in _IMPORT.findall(path.read_text()):
            waiting += [parent, *(f"{parent}.{name.split(' as ')[0].strip()}" for name in names.strip("()").split(",") if name.strip())]
    return tuple(sorted(found))


def _file_of(module: str) -> Path | None:
    path = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
    return path if path.is_file() else None


@functools.cache
def sources_of(op: str) -> str:
    """SHA-256 (hex) of the sources and the compiler that shape the kernels of one operation: an edit elsewhere compiles nothing again."""
    from kimi_k3_decode.kernels import SPECS

    module = SPECS[op].__module__
    digest = hashlib.sha256(toolchain.identity().encode() + Path(__file__).read_bytes())
    for path in dict.fromkeys((*modules_below(module), *modules_below(module.replace(".launch", ".contract")))):
        digest.update(f"\0{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def name_of(model: str, spec: KernelSpec, arch: str) -> str:
    """File name of one variant: readable start, then a digest of what it is and of the sources it is made from."""
    digest = hashlib.sha256(f"{model} {spec.id} {arch} {sources_of(spec.op)}".encode()).hexdigest()[:20]
    return f"{spec.op}-{arch}-{digest}"


def compile_variant(spec: KernelSpec, arch: str) -> tuple[bytes, str]:
    """(cubin, PTX). Raises whatever the compiler raises."""
    import cutlass.cute as cute

    from kimi_k3_decode.device.launcher import placeholders

    compiled = cute.compile[(cute.GPUArch(arch), cute.KeepPTX(), cute.KeepCUBIN())](spec.make(), *placeholders(spec))
    cubin, ptx = compiled.__cubin__, compiled.__ptx__
    if not cubin or not ptx:
        raise RuntimeError(f"compiler: got no {'PTX' if cubin else 'cubin'} for {spec.id}, needs both")
    return cubin, ptx if isinstance(ptx, str) else ptx.decode()


def describe(config: ModelConfig, spec: KernelSpec, pdl: bool, arch: str) -> dict[str, Any]:
    """What the audit needs to know about a variant, as JSON values. Parameters are those of the kernel itself, in order."""
    params = [{"name": p.name, "kind": p.kind.value, "role": p.role, "bytes": p.bytes, "count": p.count} for p in spec.device_params]
    return {"model": config.name, "op": spec.op, "variant": spec.id, "arch": arch, "pdl": pdl, "params": params}


def main(request: dict[str, Any]) -> dict[str, Any]:
    out, started = Path(request["out"]), time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    names, errors, compiled = [], {}, 0
    work = [(config, spec, pdl, arch) for config, spec, pdl in variants(request["scope"]) for arch in request["archs"]]
    for number, (config, spec, pdl, arch) in enumerate(work):
        name = name_of(config.name, spec, arch)
        names.append(name)
        if number % request["parts"] != request["part"] or (out / f"{name}.json").is_file():
            continue
        try:
            cubin, ptx = compile_variant(spec, arch)
        except Exception as error:
            errors[f"{config.name} {spec.id} {arch}"] = f"{type(error).__name__}: {str(error)[:500]}"
            continue
        compiled += 1
        _write(out / f"{name}.cubin", cubin)
        _write(out / f"{name}.ptx", ptx.encode())
        _write(out / f"{name}.json", json.dumps(describe(config, spec, pdl, arch)).encode())
    return {"names": names, "errors": errors, "compiled": compiled, "seconds": round(time.perf_counter() - started, 2)}


def _write(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
