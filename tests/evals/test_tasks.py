"""The task files: guards, local data, scoring rules; lm-eval itself must be able to load the nano tasks."""

import json
import random
import re
import sys
from difflib import SequenceMatcher
from pathlib import Path

import datasets
import pytest
from lm_eval.tasks import TaskManager

from evals.generation import PairedSession, PathReply
from evals.policy import SuitePolicy
from evals.records import RecordFile
from evals.run import run_suite
from evals.tasks import docs, loading, scoring
from evals.tasks.loading import FOLDER, NANO_SUITES, REAL_SUITES, load_task, task_config
from validation.core.types import HarnessError

sys.path.insert(0, str(Path(__file__).parent))
from fakes import SIZES, write_suites


@pytest.fixture
def nano(tmp_path, monkeypatch):
    rows = write_suites(tmp_path)
    monkeypatch.setattr(loading, "ROOT", tmp_path)
    return rows


@pytest.fixture
def public(tmp_path, monkeypatch):
    """Local copies in the published forms: GSM8K, AIME25, GPQA (invented questions) and MRCR."""

    def write(name, rows):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("gsm8k/test.jsonl", [{"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in range(8)])
    write("gsm8k/train64.jsonl", [{"question": f"What is {i} + 2?", "answer": f"#### {i + 2}"} for i in range(20)])
    write("aime25/test.jsonl", [{"index": i, "question": f"Find $x={i}$.", "true_answer": str(i)} for i in range(4)])
    wrong = {f"Incorrect Answer {k}": f"wrong {k}" for k in (1, 2, 3)}
    write("gpqa/gpqa_diamond.jsonl", [{"Question": f"invented {i}?", "Correct Answer": "right", **wrong} for i in range(12)])
    chat = [{"role": "user", "content": "Write a poem"}, {"role": "assistant", "content": "la"}, {"role": "user", "content": "Repeat it"}]
    write("mrcr/2needle.jsonl", [{"prompt": json.dumps(chat), "answer": "Xyla", "random_string_to_prepend": "Xy", "n_needles": 2}] * 3)
    monkeypatch.setenv("K3_EVAL_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("suite", NANO_SUITES)
def test_nano_tasks_load_their_rows_and_score_right_and_wrong(nano, suite):
    task = load_task(suite)
    assert len(task.eval_docs) == SIZES[suite]
    doc, row = task.eval_docs[0], nano[suite][0]
    assert task.doc_to_text(doc) == row["prompt"]
    name, filter_name = task.primary
    assert filter_name in [f["name"] for f in task.config.filter_list]
    scored = [_score(task, doc, row[kind])[name] for kind in ("right", "wrong")]
    assert scored == [1.0, 0.0]


def _score(task, doc, text):
    """Through the task's own filters, as lm-eval applies them."""
    replies = [[text] * task.config.repeats]
    for step in task._filters[0].filters:
        replies = list(step().apply(replies, [doc]))
    return task.process_results(doc, [replies[0]])


@pytest.mark.parametrize("suite", NANO_SUITES)
def test_lm_eval_loads_the_nano_tasks_by_itself(nano, suite, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the data files are named from the project's root
    manager = TaskManager(include_path=str(FOLDER / "nano"), include_defaults=False)
    assert suite in manager.all_subtasks
    assert len(manager.load([suite])["tasks"][suite].eval_docs) == SIZES[suite]


@pytest.mark.parametrize("suite", REAL_SUITES)
def test_public_tasks_run_from_local_files(public, suite):
    task = load_task(suite)
    doc = task.eval_docs[0]
    assert task.doc_to_text(doc)
    assert task.config.generation_kwargs["max_gen_toks"] >= 8192
    assert task.config.dataset_path == "json"


ANSWERS = {
    "gsm8k": lambda i: f"so {i} + 1 = {i + 1}. #### {i + 1}",
    "aime25": lambda i: rf"Therefore \boxed{{{i}}}",
    "mrcr": lambda i: "Xyla",
}


class Solver:
    """Solves the invented public rows on stock; the candidate gets every second prompt wrong."""

    max_context_tokens = 100_000

    def __init__(self, suite):
        self.suite, self.prompts = suite, []

    def count_tokens(self, prompt):
        return len(prompt)

    def generate_pair(self, prompts, params):
        return {path: self.generate(prompts, params, path) for path in ("stock", "candidate")}

    def generate(self, prompts, params, path):
        self.prompts += prompts
        return [self._reply(prompt, path) for prompt in prompts]

    def _reply(self, prompt, path):
        numbers = [int(n) for n in re.findall(r"(?:What is |x=)(\d+)", prompt)] or [0]
        wrong = path == "candidate" and numbers[-1] % 2 == 0
        text = "no idea" if wrong else ANSWERS[self.suite](numbers[-1])
        return PathReply(token_ids=tuple(map(ord, text)), text=text, finish_reason="stop")


@pytest.mark.parametrize("suite", sorted(ANSWERS))
def test_public_tasks_run_end_to_end_from_local_files(public, tmp_path, suite):
    solver = Solver(suite)
    with RecordFile(tmp_path / "r.jsonl") as records:
        session = PairedSession(solver, records, {"stock": "s", "candidate": "c"})
        result = run_suite(suite, session, SuitePolicy(suite=suite, delta=0.05, ceiling=1.0))
    assert result.gate.stock.mean == 1.0
    assert result.gate.candidate.mean == (0.0 if suite == "mrcr" else 0.5)
    repeats = 8 if suite == "aime25" else 1
    assert result.gate.n_repeats == repeats
    assert len(records.replies) == 2 * repeats * len(load_task(suite).eval_docs)
    if suite == "mrcr":
        assert solver.prompts[0] == "User: Write a poem\nBot: la\nUser: Repeat it\nBot:"
    if suite == "gsm8k":
        assert solver.prompts[0].count("Question:") == 6  # five shots and the question


def test_public_tasks_keep_the_shipped_prompts(public):
    assert load_task("gsm8k").doc_to_text({"question": "Q?"}) == "Question: Q?\nAnswer:"
    assert load_task("gsm8k").config.num_fewshot == 5
    assert load_task("aime25").doc_to_text({"problem": "P"}) == "Question: P\nAnswer:"
    assert "The answer is" in str(load_task("gpqa_diamond_cot_zeroshot").config.filter_list)


def test_public_tasks_fall_back_to_the_hub_without_local_files(tmp_path, monkeypatch):
    monkeypatch.setenv("K3_EVAL_DATA", str(tmp_path / "nothing"))
    assert task_config("gsm8k")["dataset_path"] == "openai/gsm8k"
    assert task_config("gpqa_diamond_cot_zeroshot")["dataset_path"] == "Idavidrein/gpqa"
    assert task_config("mrcr")["dataset_path"] == "openai/mrcr"


def test_real_rows_beside_the_checkout_load_when_present():
    folder = loading.ROOT.parent / "shared" / "data"
    if not (folder / "gsm8k" / "test.jsonl").is_file():
        pytest.skip("no public data beside the checkout")
    assert len(load_task("gsm8k").eval_docs) == 1319
    assert len(load_task("aime25").eval_docs) == 30


# ---- traps ----
@pytest.mark.parametrize("suite", NANO_SUITES + REAL_SUITES)
def test_every_task_states_its_limit_of_new_tokens(suite, monkeypatch):
    assert task_config(suite)["generation_kwargs"]["max_gen_toks"] > 0
    config = task_config(suite)
    config["generation_kwargs"].pop("max_gen_toks")
    with pytest.raises(HarnessError, match="would cut reasoning"):
        loading._guard(suite, config)


def test_the_shipped_gsm8k_would_have_no_limit():
    """Why the guard exists: if lm-eval ever sets one, this test says that the comment in the task file is out of date."""
    assert "max_gen_toks" not in loading.load_yaml(loading.SHIPPED / "gsm8k/gsm8k.yaml")["generation_kwargs"]


def test_greedy_repeats_are_refused():
    with pytest.raises(HarnessError, match="would be copies"):
        task_config("gsm8k_nano", repeats=4)
    assert task_config("aime25_nano", repeats=4)["repeats"] == 4


@pytest.mark.parametrize("suite", ["aime25", "aime25_nano"])
def test_all_repeats_are_scored_not_the_first_alone(public, nano, suite):
    task = load_task(suite, repeats=4)
    doc = task.eval_docs[0]
    target = doc.get("target", doc.get("answer"))
    replies = [r"\boxed{999999}", rf"\boxed{{{target}}}", rf"so \boxed{{{target}}}", "none"]
    scored = task.process_results(doc, [replies])
    assert scored["exact_match"] == 0.5
    assert scored["exact_match_by_repeat"] == [0.0, 1.0, 1.0, 0.0]
    filters = [step["function"] for one in task.config.filter_list for step in one["filter"]]
    assert "take_first" not in filters
    assert "take_first_k" in filters


def test_gpqa_choices_do_not_depend_on_the_process_wide_generator(public):
    prompts = []
    for seed in (1, 2):
        random.seed(seed)
        task = load_task("gpqa_diamond_cot_zeroshot")
        prompts.append([task.doc_to_text(doc) for doc in task.eval_docs])
        letters = {doc["answer"] for doc in task.eval_docs}
        assert len(letters) > 1
        for doc in task.eval_docs:
            assert doc["choices"]["(A)(B)(C)(D)".index(doc["answer"]) // 3] == "right"
    assert prompts[0] == prompts[1]


# ---- scoring rules ----
@pytest.mark.parametrize(
    ("reply", "score"),
    [(r"\boxed{12}", 1.0), (r"first \boxed{3}, then \boxed{ 12 }", 1.0), (r"\boxed{12}, no: \boxed{13}", 0.0), ("12", 0.0), ("", 0.0)],
)
def test_boxed_integer_takes_the_last_box(reply, score):
    assert scoring.boxed_integer({"target": "12"}, [reply]) == {"exact_match": score}


def test_mrcr_scores_follow_the_published_rule():
    doc = {"answer": "Xy12 a fine poem about owls", "random_string_to_prepend": "Xy12"}
    assert scoring.mrcr(doc, [doc["answer"]]) == {"mrcr_ratio": 1.0}
    assert scoring.mrcr(doc, [" a fine poem about owls"]) == {"mrcr_ratio": 0.0}
    assert scoring.mrcr(doc, [" " + doc["answer"]]) == {"mrcr_ratio": 0.0}
    near = "Xy12 a fine song about owls"
    expected = SequenceMatcher(None, near[4:], doc["answer"][4:]).ratio()
    assert scoring.mrcr(doc, [near])["mrcr_ratio"] == pytest.approx(expected)
    assert 0.5 < expected < 1
    nano = {"target": doc["answer"], "random_string_to_prepend": "Xy12"}
    assert scoring.mrcr_nano(nano, [" " + doc["answer"]]) == {"mrcr_ratio": 1.0}


def test_a_damaged_mrcr_row_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="damaged"):
        scoring.prefixed_ratio("x", "answer", "PREFIX")
    with pytest.raises(ValueError, match="random_string_to_prepend"):
        docs.mrcr(datasets.Dataset.from_list([{"prompt": "[]", "answer": "a"}]))


def test_chat_prompts_unfold():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "Again "}]
    assert docs.chat_messages(json.dumps(messages)) == messages
    assert docs.chat_messages("[1, 2]") is None
    assert docs.chat_messages("Question: [") is None
    assert docs.transcript(messages) == "User: Hi\nBot: Ho\nUser: Again\nBot:"


def test_missing_data_and_unknown_suites_are_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "ROOT", tmp_path)
    with pytest.raises(HarnessError, match=r"gsm8k_nano.*needs its data"):
        load_task("gsm8k_nano")
    with pytest.raises(HarnessError, match="needs one of gsm8k_nano"):
        task_config("mmlu")
