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
    assert (checks.ERROR_LIMIT, checks.WORKLOAD_ERROR_LIMIT) == (cpu_engine.ERROR_LIMIT, workloads.ERROR_LIMIT)
    found = checks.checks()
    assert {c.id for c in found} == set(checks.LIMITS)
    assert all(list(c.limits(case)) for c in found for case in c.cases())


def test_acceptance_of_the_real_drafter_off_by_more_than_two_percent_fails_its_cell() -> None:
    got = cpu_engine.measured_acceptance("stock", items=2, tokens=16)
    assert 1 < got["mean_length"] <= 1 + got["drafts"]
    assert got["problem"] == ""
    assert "does not count" in cpu_engine.measured_acceptance("stock", items=2, tokens=16, asked=1.05 * got["mean_length"])["problem"]


SMALL = traces.Mixed(users=2, prompt_tokens=16, between=2, after=3, stretches=2)


def test_a_trace_is_cut_into_arrivals_and_decode() -> None:
    assert SMALL.decoded_tokens == 2 * 1 + 2 * 3 * 2
    assert SMALL.decodes == (False, True, False, True, True)
    assert SMALL.lengths() == [[0, 0], [16, 0], [18, 0], [18, 16], [21, 19], [24, 22]]
    assert replace(SMALL, earlier_prompt_tokens=4).lengths()[1:4] == [[4, 0], [6, 0], [6, 16]]
    inputs = SMALL.requests()
    made = [inputs(seed) for seed in range(7)]
    assert [one["after"].tolist() for one in made[:5]] == SMALL.lengths()[1:]
    assert [one["tokens"].shape for one in made[:3]] == [(2, 16), (2, 18), (2, 18)]
    assert not made[1]["tokens"][1].any()  # what arrives later is not told
    assert np.array_equal(made[4]["tokens"][0, :18], made[1]["tokens"][0])
    assert not np.array_equal(made[5]["tokens"], made[0]["tokens"])  # the next trace is on fresh tokens


def test_both_paths_and_the_oracle_replay_the_same_mixed_trace() -> None:
    inputs = SMALL.requests()
    given = [inputs(seed) for seed in range(5)]
    oracle, paths = traces.oracle(), (traces.stock({}), traces.candidate({"candidate": "specialized"}))
    for one in given:
        reference = oracle(one)
        assert reference["logits"].shape[0] == int((one["after"] > one["before"]).sum())
        for run in paths:
            assert row_errors(run(one), reference, range(len(reference["logits"])))["logits"] < workloads.ERROR_LIMIT
    afresh = traces.stock({})(given[-1])  # saw the last request only, so it starts over
    assert row_errors(afresh, reference, [0, 1])["logits"] < workloads.ERROR_LIMIT
    other = SMALL.requests()
    elsewhere = [other(seed + 9) for seed in range(5)][-1]
    assert row_errors(traces.stock({})(elsewhere), reference, [0, 1])["logits"] > workloads.ERROR_LIMIT  # another trace is not excused


def test_decode_alone_is_the_decode_requests_and_end_to_end_is_all_of_them() -> None:
    arrival, decode = 1000.0, 10.0
    times = [decode if decodes else arrival for decodes in SMALL.decodes]
    sides = {
        name: Side(name=name, samples_us=tuple(times if name == "stock" else [t / 2 if t == decode else t for t in times]) * 3,
                   objections=(), worst_error=0.1)
        for name in ("stock", "candidate")
    }  # fmt: skip
    row = workloads._mixed_row(SMALL, Comparison(**sides, outcome="measured"))
    assert row["sides"]["stock"]["decode_alone_tokens_per_s"] == pytest.approx(14 / 30e-6)
    assert row["sides"]["stock"]["end_to_end_tokens_per_s"] == pytest.approx(14 / 2030e-6)
    assert (row["decode_speed_up"], row["decode_pairs"]) == (2.0, 9)
    assert row["speed_up"] == pytest.approx(2030 / 2015)
    assert row["pairs"] == 3


def test_a_conversation_goes_on_from_what_is_held_and_starts_over_where_it_is_not() -> None:
    agentic = traces.Agentic(users=2, turns=3, tool_tokens=8, answer_tokens=3)
    inputs = agentic.requests()
    made = [inputs(seed) for seed in range(4)]
    assert [int(one["turn"][0]) for one in made] == [0, 1, 2, 0]
    assert {int(one["tool"][0]) for one in made} == {8}
    assert [one["history"].shape for one in made] == [(2, 8), (2, 19), (2, 30), (2, 8)]
    assert np.array_equal(made[1]["history"][:, :8], made[0]["history"])
    assert np.array_equal(made[1]["history"][:, 8:11], made[0]["answer"])
    going_on, afresh = traces.stock({}), traces.oracle()
    for given in made[:3]:
        kept = going_on(given)
    assert going_on.held is not None
    assert row_errors(kept, afresh(made[2]), [0, 1])["logits"] < workloads.ERROR_LIMIT  # the oracle saw the last turn only


def test_the_workloads_are_measured_beside_their_conditions(monkeypatch) -> None:
    monkeypatch.setattr(traces, "Mixed", lambda **given: SMALL)
    found = workloads.measure("specialized", pairs=3, prompt_tokens=16)
    row = found["mixed_prefill"]
    assert row["reasons"] == []
    assert row["worst_error"] < workloads.ERROR_LIMIT
    text = " ".join(str(item) for item in workload_table(found)["rows"][0])
    assert "prefill counted" in text
    assert "no speculation" in text


def test_a_workload_with_an_objection_shows_no_number() -> None:
    inputs = SMALL.requests()
    decode = [inputs(seed) for seed in range(2)][-1]
    wrong = traces.candidate({"candidate": f"{__name__}:answers_for_the_next_token"})(decode)
    assert row_errors(wrong, traces.oracle()(decode), [0])["logits"] > workloads.ERROR_LIMIT
    side = Side(name="candidate", samples_us=(1.0, 2.0, 3.0, 4.0, 5.0) * 3, objections=("off by 9",), worst_error=9.0)
    refused = Comparison(stock=replace(side, objections=()), candidate=side, outcome="refused", reasons=("candidate: off by 9",))
    row = workloads._mixed_row(SMALL, refused)
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
