"""`python -m perf.kernels OUT PART...`: GPU records as JSON lines in OUT, one file a part; `matrix`, `proof`, `long` and `all` run several.

check: every launch against its oracle. edges: ties, padding, null slots, long contexts, FP8. nano: the whole nano model in every way of
launching, thousands of replays, sleeping kernels. answers: nano's replies beside stock's. layer: one rank's layers beside stock.
placement: a single-row layer in a process of its own, to be run several times. launches: each launch beside the copy rate. step: a whole
step of one rank. two: two GPUs. sanitize: small cases under compute-sanitizer. ops: products and tilings, for tuning.

matrix: layer, placement, launches and step: the perf matrix of one rank. proof: every launch, edges, nano in every way of launching
and with sleeping kernels. long: replies, sanitizers, replays. all: all three, which is everything that one GPU can show. A group compiles
side by side and times alone: a part that times waits until nothing else uses the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from kimi_k3_decode.config import K3, NANO, ModelConfig, Shard
from kimi_k3_decode.launches import Launch, launch_graph

# A quarter of K3's heads and expert widths: split in two, each rank has the shares of a TP8 rank, which the kernels are made for.
QUARTER = replace(K3, name="kimi-k3-quarter", kda_heads=24, mla_heads=24, moe_intermediate_size=768)
MODELS = {
    "k3-tp8": (K3, 8, 3), "k3-tp16": (K3, 16, 5), "nano-tp1": (NANO, 1, 0), "nano-tp2": (NANO, 2, 1), "quarter-tp2": (QUARTER, 2, 1),
}  # fmt: skip
CHECKED = ("k3-tp8", "k3-tp16", "nano-tp1", "nano-tp2")
SHAPES = (*((rows, 1) for rows in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)), *((rows, 8) for rows in (8, 16, 32, 64)))
VERIFY_OPS = ("kda", "mla_query", "mla_decode")  # the launches that know how many tokens a request has
FILES = {
    "check": "kernel_checks", "edges": "kernel_edges", "nano": "kernel_nano", "answers": "kernel_answers", "layer": "kernel_layers",
    "profile": "kernel_profile", "placement": "kernel_placements", "launches": "kernel_launches", "step": "kernel_steps",
    "two": "kernel_two_gpus",
    "sanitize": "kernel_sanitizer", "ops": "kernel_ops",
}  # fmt: skip
EDGE_WORKERS = 4
LARGE_BYTES, LARGE_AT_ONCE = 256 << 20, 3
PLACEMENTS = 4  # processes that time the same single-row layer: an interval within one is not all the spread
MATRIX = (
    "layer --tp 8", "layer --tp 16", "launches", "step", *(f"placement --tp {tp} --worker {n}" for tp in (8, 16) for n in range(PLACEMENTS))
)  # fmt: skip
NANO_PROOF = [
    f"nano --names {name} --tp {tp} --worker {tp}" for name, tp in (("model", 1), ("model", 2), ("delays", 1), ("delays", 2), ("delays", 4))
]
LONG = ("answers", "sanitize", "nano --names replays --tp 1 --worker 1", "nano --names replays --tp 2 --worker 2")


class Records:
    """Appends one JSON object a line; every line carries the hardware."""

    def __init__(self, out: Path, part: str, worker: str = "") -> None:
        import torch

        out.mkdir(parents=True, exist_ok=True)
        self.path = out / f"{FILES[part]}{worker}.jsonl"
        p = torch.cuda.get_device_properties(0)
        self.hardware = {"gpu": p.name, "processors": p.multi_processor_count, "torch": torch.__version__, "cuda": torch.version.cuda}
        with contextlib.suppress(RuntimeError):
            from perf.kernels.conditions import Card

            self.hardware["driver"] = Card().driver

    def add(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({**record, "hardware": self.hardware}) + "\n")


@contextlib.contextmanager
def the_gpu(out: Path, *, alone: bool) -> Iterator[None]:
    """Holds the GPU for this process: shared, or alone once nobody else has it."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def room(out: Path, weight_bytes: int) -> Iterator[None]:
    """Of cases with large weights only a few are held at a time over all processes: their oracles widen them to FP64."""
    if weight_bytes < LARGE_BYTES:
        yield
        return
    with contextlib.ExitStack() as stack:
        slots = [stack.enter_context((out / f".large{i}").open("w")) for i in range(LARGE_AT_ONCE)]
        while True:
            for slot in slots:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield
                    return
            time.sleep(0.05)


# ---- correctness ----
def distinct(config: ModelConfig, tp: int, rank: int, rows: int, q: int) -> Iterator[Launch]:
    """One launch for each different kernel of a step, in plan order."""
    from kimi_k3_decode.kernels import kernel_spec

    seen: set[str] = set()
    for launch in launch_graph(config, Shard(config=config, tp=tp, rank=rank), rows, q):
        key = kernel_spec(config, launch.contract).id
        if key not in seen:
            seen.add(key)
            yield launch


def run_checks(records: Records, shapes: Sequence[tuple[int, int]], models: Sequence[str], only: set[str] | None = None) -> tuple[int, int]:
    """(cases, cases that do not hold)."""
    from kimi_k3_decode.kernels import kernel_spec
    from perf.kernels.binaries import in_table, sass_digest
    from perf.kernels.check import check, patiently

    cases = failed = 0
    for model in models:
        config, tp, rank = MODELS[model]
        for rows, q in shapes:
            for launch in distinct(config, tp, rank, rows, q):
                if (only and launch.op not in only) or (q > 1 and launch.op not in VERIFY_OPS):
                    continue
                case = f"{model}-r{rows}-q{q}-{launch.id}"
                begin = time.perf_counter()
                record: dict[str, Any] = {"op": launch.op, "case": case}
                try:
                    spec = kernel_spec(config, launch.contract)
                    record |= {"kernel": spec.id, "sass_sha256": sass_digest(spec), "in_table": in_table(spec)}
                    with room(records.path.parent, launch.contract.weight_bytes):
                        outcome = patiently(partial(check, config, launch.contract, 1000 + rows, case, rank=rank))
                    record |= {**asdict(outcome), "holds": outcome.judged()}
                except Exception as error:
                    record |= {"error": f"{type(error).__name__}: {error}"[:600], "holds": False}
                    if "CUDA error" in str(error) or "cudaError" in str(error):
                        records.add(record)
                        raise
                record["seconds"] = round(time.perf_counter() - begin, 3)
                records.add(record)
                cases += 1
                if not record["holds"]:
                    failed += 1
                    print("BAD", json.dumps({k: v for k, v in record.items() if k != "seconds"})[:700], flush=True)
    print(f"checked: {cases} cases, {failed} failed", flush=True)
    return cases, failed


def check_jobs(models: Sequence[str], shapes: Sequence[tuple[int, int]]) -> list[str]:
    """Arguments of one process for each model and group of row counts that share kernels."""
    groups: dict[int, list[str]] = {}
    for rows, q in shapes:
        groups.setdefault(max(rows, 8), []).append(f"{rows}x{q}")
    return [f"check --models {model} --shapes {','.join(group)} --in-process" for model in models for group in groups.values()]


def proof_jobs() -> list[str]:
    return [*check_jobs(CHECKED, SHAPES), *(f"edges --worker {i}" for i in range(EDGE_WORKERS)), *NANO_PROOF]


GROUPS: dict[str, Callable[[], Sequence[str]]] = {
    "matrix": lambda: MATRIX,
    "proof": proof_jobs,
    "long": lambda: LONG,
    "all": lambda: (*MATRIX, *proof_jobs(), *LONG),
}


# ---- processes ----
def spawn(out: Path, jobs: Sequence[str]) -> list[tuple[str, subprocess.Popen[bytes]]]:
    """One process a job, each with its own log in OUT."""
    started = []
    for number, job in enumerate(jobs):
        worker = f".part{os.getpid()}-{number}" if "--in-process" in job or "--worker" in job else ""
        log = (out / f"log-{number:02d}-{job.split()[0]}.txt").open("ab")
        command = [sys.executable, "-m", "perf.kernels", str(out), *job.split(), *(["--suffix", worker] if worker else [])]
        started.append((job, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)))
    return started


def wait_for(started: Sequence[tuple[str, subprocess.Popen[bytes]]]) -> int:
    """How many ended with an error; each is named."""
    bad = 0
    for job, process in started:
        if code := process.wait():
            bad += 1
            print(f"== {job}: exit code {code}", flush=True)
    return bad


def join(out: Path, part: str) -> None:
    """One file a part out of its workers' files."""
    with (out / f"{FILES[part]}.jsonl").open("ab") as whole:
        for path in sorted(out.glob(f"{FILES[part]}.part*.jsonl")):
            whole.write(path.read_bytes())
            path.unlink()


def side_by_side(out: Path, jobs: Sequence[str]) -> int:
    begin = time.perf_counter()
    bad = wait_for(spawn(out, jobs))
    for part in ("check", "edges", "nano", "placement"):
        if any(job.startswith(part) for job in jobs):
            join(out, part)
    print(f"== {len(jobs)} processes: {time.perf_counter() - begin:.1f} s, {bad} with problems", flush=True)
    return bad


# ---- parts ----
def part_of(asked: argparse.Namespace, part: str) -> int:
    """Run one part in this process; 0 when all held."""
    out: Path = asked.out
    os.environ.setdefault("CUTE_DSL_ARCH", architecture())
    if part == "check":
        return check_part(asked)
    if part == "edges":
        return edges_part(asked)
    if part in ("layer", "placement", "launches", "step"):
        return timed_part(asked, part)
    if part == "nano":
        from perf.kernels import nano

        ranks, names = [int(tp) for tp in asked.tp.split(",")], asked.names.split(",")
        if names == ["replays"]:
            nano.warm_up(ranks)
        with the_gpu(out, alone="replays" in names):
            return nano.run(Records(out, "nano", asked.suffix), names, ranks)
    if part == "two":
        from perf.kernels import two

        with the_gpu(out, alone=True):
            return two.run(Records(out, "two"))
    if part == "answers":
        from perf.kernels import answers

        with the_gpu(out, alone=False):
            return answers.run(Records(out, "answers"))
    if part == "sanitize":
        from perf.kernels import sanitize

        with the_gpu(out, alone=False):
            return sanitize.run(Records(out, "sanitize"), out)
    from perf.kernels import tilings

    tps, sweep = [int(tp) for tp in asked.tp.split(",")], [op for op in asked.sweep.split(",") if op]
    rows = sorted({int(pair.split("x")[0]) for pair in asked.shapes.split(",")} & {1, 8, 64})
    tilings.warm_up(tps, rows, sweep)
    with the_gpu(out, alone=True):
        tilings.ops(Records(out, "ops", asked.suffix), tps, rows, sweep)
    return 0


def check_part(asked: argparse.Namespace) -> int:
    shapes = [(int(a), int(b)) for a, b in (pair.split("x") for pair in asked.shapes.split(","))]
    models = asked.models.split(",")
    if not asked.in_process:
        return side_by_side(asked.out, check_jobs(models, shapes))
    only = set(filter(None, asked.only.split(","))) or None
    with the_gpu(asked.out, alone=False):
        _, failed = run_checks(Records(asked.out, "check", asked.suffix), shapes, models, only)
    return failed


def edges_part(asked: argparse.Namespace) -> int:
    from perf.kernels import edges

    if asked.worker is None:
        return side_by_side(asked.out, [f"edges --worker {i}" for i in range(EDGE_WORKERS)])
    with the_gpu(asked.out, alone=False):
        return edges.run(Records(asked.out, "edges", asked.suffix), asked.worker, EDGE_WORKERS)


def timed_part(asked: argparse.Namespace, part: str) -> int:
    """Compile first, while others may use the GPU, then time alone."""
    from perf.kernels import speed, step
    from perf.kernels.binaries import warm
    from perf.kernels.layer import layers_of

    out, tps = asked.out, tuple(int(tp) for tp in asked.tp.split(","))
    if part == "step":
        warm(K3, [launch for rows, q in step.SHAPES for launch in launch_graph(K3, Shard(config=K3, tp=16), rows, q)])
    elif part == "placement":
        warm(K3, [launch for tp in tps for launch in layers_of(K3, tp, speed.LAYERS, 1)])
    else:
        shapes = speed.SHAPES if part == "layer" else [(rows, 1) for rows in speed.PROFILED]
        warm(K3, [launch for tp in tps for rows, q in shapes for launch in layers_of(K3, tp, speed.LAYERS, rows, q)])
    with the_gpu(out, alone=True):
        if part == "step":
            step.steps(Records(out, "step"))
        elif part == "placement":
            speed.placement(Records(out, "placement", asked.suffix), tps, asked.worker)
        elif part == "launches":
            speed.launches(Records(out, "launches"), tps=tps)
        else:
            speed.layers(Records(out, "layer"), Records(out, "profile"), tps)
    return 0


def architecture() -> str:
    """The compiler's name of this machine's GPU, asked without starting CUDA here."""
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout.split()
    return f"sm_{asked[0].replace('.', '')}a"


def guarded(name: str, part: Callable[[], int]) -> int:
    begin = time.perf_counter()
    try:
        bad = part()
    except Exception:
        traceback.print_exc()
        bad = 1
    print(f"== {name}: {time.perf_counter() - begin:.1f} s, {bad} with problems", flush=True)
    return bad


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.kernels", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="+", choices=[*(p for p in FILES if p != "profile"), *GROUPS])
    parser.add_argument("--models", default=",".join(CHECKED), help="check: of " + ", ".join(MODELS))
    parser.add_argument(
        "--shapes", default=",".join(f"{r}x{q}" for r, q in SHAPES), help="check, ops: rows x tokens a request, with commas"
    )
    parser.add_argument("--only", default="", help="check: these launches")
    parser.add_argument("--tp", default="", help="layer, launches, ops (8,16) and nano (1,2,4): ranks of the group")
    parser.add_argument("--names", default="model,replays,delays", help="nano: which of its measures")
    parser.add_argument("--sweep", default="", help="ops: these products alone, in every tiling in reach of the scheduled one")
    parser.add_argument("--in-process", action="store_true", help="check: here, not in several processes")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--suffix", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    asked.tp = asked.tp or ("1,2,4" if asked.parts == ["nano"] else "8,16")
    return asked


def main(argv: Sequence[str]) -> int:
    # Virtual ranks spin on each other from streams of one device: they need hardware queues of their own. Read when CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Kernels of one class share a file name, so every process has a folder of its own for what the compiler leaves behind.
    os.environ["CUTE_DSL_DUMP_DIR"] = tempfile.mkdtemp(prefix="k3-cubin-")
    asked = arguments(argv)
    if shutil.which("nvidia-smi") is None:
        need = "needs a machine with a Hopper or Blackwell GPU; `python -m perf matrix` needs none"
        print(f"perf.kernels: got no nvidia-smi, {need}", file=sys.stderr)
        return 3
    asked.out.mkdir(parents=True, exist_ok=True)
    bad = 0
    for part in asked.parts:
        if part in GROUPS:
            bad += guarded(part, lambda part=part: side_by_side(asked.out, GROUPS[part]()))  # type: ignore[misc]
        else:
            bad += guarded(part, lambda part=part: part_of(asked, part))  # type: ignore[misc]
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
