"""The lane end to end on a scripted engine: planted faults are named, equal paths pass, a killed run resumes."""

import sys
from pathlib import Path

import pytest

from evals.generation import PairedSession
from evals.records import RecordFile
from evals.run import SuitePlan, run_suite, selection
from evals.tasks import loading
from evals.tasks.loading import NANO_SUITES
from validation.core.types import HarnessError, Status
from validation.policy import load_policy

sys.path.insert(0, str(Path(__file__).parent))
from fakes import SIZES, ScriptedEngine, write_suites

from evals.policy import suite_policy

POLICY = load_policy()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    rows = write_suites(root)
    patch = pytest.MonkeyPatch()
    patch.setattr(loading, "ROOT", root)
    patch.setenv("HF_HOME", str(root / "hf"))
    yield rows
    patch.undo()


def run(data, suite, folder, *, plan=None, engine=None, seed=0, fingerprints=None, **faults):
    engine = engine or ScriptedEngine(data, seed=seed, **faults)
    with RecordFile(folder / "records.jsonl") as records:
        session = PairedSession(engine, records, fingerprints or {"stock": "s", "candidate": "c"}, base_seed=seed)
        return run_suite(suite, session, suite_policy(suite, POLICY, 4), plan), engine


@pytest.mark.parametrize("suite", NANO_SUITES)
def test_equal_paths_pass_and_lm_eval_reports_the_same_scores(data, tmp_path, suite):
    result, engine = run(data, suite, tmp_path)
    assert result.gate.status is Status.PASS, result.gate.reasons
    assert result.gate.n_items == SIZES[suite]
    assert 0.6 < result.gate.stock.mean < 0.95
    assert result.gate.difference.mean == 0
    primary = ",".join(loading.load_task(suite).primary)
    for path in ("stock", "candidate"):
        assert result.reported[path][primary] == pytest.approx(getattr(result.gate, path).mean, abs=1e-9)
    repeats = 4 if suite == "aime25_nano" else 1
    assert engine.calls == {"stock": repeats * SIZES[suite], "candidate": repeats * SIZES[suite]}


def test_identical_candidate_passes_in_20_of_20_seeds(data, tmp_path):
    for seed in range(20):
        suite = NANO_SUITES[seed % 4]
        result, _ = run(data, suite, tmp_path / f"{seed}", seed=seed)
        assert result.gate.status is Status.PASS, (seed, suite, result.gate.reasons)


@pytest.mark.parametrize("suite", NANO_SUITES)
def test_a_planted_accuracy_drop_fails(data, tmp_path, suite):
    result, _ = run(data, suite, tmp_path, drop=0.3)
    assert result.gate.status is Status.FAIL
    assert "score drops by" in result.gate.reasons[0]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"truncate": 0.1}, "replies hit the token limit"),
        ({"lose": 0.01}, "missing or have no score"),
        ({"crash": 0.06}, "missing or have no score"),
        ({"swap": 0.05}, "swapped between requests"),
        ({"long": 1.0}, "of stock's tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_planted_faults_are_named(data, tmp_path, fault, words):
    result, _ = run(data, "gsm8k_nano", tmp_path, **fault)
    assert result.gate.status is Status.FAIL
    assert any(words in reason for reason in result.gate.reasons), result.gate.reasons


def test_a_crashing_prompt_is_a_recorded_outcome_of_its_path_alone(data, tmp_path):
    result, _ = run(data, "gsm8k_nano", tmp_path, crash=0.06)
    assert result.gate.missing_candidate > 0
    assert result.gate.missing_stock == 0
    with RecordFile(tmp_path / "records.jsonl") as records:
        failed = [r for r in records.replies.values() if r.text is None]
    assert {r.key.path for r in failed} == {"candidate"}
    assert all("FloatingPointError" in r.finish_reason for r in failed)


@pytest.mark.parametrize(("accuracy", "word"), [(0.0, "floor"), (1.0, "ceiling")])
def test_floor_and_ceiling_are_not_proven(data, tmp_path, accuracy, word):
    result, _ = run(data, "gpqa_diamond_nano", tmp_path, accuracy=accuracy)
    assert result.gate.status is Status.NOT_PROVEN
    assert any(word in r for r in result.gate.reasons)


def test_a_killed_run_resumes_with_nothing_lost_or_counted_twice(data, tmp_path):
    whole, _ = run(data, "gsm8k_nano", tmp_path / "whole")
    engine = ScriptedEngine(data)
    engine.prompts_before_interrupt = 250
    with pytest.raises(KeyboardInterrupt):
        run(data, "gsm8k_nano", tmp_path / "cut", engine=engine)
    kept = dict(engine.calls)
    path = tmp_path / "cut" / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # and the kill tore the last line
    resumed, again = run(data, "gsm8k_nano", tmp_path / "cut")
    assert resumed.gate == whole.gate
    assert resumed.reported == whole.reported
    # the torn line is one reply of one side; its pair and the batch that was cut off are generated again
    assert again.calls["stock"] <= SIZES["gsm8k_nano"] - kept["stock"] + 65
    unchanged, third = run(data, "gsm8k_nano", tmp_path / "cut")
    assert third.calls == {"stock": 0, "candidate": 0}
    assert unchanged.gate == whole.gate


def test_another_candidate_in_the_same_folder_gets_its_own_answers(data, tmp_path):
    """The trap of a shared cache: the second candidate must not be given the first one's replies."""
    run(data, "gpqa_diamond_nano", tmp_path)
    result, engine = run(data, "gpqa_diamond_nano", tmp_path, fingerprints={"stock": "s", "candidate": "other"}, drop=0.4)
    assert engine.calls["candidate"] == SIZES["gpqa_diamond_nano"]
    assert result.gate.status is Status.FAIL


def test_sampled_repeats_are_not_copies(data, tmp_path):
    result, _ = run(data, "aime25_nano", tmp_path, accuracy=0.5)
    spread = result.pairs.stock
    assert spread.shape == (30, 4)
    assert (spread.max(axis=1) != spread.min(axis=1)).mean() > 0.5


def test_repeats_are_topped_up_until_the_gate_decides(data, tmp_path):
    plan = SuitePlan(limit=12, repeats=1, max_repeats=16)
    result, engine = run(data, "aime25_nano", tmp_path, plan=plan)
    assert result.gate.looks > 1
    assert result.gate.status is Status.PASS, result.gate.reasons
    assert engine.calls["stock"] == 12 * result.gate.n_repeats
    with RecordFile(tmp_path / "records.jsonl") as records:
        assert len(records.replies) == 2 * 12 * result.gate.n_repeats


def test_a_budget_that_ends_too_early_is_not_proven_with_advice(data, tmp_path):
    result, _ = run(data, "gsm8k_nano", tmp_path, plan=SuitePlan(limit=10))
    assert result.gate.status is Status.NOT_PROVEN
    assert any("would decide" in r for r in result.gate.reasons)


def test_a_limit_is_spread_over_the_file():
    assert selection(10, None) == list(range(10))
    assert selection(10, 20) == list(range(10))
    picked = selection(500, 7)
    assert len(picked) == 7
    assert picked[0] < 60
    assert picked[-1] > 440


def test_rows_keep_their_own_number_under_a_limit(data, tmp_path):
    result, _ = run(data, "gpqa_diamond_nano", tmp_path, plan=SuitePlan(limit=6))
    assert [int(i) for i in result.pairs.items] == selection(198, 6)


def test_plans_and_sessions_refuse_nonsense(data, tmp_path):
    with pytest.raises(HarnessError, match="limit 0"):
        SuitePlan(limit=0)
    with RecordFile(tmp_path / "r.jsonl") as records, pytest.raises(HarnessError, match="none for candidate"):
        PairedSession(ScriptedEngine(data), records, {"stock": "s", "candidate": ""})


class BrokenEngine(ScriptedEngine):
    """Cannot answer anything, as when the machine refuses the memory a library needs."""

    def generate(self, prompts, params, path):
        raise RuntimeError("could not create a primitive")


@pytest.mark.parametrize("suite", NANO_SUITES)
def test_an_engine_that_fails_every_prompt_is_recorded_and_not_proven(data, tmp_path, suite):
    """Fault: with repeats to add, this ended the whole run with an error of the suite instead of a recorded outcome."""
    plan = SuitePlan(repeats=4, max_repeats=8) if suite == "aime25_nano" else None
    result, _ = run(data, suite, tmp_path, plan=plan, engine=BrokenEngine(data))
    assert result.gate.status is Status.NOT_PROVEN
    assert result.gate.n_items == 0
