"""Real vLLM on a CPU with a real small model: FP32 as the baseline, BF16 with n-gram drafts as the candidate, one after the other.

The first test of each server starts it; everything that compares the two runs last. `make test-serving`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from evals.gate import judge_suite
from evals.pairing import pair_answers
from evals.policy import SuitePolicy
from evals.serving.client import Endpoint
from evals.serving.differences import position_errors
from evals.serving.forced import LOGITS_PROCESSOR, ONE_TOKEN, ForcedWindow, force_window
from evals.serving.launch import StartedServer, StartFailed
from perf.matrix import CellResult
from tests.serving import bench, easy_suite
from tests.serving.nano_server import CHECKPOINT, served
from tests.serving.vllm_environment import FORCING, MODEL, NGRAM, SERVED_NAME, side
from validation.core.settings import PROJECT_ROOT
from validation.core.types import Status

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

WINDOW, WINDOWS, CONTEXT = 160, 8, 96  # 1,280 tokens of real text a side, after contexts of 96 tokens
SHORT = 24  # tokens a window that is forced by one request a token
LOGPROBS = 20


@dataclass
class Seen:
    """What each server gave, kept for the comparisons."""

    windows: dict[str, list[ForcedWindow]] = field(default_factory=dict)
    easy: dict[str, Any] = field(default_factory=dict)
    cells: dict[str, CellResult] = field(default_factory=dict)
    metrics: str = ""


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@contextmanager
def running(role: str, folder: Path, dtype: str, *options: str) -> Iterator[str]:
    server = StartedServer(side(dtype, *options), role=role, folder=folder)
    try:
        server.wait_until_ready()
        yield server.base_url
    finally:
        server.stop()


def text_ids(url: str) -> list[int]:
    """Real text that no test wrote: the licence, in the server's own tokens."""
    with Endpoint(url, model=SERVED_NAME) as endpoint:
        return list(endpoint.tokenize((PROJECT_ROOT / "LICENSE").read_text()))


def forced(url: str, method: str, window: int, count: int) -> list[ForcedWindow]:
    """`count` windows of `window` tokens; with the plug-in all at once, so that each step decodes all of them."""
    ids = text_ids(url)
    step = (len(ids) - CONTEXT - WINDOW) // WINDOWS
    starts = [place * step for place in range(count)]

    async def all_of_them() -> list[ForcedWindow]:
        async with Endpoint(url, model=SERVED_NAME) as endpoint:
            asked = [
                force_window(
                    endpoint, ids[s : s + CONTEXT], ids[s + CONTEXT : s + CONTEXT + window], method=method, logprobs=LOGPROBS, timeout_s=600
                )
                for s in starts
            ]
            return list(await asyncio.gather(*asked)) if method == LOGITS_PROCESSOR else [await one for one in asked]

    return asyncio.run(all_of_them())


def bench_cell(url: str, name: str, folder: Path) -> CellResult:
    return bench.measured(name, url, SERVED_NAME, MODEL, folder / "bench.json")


# ---- one server at a time ----
def test_the_baseline_forces_scores_and_is_timed(vllm_cpu: None, seen: Seen, tmp_path: Path) -> None:
    with running("stock", tmp_path, "float32", *FORCING) as url:
        seen.windows["stock"] = forced(url, LOGITS_PROCESSOR, WINDOW, WINDOWS)
        seen.windows["stock, token by token"] = forced(url, ONE_TOKEN, SHORT, 1)
        reply = httpx.post(
            f"{url}/v1/completions", json={"model": SERVED_NAME, "prompt": "a", "vllm_xargs": {"force_ids": "x"}}, timeout=60
        )
        assert reply.status_code == 400
        assert "force_ids" in reply.json()["error"]["message"]
        seen.easy["stock"] = easy_suite.answers(url, SERVED_NAME, tmp_path / "easy")
        seen.cells["stock"] = bench_cell(url, "smollm2-CPU-tp1-b2-q1-c64-al1-auto", tmp_path)


def test_the_two_ways_of_forcing_agree(seen: Seen) -> None:
    """The same decode step, reached once by forcing and once from a cached prefix, on one server."""
    (single,) = seen.windows["stock, token by token"]
    whole = seen.windows["stock"][0].positions[: SHORT - 1]
    assert (single.method, len(single.positions)) == (ONE_TOKEN, SHORT - 1)
    errors = position_errors(whole, single.positions)
    assert errors.non_finite == 0
    assert float(errors.rms.max()) < 0.01


def test_the_candidate_drafts_and_is_forced_token_by_token(vllm_cpu: None, seen: Seen, tmp_path: Path) -> None:
    with running("candidate", tmp_path, "bfloat16", *NGRAM) as url:
        seen.windows["candidate"] = forced(url, "auto", SHORT, 3)
        seen.easy["candidate"] = easy_suite.answers(url, SERVED_NAME, tmp_path / "easy")
        repeating = "one two three four five six seven eight nine ten. " * 8
        body = {"model": SERVED_NAME, "prompt": repeating, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=120).status_code == 200
        seen.metrics = httpx.get(f"{url}/metrics", timeout=60).text


def test_speculation_refuses_the_plug_in_at_start_up(vllm_cpu: None, tmp_path: Path) -> None:
    server = StartedServer(side("bfloat16", *NGRAM, *FORCING), role="candidate", folder=tmp_path)
    with pytest.raises(StartFailed, match="ended with exit code"):
        server.wait_until_ready()
    assert "Custom logits processors are not supported" in server.log.read_text()


def test_a_bf16_server_is_forced_and_timed(vllm_cpu: None, seen: Seen, tmp_path: Path) -> None:
    with running("candidate", tmp_path, "bfloat16", *FORCING) as url:
        seen.windows["bf16"] = forced(url, LOGITS_PROCESSOR, WINDOW, WINDOWS)
        seen.cells["candidate"] = bench_cell(url, "smollm2-CPU-tp1-b2-q1-c64-al1-auto", tmp_path)


# ---- what they gave ----
def test_every_token_of_real_text_differs_by_rounding_only(seen: Seen) -> None:
    stock, candidate = seen.windows["stock"], seen.windows["bf16"]
    pairs = [position_errors(a.positions, b.positions) for a, b in zip(stock, candidate, strict=True)]
    tokens = sum(len(errors.rms) for errors in pairs)
    assert tokens == WINDOWS * (WINDOW - 1) >= 1000
    assert sum(errors.non_finite for errors in pairs) == 0
    rms = math.sqrt(sum(float((errors.rms**2).sum()) for errors in pairs) / tokens)
    agrees = sum(float(errors.agrees.double().sum()) for errors in pairs) / tokens
    assert 1e-4 < rms < 0.5, rms  # BF16 is seen, and is rounding
    assert agrees > 0.9, agrees


def test_a_drafting_server_is_measured_token_by_token(seen: Seen) -> None:
    """`auto` falls back by itself where the plug-in is not there."""
    windows = seen.windows["candidate"]
    assert {window.method for window in windows} == {ONE_TOKEN}
    pairs = [position_errors(a.positions[: SHORT - 1], b.positions) for a, b in zip(seen.windows["stock"], windows, strict=False)]
    assert sum(errors.non_finite for errors in pairs) == 0
    rms = [float(errors.rms.mean()) for errors in pairs]
    assert all(1e-4 < value < 0.5 for value in rms), rms


def test_acceptance_is_read_from_the_servers_metrics(seen: Seen) -> None:
    values: dict[str, float] = {}
    for line in seen.metrics.splitlines():
        if line.startswith("vllm:spec_decode") and "_created" not in line:
            key, _, value = line.rpartition(" ")
            values[key.split("{")[0]] = values.get(key.split("{")[0], 0.0) + float(value)
    drafts, accepted = values["vllm:spec_decode_num_drafts_total"], values["vllm:spec_decode_num_accepted_tokens_total"]
    assert values["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == accepted > 0
    assert 1 < 1 + accepted / drafts <= 4


def test_the_easy_suite_is_decided_by_the_gate(seen: Seen) -> None:
    pairs = pair_answers(easy_suite.NAME, seen.easy["stock"], seen.easy["candidate"])
    gate = judge_suite(pairs, SuitePolicy(suite=easy_suite.NAME, delta=0.15, floor=0.10, family=1))
    assert gate.n_items == easy_suite.ITEMS
    assert 0.2 < gate.stock.mean < 0.95, gate.stock.mean
    assert gate.status is Status.PASS, gate.reasons


def test_the_bench_fills_cells_of_the_matrix(seen: Seen) -> None:
    for cell in seen.cells.values():
        assert cell.outcome == "measured", cell.reasons
        assert cell.step_us is not None
        assert cell.step_us > 100


def test_vllms_own_client_measures_our_server(vllm_cpu: None, tmp_path: Path) -> None:
    """`vllm bench serve` against nano-K3 with DSpark: unmodified, acceptance length included."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes((CHECKPOINT / "tokenizer.json").read_bytes())
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(described))
    with served("--decode-backend", "latency_specialized", "--spec", "dspark", "--max-model-len", "1024") as nano:
        result = tmp_path / "bench.json"
        bench.measured("nano-k3-CPU-tp1-b2-q8-c64-al2-latency_specialized", nano.url, "nano-k3", tokenizer, result)
        told = json.loads(result.read_text())
        steps, accepted = (nano.metric(f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "accepted_tokens"))
        assert nano.metric("fasttrack:decode_steps_total", path="specialized") > 0
    assert told["completed"] == 8
    assert 1 <= told["spec_decode_acceptance_length"] <= 8
    assert len(told["spec_decode_per_position_acceptance_rates"]) == 7
    assert told["spec_decode_acceptance_length"] == pytest.approx(
        1 + accepted / steps, abs=0.2
    )  # the client's warm-up request is not in its count
