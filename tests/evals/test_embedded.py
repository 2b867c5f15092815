"""The evals over the real engine, on a checkpoint of random weights: pairs start from one prefill, and the path is proven per reply."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from evals.embedded import embedded_engine
from evals.generation import GenerationParams, PairedSession
from evals.nano.tokenizer import save_tokenizer
from evals.policy import suite_policy
from evals.records import RecordFile
from evals.run import SuitePlan, run_suite
from evals.tasks import loading
from kimi_k3_decode.config import NANO
from kimi_k3_decode.step import SpecializedPath
from kimi_k3_decode.stock import StockPath
from kimi_k3_decode.weights import random_weights
from validation.core.settings import Settings
from validation.core.types import HarnessError, Status
from validation.policy import load_policy

sys.path.insert(0, str(Path(__file__).parent))
from fakes import write_suites

GREEDY = GenerationParams(max_new_tokens=6, stop=("\n",), seeds=(None, None))


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    save_tokenizer(folder / "tokenizer.json")
    small = dataclasses.replace(NANO, name="small", n_layers=4, kda_layers=(0, 1), mla_layers=(2, 3), n_experts=8, draft=None)
    weights = random_weights(small, 3, torch.bfloat16)
    settings = Settings(checkpoint=str(folder))
    stock = SimpleNamespace(path=StockPath(weights, torch.bfloat16), weights=weights, settings=settings)

    specialized = SpecializedPath(weights)

    def pair(candidate):
        path = stock.path if candidate == "stock" else specialized
        return {"stock": stock, "candidate": SimpleNamespace(path=path, weights=weights, settings=settings)}

    return pair


def test_an_identical_candidate_gives_identical_tokens(targets):
    engine = embedded_engine(targets("stock"))
    replies = engine.generate_pair(["Question: one\nAnswer:", "Question: two, longer\nAnswer:"], GREEDY)
    assert [r.token_ids for r in replies["stock"]] == [r.token_ids for r in replies["candidate"]]
    assert engine.count_tokens("abc") == 4  # with <bos>


def test_the_specialised_path_proves_that_it_decoded(targets):
    engine = embedded_engine(targets("specialized"))
    replies = engine.generate_pair(["Question: one\nAnswer:", "Question: two\nAnswer:"], GREEDY)
    assert [r.extra["path_share"] for r in replies["candidate"]] == [1.0, 1.0]
    assert all("path_share" not in r.extra for r in replies["stock"])
    alone = engine.generate(["Question: one\nAnswer:", "Question: two\nAnswer:"], GREEDY, "candidate")
    assert [r.token_ids for r in alone] == [r.token_ids for r in replies["candidate"]]


def test_loglikelihoods_are_those_of_the_side_that_is_asked(targets):
    engine = embedded_engine(targets("specialized"))
    pairs = [("Question: one\nAnswer:", " 12"), ("Question: one\nAnswer:", " 13")]
    stock, candidate = (engine.loglikelihood(pairs, path) for path in ("stock", "candidate"))
    assert all(value < 0 for value, _ in (*stock, *candidate))
    assert stock[0][0] != stock[1][0]
    assert [v for v, _ in candidate] == pytest.approx([v for v, _ in stock], abs=0.5)
    assert [v for v, _ in candidate] != [v for v, _ in stock]  # another path: not bit for bit


def test_random_weights_are_at_the_floor_and_prove_nothing(targets, tmp_path, monkeypatch):
    write_suites(tmp_path)
    monkeypatch.setattr(loading, "ROOT", tmp_path)
    real = loading.task_config

    def short(suite, repeats=None):
        config = real(suite, repeats)
        config["generation_kwargs"] = {**config["generation_kwargs"], "max_gen_toks": 8}
        return config

    monkeypatch.setattr(loading, "task_config", short)
    with RecordFile(tmp_path / "r.jsonl") as records:
        session = PairedSession(embedded_engine(targets("stock")), records, {"stock": "s", "candidate": "c"})
        result = run_suite("gsm8k_nano", session, suite_policy("gsm8k_nano", load_policy(), 4), SuitePlan(limit=6))
    assert result.gate.status is Status.NOT_PROVEN
    assert any("floor" in reason for reason in result.gate.reasons)
    assert len(records.replies) == 12


def test_a_missing_tokenizer_is_a_harness_error(targets, tmp_path):
    settings = Settings(checkpoint=str(tmp_path))
    broken = {role: SimpleNamespace(**{**vars(target), "settings": settings}) for role, target in targets("stock").items()}
    with pytest.raises(HarnessError, match="tokenizer"):
        embedded_engine(broken)


def test_the_command_ends_with_one_json_line_and_code_3_without_a_checkpoint(tmp_path):
    command = [sys.executable, "-m", "evals", "run", "--checkpoint", str(tmp_path / "none"), "--out", str(tmp_path / "out"), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert json.loads(done.stdout.splitlines()[-1])["verdict"] == "harness_error"
    assert "checkpoint" in done.stderr
