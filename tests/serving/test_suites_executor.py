"""The executor's promise of slots in use, and the records' promise of little memory."""

import asyncio
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from evals.records import Reply
from evals.serving.asking import UNREACHABLE, Answer, Ask, Reading, Replica, WorkerLost, reply_of
from evals.serving.executor import Executor, Meter
from evals.serving.items import ItemStore
from evals.serving.progress import Silent
from evals.serving.workers import open_askers
from evals.serving.writing import Writer
from validation.core.types import HarnessError

sys.path.insert(0, str(Path(__file__).parent))
from canned import CannedProcess, Script, unit

pytestmark = pytest.mark.timeout(240)


def ask(number, prompt="a prompt"):
    return Ask(suite="s", item=f"{number:05d}", repeat=0, prompt=prompt, chat=False, max_new_tokens=8)


def windows(number, size=32, **options):
    return ([ask(i, **options) for i in range(at, min(at + size, number))] for at in range(0, number, size))


class Asker:
    """Answers after a time; `plan(number of the call) -> answer, or raises`."""

    def __init__(self, name="here", seconds=lambda: 0.0, plan=lambda call: Answer(text="yes")):
        self.name, self._seconds, self._plan = name, seconds, plan
        self.calls = self.flying = self.most = self.characters = self.most_characters = 0

    async def answer(self, ask):
        self.calls += 1
        self.flying += 1
        self.characters += len(ask.prompt)
        self.most, self.most_characters = max(self.most, self.flying), max(self.most_characters, self.characters)
        try:
            call = self.calls
            await asyncio.sleep(self._seconds())
            return self._plan(call)
        finally:
            self.flying -= 1
            self.characters -= len(ask.prompt)

    async def aclose(self):
        return None


def run(askers, requests, concurrency=8, **options):
    taken = []
    executor = Executor(askers, concurrency, lambda one, answer: taken.append((one, answer)), **options)
    return asyncio.run(executor.run(iter(requests))), taken


def test_shares_are_time_weighted_up_to_the_last_hand_out():
    now = [0.0]
    meter = Meter(2, clock=lambda: now[0])
    for at, step in ((0, meter.enter), (1, meter.enter), (4, meter.leave), (5, meter.enter), (6, meter.leave), (7, meter.enter)):
        now[0] = at
        step()
    # In flight: 1 over [0, 1], 2 over [1, 4], 1 over [4, 5], 2 over [5, 6], 1 over [6, 7]; the last hand-out is at 7.
    assert meter.shares == ((1 + 6 + 1 + 2 + 1) / (7 * 2), 4 / 7)
    now[0] = 100.0
    meter.leave()
    assert meter.shares == (11 / 14, 4 / 7)  # the tail, when nothing is left to hand out, does not count


def test_fewer_requests_than_slots_have_no_share():
    made, _ = run([Asker()], windows(5), concurrency=8)
    assert math.isnan(made.in_flight_share)
    assert math.isnan(made.full_share)


def test_the_slots_are_in_use():
    rng = random.Random(1)
    asker = Asker(seconds=lambda: rng.uniform(0.05, 0.25))
    made, taken = run([asker], windows(700), concurrency=64)
    assert len(taken) == made.answered == 700
    assert asker.most == 64
    assert made.in_flight_share >= 0.95
    assert made.full_share >= 0.95


def test_slow_prompts_show_in_the_share():
    import time

    def slow():
        for window in windows(60, size=4):
            time.sleep(0.02)
            yield window

    made, _ = run([Asker(seconds=lambda: 0.005)], slow(), concurrency=16)
    assert made.answered == 60
    assert made.in_flight_share < 0.9


def test_requests_spread_evenly_over_askers():
    rng = random.Random(2)
    askers = [Asker(name=f"r{i}", seconds=lambda: rng.uniform(0.001, 0.003)) for i in range(4)]
    made, _ = run(askers, windows(400), concurrency=32)
    assert [asker.most for asker in askers] == [8] * 4
    assert sum(made.by_endpoint.values()) == 400
    assert min(made.by_endpoint.values()) > 60


def test_long_prompts_are_bounded_by_characters():
    asker = Asker(seconds=lambda: 0.001)
    made, _ = run([asker], windows(60, size=4, prompt="x" * 1000), concurrency=16, max_characters=3500)
    assert made.answered == 60
    assert asker.most_characters <= 3500
    assert asker.most == 3
    single, _ = run([asker], windows(3, prompt="x" * 9000), max_characters=3500)  # longer than the bound: alone
    assert single.answered == 3


def test_failures_are_answers_and_are_counted_by_kind():
    asker = Asker(plan=lambda call: Answer(failure="dropped", message="x") if call % 5 == 0 else Answer(text="yes", attempts=1 + call % 2))
    made, taken = run([asker], windows(100))
    assert (made.answered, made.failed, made.asked) == (80, {"dropped": 20}, 100)
    assert made.tried_again == 40
    assert sum(bool(answer.failure) for _, answer in taken) == 20


def test_an_unreachable_server_is_left_alone_and_its_work_goes_elsewhere():
    gone = Asker(name="gone", plan=lambda call: Answer(failure=UNREACHABLE, message="refused"))
    made, taken = run([gone, Asker(name="good", seconds=lambda: 0.001)], windows(100))
    assert made.answered == 100
    assert made.failed == {}
    assert gone.calls <= 3 + 4  # what was in flight when it was given up
    assert len({one.item for one, _ in taken}) == len(taken) == 100
    made, taken = run([gone], windows(100), concurrency=2)
    assert made.stopped == "no endpoint is left: refused"
    assert made.asked < 10


def test_a_lost_worker_is_never_used_again():
    def lost(call):
        if call > 20:
            raise WorkerLost("gone")
        return Answer(text="yes")

    dying = Asker(name="dying", plan=lost, seconds=lambda: 0.001)
    made, taken = run([dying, Asker(name="good", seconds=lambda: 0.001)], windows(100))
    assert made.answered == 100
    assert 1 <= made.moved <= 8
    assert len({one.item for one, _ in taken}) == 100


def test_an_error_while_building_prompts_ends_the_pass():
    def broken():
        yield [ask(0)]
        raise HarnessError("no room")

    with pytest.raises(HarnessError, match="no room"):
        run([Asker(seconds=lambda: 0.01)], broken())
    with pytest.raises(HarnessError, match="needs at least one of each"):
        Executor([], 1, lambda a, b: None)


# ---- records ----
def reply(number, text="yes", **changes):
    return reply_of(ask(number), Answer(text=text, token_ids=(1, 2), **changes), "stock", "f", Reading())


def test_records_survive_and_a_torn_line_is_cut_off(tmp_path):
    path = tmp_path / "stock.jsonl"
    with ItemStore(path) as store:
        store.add([reply(i) for i in range(5)])
        store.add_scores([(reply(0).key, {"m": 1.0})])
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines(keepends=True)[0][:40])
    with ItemStore(path) as store:
        assert store.repaired_bytes == 40
        assert len(store) == 5
        assert store.get(reply(3).key) == reply(3)
        assert store.scores(reply(0).key) == {"m": 1.0}
        with pytest.raises(HarnessError, match="second reply"):
            store.add([reply(3)])
        with pytest.raises(HarnessError, match="in use"):
            ItemStore(path)
    damaged = path.read_bytes().replace(b'"yes"', b'"no!"', 1)
    path.write_bytes(damaged)
    with pytest.raises(HarnessError, match="altered line at byte 0"):
        ItemStore(path)


def test_a_failure_may_be_answered_later_and_both_stay_on_disk(tmp_path):
    key = reply(1).key
    with ItemStore(tmp_path / "a.jsonl") as store:
        store.add([reply(1, failure="dropped", message="x")])
        assert not store.answered(key)
        store.add([reply(1, failure="timed out", message="x")])
        assert store.failures(key) == 2
        store.add([reply(1)])
        assert store.answered(key)
    with ItemStore(tmp_path / "a.jsonl") as store:
        assert store.failures(key) == 2
        assert store.get(key).text == "yes"
        assert [one.text for one in store.replies()] == ["yes"]
    assert len((tmp_path / "a.jsonl").read_bytes().splitlines()) == 3


def test_the_writer_hands_its_error_to_whoever_takes(tmp_path):
    with ItemStore(tmp_path / "a.jsonl") as store:
        store.add([reply(0)])
        shown = Silent()
        shown.begin("t", 2, 0)
        with (
            pytest.raises(HarnessError, match="second reply"),
            Writer(store, "f", "stock", Reading(), lambda r, t: 1.0, shown, "t") as writer,
        ):
            writer.take(ask(0), Answer(text="yes"))


MANY_ITEMS = """
import asyncio, json, sys, time
from pathlib import Path
from evals.serving.asking import Answer, Ask, Reading
from evals.serving.executor import Executor, peak_rss_bytes
from evals.serving.items import ItemStore
from evals.serving.progress import Silent
from evals.serving.writing import Writer

number, tokens, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

class Asker:
    name = "here"
    async def answer(self, ask):
        await asyncio.sleep(0.001)
        text = f"{ask.item} " + "word " * tokens
        return Answer(text=text, token_ids=tuple(range(1000, 1000 + tokens)), finish_reason="stop", prompt_tokens=9)
    async def aclose(self): return None

def windows():
    for at in range(0, number, 32):
        rows = [(i, f"{i} " + "Question " * 400) for i in range(at, min(at + 32, number))]
        yield [Ask(suite="s", item=f"{i:05d}", repeat=0, prompt=prompt, chat=False, max_new_tokens=8) for i, prompt in rows]

base, started, shown = peak_rss_bytes(), time.process_time(), Silent()
shown.begin("t", number, 0)
with ItemStore(folder / "a.jsonl") as store:
    with Writer(store, "f", "stock", Reading(), lambda row, text: 1.0, shown, "t") as writer:
        made = asyncio.run(Executor([Asker()], 64, writer.take).run(windows()))
told = {"answered": made.answered, "base": base, "peak": peak_rss_bytes(), "cpu_seconds": time.process_time() - started}
with ItemStore(folder / "a.jsonl") as store:
    told |= {"reopened": len(store), "peak_reopened": peak_rss_bytes(), "bytes": (folder / "a.jsonl").stat().st_size}
print(json.dumps(told))
"""


@pytest.mark.parametrize(
    ("number", "tokens"), [(1500, 400), pytest.param(20_000, 1000, marks=[pytest.mark.serving, pytest.mark.timeout(900)])]
)
def test_memory_does_not_grow_with_the_suite(tmp_path, number, tokens):
    """20,000 answers of 1,000 tokens (hundreds of megabytes on disk) in a process of its own; 2 GiB is the promise, this is far below."""
    made = subprocess.run([sys.executable, "-c", MANY_ITEMS, str(number), str(tokens), str(tmp_path)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    told = json.loads(made.stdout.splitlines()[-1])
    print(told)
    assert told["answered"] == told["reopened"] == number
    assert told["peak_reopened"] - told["base"] < 128 << 20
    assert told["peak_reopened"] < 1 << 30


async def opened(replicas, requests):
    taken = []
    async with open_askers(replicas, 64) as askers:
        made = await Executor(askers, 64, lambda one, answer: taken.append((one, answer))).run(requests)
    return made, taken


@pytest.mark.serving
@pytest.mark.parametrize(("low", "high", "number"), [(1.0, 4.0, 800), (0.1, 0.4, 1500)])
def test_sixty_four_in_flight_against_a_real_server(tmp_path, low, high, number):
    """Measured twice: by the executor, and by the server of what it had in its hands, which is less by the time on the way."""
    with CannedProcess(Script(latency=(low, high)), tmp_path) as server:
        made, taken = asyncio.run(opened((Replica(base_url=server.url, model="canned"),), windows(number)))
        load = server.ask("/load")
    print(made, load)
    assert len(taken) == made.answered == number
    assert made.in_flight_share >= 0.95
    assert load["most"] == 64
    held = sum(low + (high - low) * unit("latency", "canned", one.prompt, None) for one, _ in taken)
    in_its_hands = held / sum(answer.seconds for _, answer in taken)
    assert load["mean"] / 64 == pytest.approx(made.in_flight_share * in_its_hands, abs=0.05)
    if low >= 1:
        assert made.full_share >= 0.95
        assert load["mean"] / 64 >= 0.95 * in_its_hands  # 0.95 where the machine is quiet


def test_replies_keep_what_the_records_promise():
    one: Reply = reply(7, reasoning="thought", finish_reason="length", prompt_tokens=5, completion_tokens=2, endpoint="e", attempts=3)
    assert one.truncated
    assert dict(one.extra) == {"endpoint": "e", "attempts": 3, "reasoning": "thought", "completion_tokens": 2}
    failed = reply(7, failure="http 500", message="boom")
    assert failed.text is None
    assert failed.finish_reason == "error: http 500: boom"
