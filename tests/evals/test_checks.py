"""The lane as the runner sees it: limits and measurements give the gate's status; scratch, artifacts and resume work."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import evals.embedded
from evals import checks as lane
from evals.gate import judge_family, judge_suite
from evals.limits import FAMILY_LIMITS, limits_of
from evals.measurements import details_of, family_details, family_measurements, measurements_of
from evals.pairing import pair_answers
from evals.policy import SuitePolicy
from evals.tasks import loading
from validation.core import jsonio
from validation.core.judge import judge
from validation.core.registry import PlannedCase
from validation.core.settings import Settings
from validation.core.types import Case, Claim, Evidence, Outcome, Status
from validation.policy import load_policy

sys.path.insert(0, str(Path(__file__).parent))
from fakes import SIZES, ScriptedEngine, write_suites
from test_gate import answers, flipped

POLICY = SuitePolicy(suite="s", delta=0.06)


def verdict_of(check, case, limits, measurements, policy_limits=None):
    """Status of a claim that this one case carries."""
    item = PlannedCase(
        lane="evals", module="evals.checks", check=check, claim="C", roles=(), case=case, limits=tuple(limits), time_limit_s=1.0
    )
    record = Evidence(id="E-1", run="R", check=check, case=case, outcome=Outcome.MEASURED, measurements=tuple(measurements))
    claim = Claim(id="C", sentence="s", lane="evals", checks=(check,), required_in=("embedded",), proven_by="")
    result = judge(
        run="R",
        profile="embedded",
        lanes=("evals",),
        records=[record],
        plan=[item],
        claims=[claim],
        policy_limits=policy_limits or {},
        policy_digest="",
    )
    return result.claims[0]


def situations():
    stock = np.random.default_rng(0).binomial(1, 0.8, size=400).astype(float)
    lost = stock.copy()
    lost[3] = np.nan
    stock_lost = stock.copy()
    stock_lost[:40] = np.nan
    cut, slightly_cut, nearly_cut = answers(stock), answers(stock), answers(stock)
    for table, n in ((cut, 80), (slightly_cut, 22), (nearly_cut, 18)):
        table.loc[: n - 1, "truncated"] = True
    other = answers(stock, prompt=lambda i: f"p{i}" if i > 50 else f"q{i}")
    swapped = answers(stock)
    swapped.loc[10, "text"], swapped.loc[11, "text"] = swapped.loc[11, "text"], swapped.loc[10, "text"]
    easy, hard = (np.arange(400) < 398).astype(float), (np.arange(400) < 4).astype(float)
    yield "identical", answers(stock), answers(stock)
    yield "few flips", answers(stock), answers(flipped(stock, 3, 3))
    yield "drop", answers(stock), answers(flipped(stock, 40, 4))
    yield "undecided", answers(stock), answers(flipped(stock, 14, 4))
    yield "gain", answers(stock), answers(flipped(stock, 0, 40))
    yield "lost", answers(stock), answers(lost)
    yield "all lost", answers(stock), answers(np.full(400, np.nan))
    yield "stock lost", answers(stock_lost), answers(stock)
    yield "nothing", answers(np.full(5, np.nan)), answers(np.full(5, np.nan))
    yield "cut", answers(stock), cut
    yield "slightly cut", nearly_cut, slightly_cut
    yield "both cut", cut, cut
    yield "long", answers(stock), answers(stock, tokens=80)
    yield "prompts differ", answers(stock), other
    yield "swapped", answers(stock), swapped
    yield "floor", answers(hard), answers(hard)
    yield "ceiling", answers(easy), answers(easy)
    yield "small", answers(stock[:20]), answers(stock[:20])


EXPECTED = {
    "identical": Status.PASS,
    "few flips": Status.PASS,
    **dict.fromkeys(("drop", "lost", "all lost", "cut", "long", "swapped"), Status.FAIL),
}


@pytest.mark.parametrize(("name", "stock", "candidate"), list(situations()), ids=lambda v: v if isinstance(v, str) else "")
def test_limits_on_measurements_give_the_gates_own_status(name, stock, candidate):
    for table, share in ((stock, np.nan), (candidate, 1.0)):
        table["path_share"] = share
    pairs = pair_answers("s", stock, candidate)
    gate = judge_suite(pairs, POLICY)
    result = verdict_of("evals.gate.s", Case(subject="s"), limits_of(POLICY), measurements_of(gate, pairs))
    assert result.status is gate.status is EXPECTED.get(name, Status.NOT_PROVEN), (gate.reasons, result.note)
    jsonio.dumps(details_of(gate, pairs))


@pytest.mark.parametrize(("share", "status"), [(1.0, Status.PASS), (0.5, Status.FAIL), (np.nan, Status.NOT_PROVEN)])
def test_a_candidate_that_fell_back_to_stock_proves_nothing(share, status):
    stock = np.random.default_rng(0).binomial(1, 0.8, size=400).astype(float)
    left, right = answers(stock), answers(stock)
    left["path_share"], right["path_share"] = np.nan, share
    pairs = pair_answers("s", left, right)
    measured = measurements_of(judge_suite(pairs, POLICY), pairs)
    assert verdict_of("c", Case(subject="s"), limits_of(POLICY), measured).status is status


def test_the_policy_file_keeps_the_limits_meanings():
    """The judge replaces a bound by the policy's number of the same name; no name may mean two things."""
    policy = load_policy()
    for suite in lane.EMBEDDED_PLANS:
        check = lane.SuiteCheck(suite=suite)
        for limit in check.limits(lane.suite_case(suite)):
            named = policy.limits["evals"].get(limit.measurement)
            assert named is None or named == limit.bound
        margins = [limit.bound for limit in check.limits(lane.suite_case(suite)) if limit.measurement == "difference_lower_bound"]
        assert margins == [-policy.limits["evals"]["margin"][suite]]


def test_family_measurements_follow_holm():
    stock = np.random.default_rng(0).binomial(1, 0.8, size=400).astype(float)
    gates = [judge_suite(pair_answers("s", answers(stock), answers(flipped(stock, n))), POLICY) for n in (0, 40)]
    for chosen, status in ((gates[:1], Status.PASS), (gates, Status.FAIL), ([], Status.NOT_PROVEN)):
        family = judge_family(chosen)
        measured = family_measurements(family, chosen)
        assert verdict_of("f", Case(subject="all"), FAMILY_LIMITS, measured).status is status
        jsonio.dumps(family_details(family, chosen))


# ---- the checks themselves ----
@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Targets over a scripted engine, and a scratch folder as the runner gives it."""
    rows = write_suites(tmp_path)
    monkeypatch.setattr(loading, "ROOT", tmp_path)
    monkeypatch.setenv("FASTTRACK_SCRATCH", str(tmp_path / "scratch"))
    engines = []

    def build(**faults):
        settings = Settings(policy=str(Path("rfc/policy.toml")))
        monkeypatch.setattr(
            evals.embedded, "embedded_engine", lambda targets: engines.append(ScriptedEngine(rows, **faults)) or engines[-1]
        )
        mark = json.dumps(faults)
        return {r: SimpleNamespace(settings=settings, fingerprint=lambda r=r: r + mark) for r in ("stock", "candidate")}

    return SimpleNamespace(build=build, engines=engines, scratch=tmp_path / "scratch")


def run_lane(targets, count=None):
    results = {}
    for check in lane.checks()[:count]:
        for case in check.cases():
            measured, details = check.measure(case, targets)
            jsonio.dumps(details)
            results[check.id] = verdict_of(check.id, case, check.limits(case), measured, load_policy().limits)
    return results


def test_an_equal_candidate_passes_every_check_and_the_records_are_kept(bench):
    results = run_lane(bench.build())
    assert {r.status for r in results.values()} == {Status.PASS}, {k: r.note for k, r in results.items()}
    assert set(results) == {f"evals.gate.{name}" for name in (*lane.EMBEDDED_PLANS, "family")}
    lines = (bench.scratch / "artifacts" / "records.jsonl").read_text().splitlines()
    assert len(lines) == 4 * SIZES["mrcr_nano"]  # of the last suite: a reply and its score, on both sides


@pytest.mark.parametrize("fault", [{"drop": 0.25}, {"truncate": 0.2}, {"fall_back": 0.4}, {"lose": 0.05}], ids=lambda f: next(iter(f)))
def test_a_faulty_candidate_fails_the_lane(bench, fault):
    results = run_lane(bench.build(**fault), count=1)
    assert Status.FAIL in {r.status for r in results.values()}


def test_the_family_check_generates_nothing_and_a_second_run_either(bench):
    targets = bench.build()
    run_lane(targets)
    assert sum(sum(e.calls.values()) for e in bench.engines[:4]) == 2 * (sum(SIZES.values()) + 3 * SIZES["aime25_nano"])
    run_lane(targets)
    assert sum(sum(e.calls.values()) for e in bench.engines[4:]) == 0


def test_planning_loads_no_heavy_package():
    code = (
        "import sys, evals.checks as c; [k.limits(x) for k in c.checks() for x in k.cases()];"
        "sys.exit(any(m in sys.modules for m in ('torch', 'lm_eval', 'pandas', 'scipy')))"
    )
    assert os.system(f'{sys.executable} -c "{code}"') == 0
