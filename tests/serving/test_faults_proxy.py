"""The proxy does what its fault says and nothing else; whether the suite catches it is another file's question."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from evals.serving.faults import EXIT_DIED, FAULTS, Proxy, Setup
from tests.serving.faulty import faulty
from tests.serving.nano_server import Served, prompts
from validation.core.settings import PROJECT_ROOT
from validation.core.types import HarnessError

ASKED = {"prompt": prompts()[0], "max_tokens": 8, "temperature": 0, "logprobs": 2, "return_token_ids": True}


def ask(url: str, **changed: object) -> httpx.Response:
    with httpx.Client(timeout=30) as client:
        return client.post(f"{url}/v1/completions", json=ASKED | changed)


def choice(reply: httpx.Response) -> dict:  # type: ignore[type-arg]
    return json.loads(reply.text)["choices"][0]


@pytest.fixture(scope="module")
def right(server: Served) -> dict:  # type: ignore[type-arg]
    return choice(ask(server.url))


def test_without_a_fault_everything_passes_through(server: Served, right: dict) -> None:  # type: ignore[type-arg]
    with faulty(server.url, "none") as proxied:
        assert choice(ask(proxied.url)) == right
        for path in ("/health", "/v1/models", "/metrics", "/version"):
            assert httpx.get(proxied.url + path).status_code == 200
        assert httpx.get(proxied.url + "/v1/models").json() == httpx.get(server.url + "/v1/models").json()
        assert ask(proxied.url, max_tokens=-1).status_code == 400
        streamed = ask(proxied.url, stream=True).text
        assert streamed.rstrip().endswith("[DONE]")
        assert (proxied.proxy.counted, proxied.proxy.hit) == (3, 3)


@pytest.mark.parametrize("fault", ["drop", "cut"])
def test_a_connection_that_ends_early(server: Served, fault: str) -> None:
    with faulty(server.url, fault, every=2) as proxied:
        assert ask(proxied.url).status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            ask(proxied.url)


def test_slow_answers_are_late_and_right(server: Served, right: dict) -> None:  # type: ignore[type-arg]
    with faulty(server.url, "slow", delay_s=1.0) as proxied:
        began = time.monotonic()
        assert choice(ask(proxied.url)) == right
        assert time.monotonic() - began > 1.0


def test_a_dragging_server_takes_its_factor_and_answers_rightly(server: Served, right: dict) -> None:  # type: ignore[type-arg]
    with faulty(server.url, "slow", delay_s=0.3) as behind, faulty(behind.url, "drag", factor=3.0) as proxied:
        began = time.monotonic()
        assert choice(ask(proxied.url)) == right
        assert 0.9 < time.monotonic() - began < 3.0


def test_a_hung_request_leaves_the_rest_alone(server: Served) -> None:
    with faulty(server.url, "hang") as proxied:
        with httpx.Client(timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
            client.post(f"{proxied.url}/v1/completions", json=ASKED)
        assert httpx.get(proxied.url + "/health").status_code == 200


def test_errors_end_after_their_count(server: Served) -> None:
    with faulty(server.url, "http_500", times=2) as proxied:
        assert [ask(proxied.url).status_code for _ in range(3)] == [500, 500, 200]


def test_edited_answers(server: Served, right: dict) -> None:  # type: ignore[type-arg]
    values = right["logprobs"]["token_logprobs"]
    with faulty(server.url, "truncate") as proxied:
        made = choice(ask(proxied.url))
        assert (made["text"], made["token_ids"], made["finish_reason"]) == (right["text"][:4], right["token_ids"][:4], "stop")
        assert made["logprobs"]["token_logprobs"] == values[:4]
    with faulty(server.url, "empty") as proxied:
        assert choice(ask(proxied.url))["text"] == ""
    with faulty(server.url, "nan") as proxied:
        made = choice(ask(proxied.url))["logprobs"]["token_logprobs"]
        assert [math.isnan(value) for value in made] == [False, True] * 4
    with faulty(server.url, "perturb", size=0.5) as proxied:
        made = choice(ask(proxied.url))
        assert made["text"] == right["text"]
        changed = [abs(a - b) for a, b in zip(made["logprobs"]["token_logprobs"], values, strict=True)]
        assert 0 < sum(changed) / len(changed) < 2


def test_two_users_get_each_others_answers(server: Served) -> None:
    asked = [{"prompt": prompt} for prompt in prompts()[:2]]
    alone = [choice(ask(server.url, **body)) for body in asked]
    with faulty(server.url, "swap") as proxied, ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda body: choice(ask(proxied.url, **body)), asked)
    assert (first["text"], second["text"]) == (alone[1]["text"], alone[0]["text"])
    assert (first["prompt_token_ids"], second["prompt_token_ids"]) == (alone[0]["prompt_token_ids"], alone[1]["prompt_token_ids"])


def test_forcing_is_not_read(server: Served, right: dict) -> None:  # type: ignore[type-arg]
    forced = {"vllm_xargs": {"force_ids": [50, 51, 52]}, "max_tokens": 3}
    assert choice(ask(server.url, **forced))["token_ids"] == [50, 51, 52]
    with faulty(server.url, "ignore_forcing") as proxied:
        assert choice(ask(proxied.url, **forced))["token_ids"] == right["token_ids"][:3]
        assert choice(ask(proxied.url, allowed_token_ids=[50], max_tokens=1))["token_ids"] == right["token_ids"][:1]


def test_the_command_dies_in_the_middle(server: Served) -> None:
    command = [sys.executable, "-m", "evals.serving.faults", "--upstream", server.url, "--fault", "die", "--after", "1"]
    process = subprocess.Popen(command, cwd=PROJECT_ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["serving"]
        assert ask(url).status_code == 200
        with pytest.raises(httpx.TransportError):
            ask(url)
        assert process.wait(10) == EXIT_DIED
    finally:
        process.kill()
        process.wait()


def test_what_is_no_fault_is_one_sentence() -> None:
    assert len(FAULTS) == 14
    with pytest.raises(HarnessError, match="needs one of"):
        Proxy(Setup(upstream="http://127.0.0.1:1", fault="gremlin"))
    with pytest.raises(HarnessError, match="at least 1"):
        Proxy(Setup(upstream="http://127.0.0.1:1", fault="drop", every=0))


def test_a_server_behind_that_is_gone_is_a_502() -> None:
    with faulty("http://127.0.0.1:9", "none") as proxied:
        assert ask(proxied.url).status_code == 502


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"upstream": "ftp://a"}, "upstream"),
        ({"fault": "slow", "delay_s": -3.0}, "delay-s"),
        ({"fault": "slow", "delay_s": math.nan}, "delay-s"),
        ({"fault": "drag", "factor": 0.5}, "factor"),
        ({"fault": "die", "after": -1}, "after"),
        ({"fault": "perturb", "size": math.inf}, "size"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(wrong: dict, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(HarnessError, match=words):
        Proxy(Setup(**{"upstream": "http://127.0.0.1:1", "fault": "none"} | wrong))
