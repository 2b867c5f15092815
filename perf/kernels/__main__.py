"""`python -m perf.kernels OUT [check] [edges] [ops] [layer] [nano]`: GPU records as JSON lines in OUT, one file a part.

check: every launch against its oracle. ops: time of each launch, tilings and the library product beside it. layer: one rank's layers.
edges: ties, padding, null slots, long contexts, FP8.
nano: the whole nano model, kernels beside contract execution, PDL on and off, virtual ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kimi_k3_decode.config import K3, NANO, ModelConfig, Shard
from kimi_k3_decode.kernels import kernel_spec
from kimi_k3_decode.launches import Launch, launch_graph
from perf.kernels.check import check

MODELS = {"k3-tp8": (K3, 8, 3), "k3-tp16": (K3, 16, 5), "nano-tp1": (NANO, 1, 0), "nano-tp2": (NANO, 2, 1)}


class Records:
    """Appends one JSON object a line; every line carries the hardware."""

    def __init__(self, path: Path) -> None:
        self.path = path
        p = torch.cuda.get_device_properties(0)
        self.hardware = {"gpu": p.name, "processors": p.multi_processor_count, "torch": torch.__version__, "cuda": torch.version.cuda}

    def add(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({**record, "hardware": self.hardware}) + "\n")


def distinct(config: ModelConfig, tp: int, rank: int, rows: int, q: int) -> Iterator[Launch]:
    """One launch for each different kernel of a step, in plan order."""
    seen: set[str] = set()
    for launch in launch_graph(config, Shard(config=config, tp=tp, rank=rank), rows, q):
        key = kernel_spec(config, launch.contract).id
        if key not in seen:
            seen.add(key)
            yield launch


def run_checks(records: Records, rows_list: list[tuple[int, int]], models: list[str], only: set[str] | None = None) -> int:
    failed = 0
    for model in models:
        config, tp, rank = MODELS[model]
        for rows, q in rows_list:
            for launch in distinct(config, tp, rank, rows, q):
                if only and launch.op not in only:
                    continue
                if q > 1 and launch.op not in ("kda", "mla_query", "mla_decode"):
                    continue
                case = f"{model}-r{rows}-q{q}-{launch.id}"
                begin = time.perf_counter()
                try:
                    outcome = check(config, launch.contract, 1000 + rows, case, rank=rank)
                    ok = outcome.judged()
                    record = {**asdict(outcome), "holds": ok}
                except Exception as error:
                    ok, record = False, {"op": launch.op, "case": case, "error": f"{type(error).__name__}: {error}"[:600]}
                    if "CUDA error" in str(error) or "cudaError" in str(error):
                        records.add(record)
                        raise
                record["seconds"] = round(time.perf_counter() - begin, 3)
                records.add(record)
                if not ok:
                    failed += 1
                    print("BAD", json.dumps({k: v for k, v in record.items() if k != "seconds"})[:700], flush=True)
    return failed


def guarded(name: str, part: Callable[[], None]) -> None:
    begin = time.perf_counter()
    try:
        part()
    except Exception:
        traceback.print_exc()
    print(f"== {name}: {time.perf_counter() - begin:.1f} s", flush=True)


def main() -> None:
    # Virtual ranks spin on each other from streams of one device: they need hardware queues of their own. Read when CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    out = Path(sys.argv[1])
    parts = sys.argv[2:]
    out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    quick = bool(os.environ.get("K3_KERNELS_QUICK"))
    if "check" in parts:
        records = Records(out / "check.jsonl")
        models = os.environ.get("K3_KERNELS_MODELS", "nano-tp1,nano-tp2,k3-tp8,k3-tp16").split(",")
        only = set(filter(None, os.environ.get("K3_KERNELS_OPS", "").split(","))) or None
        rows = [(1, 1), (8, 1)] if quick else [(1, 1), (2, 1), (3, 1), (7, 1), (8, 1), (16, 1), (32, 1), (64, 1), (8, 8), (64, 8)]
        guarded("check", lambda: print("failed checks:", run_checks(records, rows, models, only)))
    if "ops" in parts or "layer" in parts:
        from perf.kernels import speed

        if "ops" in parts:
            guarded("ops", lambda: speed.ops(Records(out / "ops.jsonl")))
        if "layer" in parts:
            guarded("layer", lambda: speed.layers(Records(out / "layer.jsonl")))
    if "edges" in parts:
        from perf.kernels import edges

        guarded("edges", lambda: print("failed edges:", edges.run(Records(out / "edges.jsonl"))))
    if "nano" in parts:
        from perf.kernels import nano

        guarded("nano", lambda: nano.run(Records(out / "nano.jsonl")))


if __name__ == "__main__":
    main()
