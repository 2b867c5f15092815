"""Which path decodes: stock, specialised, a planted fault, and speculation; and how the server starts and stops."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from evals.serving.server.cli import main
from tests.serving.nano_server import Served, prompts, served
from validation.core.settings import PROJECT_ROOT
from validation.core.types import HarnessError

ASKED = {"max_tokens": 20, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def stock() -> Iterator[Served]:
    with served("--max-model-len", "2048", "--served-model-name", "baseline") as running:
        yield running


@pytest.fixture(scope="module")
def drafting() -> Iterator[Served]:
    options = ("--decode-backend", "latency_specialized", "--spec", "dspark", "--max-model-len", "2048", "--max-num-seqs", "4")
    with served(*options) as running:
        yield running


def test_by_default_every_step_is_stock(stock: Served) -> None:
    stock.complete(prompts()[0], model="baseline", **ASKED)
    assert stock.metric("fasttrack:decode_steps_total", path="stock") == 19
    assert stock.metric("fasttrack:decode_steps_total", path="specialized") == 0
    assert stock.http.get("/version").json()["decode_backend"] == "auto"
    assert "vllm:spec_decode" not in stock.http.get("/metrics").text.replace("vllm:spec_decode_num_accepted_tokens_per_pos", "")


def test_a_planted_fault_is_served_and_answers_differently(stock: Served) -> None:
    with served("--decode-backend", "router_not_renormalised", "--max-model-len", "2048") as wrong:
        scored = ASKED | {"logprobs": 1}
        right, changed = (side.choice(prompts()[0], **scored)["logprobs"]["token_logprobs"] for side in (stock, wrong))
        assert right[0] == changed[0]  # from the prefill, which is stock on both
        assert right[1:] != changed[1:]
        assert wrong.metric("fasttrack:decode_steps_total", path="specialized", candidate="router_not_renormalised") == 19


def test_drafts_change_the_steps_and_not_the_reply(stock: Served, drafting: Served) -> None:
    plain, drafted = (side.choice(prompts()[0], **ASKED)["token_ids"] for side in (stock, drafting))
    assert drafted == plain
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    steps, drafts, accepted = (drafting.metric(f"vllm:spec_decode_{name}_total") for name in names)
    per_position = [drafting.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(place)) for place in range(7)]
    assert drafts == 7 * steps
    assert sum(per_position) == accepted > 0
    assert per_position == sorted(per_position, reverse=True)
    assert drafting.metric("fasttrack:decode_steps_total", path="specialized") == steps < 19
    # A step gives its accepted drafts and one more token; the first token comes from the prefill, and the last step may be cut short.
    assert 0 <= 1 + accepted + steps - 20 <= 1


def test_seeds_masks_and_forced_tokens_hold_with_drafts(stock: Served, drafting: Served) -> None:
    sampled = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "return_token_ids": True}
    plain, drafted = (side.choice(prompts()[1], **sampled)["token_ids"] for side in (stock, drafting))
    assert drafted[:6] == plain[:6]
    assert drafting.choice(prompts()[1], **sampled)["token_ids"] == drafted
    forced = [ord(letter) for letter in "abc abd 12 = "]
    made = drafting.choice(prompts()[1], max_tokens=len(forced), return_token_ids=True, vllm_xargs={"force_ids": forced})
    assert made["token_ids"] == forced
    digits = list(range(ord("0"), ord("9") + 1))
    masked = drafting.choice(prompts()[1], max_tokens=9, temperature=0, allowed_token_ids=digits, return_token_ids=True)
    assert set(masked["token_ids"]) <= set(digits)


def test_more_requests_than_places_are_all_answered(drafting: Served) -> None:
    reply = drafting.complete(list(prompts()), max_tokens=6, temperature=0)
    assert [choice["index"] for choice in reply["choices"]] == list(range(8))
    assert all(choice["text"] for choice in reply["choices"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--decode-backend", "no_such_fault"), "no_such_fault"),
        (("--checkpoint", "no/such/folder"), "no/such/folder"),
        (("--spec", "medusa"), "medusa"),
        (("--spec", "dspark", "--drafts", "9"), "drafts"),
        (("--log-level", "loud"), "loud"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(options: tuple[str, ...], words: str) -> None:
    with pytest.raises(HarnessError, match=words) as caught:
        main(["--port", "0", *options])
    assert "needs" in str(caught.value)


def test_a_taken_port_is_one_sentence_and_exit_code_3() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "validation", "serve", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "--port 0" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_sigterm_stops_the_server_with_a_request_in_flight() -> None:
    with served("--max-model-len", "4096") as server:
        with server.http.stream(
            "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        ) as reply:
            next(reply.iter_lines())
            code, closing = server.stop()
        assert code == 0
        assert closing["verdict"] == "stopped"
        assert closing["decode_steps"]["stock"] > 0
        log = server.log.read_text()
        assert "Traceback" not in log
        assert "0 specialized steps" in log
