"""The nano engine as a subject of timing: wrong candidates are objected to, the drafter's acceptance is measured, workloads add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perf import checks, cpu_engine, traces, workloads
from perf.adversary import Comparison, Side, row_errors
from perf.markdown import workload_table
from perf.matrix import Source


def test_a_right_candidate_is_measured_and_a_wrong_one_is_not() -> None:
    (good,) = cpu_engine.measure("specialized", ((1, 1),), pairs=3, control=False)
    assert good["outcome"] == "measured"
    assert good["candidate_worst_error"] < cpu_engine.ERROR_LIMIT
    made = cpu_engine.results([good])
    assert [r.cell.backend for r in made] == ["auto", "latency_specialized"]
    assert all(r.source is Source.CPU_ENGINE and r.step_us and r.conditions["hardware"].startswith("CPU") for r in made)
    (bad,) = cpu_engine.measure(f"{__name__}:replays_the_first_answer", ((1, 1),), pairs=3, control=False)
    assert bad["outcome"] == "refused"
    assert any("off by" in reason for reason in bad["reasons"])
    assert all(r.step_us is None for r in cpu_engine.results([bad]))


def replays_the_first_answer(weights):
    """A path that computes once and answers so for ever."""
    from kimi_k3_decode.stock import StockPath

    class Replays:
        def __init__(self) -> None:
            self.path, self.kept = StockPath(weights), None

        def step(self, batch, caches, **options):
            self.kept = self.kept or self.path.step(batch, caches, **options)
            return self.kept

    return Replays()


def test_the_limit_of_the_lane_is_the_engines() -> None:
    assert checks.ERROR_LIMIT == cpu_engine.ERROR_LIMIT
    found = checks.checks()
    assert {c.id for c in found} == set(checks.LIMITS)
    assert all(list(c.limits(case)) for c in found for case in c.cases())


def test_acceptance_of_the_real_drafter_off_by_more_than_two_percent_fails_its_cell() -> None:
    got = cpu_engine.measured_acceptance("stock", items=2, tokens=16)
    assert 1 < got["mean_length"] <= 1 + got["drafts"]
    assert got["problem"] == ""
    assert "does not count" in cpu_engine.measured_acceptance("stock", items=2, tokens=16, asked=1.05 * got["mean_length"])["problem"]


SMALL = traces.Mixed(users=2, prompt_tokens=16, between=2, after=3)


def test_both_paths_and_the_oracle_replay_the_same_mixed_trace() -> None:
    given = SMALL.inputs(3)
    assert SMALL.decoded_tokens == 2 * 1 + 3 * 2
    reference = traces.oracle()(given)
    for run in (traces.stock({}), traces.candidate({"candidate": "specialized"})):
        errors = row_errors(run(given), reference, [0, 1])
        assert errors["logits"] < cpu_engine.ERROR_LIMIT
    late = replace(SMALL, earlier_prompt_tokens=4).inputs(3)
    assert row_errors(traces.stock({})(late), traces.oracle()(late), [0, 1])["logits"] < cpu_engine.ERROR_LIMIT
    assert row_errors(traces.stock({})(late), reference, [0])["logits"] > cpu_engine.ERROR_LIMIT
    other = traces.stock({})(SMALL.inputs(4))
    assert row_errors(other, reference, [0, 1])["logits"] > cpu_engine.ERROR_LIMIT  # another trace is not excused


def test_a_conversation_goes_on_from_what_is_held_and_starts_over_where_it_is_not() -> None:
    agentic = traces.Agentic(users=2, turns=3, tool_tokens=8, answer_tokens=3)
    inputs = agentic.requests()
    made = [inputs(seed) for seed in range(4)]
    assert [int(one["turn"][0]) for one in made] == [0, 1, 2, 0]
    assert [one["history"].shape for one in made] == [(2, 8), (2, 19), (2, 30), (2, 8)]
    assert np.array_equal(made[1]["history"][:, :8], made[0]["history"])
    assert np.array_equal(made[1]["history"][:, 8:11], made[0]["answer"])
    going_on, afresh = traces.stock({}), traces.oracle()
    for given in made[:3]:
        kept = going_on(given)
    assert going_on.held is not None
    assert row_errors(kept, afresh(made[2]), [0, 1])["logits"] < cpu_engine.ERROR_LIMIT  # the oracle saw the last turn only


def test_the_workloads_are_measured_beside_their_conditions(monkeypatch) -> None:
    monkeypatch.setattr(traces, "Mixed", lambda **given: replace(SMALL, **{k: v for k, v in given.items() if v == 0 and k != "users"}))
    found = workloads.measure("specialized", pairs=3, prompt_tokens=16)
    row = found["mixed_prefill"]
    assert row["reasons"] == []
    assert row["worst_error"] < cpu_engine.ERROR_LIMIT
    text = " ".join(str(item) for item in workload_table(found)["rows"][0])
    assert "prefill counted" in text
    assert "no speculation" in text


def test_a_workload_with_an_objection_shows_no_number() -> None:
    wrong = traces.candidate({"candidate": f"{__name__}:answers_for_the_next_token"})(SMALL.inputs(3))
    assert row_errors(wrong, traces.oracle()(SMALL.inputs(3)), [0, 1])["logits"] > cpu_engine.ERROR_LIMIT
    side = Side(name="candidate", samples_us=(1.0, 2.0, 3.0), objections=("off by 9",), worst_error=9.0)
    refused = Comparison(stock=replace(side, objections=()), candidate=side, outcome="refused", reasons=("candidate: off by 9",))
    row = workloads._mixed_row(SMALL, refused, refused)
    assert row["sides"] == {}
    assert "speed_up" not in row
    made = {"candidate": "x", "conditions": cpu_engine.conditions(), "mixed_prefill": row}
    assert workload_table(made)["rows"][1][2:5] == ["–"] * 3


def answers_for_the_next_token(weights):
    """A path whose logits stand one place too far."""
    from kimi_k3_decode.stock import StockPath

    class Shifted:
        def __init__(self) -> None:
            self.path = StockPath(weights)

        def step(self, batch, caches, **options):
            output = self.path.step(batch, caches, **options)
            return replace(output, logits_BQV=output.logits_BQV.roll(1, dims=-1))

    return Shifted()


def test_p90_interactivity_by_hand() -> None:
    assert workloads.interactivity_p90(list(range(1, 12))) == pytest.approx(2.0)
    for rates in ([], [1.0, float("nan")], [0.0]):
        with pytest.raises(ValueError, match="at least one turn"):
            workloads.interactivity_p90(rates)
