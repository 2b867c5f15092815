"""Workers on their worst days: each case becomes exactly one record, and the lane goes on."""

from __future__ import annotations

import dataclasses
import json
import socket
import time

import pytest

from validation.core import validate
from validation.core.store import read_evidence
from validation.core.types import Outcome, Status
from validation.core.validate import run_validation
from validation.core.verify import verify

OK = {"do": "ok"}


def measure(settings):
    result = run_validation(settings, argv=("test",), fresh=False, quiet=True)
    assert verify(result.run_dir).intact
    return result, list(read_evidence(result.run_dir))


def test_a_good_candidate_passes(fake):
    result, records = measure(fake([OK, OK]))
    assert result.verdict.status is Status.PASS
    assert [r.outcome for r in records] == [Outcome.MEASURED] * 2
    assert not (result.run_dir.parent / f".{result.run_dir.name}.part").exists()


@pytest.mark.parametrize(
    ("bad", "outcome", "words"),
    [
        ({"do": "raise"}, Outcome.ERROR, "RuntimeError: planted"),
        ({"do": "die"}, Outcome.ERROR, "exit code 7"),
        ({"do": "segfault"}, Outcome.ERROR, "SIGSEGV"),
        ({"do": "oom"}, Outcome.ERROR, "memory"),
        ({"do": "refuse"}, Outcome.REFUSED, "wrong dtype"),
        ({"do": "nothing"}, Outcome.ERROR, "no measurement"),
    ],
    ids=lambda value: value["do"] if isinstance(value, dict) else "",
)
def test_a_bad_case_is_one_record_and_the_next_case_runs(fake, bad, outcome, words):
    result, records = measure(fake([OK, bad, OK]))
    assert [r.outcome for r in records] == [Outcome.MEASURED, outcome, Outcome.MEASURED]
    assert words in "; ".join(records[1].reasons)
    assert records[1].measurements == ()
    assert result.verdict.status is Status.NOT_PROVEN


def test_last_words_are_kept(fake):
    _, records = measure(fake([{"do": "die"}]))
    assert "last words" in records[0].reasons[0]


def test_a_hang_is_stopped_at_the_time_limit(fake):
    started = time.monotonic()
    _, records = measure(fake([{"do": "hang"}, OK], case_time_limit_s=2.0))
    assert time.monotonic() - started < 30
    assert "time limit" in records[0].reasons[0]
    assert records[1].outcome is Outcome.MEASURED


def test_nan_is_a_failure_and_survives_storage(fake):
    result, records = measure(fake([{"do": "nan"}]))
    assert result.verdict.status is Status.FAIL
    assert records[0].measurements[0].value != records[0].measurements[0].value


def test_printing_candidates_do_not_garble_answers(fake):
    _, records = measure(fake([{"do": "chatty"}, OK]))
    assert [r.outcome for r in records] == [Outcome.MEASURED] * 2


def test_workers_inherit_no_secrets(fake, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("HF_TOKEN", "x")
    _, records = measure(fake([{"do": "environment"}]))
    assert records[0].measurements[0].value == 0.0


def test_workers_cannot_write_evidence(fake, tmp_path):
    victim = tmp_path / "runs" / "evidence.jsonl"
    victim.parent.mkdir()
    victim.touch()
    result, records = measure(fake([{"do": "intrude", "path": str(victim)}]))
    config = json.loads((result.run_dir / "run.json").read_text())["config"]
    if "writes only to its scratch folder" not in config["isolation"]:
        pytest.skip("this kernel has no Landlock; the store's own guard is tested with the store")
    assert records[0].measurements[0].value == 0.0
    assert victim.read_text() == ""


def test_workers_have_no_network(fake):
    with socket.create_server(("127.0.0.1", 0)) as server:
        result, records = measure(fake([{"do": "network", "port": server.getsockname()[1]}]))
    config = json.loads((result.run_dir / "run.json").read_text())["config"]
    if "no network" not in config["isolation"]:
        pytest.skip("this kernel gives no network namespace")
    assert records[0].measurements[0].value == 0.0


def test_artifacts_are_copied_and_links_are_not(fake):
    result, records = measure(fake([{"do": "artifact"}, OK]))
    assert list(records[0].artifacts) == [f"artifacts/fake.a/{records[0].case.id}/table.csv"]
    assert (result.run_dir / next(iter(records[0].artifacts))).read_text() == "a,b\n"
    assert records[1].artifacts == {}


def test_lanes_run_side_by_side(fake):
    """Two lanes of two seconds each; their records carry when each one ran."""
    names = {"fake": "fake_lane", "other": "fake_other_lane"}
    settings = fake([{"do": "stamp", "sleep_s": 2.0}], lanes=("fake", "other"), lane_modules=names)
    _, records = measure(settings)
    begins, ends = zip(*((r.details["began"], r.details["ended"]) for r in records), strict=True)
    assert len(records) == 2
    assert max(begins) < min(ends)


def test_a_finished_run_is_not_continued(fake):
    settings = fake([OK])
    first, _ = measure(settings)
    time.sleep(1.1)
    second, _ = measure(settings)
    assert first.run_dir != second.run_dir


def test_a_run_interrupted_before_its_verdict_is_finished(fake):
    settings = fake([OK, OK])
    first, records = measure(settings)
    (first.run_dir / "verdict.json").unlink()
    second, again = measure(settings)
    assert second.run_dir == first.run_dir
    assert again == records
    assert second.verdict == first.verdict


def test_other_settings_do_not_continue_a_run(fake):
    first, _ = measure(fake([OK]))
    (first.run_dir / "verdict.json").unlink()
    second, _ = measure(fake([OK], seed=1))
    third, _ = measure(fake([{**OK, "at_most": 2.0}]))
    assert len({first.run_dir, second.run_dir, third.run_dir}) == 3


def test_two_runs_of_one_checkout_load_beside_each_other(fake, monkeypatch):
    settings, real, folders = fake([OK]), validate.ask_fingerprints, []

    def slowly(settings, scratch, roles, say):
        folders.append(scratch)
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / "mine").touch()
        if len(folders) == 1:  # another run begins and ends meanwhile
            run_validation(dataclasses.replace(settings, seed=1), argv=("test",), fresh=True, quiet=True)
        assert (scratch / "mine").exists()
        return real(settings, scratch, roles, say)

    monkeypatch.setattr(validate, "ask_fingerprints", slowly)
    result, _ = measure(settings)
    assert result.verdict.status is Status.PASS
    assert len(set(folders)) == 2
    assert not any(folder.exists() for folder in folders)
