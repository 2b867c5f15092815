"""The nano engine on this machine: stock against candidate, each in a process of its own, outputs checked against the FP64 oracle.

A test of the machinery. It says nothing about a GPU, and its numbers are labelled so wherever they appear.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterable
from typing import Any

from perf.adversary import Comparison, Subject, Workload, compare
from perf.decision import decide
from perf.matrix import AcceptanceKind, Cell, CellResult, Source, realised_acceptance_problem
from perf.stats import median_interval

SHAPES = ((1, 1), (8, 1), (64, 1))  # requests, tokens each
PAIRS = 12
# Relative error of a row of logits. BF16 noise moves an expert choice here and there and with it a row by up to half; a reply that was not
# computed from its inputs is off by more than one.
ERROR_LIMIT = 0.7
ACCEPTANCE_ITEMS, ACCEPTANCE_TOKENS = 4, 48


def measure(
    candidate: str = "specialized", shapes: Iterable[tuple[int, int]] = SHAPES, *, pairs: int = PAIRS, control: bool = True
) -> list[dict[str, Any]]:
    """One row a shape: both sides' medians, the ratio with its interval, what was objected, and the decision. `control` adds stock
    against stock. Raises HarnessError when a subject dies or hangs."""
    from perf import nano_subject

    oracle = nano_subject.oracle()
    rows = []
    here = "perf.nano_subject"
    with Subject("stock", f"{here}:stock", {}) as stock, Subject("candidate", f"{here}:candidate", {"candidate": candidate}) as other:
        for requests, q in shapes:
            work = Workload(inputs=nano_subject.tokens(requests, q), oracle=oracle, error_limit=ERROR_LIMIT)
            rows.append(_row(compare(stock, other, work, pairs=pairs, warm_ups=2, seed=requests), requests, q, candidate))
    if control:
        with Subject("stock", f"{here}:stock", {}) as stock, Subject("candidate", f"{here}:stock", {}) as other:
            work = Workload(inputs=nano_subject.tokens(1, 1), oracle=oracle, error_limit=ERROR_LIMIT)
            rows.append(_row(compare(stock, other, work, pairs=3 * pairs, warm_ups=2, seed=7), 1, 1, "stock"))
    return rows


def conditions() -> dict[str, Any]:
    import torch

    return {
        "hardware": f"CPU {platform.processor() or platform.machine()}, one thread a side",
        "gpus": 0,
        "prefill": "none",
        "speculation": "none",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "what": "contract execution of the nano model, one step, both sides interleaved on a shared machine",
    }


def _cell(requests: int, q: int, backend: str) -> Cell:
    return Cell(model="nano-k3", gpu="cpu", tp=1, requests=requests, q=q, context_tokens=64, acceptance_length=1.0, backend=backend)


def _row(found: Comparison, requests: int, q: int, candidate: str) -> dict[str, Any]:
    made: dict[str, Any] = {
        "cell": _cell(requests, q, "latency_specialized").id,
        "requests": requests,
        "q": q,
        "candidate": candidate,
        "outcome": found.outcome,
        "reasons": list(found.reasons),
    }
    for name, side in (("stock", found.stock), ("candidate", found.candidate)):
        middle = median_interval(side.samples_us)
        made |= {
            f"{name}_us": middle.value,
            f"{name}_low_us": middle.low,
            f"{name}_high_us": middle.high,
            f"{name}_worst_error": side.worst_error,
        }
        made[f"{name}_samples_us"] = list(side.samples_us)
    if found.outcome == "measured":
        ratio = found.speed_up
        made |= {"speed_up": ratio.value, "speed_up_low": ratio.low, "speed_up_high": ratio.high, "pairs": ratio.n}
        made["decision"] = decide(found.stock.samples_us, found.candidate.samples_us)
    return made


def results(rows: Iterable[dict[str, Any]]) -> list[CellResult]:
    """The rows as cells of the table, source cpu_engine."""
    made = []
    shared = conditions()
    for row in rows:
        for side, backend in (("stock", "auto"), ("candidate", "latency_specialized")):
            if side == "candidate" and row["candidate"] == "stock":
                continue
            cell = _cell(row["requests"], row["q"], backend)
            ok = row["outcome"] == "measured"
            made.append(
                CellResult(
                    cell=cell,
                    source=Source.CPU_ENGINE,
                    outcome="measured" if ok else "error",
                    step_us=row[f"{side}_us"] if ok else None,
                    step_low_us=row[f"{side}_low_us"] if ok else None,
                    step_high_us=row[f"{side}_high_us"] if ok else None,
                    correctness=f"checked in the timed replies, worst row {row[f'{side}_worst_error']:.3g}" if ok else "",
                    reasons=tuple(row["reasons"]),
                    conditions=shared,
                )
            )
    return list({result.cell.id: result for result in reversed(made)}.values())[::-1]


def measured_acceptance(
    candidate: str = "specialized", items: int = ACCEPTANCE_ITEMS, tokens: int = ACCEPTANCE_TOKENS, asked: float | None = None
) -> dict[str, Any]:
    """Mean accepted length of the shipped drafter over word problems of the test set, verified by the candidate.

    `asked`: the acceptance length that the cell wants; further off than the policy's tolerance, the cell fails.
    """
    import json

    import torch

    from kimi_k3_decode.cache import Caches
    from kimi_k3_decode.config import NANO
    from kimi_k3_decode.dspark import DsparkProposer, SpeculativeDecoder, lowest_argmax
    from kimi_k3_decode.stock import StockPath
    from perf import nano_subject
    from validation.policy import load_policy
    from validation.targets.engine import find_candidate

    prompts = [json.loads(line)["prompt"] for line in nano_subject.WORD_PROBLEMS.read_text().splitlines()[: 50 * items : 50]]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(nano_subject.CHECKPOINT / "tokenizer.json"))
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    weights = nano_subject.weights()
    stock, everyone = StockPath(weights), list(range(len(encoded)))
    limit = max(map(len, encoded)) + tokens + 16
    caches = Caches.allocate(NANO, len(encoded), limit, q_max=8, dtype=torch.bfloat16)
    proposer = DsparkProposer(weights, len(encoded), limit)
    with torch.inference_mode():
        out = stock.prefill(encoded, caches, everyone, taps=True)
        for request, taps in zip(everyone, out.taps or [], strict=True):
            proposer.observe([request], taps.unsqueeze(1), torch.tensor([taps.shape[1]]))
        decoder = SpeculativeDecoder(find_candidate(candidate)(weights), proposer, caches)
        replies = [[anchor] for anchor in lowest_argmax(out.logits_RV).tolist()]
        while active := [r for r in everyone if NANO.eos_token_id not in replies[r] and len(replies[r]) < tokens]:
            gained = decoder.step(active, [replies[r][-1] for r in active]).tokens
            for request, more in zip(active, gained, strict=True):
                replies[request] += more
    length = decoder.count.mean_length
    tolerance = load_policy().limit("perf", "acceptance_length_tolerance")
    return {
        "acceptance": AcceptanceKind.MEASURED.value,
        "mean_length": length,
        "verify_steps": decoder.count.verify_steps,
        "items": len(encoded),
        "drafts": proposer.n_drafts,
        "candidate": candidate,
        "problem": "" if asked is None else realised_acceptance_problem(asked, length, tolerance),
    }
