"""`python -m perf matrix | workload | compare`: the speed matrix from what is published and modelled, a long prompt on the nano engine as a
raw record, and two sets of evidence cell by cell.

Exit codes: 0 pass, 1 fail, 2 not proven, 3 the program could not work. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kimi_k3_decode.config import Unsupported
from perf.sweep import Part, run_parts
from validation.core import jsonio
from validation.core.settings import PROJECT_ROOT
from validation.core.store import write_atomically
from validation.core.types import EXIT_CODES, EXIT_HARNESS_ERROR, HarnessError

MOST_TOKENS = 1 << 17  # a prompt of the matrix's longest context; its prefill alone takes hours of one core


class _Parser(argparse.ArgumentParser):
    """argparse leaves with 2, which here means "not proven": wrong use is an error of its own."""

    def error(self, message: str) -> NoReturn:
        raise HarnessError(f"{self.prog}: {message}; `{self.prog} --help` shows what there is")


def _tokens(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"got {text!r}, needs a whole number from 1 to {MOST_TOKENS}")
    return int(text)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m perf", description="The speed matrix, and comparisons of two sets of evidence.")
    commands = parser.add_subparsers(dest="command", required=True)
    matrix = commands.add_parser("matrix", help="list and fill every cell (two minutes at most, no GPU)")
    matrix.add_argument("--gpu", action="append", help="H200, B200, B300 or GB300; may be repeated (default: H200 and GB300)")
    matrix.add_argument(
        "--out", type=Path, default=PROJECT_ROOT / "reports" / "runs" / "perf-matrix", help="folder of matrix.json, .csv, .md"
    )
    matrix.add_argument("--candidate", default="specialized", help="what the nano engine times against stock")
    matrix.add_argument("--no-engine", action="store_true", help="leave out the nano engine on this machine")
    matrix.add_argument(
        "--server", action="append", nargs=2, metavar=("CELL", "JSON"), default=[], help="a `vllm bench` result of a cell id"
    )
    matrix.add_argument(
        "--prompt-tokens", type=_tokens, help="add a prompt this long to the workloads; 32768 takes ten minutes (default: short ones only)"
    )
    matrix.add_argument("--state", type=Path, help="folder that keeps finished parts, so that a stopped sweep continues")
    matrix.add_argument("--ray-address", help="run the sweep's parts on a Ray cluster (or `local`) instead of local processes")
    workload = commands.add_parser(
        "workload", help="a long prompt that arrives while another user decodes, as a raw record (32768 tokens: ten minutes of one core)"
    )
    workload.add_argument("out", type=Path, help="folder of cpu_workloads.jsonl and digests.json, for `fasttrack publish`")
    workload.add_argument("--prompt-tokens", type=_tokens, default=32768, help="of the prompt that arrives (default: 32768)")
    workload.add_argument("--candidate", default="specialized", help="what is timed against stock")
    compare = commands.add_parser(
        "compare", help="per cell ratio of two run folders; a slow-down beyond the policy's margin fails (seconds)"
    )
    compare.add_argument("base", type=Path)
    compare.add_argument("candidate", type=Path)
    compare.add_argument("--margin", type=float, help="allowed slow-down as a share (default: the policy's)")
    return parser.parse_args(argv)


def matrix(asked: argparse.Namespace) -> int:
    from perf.build import GPUS_SHOWN, build, counts, write
    from perf.cpu_engine import PAIRS, SHAPES
    from perf.servers import read_cell

    _writable(asked.out)
    parts = [
        Part(name="acceptance", function="perf.cpu_engine:measured_acceptance", arguments={"candidate": asked.candidate}, limit_s=60.0)
    ]
    for requests, q in SHAPES:  # a part each, so that a stopped sweep continues with the next shape
        engine = {"candidate": asked.candidate, "shapes": [[requests, q]], "control": False}
        parts.append(Part(name=f"engine-b{requests}-q{q}", function="perf.cpu_engine:measure", arguments=engine, limit_s=90.0))
    control = {"candidate": "stock", "shapes": [[1, 1]], "pairs": 3 * PAIRS, "control": False}
    parts.append(Part(name="engine-self-check", function="perf.cpu_engine:measure", arguments=control, limit_s=90.0))
    replay = {"candidate": asked.candidate}
    parts.append(Part(name="workloads", function="perf.workloads:measure", arguments=replay, limit_s=90.0))
    if asked.prompt_tokens is not None:
        parts.append(_long(asked))
    done = {} if asked.no_engine else run_parts(parts, state=asked.state, processes=1, ray_address=asked.ray_address)
    problems = [f"{name}: {outcome.reason}" for name, outcome in done.items() if outcome.outcome != "measured"]
    value = {name: outcome.value for name, outcome in done.items() if outcome.outcome == "measured"}
    made = build(
        tuple(asked.gpu or GPUS_SHOWN),
        engine_rows=[row for name, rows in value.items() if name.startswith("engine-") for row in rows],
        acceptance=value.get("acceptance", {}),
        workloads=[value[name] for name in ("workloads", "long") if name in value],
        servers=[read_cell(cell, Path(path)) for cell, path in asked.server],
    )
    problems += [f"{r.cell.id}: {reason}" for r in made.servers if r.outcome == "error" for reason in r.reasons]
    paths = write(made, asked.out)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(jsonio.dumps({"verdict": "made", "counts": counts(made), "problems": problems, "report": str(paths["md"])}), flush=True)
    return 0


def _long(asked: argparse.Namespace) -> Part:
    arguments = {"candidate": asked.candidate, "prompt_tokens": asked.prompt_tokens}
    return Part(name="long", function="perf.workloads:measure", arguments=arguments, limit_s=120.0 + 0.2 * asked.prompt_tokens)


def _writable(folder: Path) -> Path:
    """The folder, made before anything is measured for it. Raises HarnessError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HarnessError(f"out: got {error}, needs a writable folder {folder}") from error
    if not os.access(folder, os.W_OK):
        raise HarnessError(f"out: got {folder}, which cannot be written to, needs a writable folder")
    return folder


def workload(asked: argparse.Namespace) -> int:
    """One raw record and this checkout's digests. Exit code 0 measured, 1 objected to, 3 not measured at all."""
    from perf.workloads import record
    from validation.freshness import digests

    began = time.monotonic()
    folder = _writable(asked.out)
    outcome = run_parts([_long(asked)])["long"]
    if outcome.outcome != "measured":
        raise HarnessError(f"workload: got {outcome.reason}, needs an answer of both sides")
    made = record(outcome.value) | {"seconds": round(time.monotonic() - began, 1)}
    write_atomically(folder / "digests.json", jsonio.dumps(digests.current()).encode())
    write_atomically(folder / "cpu_workloads.jsonl", jsonio.dumps(made).encode() + b"\n")
    verdict = "refused" if made.get("reasons") else "measured"
    print(jsonio.dumps({"verdict": verdict, "record": str(folder / "cpu_workloads.jsonl"), "reasons": made.get("reasons", [])}), flush=True)
    return 1 if made.get("reasons") else 0


def compare(asked: argparse.Namespace) -> int:
    from perf.compare import compare_folders, lines

    found = compare_folders(asked.base, asked.candidate, margin=asked.margin)
    for line in lines(found):
        print(line, file=sys.stderr)
    print(
        jsonio.dumps({"verdict": found.status, "cells": len(found.cells), "slower": len(found.slower), "missing": len(found.missing)}),
        flush=True,
    )
    return EXIT_CODES[found.status]


def main(argv: Sequence[str]) -> int:
    try:
        asked = _arguments(argv)
        return {"matrix": matrix, "workload": workload, "compare": compare}[asked.command](asked)
    except (HarnessError, Unsupported) as error:
        found = str(error)
    except Exception as error:  # a fault of this program, which must not read as a failed comparison
        traceback.print_exc()
        found = f"{type(error).__name__}: {error}"
    print(f"error: {found}", file=sys.stderr)
    print(jsonio.dumps({"verdict": "error", "error": found}), flush=True)
    return EXIT_HARNESS_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
