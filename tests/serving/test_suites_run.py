"""run_suite against real HTTP servers: scores, records, failures, resumption, chat and reasoning, top-up."""

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from evals.records import decode_line
from evals.serving.asking import Reading, Replica
from evals.serving.budget import Budget, Look, LookFile
from evals.serving.progress import Bars, Lines, Silent, display
from evals.serving.suites import Sampling, ServedPlan, SuiteSide, run_suite
from validation.core.types import HarnessError, Status

sys.path.insert(0, str(Path(__file__).parent))
from canned import CannedServer, Script
from suite_parts import aime25, gsm8k, plan, policy, side

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("K3_EVAL_DATA", str(tmp_path))
    return tmp_path


def run(suite, stock, candidate, folder, *, served=None, judged=None, **options):
    sides = {"stock": side("stock", stock, **options), "candidate": side("candidate", candidate, **options)}
    return run_suite(suite, **sides, policy=judged or policy(suite), plan=served or plan(), folder=folder, shown=Silent())


def records(path):
    made = [decode_line(line) for line in path.read_bytes().splitlines(keepends=True)]
    return [one for one in made if one["kind"] == "reply"]


def test_equal_servers_pass_and_every_item_is_on_record(data, tmp_path):
    answers = gsm8k(data, 40)
    with CannedServer(Script(answers=answers, accuracy=0.8)) as server:
        result = run("gsm8k", server, server, tmp_path / "out")
    assert result.gate.status is Status.PASS, result.gate.reasons
    assert result.gate.n_items == 40
    assert result.gate.stock.mean == result.gate.candidate.mean == result.reported["stock"]["exact_match,flexible-extract"]
    assert 0.6 < result.gate.stock.mean < 0.95
    for role in ("stock", "candidate"):
        made = records(tmp_path / "out" / f"{role}.jsonl")
        assert sorted(one["key"]["item"] for one in made) == [f"{i:05d}" for i in range(40)]
        one = made[0]
        assert one["token_ids"] == [ord(c) % 1000 for c in one["text"]]
        assert one["finish_reason"] == "stop"
        assert one["prompt_tokens"] > 20
        assert one["seconds"] > 0
        assert one["extra"]["endpoint"] == server.url
        assert one["extra"]["attempts"] == 1
        assert one["extra"]["completion_tokens"] == len(one["token_ids"])
    body = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert body["items"]["outcome"] == ["paired"] * 40
    assert len({entry["request"]["prompt"] for entry in server.log}) == 40
    assert all(entry["request"]["prompt"].count("Question:") == 6 for entry in server.log)


def test_prompts_are_those_of_lm_evals_own_pass(data, tmp_path):
    """Few-shot examples come from a generator that moves from row to row: windows and resumption must not disturb it."""
    import lm_eval
    from lm_eval.api.model import LM

    from evals.tasks.loading import load_task

    class Listening(LM):
        def generate_until(self, requests):
            self.prompts = [r.args[0] for r in requests]
            return [""] * len(requests)

        def loglikelihood(self, requests):
            raise AssertionError

        loglikelihood_rolling = loglikelihood

    answers = gsm8k(data, 70)  # more than two windows
    task = load_task("gsm8k")
    task.set_fewshot_seed(seed=1234)
    listening = Listening()
    lm_eval.evaluate(lm=listening, task_dict={"tasks": {"gsm8k": task}}, bootstrap_iters=0)
    with CannedServer(Script(answers=answers, fail_500=0.3)) as server:
        run("gsm8k", server, server, tmp_path / "out")
        server.script.fail_500 = 0.0
        run("gsm8k", server, server, tmp_path / "out")  # only the failed rows
    assert {entry["request"]["prompt"] for entry in server.log} == set(listening.prompts)


def test_a_drop_fails_and_a_lost_reply_is_named(data, tmp_path):
    answers = gsm8k(data, 60)
    with CannedServer(Script(answers=answers, accuracy=0.9)) as good, CannedServer(Script(answers=answers, accuracy=0.3)) as bad:
        result = run("gsm8k", good, bad, tmp_path / "a", judged=policy("gsm8k", delta=0.1))
        assert result.gate.status is Status.FAIL
        assert "score drops" in result.gate.reasons[0]
        bad.script.accuracy, bad.script.drop = 0.9, 0.05
        result = run("gsm8k", good, bad, tmp_path / "b")
    lost = result.failures["candidate"]["dropped"]
    assert result.gate.status is Status.FAIL
    assert result.gate.missing_candidate == lost > 0
    assert f"{lost} replies of the candidate are missing" in result.gate.reasons[0]
    assert result.complete  # everything was asked; nothing was dropped silently
    made = records(tmp_path / "b" / "candidate.jsonl")
    assert len(made) == 60
    assert sum(one["text"] is None and one["extra"]["failure"] == "dropped" for one in made) == lost
    assert result.reported["candidate"]["exact_match,flexible-extract"] <= 1 - lost / 60


def test_failures_of_stock_leave_pairs_out_and_prove_nothing_beyond_the_bound(data, tmp_path):
    answers = gsm8k(data, 40)
    with (
        CannedServer(Script(answers=answers, accuracy=0.8, fail_500=0.2)) as bad,
        CannedServer(Script(answers=answers, accuracy=0.8)) as good,
    ):
        result = run("gsm8k", bad, good, tmp_path / "out")
        assert result.gate.status is Status.NOT_PROVEN
        assert any("form pairs" in reason for reason in result.gate.reasons)
        assert result.failures["stock"]["http 500"] == result.gate.missing_stock > 0
        bad.script.fail_500 = 0.0
        asked = len(good.log)
        again = run("gsm8k", bad, good, tmp_path / "out")
    assert again.gate.status is Status.PASS, again.gate.reasons
    assert again.failures == {"stock": {}, "candidate": {}}
    assert len(good.log) == asked  # what was answered is not asked again


def test_a_server_that_dies_is_no_verdict_and_the_same_call_continues(data, tmp_path):
    answers = gsm8k(data, 60)
    with CannedServer(Script(answers=answers, accuracy=0.8)) as stock:
        with CannedServer(Script(answers=answers, accuracy=0.8, refuse_after=25)) as dying:
            result = run("gsm8k", stock, dying, tmp_path / "out", concurrency=2)
        assert result.gate.status is Status.NOT_PROVEN or "missing" in result.gate.reasons[0]
        assert not result.complete
        assert result.looks == 0
        assert result.throughput["candidate"][0].stopped.startswith("no endpoint is left")
        answered = sum(one["text"] is not None for one in records(tmp_path / "out" / "candidate.jsonl"))
        assert 20 <= answered <= 25
        with CannedServer(Script(answers=answers, accuracy=0.8)) as fresh:
            result = run("gsm8k", stock, fresh, tmp_path / "out", concurrency=2)
        assert len(fresh.log) == 60 - answered
        assert len(stock.log) == 60
    assert result.gate.status is Status.PASS, result.gate.reasons
    assert result.complete


def test_an_interrupt_keeps_what_was_answered(data, tmp_path):
    answers = gsm8k(data, 60)

    class Impatient(Silent):
        def answered(self, title, score, failed):
            super().answered(title, score, failed)
            if "candidate" in title and self.tallies[title].done == 20:
                raise KeyboardInterrupt

    with CannedServer(Script(answers=answers, accuracy=0.8, latency=(0.001, 0.01))) as server:
        sides = {"stock": side("stock", server), "candidate": side("candidate", server)}
        with pytest.raises(KeyboardInterrupt):
            run_suite("gsm8k", **sides, policy=policy("gsm8k"), plan=plan(), folder=tmp_path / "out", shown=Impatient())
        kept = len(records(tmp_path / "out" / "candidate.jsonl"))
        assert 20 <= kept < 60
        before = len(server.log)
        result = run("gsm8k", server, server, tmp_path / "out")
    assert result.gate.status is Status.PASS, result.gate.reasons
    assert len(server.log) - before == 60 - kept


def test_a_cut_prompt_is_no_pair(data, tmp_path):
    """One server counts fewer prompt tokens than the other: it answered another question."""
    answers = gsm8k(data, 40)
    with CannedServer(Script(answers=answers)) as good, CannedServer(Script(answers=answers, prompt_tokens_off=0.5)) as cutting:
        result = run("gsm8k", good, cutting, tmp_path / "out")
    assert result.gate.prompts_differ > 5
    assert result.gate.status is Status.NOT_PROVEN


@pytest.mark.parametrize(("how", "inline"), [("field", False), ("tags", True)])
def test_chat_template_and_reasoning_are_respected(data, tmp_path, how, inline):
    answers = gsm8k(data, 20)
    wrong_thought = "#### 99999 would be a first guess. Question: is it?"
    script = Script(answers=answers, accuracy=0.8, reasoning=wrong_thought, inline_reasoning=inline)
    served = plan(chat=True, reading=Reading(reasoning=how), extra={"chat_template_kwargs": {"thinking": "max"}})
    with CannedServer(script) as server:
        result = run("gsm8k", server, server, tmp_path / "out", served=served)
    request = server.log[0]["request"]
    assert server.log[0]["route"] == "/v1/chat/completions"
    assert [m["role"] for m in request["messages"]] == ["user", "assistant"] * 5 + ["user"]  # shots as turns
    assert request["chat_template_kwargs"] == {"thinking": "max"}
    assert "stop" not in request  # "Question:" would cut a thought that quotes the question
    assert result.gate.stock.mean > 0.6
    one = records(tmp_path / "out" / "stock.jsonl")[0]
    assert one["extra"]["reasoning"] == wrong_thought
    assert "99999" not in one["text"]


def test_thoughts_that_never_end_are_no_answer():
    from evals.serving.asking import Answer

    assert Reading(reasoning="tags").split(Answer(text="hm, #### 4")) == ("", "hm, #### 4")
    assert Reading(reasoning="none").split(Answer(text="#### 4")) == ("#### 4", "")


def test_the_model_cards_sampling_and_the_top_up(data, tmp_path):
    answers = aime25(data, 6)
    served = plan(sampling=Sampling(temperature=1.0, top_p=0.95, top_k=20), repeats=2, max_repeats=16)
    with CannedServer(Script(answers=answers, accuracy=0.7)) as server:
        result = run("aime25", server, server, tmp_path / "out", served=served, judged=policy("aime25", delta=0.05))
        asked = len(server.log)
        request = server.log[0]["request"]
        assert (request["temperature"], request["top_p"], request["top_k"]) == (1.0, 0.95, 20)
        again = run("aime25", server, server, tmp_path / "out", served=served, judged=policy("aime25", delta=0.05))
        assert len(server.log) == asked  # nothing is asked twice
    assert result.looks > 1
    looks = json.loads((tmp_path / "out" / "looks.json").read_text())
    assert [look["repeats"] for look in looks] == [2, 4, 8, 16][: result.looks]
    assert result.gate.n_repeats == looks[-1]["repeats"]
    assert asked == 2 * 6 * result.gate.n_repeats
    assert again.report == result.report
    assert result.gate.looks == result.looks


def test_greedy_decoding_has_one_repeat(data, tmp_path):
    answers = aime25(data, 6)
    with CannedServer(Script(answers=answers, accuracy=0.7)) as server:
        result = run("aime25", server, server, tmp_path / "out", served=plan(sampling=Sampling()))
        assert result.gate.n_repeats == 1
        assert "seed" not in server.log[0]["request"]
        with pytest.raises(HarnessError, match="would be copies"):
            run("aime25", server, server, tmp_path / "b", served=plan(sampling=Sampling(), repeats=4))


def test_both_sides_at_once_and_servers_up_only_while_needed(data, tmp_path):
    answers = gsm8k(data, 30)
    events = []

    class Up:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            events.append(f"{self.name} up")

        def __exit__(self, *error):
            events.append(f"{self.name} down")

    with CannedServer(Script(answers=answers, accuracy=0.8)) as a, CannedServer(Script(answers=answers, accuracy=0.8)) as b:
        sides = {role: side(role, server, serving=lambda role=role: Up(role)) for role, server in (("stock", a), ("candidate", b))}
        for together in (False, True, True):
            folder = tmp_path / f"out-{together}"
            result = run_suite("gsm8k", **sides, policy=policy("gsm8k"), plan=plan(together=together), folder=folder, shown=Silent())
            assert result.gate.status is Status.PASS, result.gate.reasons
    # One after the other; then both; the third call finds everything on record and starts nothing.
    assert events[:4] == ["stock up", "stock down", "candidate up", "candidate down"]
    assert sorted(events[4:]) == ["candidate down", "candidate up", "stock down", "stock up"]
    assert (tmp_path / "out-False" / "report.json").read_bytes() == (tmp_path / "out-True" / "report.json").read_bytes()


def test_another_deployment_in_the_same_folder_gets_its_own_answers(data, tmp_path):
    answers = gsm8k(data, 20)
    with CannedServer(Script(answers=answers)) as server:
        for fingerprint in ("first", "second"):
            run("gsm8k", server, server, tmp_path / "out", fingerprint=fingerprint)
    assert len(server.log) == 80


def test_the_budget_is_decided_before_the_data_and_replayed(tmp_path):
    budget = Budget(first=2, max_repeats=16, max_minutes=10)
    assert budget.plan([], 60.0) == Look(repeats=2, last=False)
    assert budget.plan([], 400.0) == Look(repeats=2, last=True)  # twice the repeats would take 800 s
    assert budget.plan([Look(repeats=8, last=False)], 100.0) == Look(repeats=16, last=True)
    looks = LookFile(tmp_path / "looks.json")
    assert looks.next_repeats(budget, 0) == 2
    looks.settle(budget, 0, 400.0)
    again = LookFile(tmp_path / "looks.json")
    assert again.settle(budget, 0, 1.0) == Look(repeats=2, last=True)  # a continued run gets no second chance
    (tmp_path / "looks.json").write_text("[{]")
    with pytest.raises(HarnessError, match="as written"):
        LookFile(tmp_path / "looks.json")


def test_plans_and_sides_refuse_nonsense():
    with pytest.raises(HarnessError, match=r"limit 0.*shard \(4, 4\)"):
        ServedPlan(limit=0, shard=(4, 4))
    with pytest.raises(HarnessError, match="needs one of"):
        SuiteSide(role="other", fingerprint="", replicas=())
    assert Replica(base_url="http://a", model="m").name == "http://a"


def test_a_terminal_gets_bars_and_anything_else_lines(capsys):
    file = io.StringIO()
    bars = Bars(Console(file=file, force_terminal=True, width=140))
    with bars.display:
        bars.begin("gsm8k stock", 100, 40)
        for i in range(10):
            bars.answered("gsm8k stock", 1.0 if i < 9 else None, failed=i == 9)
    told = file.getvalue()
    assert "50/100" in told
    assert "score 1.000 of 9, 1 failed" in told
    with display() as shown:  # captured: no terminal
        shown.begin("gsm8k stock", 4, 0)
    assert capsys.readouterr().err == "gsm8k stock: 4 of 4 to ask\n"
    with display(quiet=True) as shown:
        shown.begin("gsm8k stock", 4, 0)
        shown.answered("gsm8k stock", None, False)
    assert capsys.readouterr().err == ""


def test_plain_lines_show_the_running_score_and_the_time_left():
    now, lines = [0.0], []
    shown = Lines(lines.append, clock=lambda: now[0])
    shown.begin("gsm8k stock", 120, 20)
    for i in range(25):
        now[0] += 1.0
        shown.answered("gsm8k stock", 1.0 if i % 2 else 0.0, failed=i == 0)
    shown.end("gsm8k stock")
    assert lines[0] == "gsm8k stock: 100 of 120 to ask"
    assert lines[1] == "gsm8k stock: 30/120, 1.0/s, 1 min 30 s left, score 0.500 of 10, 1 failed"
    assert lines[-1].startswith("gsm8k stock: 45/120, 1.0/s, 1 min 15 s left")
