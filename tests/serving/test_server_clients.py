"""Clients that know nothing of this project, unmodified: lm-eval's API models and the openai package."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from openai import BadRequestError, NotFoundError, OpenAI

from kimi_k3_decode.engine import CANDIDATE
from kimi_k3_decode.sampling import SamplingParams
from tests.serving.nano_server import Served, engine, prompts

UNTIL = {"until": ["\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0}


def requests(kind: str, arguments: list[tuple[object, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=given, idx=number) for number, given in enumerate(arguments)]  # type: ignore[arg-type]


@lru_cache
def reply(place: int) -> str:
    asked = SamplingParams(max_new_tokens=24, stop=("\n",))
    return engine().generate([prompts()[place]], asked, CANDIDATE)[0].text


def wanted(count: int) -> list[str]:
    return [reply(place) for place in range(count)]


def test_lm_eval_completions_generates_what_the_engine_does(server: Served) -> None:
    model = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="nano-k3",
        num_concurrent=2,
        tokenizer_backend=None,
        tokenized_requests=False,
        max_length=4096,
    )
    made = model.generate_until(requests("generate_until", [(prompt, dict(UNTIL)) for prompt in prompts()[:2]]), disable_tqdm=True)
    assert made == wanted(2)


def test_lm_eval_completions_scores_continuations_with_the_servers_tokenizer(server: Served) -> None:
    model = LocalCompletionsAPI(base_url=f"{server.url}/v1/completions", model="nano-k3", max_length=4096)
    assert model.tokenizer_backend == "remote"
    context = prompts()[0]
    right, wrong = model.loglikelihood(requests("loglikelihood", [(context, " 3 - 2 = 1"), (context, " 3 - 2 = 7")]), disable_tqdm=True)
    tokens = engine().tokenizer.encode_continuation(context + " 3 - 2 = 1")
    place = (caches := _caches(len(tokens))).acquire()
    with torch.inference_mode():
        rows = engine().stock.prefill([tokens], caches, [place], all_logits=True).all_logits
    assert rows is not None
    n_continuation = len(" 3 - 2 = 1")
    logprobs = torch.log_softmax(rows[0].double(), -1)[-n_continuation - 1 : -1]
    value = logprobs.gather(1, torch.tensor(tokens[-n_continuation:]).unsqueeze(1)).sum().item()
    assert right[0] == pytest.approx(value, abs=1e-6)
    assert right[1] is True
    assert wrong[1] is False
    assert wrong[0] < right[0]


def _caches(tokens: int):  # type: ignore[no-untyped-def]
    from kimi_k3_decode.cache import Caches

    return Caches.allocate(engine().config, 1, tokens)


def test_lm_eval_chat_completions(server: Served) -> None:
    model = LocalChatCompletion(base_url=f"{server.url}/v1/chat/completions", model="nano-k3", max_length=4096)
    histories = [model.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in prompts()[:2]]
    made = model.generate_until(requests("generate_until", [(history, dict(UNTIL)) for history in histories]), disable_tqdm=True)
    assert made == wanted(2)


def test_the_openai_package(server: Served) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [card.id for card in client.models.list()] == ["nano-k3"]
    plain = client.completions.create(model="nano-k3", prompt=prompts()[0], max_tokens=24, temperature=0, stop="\n", logprobs=1)
    assert plain.choices[0].text == wanted(1)[0]
    assert plain.choices[0].logprobs is not None
    asked = {"model": "nano-k3", "messages": [{"role": "user", "content": prompts()[0]}], "max_completion_tokens": 24, "temperature": 0}
    chat = client.chat.completions.create(**asked, stop=["\n"], logprobs=True, top_logprobs=2)
    assert chat.choices[0].message.content == wanted(1)[0]
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
    pieces = client.chat.completions.create(**asked, stop=["\n"], stream=True, stream_options={"include_usage": True})
    chunks = list(pieces)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == wanted(1)[0]
    assert chunks[-1].usage is not None
    with pytest.raises(NotFoundError, match="nano-k3"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(BadRequestError, match="max_tokens"):
        client.completions.create(model="nano-k3", prompt="a", max_tokens=-1)
