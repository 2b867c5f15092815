"""One server, the specialised path: every answer against the engine in this process."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from kimi_k3_decode.engine import CANDIDATE
from kimi_k3_decode.sampling import SamplingParams, logprobs_of
from tests.serving.nano_server import Served, engine, prompts


def expected(prompt: str, **params: object) -> object:
    return engine().generate([prompt], SamplingParams(max_new_tokens=24, **params), CANDIDATE)[0]  # type: ignore[arg-type]


def test_greedy_replies_and_their_logprobs_are_those_of_the_engine(server: Served) -> None:
    prompt = prompts()[0]
    reply = server.complete(prompt, max_tokens=24, temperature=0, logprobs=3, return_token_ids=True)
    choice, wanted = reply["choices"][0], expected(prompt, logprobs=3)
    assert choice["token_ids"] == list(wanted.token_ids)
    assert choice["text"] == wanted.text
    assert choice["prompt_token_ids"] == engine().tokenizer.encode(prompt)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([item.logprob for item in wanted.logprobs], abs=1e-9)
    for shown, item in zip(choice["logprobs"]["top_logprobs"], wanted.logprobs, strict=True):
        assert sorted(shown.values()) == pytest.approx(sorted(value for _, value in item.top), abs=1e-9)
    assert reply["usage"] == {"prompt_tokens": len(choice["prompt_token_ids"]), "completion_tokens": 24, "total_tokens": 24 + 192}


def test_the_metrics_prove_that_the_specialised_path_decoded(server: Served) -> None:
    before = server.metric("fasttrack:decode_steps_total", path="specialized", candidate="specialized")
    server.complete(prompts()[1], max_tokens=5, temperature=0)
    after = server.metric("fasttrack:decode_steps_total", path="specialized", candidate="specialized")
    assert after - before == 4  # the first token comes from the prefill
    assert server.metric("fasttrack:decode_steps_total", path="stock") == 0
    assert server.metric("vllm:generation_tokens_total") >= 5
    assert server.metric("vllm:num_requests_running") == 0


def test_echoed_prompts_carry_the_logprobs_of_a_prefill(server: Served) -> None:
    prompt = prompts()[0][:40]
    ids = engine().tokenizer.encode(prompt)
    choice = server.choice(prompt, max_tokens=1, temperature=0, echo=True, logprobs=1)
    place = (caches := _caches(len(ids))).acquire()
    rows = engine().stock.prefill([ids], caches, [place], all_logits=True).all_logits
    assert rows is not None
    wanted = [item.logprob for item in logprobs_of(rows[0][:-1], ids[1:], 0)]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:-1] == pytest.approx(wanted, abs=1e-9)
    assert choice["text"].startswith(prompt)
    alone = server.choice(prompt, max_tokens=0, echo=True, logprobs=1)
    assert alone["logprobs"]["token_logprobs"] == choice["logprobs"]["token_logprobs"][:-1]


def _caches(tokens: int):  # type: ignore[no-untyped-def]
    from kimi_k3_decode.cache import Caches

    return Caches.allocate(engine().config, 1, tokens)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_streamed_reply_is_the_whole_one_in_pieces(server: Served, route: str) -> None:
    chat = "chat" in route
    body = {"messages": [{"role": "user", "content": prompts()[2]}]} if chat else {"prompt": prompts()[2]}
    body |= {"max_tokens": 12, "temperature": 0, "return_token_ids": True, "logprobs": True if chat else 2}
    whole = server.post(route, **body).json()
    events = server.stream(route, **body, stream_options={"include_usage": True})
    parts = [event["choices"][0] for event in events[:-1]]
    pieces = [part["delta"].get("content", "") if chat else part["text"] for part in parts]
    choice = whole["choices"][0]
    assert "".join(pieces) == (choice["message"]["content"] if chat else choice["text"])
    assert len(pieces) == 12
    assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
    assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    if not chat:
        assert [value for part in parts for value in part["logprobs"]["token_logprobs"]] == choice["logprobs"]["token_logprobs"]
        assert [value for part in parts for value in part["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]


def test_seeds_decide_sampled_replies(server: Served) -> None:
    prompt, asked = "Question:", {"max_tokens": 16, "temperature": 1.0, "top_p": 0.95, "return_token_ids": True, "ignore_eos": True}
    first, again, other = (server.choice(prompt, seed=seed, **asked)["token_ids"] for seed in (7, 7, 8))
    wanted = expected(prompt, temperature=1.0, top_p=0.95, seeds=(7,), ignore_eos=True)
    assert first == again == list(wanted.token_ids[:16])
    assert other != first
    several = [choice["token_ids"] for choice in server.complete(prompt, seed=7, n=3, **asked)["choices"]]
    assert several[0][:8] == first[:8]  # later a draw may fall the other way: three rows round differently than one
    assert len({tuple(ids) for ids in several}) == 3
    # Two short replies may be the same by chance; six are not.
    unseeded = [tuple(choice["token_ids"]) for choice in server.complete([prompt] * 6, **asked)["choices"]]
    assert len(set(unseeded)) > 1
    assert server.choice(prompt, seed=7, **(asked | {"top_k": 1}))["token_ids"] == list(expected(prompt, ignore_eos=True).token_ids[:16])


def test_stop_strings_end_the_text_before_them(server: Served) -> None:
    prompt = prompts()[0]
    whole = server.choice(prompt, max_tokens=32, temperature=0)
    stop = whole["text"][10:16]
    cut = server.choice(prompt, max_tokens=32, temperature=0, stop=[stop, "never"])
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    kept = server.choice(prompt, max_tokens=32, temperature=0, stop=stop, include_stop_str_in_output=True)
    assert kept["text"] == cut["text"] + stop
    events = server.stream("/v1/completions", prompt=prompt, max_tokens=32, temperature=0, stop=stop)
    assert "".join(event["choices"][0]["text"] for event in events) == cut["text"]
    by_id = server.choice(prompt, max_tokens=32, temperature=0, stop_token_ids=[ord("=")])
    assert (by_id["finish_reason"], by_id["stop_reason"]) == ("stop", ord("="))


def test_forced_tokens_are_decoded_and_scored_on_the_decode_path(server: Served) -> None:
    prompt, text = prompts()[3], " 12 + 30 = 42"
    context, forced = engine().tokenizer.encode(prompt), engine().tokenizer.encode_continuation(text)
    choice = server.choice(
        prompt,
        max_tokens=len(forced),
        logprobs=0,
        return_token_ids=True,
        ignore_eos=True,
        vllm_xargs={"force_ids": forced},
    )
    assert choice["token_ids"] == forced
    with torch.inference_mode():
        trace = engine().teacher_force([context + forced], len(forced))[CANDIDATE]
    wanted = [item.logprob for item in logprobs_of(trace.logits_BWV[0, :-1], forced[1:], 0)]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-9)
    # One token a request, as with a server that refuses custom processors: here the token follows the prefill.
    single = server.choice(
        context + forced[:4], max_tokens=1, temperature=0, logprobs=0, allowed_token_ids=[forced[4]], return_token_ids=True
    )
    assert single["token_ids"] == [forced[4]]
    assert single["logprobs"]["token_logprobs"][0] == pytest.approx(choice["logprobs"]["token_logprobs"][4], abs=0.2)


def test_clients_at_once_get_their_own_answers(server: Served) -> None:
    def answer(prompt: str) -> str:
        return str(server.choice(prompt, max_tokens=12, temperature=0, stop="\n")["text"])

    asked = prompts()[:4]
    alone = [answer(prompt) for prompt in asked]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(answer, asked))
    assert together == alone
    assert len(set(alone)) == len(alone)
    batch = server.complete(list(asked[:3]), max_tokens=12, temperature=0, stop="\n", n=1)["choices"]
    assert [choice["text"] for choice in batch] == alone[:3]
    assert [choice["index"] for choice in batch] == [0, 1, 2]


@pytest.mark.parametrize(
    ("route", "body", "status", "words"),
    [
        ("/v1/completions", {"prompt": ""}, 400, "prompt 0"),
        ("/v1/completions", {"prompt": [1, 999]}, 400, "token ids 0..127"),
        ("/v1/completions", {"prompt": []}, 400, "not empty"),
        ("/v1/completions", {}, 400, "prompt 0"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a" * 5000, "max_tokens": 1}, 400, "at most 4096"),
        ("/v1/completions", {"prompt": "a", "temperature": -1, "top_p": 0}, 400, "top_p"),
        ("/v1/completions", {"prompt": "a", "logprobs": 1000}, 400, "0..128"),
        ("/v1/completions", {"prompt": "a", "stop": [""]}, 400, "stop"),
        ("/v1/completions", {"prompt": "a", "guided_choice": ["x"]}, 400, "unknown field"),
        ("/v1/completions", {"prompt": "a", "repetition_penalty": 1.2}, 400, "not served"),
        ("/v1/completions", {"prompt": "a", "vllm_xargs": {"forced": [1]}}, 400, "force_ids"),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids"),
        ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream"),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "nano-k3"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "text content"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400, "logprobs true"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
        ("/v1/embeddings", {}, 404, "routes"),
    ],
)
def test_bad_requests_get_one_sentence(server: Served, route: str, body: dict[str, object], status: int, words: str) -> None:
    reply = server.post(route, **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, status)
    assert words in error["message"]
    assert "got" in error["message"]
    assert "needs" in error["message"]
    assert "Traceback" not in reply.text


def test_bodies_that_are_no_object_are_refused(server: Served) -> None:
    for content in (b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"prompt": "\\uD800"}', b'{"model": "\\udfff", "prompt": "a"}'):
        reply = server.http.post("/v1/completions", content=content)
        assert reply.status_code == 400, content[:10]
        assert "body" in reply.json()["error"]["message"]
    assert server.http.get("/v1/completions").status_code == 405
    assert server.http.get("/health").status_code == 200


def test_the_tokenizer_routes_and_the_model_card(server: Served) -> None:
    text = prompts()[0]
    made = server.post("/tokenize", prompt=text).json()
    assert made["tokens"] == engine().tokenizer.encode(text)
    assert made["count"] == len(made["tokens"])
    assert server.post("/detokenize", tokens=made["tokens"]).json() == {"prompt": text}
    bare = server.post("/tokenize", prompt=text, add_special_tokens=False).json()
    assert bare["tokens"] == made["tokens"][1:]
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]).json()
    assert server.post("/detokenize", tokens=chat["tokens"]).json() == {"prompt": "User: a\nBot: b\nBot:"}
    card = server.http.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("nano-k3", 4096)
    assert server.http.get("/version").json()["candidate"] == "specialized"


def _cancelled(server: Served, more_than: float) -> bool:
    for _ in range(100):
        if server.metric("fasttrack:request_failure_total", reason="cancelled") > more_than and not server.metric(
            "vllm:num_requests_running"
        ):
            return True
        time.sleep(0.05)
    return False


def test_a_client_that_hangs_up_stops_the_work(server: Served) -> None:
    endless = {"prompt": "Question:", "max_tokens": 4000, "ignore_eos": True}
    before = server.metric("fasttrack:request_failure_total", reason="cancelled")
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json={**endless, "stream": True}) as reply,
    ):
        next(reply.iter_lines())
    assert _cancelled(server, before)
    before = server.metric("fasttrack:request_failure_total", reason="cancelled")
    with httpx.Client(base_url=server.url, timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=endless)
    assert _cancelled(server, before)
    assert server.choice("Question:", max_tokens=1)["finish_reason"] == "length"
