"""Compile every kernel of every supported shape for the three architectures, with no GPU, and compare with the committed table.

`python -m kimi_k3_decode.compile [--arch A]... [--jobs N] [--write]`: the table (kernel_table.json) holds per kernel and architecture the
SASS digest, registers, stack and spill bytes, and shared memory. A digest that changed is reported; a spill the table does not have is an
error. Results are cached by the digest of the sources, so a second run compiles nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimi_k3_decode import toolchain
from kimi_k3_decode.config import K3, NANO, ModelConfig, Shard
from kimi_k3_decode.device.launcher import KernelSpec, placeholders
from kimi_k3_decode.kernels import kernel_spec
from kimi_k3_decode.launches import layer_plan
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.registry import CONTRACTS
from kimi_k3_decode.plan import ROW_BUCKETS

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
TABLE = Path(__file__).with_name("kernel_table.json")
SHAPES: tuple[tuple[ModelConfig, int], ...] = ((K3, 8), (K3, 16), (NANO, 1), (NANO, 2))
VERIFY_TOKENS = 8


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


def distinct_layers(config: ModelConfig) -> list[int]:
    """One layer for each combination of what its launches depend on."""
    found: dict[tuple[object, ...], int] = {}
    for layer in range(config.n_layers):
        kinds = (config.is_kda(layer), config.is_moe(layer), layer > 0 and config.is_moe(layer - 1))
        blocks = (config.writes_block(layer), config.n_blocks_before_attention(layer), config.n_blocks_before_mlp(layer))
        found.setdefault((layer == 0, *kinds, *blocks), layer)
    return list(found.values())


def step_contracts(config: ModelConfig, shard: Shard, rows: int, q: int) -> Iterator[Contract]:
    """Every distinct contract of a step, layers alike being taken once."""
    for layer in distinct_layers(config):
        yield from (launch.contract for launch in layer_plan(config, shard, layer, rows, q))
    yield from ends(shard, rows)


def variants() -> Iterator[KernelSpec]:
    """Every kernel that a step can launch: all shapes, all row buckets, one token a request and a full verify."""
    seen: set[str] = set()
    for config, tp in SHAPES:
        for rows in ROW_BUCKETS:
            for q in (1, VERIFY_TOKENS):
                if rows % q:
                    continue
                for contract in step_contracts(config, Shard(config=config, tp=tp), rows, q):
                    spec = kernel_spec(config, contract)
                    if spec.id not in seen:
                        seen.add(spec.id)
                        yield spec


def ends(shard: Shard, rows: int) -> Iterator[Contract]:
    """Contracts of what a step launches outside its layers."""
    yield CONTRACTS["embedding"](shard, rows=rows)
    yield CONTRACTS["attn_res"](shard, rows=rows, n_blocks=shard.config.n_blocks, final=True, writer="moe_tail")
    yield CONTRACTS["lm_head"](shard, rows=rows)
    yield CONTRACTS["sample"](shard, rows=rows, top_k=1)


# ELF attributes of `.nv.info` that hold a pair (symbol, value).
EIATTR_FRAME_SIZE, EIATTR_MIN_STACK_SIZE, EIATTR_REGCOUNT = 0x11, 0x12, 0x2F
PAIR_FORMAT = 0x04


def sections(cubin: bytes) -> dict[str, tuple[bytes, int]]:
    """Section name -> (contents, size). Contents are empty for sections that occupy no file space."""
    offset, entry, count, names = (*struct.unpack_from("<Q", cubin, 0x28), *struct.unpack_from("<HHH", cubin, 0x3A))
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * entry) for i in range(count)]
    strings = headers[names][4]
    found = {}
    no_bits = 8
    for name, kind, _, _, start, size, *_ in headers:
        text = cubin[strings + name : cubin.index(b"\0", strings + name)].decode()
        found[text] = (b"" if kind == no_bits else cubin[start : start + size], size)
    return found


def text_digest(cubin: bytes) -> str:
    """SHA-256 of the machine code: the .text sections of the ELF, in name order."""
    code = {name: contents for name, (contents, _) in sections(cubin).items() if name.startswith(".text.")}
    if not code:
        raise ValueError("cubin: got no .text section, needs at least one kernel")
    return hashlib.sha256(b"".join(code[name] for name in sorted(code))).hexdigest()


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack bytes a thread (spills and local arrays alike) and static shared bytes of the single kernel in `cubin`."""
    found = sections(cubin)
    info = found[".nv.info"][0]
    values: dict[int, int] = {}
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != PAIR_FORMAT:
            continue
        if size == 8:
            values[attribute] = max(values.get(attribute, 0), struct.unpack_from("<II", info, at)[1])
        at += size
    if EIATTR_REGCOUNT not in values:
        raise ValueError(f"cubin: got attributes {sorted(values)}, needs a register count; the ELF format changed")
    stack = max(values.get(EIATTR_FRAME_SIZE, 0), values.get(EIATTR_MIN_STACK_SIZE, 0))
    shared = sum(size for name, (_, size) in found.items() if name.startswith(".nv.shared.") and "reserved" not in name)
    return {"registers": values[EIATTR_REGCOUNT], "stack_bytes": stack, "shared": shared}


def build(spec: KernelSpec, arch: str) -> tuple[Built, bytes]:
    """Compile one kernel; returns its row of the table and the cubin. CUTE_DSL_ARCH must already name `arch`."""
    import cutlass.cute as cute

    kernel = spec.make()
    function = cute.compile[cute.KeepCUBIN, cute.KeepPTX](kernel, *placeholders(spec))
    cubin = function.__cubin__
    used = resources(cubin)
    dynamic = shared_bytes(kernel)
    row = Built(
        kernel=spec.id,
        arch=arch,
        sass_sha256=text_digest(cubin),
        registers=used["registers"],
        stack_bytes=used["stack_bytes"],
        shared_bytes=used["shared"] + dynamic,
    )
    return row, cubin


def shared_bytes(kernel: Any) -> int:
    """Dynamic shared memory a kernel object asks for."""
    for holder in (kernel, getattr(kernel, "core", None), getattr(getattr(kernel, "core", None), "t", None), getattr(kernel, "row", None)):
        found = getattr(holder, "shared_bytes", None)
        if isinstance(found, int):
            return found
    return 0


# ---- the runner ----
def source_digest() -> str:
    """SHA-256 of everything a binary depends on: this package's device code, launch parameters and configuration, and the compiler."""
    root = Path(__file__).parent
    files = [root / "config.py", root / "kernels.py", *sorted((root / "device").glob("*.py"))]
    for pattern in ("kernel.py", "*_kernel.py", "launch.py", "contract.py", "operands.py", "schedule.py"):
        files += sorted((root / "ops").rglob(pattern))
    found = hashlib.sha256()
    for file in files:
        found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    found.update(toolchain.identity().encode())
    return found.hexdigest()


def worker(arch: str, part: int, parts: int, out: Path) -> None:
    """Compile every `parts`-th kernel and write the rows as JSON lines (temporary file, then rename)."""
    rows = []
    for i, spec in enumerate(variants()):
        if i % parts == part:
            rows.append(json.dumps(asdict(build(spec, arch)[0])))
    draft = out.with_suffix(".tmp")
    draft.write_text("\n".join(rows) + "\n")
    draft.rename(out)


def run(architectures: tuple[str, ...], jobs: int, cache: Path) -> list[Built]:
    """All rows, from the cache where the sources are unchanged."""
    toolchain.require()
    folder = cache / source_digest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    pending = [(arch, part, folder / f"{arch}.{part}of{jobs}.jsonl") for arch in architectures for part in range(jobs)]
    pending = [job for job in pending if not job[2].exists()]
    running: list[tuple[subprocess.Popen[bytes], Path, str]] = []
    while pending or running:
        while pending and len(running) < jobs:
            arch, part, out = pending.pop(0)
            command = [sys.executable, "-m", "kimi_k3_decode.compile", "--worker", arch, str(part), str(jobs), str(out)]
            # Kernels of one class share a file name, so every worker gets a folder of its own for what the compiler leaves behind.
            dump = tempfile.mkdtemp(prefix="k3-cubin-")
            env = {**os.environ, "CUTE_DSL_ARCH": arch, "CUTE_DSL_DUMP_DIR": dump, "OMP_NUM_THREADS": "1"}
            running.append((subprocess.Popen(command, env=env), out, dump))
        process, out, dump = running.pop(0)
        failed = process.wait() or not out.exists()
        shutil.rmtree(dump, ignore_errors=True)
        if failed:
            raise RuntimeError(f"compile: worker for {out.name} ended with {process.returncode}; its message is above")
    rows = []
    for arch in architectures:
        for part in range(jobs):
            for line in (folder / f"{arch}.{part}of{jobs}.jsonl").read_text().splitlines():
                if line:
                    rows.append(Built(**json.loads(line)))
    return sorted(rows, key=lambda row: (row.kernel, row.arch))


def compare(rows: list[Built], table: Path = TABLE) -> dict[str, list[str]]:
    """What differs from the committed table: kernels added, gone, changed; and spills.

    "spills" are stack bytes that the table does not have, "known_spills" those it has: a few bytes that the assembler prefers to a lower
    occupancy in kernels with many sums, shown every time.
    """
    committed = {(r["kernel"], r["arch"]): r for r in json.loads(table.read_text())["kernels"]} if table.exists() else {}
    current = {(row.kernel, row.arch): row for row in rows}
    architectures = {row.arch for row in rows}
    name = "{0[0]} {0[1]}".format

    def allowed(key: tuple[str, str]) -> int:
        return int(committed[key]["stack_bytes"]) if key in committed else 0

    spilled = {key: row.stack_bytes for key, row in current.items() if row.stack_bytes}
    return {
        "added": [name(key) for key in current if key not in committed],
        "gone": [name(key) for key in committed if key not in current and key[1] in architectures],
        "changed": [name(key) for key, row in current.items() if key in committed and committed[key]["sass_sha256"] != row.sass_sha256],
        "spills": [f"{name(key)}: {size} bytes" for key, size in spilled.items() if size > allowed(key)],
        "known_spills": [f"{name(key)}: {size} bytes" for key, size in spilled.items() if size <= allowed(key)],
    }


def write_table(rows: list[Built], table: Path = TABLE) -> None:
    lines = ",\n  ".join(json.dumps(asdict(row)) for row in rows)
    draft = table.with_suffix(".tmp")
    draft.write_text(f'{{"sources": "{source_digest()}", "kernels": [\n  {lines}\n]}}\n')
    draft.rename(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kimi_k3_decode.compile", description=__doc__)
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path(".cache/kernels"))
    parser.add_argument("--write", action="store_true", help="replace the committed table")
    parser.add_argument("--worker", nargs=4, metavar=("ARCH", "PART", "PARTS", "OUT"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        arch, part, parts, out = given.worker
        worker(arch, int(part), int(parts), Path(out))
        return 0
    rows = run(tuple(given.arch or ARCHITECTURES), given.jobs, given.cache)
    found = compare(rows)
    if given.write:
        write_table(rows)
    print(json.dumps({"kernels": len(rows), **{what: len(names) for what, names in found.items()}}))
    for what, names in found.items():
        for kernel in names[:20]:
            print(f"{what}: {kernel}", file=sys.stderr)
    return 1 if found["spills"] else 0


if __name__ == "__main__":
    sys.exit(main())
