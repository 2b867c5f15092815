"""Per-item records survive kills, torn lines and full disks; nothing is lost and nothing is counted twice."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.records import RecordFile, Reply, ReplyKey, digest
from validation.core.types import HarnessError


def key(i=0, repeat=0, path="stock", fingerprint="f0"):
    return ReplyKey(
        suite="gsm8k_nano", item=f"{i:04d}", repeat=repeat, path=path, fingerprint=fingerprint, prompt_hash=digest(f"p{i}"), params_hash="g"
    )


def reply(i=0, text="1+1=2\n#### 2", **kwargs):
    return Reply(
        key=key(i, **kwargs), seed=7, token_ids=(1, 2, i), text=text, finish_reason="stop", prompt_tokens=12, seconds=0.25, extra={"a": [1]}
    )


def test_round_trip_keeps_every_field(tmp_path):
    odd = [
        reply(0),
        reply(1, text="naïve \ud800 \n\u2028"),
        dataclasses.replace(reply(2), text=None, finish_reason="error: NaN", seed=None),
    ]
    with RecordFile(tmp_path / "r.jsonl") as records:
        records.add_replies(odd)
        records.add_scores({odd[0].key: {"exact_match": 1.0}, odd[2].key: {"exact_match": None}})
    with RecordFile(tmp_path / "r.jsonl") as records:
        assert [records.replies[r.key] for r in odd] == odd
        assert records.scores(odd[0].key) == {"exact_match": 1.0}
        assert records.scores(odd[2].key) == {"exact_match": None}
        assert records.scores(odd[1].key) == {}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400))
def test_a_torn_last_line_is_cut_and_the_rest_survives(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("torn") / "r.jsonl"
    with RecordFile(path) as records:
        for i in range(4):
            records.add_replies([reply(i)])
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    path.write_bytes(whole[: -min(cut, last)])
    with RecordFile(path) as records:
        assert len(records.replies) == 3
        assert records.repaired_bytes == max(last - cut, 0)
        records.add_replies([reply(3)])
    assert path.read_bytes() == whole


def test_an_altered_line_is_an_error_not_a_guess(tmp_path):
    path = tmp_path / "r.jsonl"
    with RecordFile(path) as records:
        records.add_replies([reply(0), reply(1)])
    path.write_text(path.read_text().replace("#### 2", "#### 3", 1))
    with pytest.raises(HarnessError, match="altered line at byte 0"):
        RecordFile(path)


def test_a_key_is_counted_once(tmp_path):
    path = tmp_path / "r.jsonl"
    with RecordFile(path) as records:
        records.add_replies([reply(0)])
        with pytest.raises(HarnessError, match="each key once"):
            records.add_replies([reply(0)])
        with pytest.raises(HarnessError, match="each key once"):
            records.add_replies([reply(5), reply(5)])
        records.add_scores({key(0): {"m": 1.0}})
        records.add_scores({key(0): {"m": 1.0}})
        with pytest.raises(HarnessError, match="the task changed"):
            records.add_scores({key(0): {"m": 0.0}})
        with pytest.raises(HarnessError, match="needs its reply first"):
            records.add_scores({key(9): {"m": 0.0}})
    lines = path.read_text().splitlines()
    assert len(lines) == 2
    path.write_text("\n".join([lines[0], *lines]) + "\n")
    with pytest.raises(HarnessError, match="again at byte"):
        RecordFile(path)


def test_another_target_never_gets_these_answers(tmp_path):
    """One cache for two models hands the first one's answers to the second: the key must hold the fingerprint."""
    with RecordFile(tmp_path / "r.jsonl") as records:
        records.add_replies([reply(0, fingerprint="a"), reply(0, fingerprint="b", text="other")])
        assert [r.text for r in records.select("gsm8k_nano", "stock", "b")] == ["other"]
        assert list(records.select("gsm8k_nano", "candidate", "b")) == []


def test_two_writers_are_refused(tmp_path):
    with RecordFile(tmp_path / "r.jsonl"), pytest.raises(HarnessError, match="in use"):
        RecordFile(tmp_path / "r.jsonl")


def test_a_full_disk_is_one_clear_error_and_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    with RecordFile(path) as records:
        records.add_replies([reply(0)])
        size, write = path.stat().st_size, os.write

        def full(fd, data):
            if len(data) > 40:
                return write(fd, data[:40])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", lambda fd, data: full(fd, data[:60]) if len(data) > 60 else full(fd, b"x"))
        with pytest.raises(HarnessError, match="No space left"):
            records.add_replies([reply(1)])
        monkeypatch.undo()
        assert path.stat().st_size == size
        records.add_replies([reply(1)])
    with RecordFile(path) as records:
        assert len(records.replies) == 2


def test_an_unwritable_folder_is_a_harness_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match="needs a writable"):
        RecordFile(tmp_path / "file" / "r.jsonl")


def test_an_unknown_schema_is_named(tmp_path):
    path = tmp_path / "r.jsonl"
    body = json.dumps({"schema": 1, "kind": "reply", "key": {}}, separators=(",", ":"))
    path.write_text(f'{{"sha":"{digest(body)}","body":{body}}}\n')
    with pytest.raises(HarnessError, match="another form"):
        RecordFile(path)


WRITER = """
import sys
from pathlib import Path
from tests_records_helper import reply
from evals.records import RecordFile
with RecordFile(Path(sys.argv[1])) as records:
    for i in range(100000):
        if reply(i).key not in records.replies:
            records.add_replies([reply(i)])
            print(i, flush=True)
"""


def test_a_killed_writer_loses_nothing_it_reported(tmp_path):
    helper = tmp_path / "tests_records_helper.py"
    source = Path(__file__).read_text(encoding="utf-8")
    helper.write_text(source[: source.index("def test_round_trip")])
    path, reported = tmp_path / "r.jsonl", set()
    for _ in range(3):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, env=env)
        lines = [process.stdout.readline() for _ in range(40)]
        time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().splitlines()
        process.wait()
        reported |= {int(line) for line in lines if line.strip()}
    with RecordFile(path) as records:
        items = [int(k.item) for k in records.replies]
        assert len(items) == len(set(items))
        assert reported <= set(items)
        assert len(items) <= len(reported) + 3
