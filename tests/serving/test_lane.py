"""The serving profile as it is run, end to end, on two servers that it starts: what passes, what fails, and what is not proven."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evals.serving.checks import checks, suite_cases
from evals.serving.config import EvalsConfig
from validation.core.settings import PROJECT_ROOT, load_settings
from validation.core.store import read_evidence
from validation.core.types import Evidence, HarnessError

TOY = Path(__file__).with_name("toy_server.py")
NANO = PROJECT_ROOT / "evals" / "serving" / "templates" / "nano.toml"


def command(*options: str) -> str:
    return json.dumps(["{python}", str(TOY), "--port", "{port}", *options])


def config_text(candidate: tuple[str, ...] = (), *, evals: str = "", extra: str = "", numerics: str = "") -> str:
    return f"""
profile = "serving"
[servers]
poll_s = 0.1
together = true
[baseline]
model = "toy"
command = {command()}
startup_timeout_s = 60
stop_timeout_s = 2
[candidate]
model = "toy"
command = {command("--path", "specialized", *candidate)}
startup_timeout_s = 60
stop_timeout_s = 2
proof_metrics = 'toy:steps_total.*specialized'
{extra}
[evals]
suites = ["gsm8k_nano", "gpqa_diamond_nano", "aime25_nano", "mrcr_nano"]
concurrency = [1, 8]
api = "completions"
request_timeout_s = 20
{evals}
[numerics]
bins = [256, 2048, 8192]
window_tokens = 32
text = "chat"
{numerics}
"""


def run(
    tmp_path: Path, text: str, lanes: str, *options: str, limit_s: float = 240
) -> tuple[dict[str, Any], dict[str, list[Evidence]], str]:
    """The closing JSON line, the records by check, and what was said."""
    path = tmp_path / "validate.toml"
    path.write_text(text)
    arguments = ["run", "--profile", "serving", "--config", str(path), "--lanes", lanes, "--runs-dir", str(tmp_path / "runs"), *options]
    done = subprocess.run(
        [sys.executable, "-m", "validation", *arguments], capture_output=True, text=True, cwd=PROJECT_ROOT, timeout=limit_s, check=False
    )
    closing = json.loads(done.stdout.strip().splitlines()[-1])
    records: dict[str, list[Evidence]] = {}
    if closing["run"]:
        for record in read_evidence(tmp_path / "runs" / closing["run"]):
            records.setdefault(record.check, []).append(record)
    return {**closing, "code": done.returncode}, records, done.stderr


def values(record: Evidence) -> dict[str, float]:
    return {m.name: m.value for m in record.measurements}


def claims_of(tmp_path: Path, closing: dict[str, Any]) -> dict[str, str]:
    verdict = json.loads((tmp_path / "runs" / closing["run"] / "verdict.json").read_text())
    return {result["claim"]: result["status"] for result in verdict["claims"]}


@pytest.mark.slow
def test_a_sound_candidate_is_proven_on_whole_suites(tmp_path):
    closing, records, told = run(tmp_path, config_text(), "evals,numerics")
    assert closing["verdict"] == "pass", told
    assert closing["code"] == 0
    assert {"C-SERVE-1": "pass", "C-SERVE-2": "pass"}.items() <= claims_of(tmp_path, closing).items()
    assert len(records["evals.serving.gsm8k_nano"]) == 2
    assert values(records["evals.serving.gsm8k_nano"][0])["items"] == 500
    assert values(records["evals.serving.path_proof"][0])["signs_of_the_path"] > 0
    assert (tmp_path / "runs" / closing["run"] / "report.md").is_file()


def test_a_candidate_that_answers_worse_fails_and_the_suite_names_it(tmp_path):
    text = config_text(("--mode", "worse"), evals="rows = 117\nrows_at_one = 3").replace(
        '"gpqa_diamond_nano", "aime25_nano", "mrcr_nano"', ""
    )
    closing, records, told = run(tmp_path, text, "evals")
    assert closing["verdict"] == "fail", told
    one, many = records["evals.serving.gsm8k_nano"]
    assert values(many)["proven_drop"] > 0
    assert "full_size" not in values(many)
    assert values(many)["items"] == 117
    load = next(table for table in many.details["tables"] if table["title"] == "Load")
    assert [row[:3] for row in load["rows"]] == [["stock", 8, 117], ["candidate", 8, 117]]
    assert 0 < values(many)["all_in_flight_share_stock"] <= values(many)["in_flight_share_stock"] <= 1
    assert [record.outcome for record in records["evals.serving.mrcr_nano"]] == ["refused", "refused"]
    assert "not asked for" in records["evals.serving.mrcr_nano"][0].reasons[0]
    assert values(records["evals.serving.health"][0])["candidate_deaths"] == 0
    assert values(records["evals.serving.identity"][0])["facts_compared"] >= 8
    assert values(one)["items"] == 3


def test_a_distribution_that_is_off_fails_the_numerics_lane(tmp_path):
    closing, records, told = run(tmp_path, config_text(("--mode", "noisy")), "numerics")
    assert closing["verdict"] == "fail", told
    ratios = [values(record)["noise_ratio"] for record in records["numerics.serving.decode"]]
    assert len(ratios) == 3
    assert all(ratio > 3 for ratio in ratios)
    assert claims_of(tmp_path, closing)["C-SERVE-2"] == "fail"


ONE_SUITE = 'suites = ["gsm8k_nano"]\nrows = 8\nrows_at_one = 2'


def small(candidate: tuple[str, ...] = (), **options: str) -> str:
    whole = config_text(candidate, **options)
    return whole.replace('suites = ["gsm8k_nano", "gpqa_diamond_nano", "aime25_nano", "mrcr_nano"]', ONE_SUITE)


@pytest.mark.slow
def test_a_difference_that_nobody_accepted_is_refused_before_anything_is_asked(tmp_path):
    closing, records, told = run(tmp_path, small(("--dtype", "float16")), "evals,numerics")
    assert closing["verdict"] == "not_proven", told
    assert all(record.outcome == "refused" for found in records.values() for record in found if record.check != "evals.serving.health")
    assert "dtype: stock default, candidate float16" in records["evals.serving.identity"][0].reasons[0]
    assert "dtype: stock default, candidate float16" in told


def test_one_set_of_gpus_accepted_differences_and_a_server_that_dies(tmp_path):
    text = small(("--dtype", "float16", "--dies-after", "9"), extra='accept_differences = ["dtype"]').replace("together = true", "")
    closing, records, told = run(tmp_path, text, "evals")
    assert closing["verdict"] == "fail", told
    health = values(records["evals.serving.health"][0])
    assert health["candidate_deaths"] >= 1
    assert "engine core died" in json.dumps(records["evals.serving.health"][0].details)
    many = next(r for r in records["evals.serving.gsm8k_nano"] if r.case.params["concurrency"] == 8)
    assert values(many)["lost_replies"] == 0  # what was cut off by the death was asked again
    load = next(table for table in many.details["tables"] if table["title"] == "Load")
    assert {row[0] for row in load["rows"]} == {"stock", "candidate"}
    assert values(records["evals.serving.identity"][0])["accepted_differences"] == 1


@pytest.mark.slow
def test_forcing_that_did_not_happen_is_not_proven(tmp_path):
    closing, records, _ = run(tmp_path, config_text(("--mode", "unforced")), "numerics")
    assert closing["verdict"] == "not_proven"
    assert all(record.outcome == "refused" for record in records["numerics.serving.decode"])
    assert "leave the forced text" in records["numerics.serving.decode"][0].reasons[0]


def test_servers_that_nobody_reaches_prove_nothing_and_fail_nothing(tmp_path):
    side = 'model = "toy"\nbase_url = "http://127.0.0.1:{}"\n'
    text = 'profile = "serving"\n[baseline]\n' + side.format(9) + "[candidate]\n" + side.format(10)
    closing, records, told = run(tmp_path, text + '[evals]\nsuites = ["gsm8k"]\nconcurrency = [1]\n', "evals")
    assert (closing["verdict"], closing["code"]) == ("not_proven", 2), told
    assert "127.0.0.1:9" in records["evals.serving.identity"][0].reasons[1]


def test_a_suite_without_data_is_refused_and_the_rest_goes_on(tmp_path):
    (tmp_path / "empty").mkdir()
    real = config_text(evals=f'data = {{ gsm8k = "{tmp_path / "empty"}" }}').replace("bins = [256, 2048, 8192]", "bins = [256]")
    real = real.replace('suites = ["gsm8k_nano", "gpqa_diamond_nano", "aime25_nano", "mrcr_nano"]', 'suites = ["gsm8k"]')
    closing, records, told = run(tmp_path, real, "evals,numerics")
    assert (closing["verdict"], closing["code"]) == ("not_proven", 2), told
    assert {record.outcome.value for record in records["evals.serving.gsm8k"]} == {"refused"}
    assert any("got nothing for split" in reason for record in records["evals.serving.gsm8k"] for reason in record.reasons)
    assert {record.outcome.value for record in records["numerics.serving.decode"]} >= {"measured"}


@pytest.mark.slow
def test_nan_in_a_distribution_fails(tmp_path):
    closing, records, _ = run(tmp_path, config_text(("--mode", "nan"), numerics="windows = 1"), "numerics")
    assert closing["verdict"] == "fail"
    assert values(records["numerics.serving.decode"][0])["non_finite"] > 0


# ---- without servers ----
def test_the_claim_speaks_of_one_and_of_many_whatever_the_file_asks():
    cases = suite_cases("gsm8k", EvalsConfig(suites=("gsm8k",), concurrency=(32,)))
    assert [(case.params["concurrency"], case.params.get("asked", 1)) for case in cases] == [(1, 0), (32, 1)]
    assert [case.params for case in suite_cases("mrcr", EvalsConfig(suites=("gsm8k",)))][1]["asked"] == 0


def test_every_check_of_the_lane_has_limits_for_each_of_its_cases():
    for check in checks():
        assert all(check.limits(case) for case in check.cases()), check.id


def test_settings_come_from_the_file_and_the_candidate_from_the_command_line():
    settings = load_settings(NANO, {"candidate": "expert_scale_dropped"})
    assert settings.profile == "serving"
    assert settings.lanes == ("evals", "numerics", "perf", "scope")
    assert settings.serving["candidate"]["command"][-1] == "expert_scale_dropped"
    assert "{port}" in settings.serving["candidate"]["command"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [({"profile": "serving"}, "needs --config FILE"), ({"profile": "serving", "candidate": "stock"}, "needs --config")],
)
def test_the_profile_needs_a_file(overrides, words):
    with pytest.raises(HarnessError, match=words):
        load_settings(None, overrides)


def test_a_candidate_that_the_file_has_no_place_for_is_an_error(tmp_path):
    path = tmp_path / "v.toml"
    path.write_text(config_text())
    with pytest.raises(HarnessError, match=r"needs \{candidate\} in a command"):
        load_settings(path, {"candidate": "stock"})


def test_an_unknown_table_is_named_with_its_line(tmp_path):
    path = tmp_path / "v.toml"
    path.write_text(config_text() + "[evalz]\nrows = 1\n")
    with pytest.raises(HarnessError, match=r"v.toml:\d+: .*unknown key 'evalz'"):
        load_settings(path, {})


@pytest.mark.slow
@pytest.mark.parametrize(("candidate", "verdict"), [("specialized", "pass"), ("expert_scale_dropped", "fail")])
def test_served_nano_in_the_numerics_lane(tmp_path, candidate, verdict):
    text = NANO.read_text().replace("[1024, 4096, 8192]", "[512, 1024]").replace("8192", "1024")
    closing, records, told = run(tmp_path, text, "numerics", "--candidate", candidate, limit_s=280)
    ratio = values(records["numerics.serving.decode"][0])["noise_ratio"]
    assert (ratio > 2) == (candidate == "expert_scale_dropped"), told
    assert closing["verdict"] == verdict, told
