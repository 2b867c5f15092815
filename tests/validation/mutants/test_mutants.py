"""Who validates the validation: the catalogue is complete, its faults die where they must, and a weakened suite is noticed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from kimi_k3_decode.config import NANO
from kimi_k3_decode.stock import StockPath
from kimi_k3_decode.weights import random_weights
from validation.core import registry
from validation.core.types import Case, Evidence, HarnessError, Measurement, Outcome
from validation.mutants import checks, cli
from validation.mutants.catalogue import BEYOND_REACH, CHEAP, DECODED, FAULTS, QUICK, all_mutants, case_places, classes
from validation.mutants.model import EVAL, PATH, TIMING, Breach, Mutant, Seen, patched
from validation.mutants.trial import ALIVE, KILLED, Suite, run_trial
from validation.targets.engine import EngineTarget

REQUIRED = ("kda_state_transposed", "expert_scale_dropped", "conv_taps_shifted", "router_not_renormalised")
WEIGHTS = random_weights(NANO, 3)


@pytest.fixture(scope="module")
def targets():
    def build_oracle(weights):
        return StockPath(weights.to(torch.float64), torch.float64)

    def make(role, build, dtype):
        return EngineTarget(
            name=role, role=role, weights=WEIGHTS, dtype=dtype, path=build(WEIGHTS), build=build, prefiller=StockPath(WEIGHTS),
            settings=SimpleNamespace(seed=0), origin="test",
        )  # fmt: skip

    return {"stock": make("stock", StockPath, torch.bfloat16), "oracle": make("oracle", build_oracle, torch.float64)}


# ---- the catalogue ----
def test_every_class_has_a_mutant_and_every_gap_a_reason():
    found = classes()
    assert set(found) == set(FAULTS)
    assert [fault for fault, ids in found.items() if not ids] == []
    assert all(len(words.split()) > 6 and found[fault] for fault, words in BEYOND_REACH.items())


def test_every_named_check_exists():
    known = {
        check.id for lane in ("scope", "numerics", "schedule", "evals") for check in registry.load_checks(lane, registry.LANE_MODULES[lane])
    }
    for mutant in all_mutants().values():
        if mutant.control:
            assert mutant.killed_by == ""
        elif mutant.trial is None:
            assert mutant.killed_by in known, mutant.id
        assert set(mutant.also) <= known
    assert set(CHEAP) <= known


def test_every_mutant_a_check_promises_to_kill_is_in_the_catalogue():
    for lane in ("numerics", "schedule", "evals"):
        for check in registry.load_checks(lane, registry.LANE_MODULES[lane]):
            assert set(check.must_kill) <= set(all_mutants()), check.id


def test_there_are_twenty_seeds_of_the_stock_control():
    seeds = {m.seed for m in all_mutants().values() if m.control and m.candidate == "stock"}
    assert seeds == set(range(20))


def test_a_control_names_no_killer_and_every_other_mutant_does():
    with pytest.raises(ValueError, match="killed_by"):
        Mutant(id="x", fault="F01", kind=PATH, sentence="", claim="", killed_by="")
    with pytest.raises(ValueError, match="killed_by"):
        Mutant(id="x", fault="-", kind=PATH, sentence="", claim="", killed_by="numerics.ties", control=True)


def test_the_sublayer_cases_chosen_are_the_ones_meant():
    check = next(c for c in registry.load_checks("numerics", registry.LANE_MODULES["numerics"]) if c.id == "numerics.sublayer")
    cases = list(check.cases())
    chosen = [cases[place] for place in CHEAP["numerics.sublayer"]]
    assert [(c.subject, c.params["shape"]) for c in chosen] == [
        ("kda_before_norm", "wide"), ("attention", "wide"), ("mlp", "wide"), ("attention", "wide"),
    ]  # fmt: skip
    assert not NANO.is_kda(chosen[3].params["layer"])


# ---- kills ----
@pytest.mark.parametrize("identity", REQUIRED)
def test_required_mutants_die_by_the_numerics_lane(targets, identity):
    mutant = dataclasses.replace(all_mutants()[identity], also=())
    trial = run_trial(mutant, targets)
    assert trial.killed_by_named
    assert trial.lanes()["numerics"] == KILLED
    assert trial.breaches[0].measurement == "error_ratio"


@pytest.mark.parametrize("identity", ["control_stock_03", "control_other_order", "control_identical"])
def test_controls_live(targets, identity):
    trial = run_trial(all_mutants()[identity], targets)
    assert trial.breaches == ()
    assert trial.measured_cases >= 3


def test_every_eval_mutant_dies_and_its_controls_live(targets):
    for mutant in (m for m in all_mutants().values() if m.kind == EVAL):
        trial = run_trial(mutant, targets)
        assert bool(trial.breaches) is not mutant.control, mutant.id


def test_scope_mutants_die(targets):
    for identity in ("predicate_dropped", "first_reason_only"):
        assert run_trial(all_mutants()[identity], targets).killed_by_named


def test_every_mutant_of_a_speed_dies_and_its_controls_live(targets):
    for mutant in (m for m in all_mutants().values() if m.kind == TIMING):
        trial = run_trial(mutant, targets)
        assert bool(trial.breaches) is not mutant.control, mutant.id
        assert trial.lanes()["perf"] == (ALIVE if mutant.control else KILLED)


# ---- a weakened suite ----
def test_a_lane_that_is_off_leaves_survivors(targets):
    mutant = all_mutants()["router_ties_high"]
    assert run_trial(mutant, targets).killed_by_named
    trial = run_trial(mutant, targets, Suite(off=frozenset({"numerics"})))
    assert not trial.killed_by_named
    assert trial.named is None


def test_a_loosened_limit_leaves_a_survivor(targets):
    mutant = dataclasses.replace(all_mutants()["depends_on_rows"], also=())
    assert run_trial(mutant, targets).killed_by_named
    loose = Suite(loosened={"error_ratio": 100.0, "spread_ratio": 100.0})
    assert not run_trial(mutant, targets, loose).killed_by_named


def test_a_loosened_policy_leaves_a_survivor_among_the_quick_few(targets):
    """Each number of the policy that a quick mutant meets: a looser one lets that mutant live."""
    near = dataclasses.replace(all_mutants()["o_proj_coarse"], also=())
    assert near.id in QUICK
    assert run_trial(near, targets).killed_by_named
    assert not run_trial(near, targets, Suite(policy_limits={"numerics": {"error_ratio": 2.0}})).killed_by_named


@pytest.mark.parametrize(
    ("identity", "old", "new"),
    [
        ("eval_quiet_drop", "gsm8k_nano = 0.03", "gsm8k_nano = 0.5"),
        ("eval_truncated", "truncation_share_max = 0.02", "truncation_share_max = 0.5"),
        ("speed_launch_slower", "slowdown_max = 0.03", "slowdown_max = 0.1"),
        ("speed_length_overstated", "acceptance_length_tolerance = 0.02", "acceptance_length_tolerance = 0.2"),
        ("speed_of_a_wrong_kernel", "\nerror_ratio = 1.5", "\nerror_ratio = 2.0"),
    ],
)
def test_a_loosened_line_of_the_policy_file_is_noticed(targets, monkeypatch, tmp_path, identity, old, new):
    from validation import policy

    assert identity in QUICK
    strict = run_trial(all_mutants()[identity], targets)
    assert strict.killed_by_named
    text = policy.DEFAULT_POLICY.read_text()
    assert old in text
    (tmp_path / "policy.toml").write_text(text.replace(old, new).replace("one_standard_error = 1.0", "one_standard_error = 9.0"))
    real = policy.load_policy
    monkeypatch.setattr(policy, "load_policy", lambda path=None: real(tmp_path / "policy.toml"))
    loose = run_trial(all_mutants()[identity], targets)
    assert {b.rule for b in loose.breaches} != {b.rule for b in strict.breaches}
    assert len(loose.breaches) < len(strict.breaches)


def test_the_quick_few_have_one_for_each_lane_and_a_control():
    chosen = [all_mutants()[name] for name in QUICK]
    lanes = {m.killed_by.split(".")[0] for m in chosen if not m.control}
    assert lanes == {"scope", "ordering", "numerics", "schedule", "evals", "perf"}
    assert any(m.control for m in chosen)
    assert cli.select(None, quick=True) == QUICK
    with pytest.raises(HarnessError, match="one of them"):
        cli.select("F01", quick=True)


def test_a_whole_table_decodes_items_with_some_mutants_and_a_narrow_one_with_none():
    rows = {case.subject: case.params.get("eval_rows", 0) for case in checks.KillTableCheck().cases()}
    assert {name for name, n in rows.items() if n} == set(DECODED)
    with checks.narrowed(QUICK):
        assert not any(case.params for case in checks.KillTableCheck().cases())
    with checks.narrowed(None, eval_rows=0):
        assert not any(case.params for case in checks.KillTableCheck().cases())


def test_an_error_in_a_check_kills_nothing(targets):
    def broken(found):
        raise RuntimeError("no compiler")

    mutant = Mutant(id="x", fault="F01", kind=EVAL, sentence="", claim="", killed_by="evals.gate.x", trial=broken)
    trial = run_trial(mutant, targets)
    assert not trial.killed_by_named
    assert trial.measured_cases == 0
    assert "no compiler" in trial.named.error


def test_a_kill_by_another_lane_only_is_no_kill(targets):
    def blind(found):
        return Seen(check="evals.gate.x", cases=1)

    mutant = Mutant(
        id="x", fault="F25", kind=EVAL, sentence="", claim="", killed_by="evals.gate.x", trial=blind, also=("numerics.ties",),
        candidate="router_ties_high",
    )  # fmt: skip
    assert run_trial(mutant, targets).lanes()["evals"] == ALIVE


# ---- the check, the table and the command line ----
def evidence(identity, *, control=False, killed_by_named=0, killed=0, breaches=0, outcome=Outcome.MEASURED):
    names = {"cases": 1, "breaches": breaches, "killed_by_named": killed_by_named, "killed": killed}
    mutant = all_mutants()[identity]
    return Evidence(
        id=f"E-{identity[:6]}", run="R", check=checks.CHECK, case=Case(subject=identity), outcome=outcome,
        measurements=tuple(Measurement(name=n, value=v, unit="count") for n, v in names.items()) if outcome is Outcome.MEASURED else (),
        details={"control": control, "fault": mutant.fault, "kind": mutant.kind, "named": mutant.killed_by, "lanes": {"numerics": "alive"},
                 "killed_by": ["schedule.poison"] if killed else []},
    )  # fmt: skip


def test_the_table_tells_the_states_apart():
    rows = cli.table_rows(
        [
            evidence("router_ties_high", killed_by_named=1, killed=1),
            evidence("padding_routed"),
            evidence("kda_gate_bound", killed=1),
            evidence("control_identical", control=True),
            evidence("control_stock_00", control=True, breaches=2),
            evidence("mla_rotated", outcome=Outcome.ERROR),
        ]
    )
    assert [row["state"] for row in rows] == ["killed", "survived", "other lane", "control alive", "control dead", "not measured"]
    found = cli.summary(rows)
    assert found["classes_killed"] == ["F25"]
    assert found["states"]["survived"] == 1
    assert "padding_routed" in found["lane_alone"]["numerics"]["missed"]


def test_limits_fail_a_survivor_and_a_dead_control():
    check = checks.KillTableCheck()
    of_mutant = {limit.measurement: limit for limit in check.limits(Case(subject="padding_routed"))}
    of_control = {limit.measurement: limit for limit in check.limits(Case(subject="control_identical"))}
    assert not of_mutant["killed_by_named"].holds(0)
    assert of_mutant["killed_by_named"].holds(1)
    assert not of_control["breaches"].holds(1)
    assert not of_control["cases"].holds(0)


def test_a_narrowed_plan_holds_only_what_was_chosen():
    with checks.narrowed(("padding_routed",)):
        assert [case.subject for case in checks.KillTableCheck().cases()] == ["padding_routed"]
    assert len(list(checks.KillTableCheck().cases())) == len(all_mutants())


def test_selection_by_id_class_and_kind():
    assert cli.select("padding_routed") == ("padding_routed",)
    assert set(cli.select("F25")) == set(classes()["F25"])
    assert cli.select(None) == tuple(all_mutants())
    with pytest.raises(HarnessError, match="nonsense"):
        cli.select("nonsense")


def test_cases_are_limited_to_those_a_check_has():
    mutant = all_mutants()["padding_routed"]
    assert case_places(mutant, "numerics.padding", 1) == [0]
    assert case_places(mutant, "numerics.unknown", 3) == [0, 1, 2]


def test_a_patch_is_undone_even_after_an_error():
    thing = SimpleNamespace(value=1)
    with pytest.raises(RuntimeError), patched((thing, "value", 2)):
        raise RuntimeError
    assert thing.value == 1


def test_a_breach_without_a_value_is_kept_as_such():
    assert Breach(check="c", case="x", measurement="m", value=None, rule="<= 1").value is None
