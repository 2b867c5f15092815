"""The session and the lm-eval model: what they refuse, what they keep equal on both sides, and how they fail."""

import json
import sys
from pathlib import Path

import pytest
from lm_eval.api.instance import Instance

from evals.generation import GenerationParams, PairedSession, PathReply, Request, repeat_seed
from evals.lm import RecordedLM, request_from
from evals.records import RecordFile
from validation.core.types import HarnessError

sys.path.insert(0, str(Path(__file__).parent))

OPTIONS = {"until": ["\n"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 8}


class Echo:
    """Replies with the prompt's last word; keeps what it was asked."""

    max_context_tokens = 64

    def __init__(self):
        self.batches = []
        self.loglikelihoods = []

    def count_tokens(self, prompt):
        return len(prompt)

    def generate_pair(self, prompts, params: GenerationParams):
        self.batches.append((list(prompts), params))
        return {path: self.generate(prompts, params, path) for path in ("stock", "candidate")}

    def generate(self, prompts, params, path):
        return [PathReply(token_ids=(1,), text=f"{path}:{prompt.split()[-1]}", finish_reason="stop") for prompt in prompts]

    def loglikelihood(self, pairs, path):
        self.loglikelihoods.append((pairs, path))
        return [(-1.5, False)] * len(pairs)


@pytest.fixture
def records(tmp_path):
    with RecordFile(tmp_path / "r.jsonl") as file:
        yield file


def session(records, engine=None, **kwargs):
    return PairedSession(engine or Echo(), records, {"stock": "s", "candidate": "c"}, **kwargs)


def request(i=0, prompt=None, **kwargs):
    return Request(suite="t", item=f"{i}", repeat=0, prompt=f"say {i}" if prompt is None else prompt, max_new_tokens=8, **kwargs)


def instance(context, options=OPTIONS, doc_id=0, repeats=1):
    return Instance(request_type="generate_until", doc={}, arguments=(context, options), idx=0, metadata=("t", doc_id, repeats))


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_never_sent(records, prompt):
    """Trap: with a limit as large as the context, API models send an empty prompt and exit with 0."""
    with pytest.raises(HarnessError, match="empty prompt"):
        session(records).replies("stock", [request(prompt=prompt)])
    assert not records.replies


def test_a_prompt_without_room_for_its_answer_is_never_cut(records):
    with pytest.raises(HarnessError, match="57 prompt"):
        session(records).replies("stock", [request(prompt="x" * 57)])
    session(records).replies("stock", [request(prompt="x" * 56)])


def test_both_sides_get_the_same_stop_strings_limit_and_seed_in_one_pass(records):
    engine = Echo()
    s = session(records, engine)
    lm = {path: RecordedLM(s, path) for path in ("stock", "candidate")}
    asked = [instance("say one", {**OPTIONS, "do_sample": True, "temperature": 0.7})]
    assert lm["stock"].generate_until(asked) == ["stock:one"]
    assert lm["candidate"].generate_until(asked) == ["candidate:one"]
    assert len(engine.batches) == 1
    params = engine.batches[0][1]
    assert params.stop == ("\n",)
    assert params.seeds[0] is not None
    keys = sorted(records.replies)
    assert keys[0].params_hash == keys[1].params_hash
    assert keys[0].prompt_hash == keys[1].prompt_hash


def test_changed_options_are_asked_again(records):
    engine = Echo()
    s = session(records, engine)
    s.replies("stock", [request()])
    s.replies("stock", [request(stop=("Question:",))])
    assert len(engine.batches) == 2


def test_repeats_have_seeds_of_their_own_and_greedy_has_none(records):
    """Trap: lm-eval sends seed 1234 with every request, so that sampled repeats are copies."""
    s = session(records, base_seed=3)
    lm = RecordedLM(s, "stock")
    lm.generate_until([instance("say a", {**OPTIONS, "do_sample": True, "temperature": 1.0}, repeats=3)] * 3)
    asked = lm.asked["t"]
    assert [r.repeat for r in asked] == [0, 1, 2]
    assert len({r.seed for r in asked}) == 3
    assert asked[0].seed == repeat_seed(3, "t", "00000", 0)
    lm.generate_until([instance("say b", doc_id=1)])
    assert lm.asked["t"][0].seed is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"until": [], "do_sample": False}, "no max_gen_toks"),
        ({**OPTIONS, "guided_choice": ["A"]}, "unknown generation options"),
    ],
)
def test_options_that_nobody_would_read_are_errors(options, words):
    """Trap: servers ignore options they do not know, and API models default to 256 new tokens."""
    with pytest.raises(HarnessError, match=words):
        request_from("t", "0", 0, "p", options, 0)


def test_a_short_reply_list_never_shifts_answers_onto_other_items(records):
    class Short(Echo):
        def generate(self, prompts, params, path):
            return super().generate(prompts, params, path)[: -1 if len(prompts) > 1 and path == "candidate" else None]

    texts = [r.text for r in session(records, Short()).replies("candidate", [request(i) for i in range(3)])]
    assert texts == ["candidate:0", "candidate:1", "candidate:2"]


def test_results_so_far_survive_a_failing_batch(records):
    """Trap: after its retries one failed request aborts a whole lm-eval run and nothing is written."""

    class Fails(Echo):
        def generate(self, prompts, params, path):
            if path == "candidate" and any(p.endswith(" 7") for p in prompts):
                raise ConnectionError("reset")
            return super().generate(prompts, params, path)

    replies = session(records, Fails(), max_rows=4).replies("candidate", [request(i) for i in range(10)])
    assert [r.finish_reason[:5] for r in replies].count("error") == 1
    assert replies[7].text is None
    assert "ConnectionError" in replies[7].finish_reason
    assert sum(r.text is not None for r in records.replies.values()) == 19


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_the_machines_own_troubles_are_not_the_candidates_answers(records, error):
    class Dies(Echo):
        def generate(self, prompts, params, path):
            raise error

    with pytest.raises(error):
        session(records, Dies()).replies("stock", [request()])
    assert not records.replies


def test_batches_hold_alike_requests_within_the_budget(records):
    engine = Echo()
    requests = [request(i) for i in range(10)] + [request(i, stop=("x",)) for i in range(20, 25)]
    session(records, engine, max_rows=4, max_batch_tokens=40).replies("stock", requests)
    for prompts, params in engine.batches:
        assert len(prompts) <= 4
        assert sum(len(p) + params.max_new_tokens for p in prompts) <= 40
    assert sum(len(prompts) for prompts, _ in engine.batches) == 15


def test_loglikelihoods_run_on_the_side_that_is_asked(records):
    engine = Echo()
    lm = RecordedLM(session(records, engine), "candidate")
    ask = Instance(request_type="loglikelihood", doc={}, arguments=("The answer is", " (A)"), idx=0, metadata=("t", 0, 1))
    assert lm.loglikelihood([ask]) == [(-1.5, False)]
    assert engine.loglikelihoods == [([("The answer is", " (A)")], "candidate")]
    bad = Instance(request_type="loglikelihood", doc={}, arguments=("", " (A)"), idx=0, metadata=("t", 4, 1))
    with pytest.raises(HarnessError, match="empty context"):
        lm.loglikelihood([bad])
    rolling = Instance(request_type="loglikelihood_rolling", doc={}, arguments=("abc",), idx=0, metadata=("t", 0, 1))
    assert lm.loglikelihood_rolling([rolling]) == [-1.5]


class Brackets:
    name = "brackets"

    def render(self, messages, add_generation_prompt):
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + ("[assistant]" if add_generation_prompt else "")


def test_chat_prompts_use_the_template_or_become_a_transcript(records):
    engine = Echo()
    chat = json.dumps([{"role": "user", "content": "hi there"}])
    s = session(records, engine)
    RecordedLM(s, "stock").generate_until([instance(chat)])
    RecordedLM(s, "stock", template=Brackets()).generate_until([instance(chat, doc_id=1)])
    assert [b[0][0] for b in engine.batches] == ["User: hi there\nBot:", "[user]hi there[assistant]"]
    lm = RecordedLM(s, "stock", template=Brackets())
    assert lm.apply_chat_template([{"role": "user", "content": chat}]) == "[user]hi there[assistant]"
    assert lm.tokenizer_name == "brackets"
    with pytest.raises(HarnessError, match="chat template"):
        RecordedLM(s, "stock").apply_chat_template([{"role": "user", "content": "x"}])
