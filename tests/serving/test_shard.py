"""Replicas, client processes, Ray and hosts: the merged report is the same file, and a lost worker costs only what it carried."""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from evals.records import decode_line
from evals.serving.asking import Ask, Replica
from evals.serving.executor import Executor
from evals.serving.items import ItemStore
from evals.serving.merge import main as merge_main
from evals.serving.merge import merge_stores
from evals.serving.progress import Silent
from evals.serving.suites import run_suite
from evals.serving.workers import open_askers
from validation.core.types import HarnessError, Status

sys.path.insert(0, str(Path(__file__).parent))
from canned import CannedServer, Script
from suite_parts import gsm8k, plan, policy, side

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("K3_EVAL_DATA", str(tmp_path))
    return tmp_path


def servers(stack, number, answers, **changes):
    return [stack.enter_context(CannedServer(Script(answers=answers, accuracy=0.8, latency=(0.0, 0.01), **changes))) for _ in range(number)]


def run(stock, candidate, folder, **changes):
    sides = {"stock": side("stock", *stock), "candidate": side("candidate", *candidate)}
    return run_suite("gsm8k", **sides, policy=policy("gsm8k"), plan=plan(**changes), folder=folder, shown=Silent())


@pytest.mark.parametrize(
    "ways", [((1, 1), (2, 1), (4, 1), (1, 2)), pytest.param(((1, 1), (2, 2), (1, 4), (4, 4)), marks=pytest.mark.serving)]
)
def test_replicas_and_workers_give_one_report(data, tmp_path, ways):
    """One, two and four replicas a side, and one, two and four client processes: byte for byte."""
    from contextlib import ExitStack

    answers = gsm8k(data, 60)
    reports = {}
    for replicas, workers in ways:
        with ExitStack() as stack:
            a, b = servers(stack, replicas, answers), servers(stack, replicas, answers)
            result = run(a, b, tmp_path / f"{replicas}-{workers}", workers=workers)
            assert [len(s.log) > 0 for s in (*a, *b)] == [True] * 2 * replicas  # every replica worked
            assert sum(len(s.log) for s in a) == 60
            carried = result.throughput["stock"][0].by_endpoint
            assert len(carried) == replicas  # by server; which process asked is not a matter of the server
        reports[replicas, workers] = result.report
        assert result.gate.status is Status.PASS, result.gate.reasons
    assert len(set(reports.values())) == 1
    assert len(reports[1, 1]) > 5000


def ask(number):
    return Ask(suite="s", item=f"{number:05d}", repeat=0, prompt=f"prompt {number}", chat=False, max_new_tokens=8)


async def carry(replicas, number, *, workers, ray="", disturb=None):
    """Ask `number` prompts through workers; `disturb(askers)` runs beside. Returns answers by item and the pass."""
    answers = {}
    async with open_askers(replicas, 8, workers, ray) as askers:
        executor = Executor(askers, 8, lambda one, answer: answers.setdefault(one.item, []).append(answer))
        beside = asyncio.create_task(asyncio.to_thread(disturb, askers)) if disturb else None
        made = await executor.run(iter([[ask(i) for i in range(at, at + 10)] for at in range(0, number, 10)]))
        if beside is not None:
            await beside
    return answers, made


def test_a_killed_worker_costs_only_what_it_carried():
    with CannedServer(Script(latency=(0.03, 0.06))) as server:
        replicas = (Replica(base_url=server.url, model="canned"),)

        def kill(askers):
            while len(server.log) < 30:
                time.sleep(0.005)
            os.kill(askers[0]._worker.pid, signal.SIGKILL)

        answers, made = asyncio.run(carry(replicas, 80, workers=2, disturb=kill))
    assert sorted(answers) == [f"{i:05d}" for i in range(80)]
    assert all(len(one) == 1 and not one[0].failure for one in answers.values())
    assert made.answered == 80
    assert made.failed == {}
    assert 1 <= made.moved <= 8
    assert 80 <= len(server.log) <= 80 + made.moved


def test_when_the_last_worker_is_gone_it_is_said():
    with CannedServer(Script(latency=(0.03, 0.06))) as server:
        replicas = (Replica(base_url=server.url, model="canned"),)

        def kill(askers):
            while len(server.log) < 10:
                time.sleep(0.005)
            for asker in askers:
                os.kill(asker._worker.pid, signal.SIGKILL)

        answers, made = asyncio.run(carry(replicas, 60, workers=2, disturb=kill))
    assert made.stopped.startswith("no endpoint is left")
    assert made.answered < 60
    assert set(made.failed) <= {"worker lost"}
    assert made.answered + sum(made.failed.values()) == len(answers)


def test_a_replica_that_goes_away_leaves_its_work_to_the_others(data, tmp_path):
    answers = gsm8k(data, 60)
    script = {"answers": answers, "accuracy": 0.8, "latency": (0.0, 0.01)}
    with CannedServer(Script(**script)) as good, CannedServer(Script(**script)) as stock:
        gone = CannedServer(Script(**script))
        with gone:
            pass  # its port is closed now
        result = run([stock], [gone, good], tmp_path / "out")
    assert result.gate.status is Status.PASS, result.gate.reasons
    assert result.failures == {"stock": {}, "candidate": {}}
    assert result.throughput["candidate"][0].moved >= 3


def test_worker_processes_end_with_the_pass():
    seen = []
    with CannedServer(Script()) as server:
        asyncio.run(
            carry((Replica(base_url=server.url, model="canned"),), 20, workers=2, disturb=lambda a: seen.extend(x._worker.pid for x in a))
        )
    assert len(seen) == 2
    for pid in seen:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not [t for t in threading.enumerate() if "worker" in t.name]


def test_shards_of_several_hosts_merge_into_the_report_of_one(data, tmp_path):
    answers = gsm8k(data, 40)
    with CannedServer(Script(answers=answers, accuracy=0.8)) as server:
        whole = run([server], [server], tmp_path / "whole")
        for host in range(3):
            part = run([server], [server], tmp_path / f"host{host}", shard=(host, 3))
            assert part.gate.status is Status.NOT_PROVEN  # a part never passes
            assert not part.complete
        for role in ("stock", "candidate"):
            parts = [tmp_path / f"host{host}" / f"{role}.jsonl" for host in (2, 0, 1)]
            assert merge_stores(parts, tmp_path / "merged" / f"{role}.jsonl") == 40
        before = len(server.log)
        merged = run([server], [server], tmp_path / "merged")
        assert len(server.log) == before
    assert merged.report == whole.report


def test_two_different_answers_under_one_key_do_not_merge(data, tmp_path):
    answers = gsm8k(data, 10)
    for name, accuracy in (("a", 1.0), ("b", 0.0)):
        with CannedServer(Script(answers=answers, accuracy=accuracy)) as server:
            run([server], [server], tmp_path / name)
    files = [tmp_path / name / "stock.jsonl" for name in ("a", "b")]
    with pytest.raises(HarnessError, match="two different answers to gsm8k item 0000"):
        merge_stores(files, tmp_path / "merged" / "stock.jsonl")


def test_an_answer_beats_a_failure_when_merging(data, tmp_path):
    answers = gsm8k(data, 20)
    for name, failing in (("a", 0.4), ("b", 0.0)):
        with CannedServer(Script(answers=answers, fail_500=failing)) as server:
            run([server], [server], tmp_path / name)
    files = [tmp_path / name / "stock.jsonl" for name in ("a", "b")]
    merge_stores(files, tmp_path / "m" / "stock.jsonl")
    with ItemStore(tmp_path / "m" / "stock.jsonl") as store:
        assert len(store) == 20
        assert all(reply.text is not None for reply in store.replies())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent", "--into", "m"], "got absent without answers"),
        (["a", "empty", "--into", "m"], "got empty without answers"),
        (["a", "a", "--into", "m"], "twice"),
        (["a", "--into", "a"], "another folder"),
        (["a"], "--into"),
        (["--into", "m"], "SOURCES"),
        (["torn", "--into", "m"], "restore the file"),
    ],
)
def test_a_host_that_is_missing_is_an_error_and_leaves_no_file(data, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    for name, text in (("empty", ""), ("torn", "zzz\nzzz\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stock.jsonl").write_text(text)
    with CannedServer(Script(answers=gsm8k(data, 2))) as server:
        run([server], [server], tmp_path / "a")
    assert merge_main(arguments) == 3
    told = capsys.readouterr().err
    assert words.lower() in told.lower()
    assert len(told.splitlines()) == 1
    assert not (tmp_path / "m").exists()


def test_ray_absent_is_one_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(HarnessError, match="no installed ray"):
        asyncio.run(carry((Replica(base_url="http://127.0.0.1:9", model="m"),), 1, workers=1, ray="local"))


@pytest.mark.serving
def test_ray_gives_the_same_report_and_survives_a_lost_worker(ray_installed, data, tmp_path):
    answers = gsm8k(data, 60)
    with CannedServer(Script(answers=answers, accuracy=0.8, latency=(0.0, 0.01))) as a, CannedServer(Script(latency=(0.05, 0.1))) as b:
        single = run([a], [a], tmp_path / "one")
        through_ray = run([a], [a], tmp_path / "ray", workers=3, ray="local")
        assert through_ray.report == single.report

        def kill(askers):
            while len(b.log) < 20:
                time.sleep(0.005)
            os.kill(askers[0]._worker.pid, signal.SIGKILL)

        replicas = (Replica(base_url=b.url, model="canned"),)
        answered, made = asyncio.run(carry(replicas, 80, workers=3, ray="local", disturb=kill))
    assert len(answered) == made.answered == 80
    assert made.failed == {}
    assert made.moved >= 1


def test_records_of_workers_name_the_server(data, tmp_path):
    answers = gsm8k(data, 8)
    with CannedServer(Script(answers=answers)) as server:
        run([server], [server], tmp_path / "out", workers=2)
        lines = (tmp_path / "out" / "stock.jsonl").read_bytes().splitlines(keepends=True)
        assert {one["extra"]["endpoint"] for line in lines if (one := decode_line(line))["kind"] == "reply"} == {server.url}
    assert json.loads((tmp_path / "out" / "throughput.jsonl").read_text().splitlines()[0])["side"] == "stock"
