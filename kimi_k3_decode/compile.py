"""Compile every kernel of every supported shape for the three architectures, with no GPU, and compare with the committed table.

`python -m kimi_k3_decode.compile [OP]... [--arch A]... [--jobs N] [--cache FOLDER] [--write]`: the table (kernel_table.json) holds per
kernel and architecture the SASS digest, registers, stack bytes and shared memory. A digest that changed is reported; a stack byte is an
error: a spill, or a local array. Binaries are kept in the folder by what they are made from, so that a second run compiles nothing, an
edit of one operation only its own kernels, and the ordering audit finds them there.

Exit codes: 0 no kernel spills, 1 some do, 3 something did not compile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3_decode import toolchain
from kimi_k3_decode.build import ARCHITECTURES, CACHE, BuildError, Built, package_digest, produce
from kimi_k3_decode.config import K3, NANO, ModelConfig, Shard
from kimi_k3_decode.launches import layer_plan
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.registry import CONTRACTS
from kimi_k3_decode.plan import ROW_BUCKETS

if TYPE_CHECKING:
    from kimi_k3_decode.device.launcher import KernelSpec

TABLE = Path(__file__).with_name("kernel_table.json")
SHAPES: tuple[tuple[ModelConfig, int], ...] = ((K3, 8), (K3, 16), (NANO, 1), (NANO, 2))
# Tokens a request: real shapes take every verify, nano those that its profiles use.
TOKENS = {K3.name: tuple(range(1, 9)), NANO.name: (1, 4, 8)}
VARIANTS = "kimi_k3_decode.compile:by_op"
SHOWN = 20  # kernels of one kind of difference


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


def ends(shard: Shard, rows: int) -> Iterator[Contract]:
    """Contracts of what a step launches outside its layers."""
    yield CONTRACTS["embedding"](shard, rows=rows)
    yield CONTRACTS["attn_res"](shard, rows=rows, n_blocks=shard.config.n_blocks, final=True, writer="moe_tail")
    yield CONTRACTS["lm_head"](shard, rows=rows)
    yield CONTRACTS["sample"](shard, rows=rows, top_k=1)


def variants() -> Iterator[KernelSpec]:
    """Every kernel that a step can launch: all shapes, all row buckets, one token a request and every verify."""
    from kimi_k3_decode.kernels import kernel_spec

    seen: set[str] = set()
    for config, tp in SHAPES:
        for q in TOKENS[config.name]:
            for rows in sorted({bucket // q * q for bucket in ROW_BUCKETS if bucket >= q}):
                for contract in step_contracts(config, Shard(config=config, tp=tp), rows, q):
                    spec = kernel_spec(config, contract)
                    if spec.id not in seen:
                        seen.add(spec.id)
                        yield spec


def by_op(scope: str) -> Iterator[tuple[KernelSpec, Mapping[str, Any]]]:
    """The variants of the operations in `scope` (comma-separated; empty: all), as `build.produce` wants them."""
    wanted = set(scope.split(",")) if scope else None
    yield from ((spec, {}) for spec in variants() if wanted is None or spec.op in wanted)


def run(architectures: Sequence[str], jobs: int, cache: Path = CACHE, ops: Sequence[str] = ()) -> list[Built]:
    """All rows, compiling what the cache lacks. Raises BuildError naming the variants that do not compile."""
    made = produce(VARIANTS, ",".join(sorted(ops)), architectures, [cache], jobs)
    if made.errors:
        first = "; ".join(f"{name}: {reason}" for name, reason in list(made.errors.items())[:3])
        raise BuildError(f"compile: got {len(made.errors)} variants that do not compile, needs none; {first}")
    return sorted((entry.row for entry in made.entries), key=lambda row: (row.kernel, row.arch))


def op_of(kernel: str) -> str:
    """The operation of "op[variant]"."""
    return kernel.partition("[")[0]


def covered(row: Mapping[str, Any], architectures: Sequence[str], ops: Sequence[str]) -> bool:
    """Whether compiling these operations (none: all) for these architectures should have made this row of the table."""
    return row["arch"] in architectures and (not ops or op_of(row["kernel"]) in ops)


def read_table(table: Path) -> list[dict[str, Any]]:
    return list(json.loads(table.read_text())["kernels"]) if table.exists() else []


def compare(
    rows: list[Built], table: Path = TABLE, architectures: Sequence[str] = ARCHITECTURES, ops: Sequence[str] = ()
) -> dict[str, list[str]]:
    """What differs from the committed table: kernels added, gone, changed; and every kernel with stack bytes, whatever the table has."""
    committed = {(r["kernel"], r["arch"]): r for r in read_table(table) if covered(r, architectures, ops)}
    current = {(row.kernel, row.arch): row for row in rows}
    name = "{0[0]} {0[1]}".format
    return {
        "added": [name(key) for key in current if key not in committed],
        "gone": [name(key) for key in committed if key not in current],
        "changed": [name(key) for key, row in current.items() if key in committed and committed[key]["sass_sha256"] != row.sass_sha256],
        "spills": [f"{name(key)}: {row.stack_bytes} bytes" for key, row in current.items() if row.stack_bytes],
    }


def write_table(rows: list[Built], table: Path = TABLE, architectures: Sequence[str] = ARCHITECTURES, ops: Sequence[str] = ()) -> None:
    """Replace the rows of what was compiled; others stay (temporary file, then rename)."""
    kept = [row for row in read_table(table) if not covered(row, architectures, ops)]
    lines = [json.dumps(row) for row in sorted([*kept, *map(asdict, rows)], key=lambda row: (row["kernel"], row["arch"]))]
    about = {"compiler": toolchain.identity(), "sources": package_digest()}
    with tempfile.NamedTemporaryFile("w", dir=table.parent, suffix=".tmp", delete=False) as file:
        file.write(json.dumps(about)[:-1] + ', "kernels": [\n  ' + ",\n  ".join(lines) + "\n]}\n")
    os.chmod(file.name, 0o644)
    os.replace(file.name, table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kimi_k3_decode.compile", description=__doc__)
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="only this architecture (repeatable)")
    parser.add_argument("--jobs", type=int, default=2, help="compiler processes")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of binaries")
    parser.add_argument("op", nargs="*", help="only these operations, e.g. kda")
    parser.add_argument("--write", action="store_true", help="replace the table's rows of what is compiled")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.op) - set(CONTRACTS))
    if given.jobs < 1 or unknown:
        parser.error(
            f"got --jobs {given.jobs}, unknown operations {unknown}; needs a process or more, and operations of {sorted(CONTRACTS)}"
        )
    archs = given.arch or ARCHITECTURES
    try:
        rows = run(archs, given.jobs, given.cache, given.op)
    except (BuildError, toolchain.ToolchainError) as error:
        print(error, file=sys.stderr)
        return 3
    found = compare(rows, TABLE, archs, given.op)
    if given.write:
        write_table(rows, TABLE, archs, given.op)
    for what, names in found.items():
        for kernel in names[:SHOWN]:
            print(f"{what}: {kernel}", file=sys.stderr)
    print(json.dumps({"kernels": len(rows), **{what: len(names) for what, names in found.items()}}))
    return 1 if found["spills"] else 0


if __name__ == "__main__":
    sys.exit(main())
