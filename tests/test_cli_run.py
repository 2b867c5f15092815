"""The command line as a user meets it: exit codes, the closing JSON line, interrupts, broken input, a full disk."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from validation import __main__ as command_line
from validation.core.settings import PROJECT_ROOT, load_settings
from validation.core.store import read_evidence
from validation.core.types import HarnessError
from validation.core.verify import verify

FAKES = Path(__file__).resolve().parent / "validation" / "core"
OK = {"do": "ok"}


class Cli:
    """Runs `python -m validation` over the fake lane, with its runs below `folder`."""

    def __init__(self, folder):
        self.folder = folder
        self.runs = folder / "runs"
        self.config = folder / "validate.toml"
        self.configure()

    def configure(self, extra=""):
        self.config.write_text(
            f'lanes = ["fake"]\nclaims = "fake_lane:CLAIMS"\nruns_dir = "{self.runs}"\npolicy = "none"\n'
            f'memory_gib = 1.0\n{extra}\n[lane_modules]\nfake = "fake_lane"\n'
        )

    def start(self, *arguments, cases=(), preexec=None):
        environment = {**os.environ, "PYTHONPATH": str(FAKES), "FAKE_CASES": json.dumps({"fake.a": list(cases)})}
        command = [sys.executable, "-m", "validation", *arguments, "--config", str(self.config)]
        return subprocess.Popen(
            command, cwd=PROJECT_ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=preexec
        )

    def finish(self, process):
        out, err = process.communicate(timeout=120)
        return process.returncode, json.loads(out.splitlines()[-1]), err

    def __call__(self, *arguments, **options):
        return self.finish(self.start(*arguments, **options))

    def folders(self):
        return sorted(path.name for path in self.runs.iterdir()) if self.runs.exists() else []


@pytest.fixture
def cli(tmp_path):
    return Cli(tmp_path)


@pytest.mark.parametrize(
    ("cases", "code", "verdict"),
    [([OK], 0, "pass"), ([OK, {"do": "nan"}], 1, "fail"), ([OK, {"do": "raise"}], 2, "not_proven"), ([], 3, "error")],
)
def test_exit_codes(cli, cases, code, verdict):
    returned, answer, _ = cli("run", "--quiet", cases=cases)
    assert (returned, answer["verdict"]) == (code, verdict)
    assert set(answer) >= {"run", "verdict", "report"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--no-such-option"], "no-such-option"),
        (["run", "--lanes", "fake,nonsense"], "nonsense"),
        (["run", "--profile", "tpu"], "tpu"),
        (["run", "--candidate", "nonsense"], "nonsense"),  # although no case of the fake lane asks for a candidate
        (["run", "--candidate", "no.such:factory"], "no.such:factory"),
        (["run", "--checkpoint", "no/such/folder"], "no/such/folder"),
        (["verify", "R-nothing"], "R-nothing"),
        (["judge"], "none below"),
        (["repro", "E-000000000000"], "E-000000000000"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_wrong_use_is_exit_3_with_one_line(cli, arguments, words):
    code, answer, err = cli(*arguments, cases=[OK])
    assert code == 3
    assert answer["verdict"] == "error"
    assert len([line for line in err.strip().splitlines() if not line.startswith("loading ")]) == 1
    assert "Traceback" not in err
    if arguments[0] != "no-such-command":
        assert words in err
    assert cli.folders() == []


@pytest.mark.parametrize(
    "extra",
    [
        "surprise = 1",
        "jobs = 0",
        'jobs = "two"',
        "jobs = true",
        "jobs = [",
        "case_time_limit_s = nan",
        "case_time_limit_s = inf",
        "seed = -1",
    ],
)
def test_a_bad_setting_is_exit_3_before_a_run_exists(cli, extra):
    cli.configure(extra)
    code, answer, err = cli("run", cases=[OK])
    assert code == 3
    assert "settings" in answer["error"]
    assert "Traceback" not in err
    assert cli.folders() == []


@pytest.mark.parametrize(("kind", "words"), [("pipe", "device or a pipe"), ("device", "device or a pipe"), ("huge", "at most")])
def test_a_settings_file_that_is_none_is_named_without_reading_it(tmp_path, kind, words):
    path = tmp_path / "validate.toml"
    if kind == "pipe":
        os.mkfifo(path)  # would wait for ever
    elif kind == "device":
        path = Path("/dev/zero")  # would never end
    else:
        path.touch()
        os.truncate(path, 1 << 34)
    with pytest.raises(HarnessError, match=words):
        load_settings(path, {})


def test_a_fault_of_the_program_is_exit_3_in_one_line(monkeypatch, capsys):
    def broken(**_):
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr(command_line, "app", broken)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # main() would change what SIGTERM does to the tests
    with pytest.raises(SystemExit) as left:
        command_line.main()
    out, err = capsys.readouterr()
    assert left.value.code == 3
    assert len(err.splitlines()) == 1
    assert "ZeroDivisionError: a b at tests/test_cli_run.py:" in json.loads(out)["error"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('fake = "fake_lane"', 'fake = "fake_lane"\nother = "no_such_module"', "no_such_module"),
        ('fake = "fake_lane"', 'fake = "fake_lane"\nother = ""', "other"),
        ('policy = "none"', 'policy = "no/policy.toml"', "no/policy.toml"),
        ("memory_gib = 1.0", "memory_gib = inf", "memory_gib"),
        ("memory_gib = 1.0", "memory_gib = nan", "memory_gib"),
    ],
)
def test_a_setting_that_names_nothing_is_exit_3(cli, old, new, words):
    cli.config.write_text(cli.config.read_text().replace(old, new))
    code, answer, err = cli("run", cases=[OK])
    assert code == 3
    assert words in answer["error"]
    assert "Traceback" not in err
    assert cli.folders() == []


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda kind: kind.name)
def test_an_interrupted_run_is_continued(cli, kind):
    """Stopped anywhere in six slow cases and started again until it ends: every case is there once, and no worker is left."""
    cases = [{"do": "slow", "sleep_s": 0.4}] * 6
    process = cli.start("run", "--quiet", cases=cases)
    evidence = _wait_for(lambda: next(iter(cli.runs.glob("R-*/evidence.jsonl")), None))
    _wait_for(lambda: len(evidence.read_bytes().splitlines()) >= 2)
    process.send_signal(kind)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == (-9 if kind is signal.SIGKILL else 3)
    if kind is not signal.SIGKILL:
        assert json.loads(out.splitlines()[-1])["verdict"] == "interrupted"
    before = list(read_evidence(evidence.parent))
    assert 2 <= len(before) < 6
    code, answer, _ = cli("run", "--quiet", cases=cases)
    assert code == 0
    assert cli.folders() == [answer["run"]] == [evidence.parent.name]
    after = list(read_evidence(evidence.parent))
    assert after[: len(before)] == before
    assert sorted(r.case.seed for r in after) == list(range(6))
    assert verify(evidence.parent).intact
    assert verify(evidence.parent).closed
    _wait_for(lambda: not _workers_of(cli.folder))


def test_fresh_starts_over(cli):
    process = cli.start("run", "--quiet", cases=[{"do": "slow", "sleep_s": 20}])
    first = _wait_for(lambda: next(iter(cli.runs.glob("R-*")), None))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    time.sleep(1.1)
    shutil.rmtree(first)
    code, answer, _ = cli("run", "--quiet", "--fresh", cases=[OK])
    assert code == 0
    assert cli.folders() == [answer["run"]]


def test_judge_verify_and_repro_of_a_run(cli):
    _, ran, _ = cli("run", "--quiet", cases=[OK, {"do": "nan"}])
    run_dir = cli.runs / ran["run"]
    before = (run_dir / "evidence.jsonl").read_bytes()
    code, answer, _ = cli("judge", ran["run"], "--no-report")
    assert (code, answer["verdict"]) == (1, "fail")
    for record in read_evidence(run_dir):
        code, answer, _ = cli("repro", record.id, "--quiet")
        assert (code, answer["verdict"]) == (0, "same")
    assert cli("verify", ran["run"])[0] == 0
    assert (run_dir / "evidence.jsonl").read_bytes() == before
    (run_dir / "evidence.jsonl").write_bytes(before.replace(b'"value":1.0', b'"value":0.5'))
    code, answer, err = cli("verify", ran["run"])
    assert code == 1
    assert not answer["intact"]
    assert "edited" in err


def test_judging_refuses_records_that_were_changed(cli):
    _, ran, _ = cli("run", "--quiet", cases=[{"do": "nan"}])
    run_dir = cli.runs / ran["run"]
    evidence, verdict = run_dir / "evidence.jsonl", (run_dir / "verdict.json").read_bytes()
    lines = evidence.read_text().splitlines()
    changed = [line.replace('{"$float":"nan"}', "1.0") for line in lines]
    assert changed != lines
    evidence.write_text("".join(f"{line}\n" for line in changed))
    code, answer, err = cli("judge", ran["run"], "--no-report")
    assert (code, answer["verdict"]) == (3, "error")
    assert "edited" in answer["error"]
    assert "Traceback" not in err
    assert (run_dir / "verdict.json").read_bytes() == verdict


def test_a_damaged_file_is_named(cli):
    _, ran, _ = cli("run", "--quiet", cases=[OK])
    damaged = cli.runs / ran["run"] / "run.json"
    damaged.write_text("{")
    for command in ("verify", "judge"):
        code, answer, _ = cli(command, ran["run"])
        assert code == 3
        assert str(damaged) in answer["error"]


def test_a_full_disk_is_one_error_and_the_run_can_go_on(cli):
    """Files of this process and its children are limited, as a full disk would limit them."""
    cases = [OK] * 40

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))

    cli.configure()
    code, answer, err = cli("run", "--quiet", cases=cases, preexec=limit)
    assert code == 3
    assert "free space" in answer["error"]
    assert "Traceback" not in err
    for folder in cli.runs.glob("R-*"):
        assert verify(folder).intact
    assert not list(cli.runs.glob(".*"))
    assert not list(cli.runs.rglob("*.part"))
    code, answer, _ = cli("run", "--quiet", cases=cases)
    assert code == 0
    assert len(list(read_evidence(cli.runs / answer["run"]))) == 40


def test_a_tiny_file_system_is_one_error_without_a_half_written_run(cli):
    """The real thing where mounting is allowed: a tmpfs of a few pages."""
    cli.runs.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(cli.runs)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        code, answer, err = cli("run", "--quiet", cases=[OK] * 60)
        assert code == 3
        assert "free space" in answer["error"]
        assert "Traceback" not in err
        assert cli.folders() == []
    finally:
        subprocess.run(["umount", str(cli.runs)], check=True)


def _wait_for(probe, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = probe()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("waited in vain")


def _workers_of(folder):
    """Process ids of workers whose set-up names this test's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if b"validation.core.worker" in text and str(folder).encode() in text:
            found.append(path.parent.name)
    return found
