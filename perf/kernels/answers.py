"""The shipped nano checkpoint answers its evaluation suites greedily, with the kernels and with stock on the same GPU, item by item.

Both sides decode from one stock prefill of each prompt, in batches of up to 64 rows that shrink as replies end, so every prepared row count
is used. This is no gate (that is the evals lane); it says how many replies are the same text and how many reach the target.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import torch

from kimi_k3_decode.engine import Engine
from kimi_k3_decode.gpu_step import GpuPath
from kimi_k3_decode.plan import SPECIALIZED_BACKEND, Deployment, Plan
from kimi_k3_decode.sampling import SamplingParams
from kimi_k3_decode.stock import StockPath
from kimi_k3_decode.tokenizer import FileTokenizer
from kimi_k3_decode.weights import load_checkpoint
from validation.core.settings import PROJECT_ROOT

CHECKPOINT = PROJECT_ROOT / "kimi_k3_decode" / "checkpoints" / "nano"
DATA = PROJECT_ROOT / "evals" / "nano" / "data"
SUITES: Mapping[str, tuple[int, int, tuple[str, ...]]] = {  # suite -> (items at most, new tokens at most, where a reply ends)
    "gsm8k_nano": (500, 192, ("Question:",)),
    "gpqa_diamond_nano": (198, 160, ("Question:",)),
    "aime25_nano": (30, 192, ("Problem:",)),
    "mrcr_nano": (117, 96, ("\n", "User:")),
}
REPLY_END = 40  # characters at a reply's end in which the target is looked for


def items(suite: str, limit: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{suite}.jsonl").read_text().splitlines()[:limit]]


def build() -> Engine:
    """Stock and kernels over one checkpoint on the current device."""
    weights = load_checkpoint(CHECKPOINT)
    stock = StockPath(weights.to_device("cuda"), torch.bfloat16)
    plan = Plan.make(weights.config, Deployment(decode_backend=SPECIALIZED_BACKEND))
    return Engine(stock, GpuPath(weights, probes=False), plan, FileTokenizer(CHECKPOINT))


def reaches(text: str, target: str) -> bool:
    """Whether `target` stands at the reply's end."""
    return target in text[-max(REPLY_END, len(target) + 2) :]


def compare(engine: Engine, suite: str, limit: int, new_tokens: int, stop: tuple[str, ...] = ()) -> dict[str, Any]:
    """One suite on both sides."""
    asked = items(suite, limit)
    before = {side: dict(counts) for side, counts in engine.row_counts.items()}
    replies = engine.generate_pair([item["prompt"] for item in asked], SamplingParams(max_new_tokens=new_tokens, stop=stop))
    same = sum(a.token_ids == b.token_ids for a, b in zip(replies["stock"], replies["candidate"], strict=True))
    right = {side: [reaches(r.text, str(i["target"])) for i, r in zip(asked, found, strict=True)] for side, found in replies.items()}
    rows = engine.row_counts["candidate"]
    pairs = list(zip(right["stock"], right["candidate"], strict=True))
    return {
        "case": f"answers-{suite}",
        "what": "greedy replies of nano-K3, kernels beside stock on the same GPU; right: the target stands at the reply's end",
        "items_count": len(asked),
        "same_reply_count": same,
        "stock_right_count": sum(right["stock"]),
        "kernels_right_count": sum(right["candidate"]),
        "only_stock_right_count": sum(a and not b for a, b in pairs),
        "only_kernels_right_count": sum(b and not a for a, b in pairs),
        "rows_decoded_by_kernels_count": rows["specialized"] - before["candidate"].get("specialized", 0),
        "rows_decoded_otherwise_count": rows["stock"] - before["candidate"].get("stock", 0),
        "differing_items": [item["id"] for item, (a, b) in zip(asked, pairs, strict=True) if a != b],
    }


def run(records: Any) -> int:
    """One record a suite; a suite does not hold when any of its steps ran elsewhere than on the kernels."""
    engine = build()
    failed = 0
    for suite, shape in SUITES.items():
        begin = time.perf_counter()
        try:
            record = compare(engine, suite, *shape)
            record["holds"] = record["rows_decoded_by_kernels_count"] > 0 and record["rows_decoded_otherwise_count"] == 0
        except Exception as error:
            record = {"case": f"answers-{suite}", "error": f"{type(error).__name__}: {error}"[:600], "holds": False}
        record["seconds"] = round(time.perf_counter() - begin, 1)
        records.add(record)
        failed += not record["holds"]
        print(record, flush=True)
    return failed
