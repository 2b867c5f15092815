"""The ten traps that change a score silently: lm-eval's own API model walks into each against a real server, and the guard does not.

Each test first shows the trap with lm-eval unmodified (`local-completions`, the shipped tasks, its cache), so that it also tells when a
later lm-eval has closed it; then it shows the guard on the same server. Without the guard the second half fails like the first.
"""

import asyncio
import importlib.util
import json
import random
import sys
from pathlib import Path

import datasets
import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.openai_completions import LocalCompletionsAPI

from evals.lm import quiet_lm_eval
from evals.pairing import pair_answers
from evals.records import decode_line
from evals.serving.client import Endpoint
from evals.serving.forced import NotForced, force_window
from evals.serving.progress import Silent
from evals.serving.suites import Sampling, run_suite
from evals.tasks.loading import SHIPPED, load_yaml, task_config
from validation.core.types import HarnessError, Status

sys.path.insert(0, str(Path(__file__).parent))
from canned import CannedServer, Script
from suite_parts import aime25, gpqa, gsm8k, plan, policy, side

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("K3_EVAL_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def server():
    with CannedServer(Script()) as running:
        yield running


def local_completions(server, **options):
    """lm-eval's own model over HTTP."""
    return LocalCompletionsAPI(
        **{"base_url": f"{server.url}/v1/completions", "model": "canned", "tokenizer_backend": "None", "max_retries": 1, **options}
    )


def instances(prompts, options, repeats=1):
    made = [Instance("generate_until", {}, (prompt, dict(options)), i, ("t", i, repeats)) for i, prompt in enumerate(prompts)]
    return [one for one in made for _ in range(repeats)]


def shipped_task(name, split, rows, **changes):
    """A task as lm-eval ships it, over given rows."""
    config = {**load_yaml(SHIPPED / name), **changes}
    config.pop("tag", None)
    for which in ("training_split", "validation_split", "test_split", "fewshot_split"):
        if config.get(which):
            config[which] = split
    task = type("Shipped", (ConfigurableTask,), {"download": lambda self, *a, **k: setattr(self, "dataset", {split: rows})})(config=config)
    task.set_fewshot_seed(seed=1)
    return task


def ours(suite, server, folder, other=None, **changes):
    sides = {"stock": side("stock", server), "candidate": side("candidate", other or server)}
    return run_suite(suite, **sides, policy=policy(suite), plan=plan(**changes), folder=folder, shown=Silent())


def prompts_of(server):
    return [entry["request"]["prompt"] for entry in server.log]


class Words:
    """A tokenizer for lm-eval's tokenized requests."""

    def encode(self, text):
        return list(range(1, 1 + len(text.split())))

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]


def test_1_a_limit_above_the_context_empties_the_prompt(server, data, tmp_path):
    answers = aime25(data)
    trapped = local_completions(server, max_length=2048)
    trapped.tokenizer, trapped.tokenizer_backend, trapped.tokenized_requests = Words(), "words", True
    trapped.tok_encode = lambda texts, **k: Words().encode_batch(texts)
    trapped._eos_string = "</s>"
    trapped.generate_until(instances(["Question: find x with many words in it\nAnswer:"], {"max_gen_toks": 32768, "until": []}))
    assert prompts_of(server) == [[[]]] or prompts_of(server) == [[]]  # asked from nothing, and nobody is told

    server.log.clear()
    with pytest.raises(HarnessError, match="needs a prompt and room for its answer"):
        ours("aime25", server, tmp_path / "out", context_tokens=2048)
    assert server.log == []
    server.script.answers = answers
    ours("aime25", server, tmp_path / "out", context_tokens=40960, repeats=1, sampling=Sampling())
    assert all(prompt.startswith("Question:") for prompt in prompts_of(server))


def test_2_concurrency_must_not_change_the_stop_strings(server, data, tmp_path):
    stops = []
    for slots in (1, 2):
        server.log.clear()
        trapped = local_completions(server, num_concurrent=slots, eos_string="</s>")
        trapped.generate_until(instances(["a", "b"], {"until": ["Question:"], "max_gen_toks": 8}))
        stops.append(server.log[0]["request"]["stop"])
    assert stops == [["Question:", "</s>"], ["Question:"]]

    gsm8k(data, 12)
    requests = []
    for slots in (1, 8):
        server.log.clear()
        sides = {role: side(role, server, concurrency=slots) for role in ("stock", "candidate")}
        run_suite("gsm8k", **sides, policy=policy("gsm8k"), plan=plan(), folder=tmp_path / str(slots), shown=Silent())
        requests.append(sorted(json.dumps(entry["request"], sort_keys=True) for entry in server.log))
    assert requests[0] == requests[1]
    assert json.loads(requests[0][0])["stop"] == ["Question:", "</s>", "<|im_end|>"]


def test_3_repeats_must_not_be_copies(server, data, tmp_path):
    trapped = local_completions(server)
    trapped.generate_until(instances(["a prompt"], {"temperature": 1.0, "max_gen_toks": 8}, repeats=4))
    assert [entry["request"]["seed"] for entry in server.log] == [1234] * 4

    server.log.clear()
    server.script.answers, server.script.accuracy = aime25(data, 4), 0.5
    ours("aime25", server, tmp_path / "out", repeats=4)
    seeds = [entry["request"]["seed"] for entry in server.log]
    assert len(seeds) == 2 * 4 * 4
    assert len(set(seeds)) == 4 * 4  # one an item and repeat, the same on both sides
    made = [decode_line(line) for line in (tmp_path / "out" / "stock.jsonl").read_bytes().splitlines(keepends=True)]
    texts = {one["text"] for one in made if one["kind"] == "reply" and one["key"]["item"] == "00000"}
    assert len(texts) > 1


def test_4_every_repeat_counts(server, data, tmp_path):
    answers = aime25(data, 6)
    rows = datasets.Dataset.from_list([json.loads(line) for line in (data / "aime25" / "test.jsonl").read_text().splitlines()])
    rows = rows.rename_columns({"question": "problem", "true_answer": "answer"})
    server.script.answers, server.script.accuracy = answers, 0.5
    options = {"do_sample": True, "temperature": 1.0, "until": [], "max_gen_toks": 64}
    task = shipped_task("aime/aime25.yaml", "test", rows, repeats=5, generation_kwargs=options)

    class Sampled(LocalCompletionsAPI):  # trap 3 mended, so that repeats differ
        def _create_payload(self, *args, **kwargs):
            Sampled.calls += 1
            return super()._create_payload(*args, **{**kwargs, "seed": Sampled.calls})

        calls = 0

    model = Sampled(base_url=f"{server.url}/v1/completions", model="canned", tokenizer_backend="None")
    with quiet_lm_eval():
        outcome = lm_eval.evaluate(lm=model, task_dict={"tasks": {"aime25": task}}, bootstrap_iters=0, log_samples=True)
    first = [float(f"boxed{{{s['target']}}}" in s["resps"][0][0]) for s in outcome["samples"]["aime25"]]
    every = [float(f"boxed{{{s['target']}}}" in r) for s in outcome["samples"]["aime25"] for r in s["resps"][0]]
    assert outcome["results"]["aime25"]["exact_match,none"] == sum(first) / 6  # 24 of 30 replies were paid for and thrown away
    assert sum(every) / 30 != sum(first) / 6

    result = ours("aime25", server, tmp_path / "out", repeats=5)
    made = [decode_line(line) for line in (tmp_path / "out" / "stock.jsonl").read_bytes().splitlines(keepends=True)]
    right = [one["text"] in answers.values() for one in made if one["kind"] == "reply"]
    assert len(right) == 30
    assert result.gate.n_repeats == 5
    assert result.gate.stock.mean == pytest.approx(sum(right) / 30)
    by_repeat = json.loads(result.report)["items"]["score_stock"]
    assert len(by_repeat) == 30
    assert sum(by_repeat) == sum(right)


def test_5_the_default_of_256_tokens_cuts_reasoning(server, data, tmp_path, monkeypatch):
    answers = gsm8k(data, 12)
    server.script.answers = {question: "step. " * 300 + reply for question, reply in answers.items()}
    rows = datasets.load_dataset("json", data_files=str(data / "gsm8k" / "test.jsonl"), split="train")
    task = shipped_task("gsm8k/gsm8k.yaml", "test", rows, num_fewshot=0)
    with quiet_lm_eval():
        outcome = lm_eval.evaluate(lm=local_completions(server), task_dict={"tasks": {"gsm8k": task}}, bootstrap_iters=0, log_samples=True)
    assert {entry["request"]["max_tokens"] for entry in server.log} == {256}
    assert outcome["results"]["gsm8k"]["exact_match,strict-match"] == 0.0  # every answer was right, and cut
    assert "finish_reason" not in outcome["samples"]["gsm8k"][0]

    server.log.clear()
    result = ours("gsm8k", server, tmp_path / "out")
    assert {entry["request"]["max_tokens"] for entry in server.log} == {8192}
    assert result.gate.stock.mean == 1.0
    assert result.gate.truncated_stock == 0.0
    cut = ours("gsm8k", server, tmp_path / "cut", max_new_tokens=256)
    assert cut.gate.truncated_stock == 1.0
    assert cut.gate.status is not Status.PASS
    assert any("hit the token limit" in reason for reason in cut.gate.reasons)


def test_6_only_equal_questions_are_compared(server, data, tmp_path):
    rows = datasets.load_dataset("json", data_files=str(gpqa(data)), split="train")
    spec = importlib.util.spec_from_file_location("shipped_gpqa", SHIPPED / "gpqa" / "cot_zeroshot" / "utils.py")
    shipped = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shipped)
    orders = []
    for seed in (1, 2):
        random.seed(seed)
        orders.append([doc["choices"] for doc in shipped.process_docs(rows.map(lambda doc, s=seed: {**doc, "run": s}))])
    assert orders[0] != orders[1]  # one item number, two questions

    asked = []
    for seed in (1, 2):
        random.seed(seed)
        server.log.clear()
        result = ours("gpqa_diamond_cot_zeroshot", server, tmp_path / str(seed))
        assert result.gate.prompts_differ == 0
        asked.append(sorted(prompts_of(server)))
    assert asked[0] == asked[1]
    table = {side_: result.pairs.table.rename(columns=lambda name: name.removesuffix("_stock")) for side_ in ("stock", "candidate")}
    other = table["candidate"].assign(prompt_hash=lambda t: ["another" if i == 3 else h for i, h in enumerate(t["prompt_hash"])])
    pairs = pair_answers("gpqa", table["stock"], other)
    assert (pairs.prompts_differ, pairs.paired) == (1, len(rows) - 1)


def test_7_no_model_gets_anothers_answers(server, data, tmp_path):
    with CannedServer(Script(default="from the other model", name="other")) as second:
        requests = instances(["a prompt"], {"until": [], "max_gen_toks": 8})
        cached = [CachingLM(local_completions(one), str(tmp_path / "cache.db")) for one in (server, second)]
        texts = [model.generate_until(requests)[0] for model in cached]
        assert texts[0] == texts[1]
        assert second.log == []  # it was never asked

        gsm8k(data, 8)
        run = {}
        for name, one in (("first", server), ("second", second)):
            sides = {role: side(role, one, fingerprint=name) for role in ("stock", "candidate")}
            run[name] = run_suite("gsm8k", **sides, policy=policy("gsm8k"), plan=plan(), folder=tmp_path / "out", shown=Silent())
        assert len(server.log) == 1 + 16
        assert len(second.log) == 16
        assert all("other model" in text for text in run["second"].pairs.table["text_stock"])


def test_8_one_failed_request_costs_one_item(server, data, tmp_path):
    server.script.answers, server.script.fail_500 = gsm8k(data, 30), 0.1
    rows = datasets.load_dataset("json", data_files=str(data / "gsm8k" / "test.jsonl"), split="train")
    task = shipped_task("gsm8k/gsm8k.yaml", "test", rows, num_fewshot=0)
    with quiet_lm_eval(), pytest.raises(Exception, match="500"):
        lm_eval.evaluate(lm=local_completions(server, num_concurrent=4), task_dict={"tasks": {"gsm8k": task}}, bootstrap_iters=0)
    # Nothing of what was answered is left.

    result = ours("gsm8k", server, tmp_path / "out")
    failed = result.failures["stock"]["http 500"]
    assert 0 < failed < 10
    made = [decode_line(line) for line in (tmp_path / "out" / "stock.jsonl").read_bytes().splitlines(keepends=True)]
    assert sum(one["kind"] == "reply" and one["text"] is not None for one in made) == 30 - failed
    server.script.fail_500, before = 0.0, len(server.log)
    again = ours("gsm8k", server, tmp_path / "out")
    assert len(server.log) - before == 2 * failed
    assert again.failures == {"stock": {}, "candidate": {}}
    assert again.gate.paired_share == 1.0


@pytest.mark.parametrize("method", ["logits_processor", "one_token"])
def test_9_forcing_is_proven_by_the_returned_tokens(server, method):
    forced = [11, 12, 13]

    async def ask():
        async with Endpoint(server.url, model="canned") as endpoint:
            extra = {"vllm_xargs": {"force_ids": forced}, "guided_choice": ["yes"], "allowed_token_ids": [11]}
            ignored = await endpoint.completion_async([5, 6], max_tokens=3, extra=extra)
            with pytest.raises(NotForced, match="leave the forced text"):
                await force_window(endpoint, [5, 6], forced, method=method, logprobs=5, timeout_s=10.0)
            return ignored

    ignored = asyncio.run(ask())
    assert ignored.text != "yes"  # status 200, and nothing says that three arguments were ignored
    assert list(ignored.token_ids) != forced


def test_10_own_records_and_paired_errors(server, data, tmp_path):
    answers = gsm8k(data, 30)
    server.script.answers, server.script.accuracy = answers, 0.7
    rows = datasets.load_dataset("json", data_files=str(data / "gsm8k" / "test.jsonl"), split="train")
    task = shipped_task("gsm8k/gsm8k.yaml", "test", rows, num_fewshot=0)
    with quiet_lm_eval():
        outcome = lm_eval.evaluate(lm=local_completions(server), task_dict={"tasks": {"gsm8k": task}}, log_samples=True)
    sample = outcome["samples"]["gsm8k"][0]
    assert not {"token_ids", "finish_reason", "seed", "usage"} & set(sample)
    assert outcome["results"]["gsm8k"]["exact_match_stderr,strict-match"] > 0.05  # its only error is that of one side

    result = ours("gsm8k", server, tmp_path / "out")
    assert result.gate.difference.se == 0.0  # the same answers: paired, the difference is exactly nothing
    assert result.gate.stock.se > 0.05
    assert 0 < result.gate.difference.se_adjusted < result.gate.stock.se
    one = next(o for line in (tmp_path / "out" / "stock.jsonl").read_bytes().splitlines(keepends=True) if (o := decode_line(line)))
    assert one["token_ids"]
    assert one["finish_reason"] == "stop"
    assert {"prompt_hash", "params_hash", "fingerprint"} <= set(one["key"])


def test_the_shipped_tasks_still_need_the_guards():
    """If lm-eval closes a trap, this says which guard's reason is out of date."""
    assert "max_gen_toks" not in load_yaml(SHIPPED / "gsm8k/gsm8k.yaml")["generation_kwargs"]
    assert load_yaml(SHIPPED / "aime/aime25.yaml")["repeats"] == 1
    assert task_config("aime25")["repeats"] == 8
