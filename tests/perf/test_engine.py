"""The nano engine as a subject of timing: wrong candidates are objected to, the drafter's acceptance is measured, workloads add up."""

from __future__ import annotations

import pytest

from perf import checks, cpu_engine, workloads
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


def test_workloads_count_what_they_decode_and_both_paths_decode_the_same() -> None:
    engine = workloads.make_engine()
    import torch

    with torch.inference_mode():
        mixed = workloads.mixed_prefill(engine, "candidate", users=2, prompt_tokens=16, between=2, after=3)
        assert mixed.decoded_tokens == 1 * 2 + 2 * 3
        trace = workloads.agentic(engine, "candidate", users=2, turns=2, tool_tokens=8, answer_tokens=3)
    assert trace.decoded_tokens == 2 * 2 * 3
    assert [user for user, _, _ in trace.turns] == [0, 1, 0, 1]
    assert 0 < trace.decode_s < sum(seconds for user, _, seconds in trace.turns if user == 0)
    assert {path for path, _ in engine.step_counts["candidate"]} == {"specialized"}


def test_p90_interactivity_by_hand() -> None:
    turns = [(0, 10, 10 / rate) for rate in range(1, 12)]
    assert workloads.interactivity_p90(turns) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="no turn"):
        workloads.interactivity_p90([])
