"""A candidate that answers more slowly than stock is found, one that does not is left alone: numbers first, then servers."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from evals.serving.config import ServingConfig, Side
from evals.serving.config_rules import LEAST_WAVES
from evals.serving.pace import pace, slowdown
from evals.serving.perf_checks import RequestTimesCheck, checks
from evals.serving.request_times import Load, Timed, _found
from tests.serving.test_lane import claims_of, config_text, run, values
from validation.core import jsonio
from validation.core.settings import PROJECT_ROOT, Settings

ALLOWED = 0.03
PASSES = 3  # stock, candidate, stock again


def waves(
    rng: np.random.Generator, factor: float = 1.0, *, number: int = 16, size: int = 8, wave_noise: float = 0.05, pauses: float = 0.03
) -> list[list[float]]:
    """Seconds as servers give them: requests of their own length, waves that are disturbed as a whole, and now and then a long pause."""
    lengths = np.random.default_rng(7).uniform(0.5, 2.0, size=(number, size))
    disturbed = np.exp(rng.normal(scale=wave_noise, size=(number, 1)))
    own = np.exp(rng.normal(scale=0.03, size=(number, size)))
    paused = 1 + (rng.random((number, 1)) < pauses) * rng.uniform(0.2, 1.0, size=(number, 1))
    return (factor * lengths * disturbed * own * paused).tolist()


def judged(seed: int, factor: float, drift: float = 1.0, **options: float) -> tuple[bool, bool]:
    """Whether the candidate is proven slower, and whether it is proven not to be."""
    rng = np.random.default_rng(seed)
    found = slowdown(waves(rng, **options), waves(rng, factor * drift**0.5, **options), waves(rng, drift, **options), in_turn=True)
    return found.low > ALLOWED, found.high <= ALLOWED


def share(outcomes: list[bool]) -> float:
    return sum(outcomes) / len(outcomes)


def test_the_same_times_are_a_ratio_of_one():
    times = waves(np.random.default_rng(1))
    found = pace(times, [times, times])
    assert (found.ratio, found.low, found.high) == pytest.approx((1, 1, 1))
    assert (found.waves, found.requests) == (16, 128)


def test_a_factor_is_found_whatever_the_lengths_of_the_requests():
    times = waves(np.random.default_rng(1))
    assert pace([[1.5 * t for t in wave] for wave in times], [times]).ratio == pytest.approx(1.5)


def test_lost_requests_are_left_out_in_pairs():
    times = [[1.0, 2.0], [3.0, math.nan], [math.nan, math.nan]]
    found = pace(times, [[[1.0, 1.0], [1.0, 9.0], [1.0, 1.0]]])
    assert (found.waves, found.requests) == (2, 3)
    assert found.ratio == pytest.approx(math.exp((math.log(2) / 2 + math.log(3)) / 2))
    assert math.isnan(pace([[math.nan]], [[[1.0]]]).ratio)
    with pytest.raises(ValueError, match="same requests"):
        pace([[1.0]], [[[1.0], [1.0]]])


@pytest.mark.parametrize("factor", [1.0, 1 + ALLOWED])
def test_a_healthy_candidate_is_hardly_ever_called_slow(factor):
    """At the largest slow-down that is allowed the low end of a 95 % interval lies above it in one run of forty; less is less."""
    assert share([judged(seed, factor)[0] for seed in range(400)]) <= (0.025 if factor > 1 else 0.005)


def test_an_interval_covers_what_it_says():
    covered = [pace(waves(rng, 1.2), [waves(rng)]) for rng in map(np.random.default_rng, range(400))]
    assert 0.92 <= share([one.low <= 1.2 <= one.high for one in covered]) <= 0.99


@pytest.mark.parametrize(("factor", "least"), [(1.5, 1.0), (1.2, 0.9), (1.1, 0.3)])
def test_a_slow_candidate_is_found(factor, least):
    assert share([judged(seed, factor)[0] for seed in range(200)]) >= least


def test_a_machine_that_slows_down_meanwhile_is_no_finding():
    """A quarter slower from stock's first pass to its second: drift, which stock shows against itself."""
    assert share([judged(seed, 1.0, drift=1.25)[0] for seed in range(200)]) == 0
    assert share([judged(seed, 1.0, drift=1.25)[1] for seed in range(200)]) == 0  # and nothing is proven on such a machine


def apart(seed: int, factor: float, disturbance: float, **options: float) -> bool:
    """Whether the candidate is proven slower when each pass, minutes from the others, meets a disturbance of its own."""
    rng = np.random.default_rng(seed)
    of_pass = np.exp(rng.normal(scale=disturbance, size=PASSES))
    made = [waves(rng, scale * own, **options) for scale, own in zip((1.0, factor, 1.0), of_pass, strict=True)]
    return slowdown(*made, in_turn=False).low > ALLOWED


def test_servers_that_take_turns_by_passes_are_judged_by_how_well_stock_repeats_itself():
    for disturbance in (0.0, 0.02, 0.1, 0.3):
        assert share([apart(seed, 1.0, disturbance) for seed in range(400)]) <= 0.03, disturbance
    assert share([apart(seed, 1.5, 0.003, wave_noise=0.01, pauses=0.0) for seed in range(200)]) > 0.95  # GPUs of one's own
    assert share([apart(seed, 1.5, 0.3) for seed in range(100)]) < 0.1  # such a machine tells nothing


def test_equal_servers_are_proven_equal_on_a_quiet_machine():
    assert share([judged(seed, 1.0, wave_noise=0.005, pauses=0.0)[1] for seed in range(100)]) > 0.9


# ---- the lane ----
LOAD = "\n[perf]\nwaves = 8\nprompt_tokens = 64\nnew_tokens = 8\n"


@pytest.mark.parametrize(("seconds", "slow"), [("0.1", False), ("0.15", True)])
def test_a_candidate_that_takes_half_as_long_again_fails_the_lane_and_is_named(tmp_path, seconds, slow):
    stock, candidate = '"--port", "{port}"]', '"specialized"]'
    text = config_text().replace(stock, f'{stock[:-1]}, "--seconds", "0.1"]').replace("concurrency = [1, 8]", "concurrency = [1, 4]")
    text = text.replace(candidate, f'{candidate[:-1]}, "--seconds", "{seconds}"]')
    closing, records, told = run(tmp_path, text + LOAD, "perf")
    assert [r.outcome.value for r in records["perf.serving.request_times"]] == ["measured", "measured"], told
    for record in records["perf.serving.request_times"]:
        found = values(record)
        assert found["lost_requests"] == 0
        assert found["waves"] == 8
        assert (found["slowdown_low"] > 0.03) == slow, found
        assert ("slower than stock" in record.details["reasons"][0]) == slow
    if slow:
        assert "takes 1.4" in record.details["reasons"][0] or "takes 1.5" in record.details["reasons"][0]
        assert (closing["verdict"], claims_of(tmp_path, closing)["C-SERVE-3"]) == ("fail", "fail")
    else:
        assert claims_of(tmp_path, closing)["C-SERVE-3"] == "not_proven"  # no bench was asked for


def test_each_replica_of_the_candidate_is_a_case_of_its_own():
    config = ServingConfig(baseline=Side(model="m", base_url=("http://a",)), candidate=Side(model="m", base_url=("http://b", "http://c")))
    cases = RequestTimesCheck().cases_of(Settings(profile="serving", serving=jsonio.plain(config)))
    assert [case.params for case in cases] == [
        {"concurrency": 1}, {"concurrency": 1, "replica": 2}, {"concurrency": 64}, {"concurrency": 64, "replica": 2}
    ]  # fmt: skip
    assert all(check.limits(case) for check in checks() for case in check.cases())


@pytest.mark.parametrize(("lost", "proven"), [(0, True), (1, False), (LEAST_WAVES, False)])
def test_answers_that_stock_lost_leave_the_claim_open_and_blame_nobody(lost, proven):
    """Fewer waves than a file must ask for give no interval, whichever way they point."""
    rng = np.random.default_rng(3)
    for factor in (1.0, 1.5):
        made = {
            name: [[scale * float(rng.normal(1, 0.001))] for _ in range(LEAST_WAVES)]
            for name, scale in (("stock", 1.0), ("candidate", factor), ("again", 1.0))
        }
        made["stock"][:lost] = [[math.nan]] * lost
        losses = {"stock": ("no answer",) * lost}
        passes = {name: Timed(waves=tuple(map(tuple, given)), losses=losses.get(name, ())) for name, given in made.items()}
        measurements, _ = _found(Load(concurrency=1), passes, slowdown(*made.values(), in_turn=True), ALLOWED)
        found = {m.name: m.value for m in measurements}
        check = RequestTimesCheck()
        judged = [limit.holds(found[limit.measurement]) for limit in check.limits(next(iter(check.cases()))) if limit.measurement in found]
        expected = (1, True) if not proven else (4, True) if factor == 1.0 else (3, False)
        assert (len(judged), all(judged)) == expected


def test_checks_of_the_serving_profile_are_light_to_import():
    """Every command lists them."""
    modules = ("checks", "numerics_checks", "perf_checks")
    program = f"import sys; {'; '.join(f'import evals.serving.{name}' for name in modules)}; print({{'torch', 'scipy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
