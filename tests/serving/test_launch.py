"""Real process trees: servers start, fail and die in every way, and nothing of them is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evals.serving.broker import Broker, BrokerClient, Servers
from evals.serving.client import Endpoint
from evals.serving.config import ServersConfig, ServingConfig, Side
from evals.serving.errors import ServingError
from evals.serving.launch import StartedServer, StartFailed, cause_of

FAKE = Path(__file__).with_name("fake_server.py")


def side(mode: str, **options) -> Side:
    defaults = {"startup_timeout_s": 20.0, "stop_timeout_s": 1.0}
    return Side(model="toy", command=("{python}", str(FAKE), "{port}", mode), **{**defaults, **options})


def config(stock: str = "good", candidate: str = "good", *, together: bool = False, **options) -> ServingConfig:
    servers = ServersConfig(together=together, poll_s=0.05)
    return ServingConfig(baseline=side(stock, **options), candidate=side(candidate, **options), servers=servers)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def tree_of(server: StartedServer) -> list[int]:
    """The server and its helper, which is in a session of its own."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = re.search(r"helper (\d+)", server.log.read_text() if server.log.exists() else "")
        if found and server.status().get("pid"):
            return [int(server.status()["pid"]), int(found[1])]
        time.sleep(0.02)
    raise AssertionError("the server did not start its helper")


@pytest.mark.parametrize("mode", ["good", "slow", "stubborn"])
def test_a_server_comes_up_and_nothing_of_it_stays(tmp_path, mode):
    server = StartedServer(side(mode), role="stock", folder=tmp_path, poll_s=0.05)
    server.wait_until_ready()
    pids = tree_of(server)
    assert all(alive(pid) for pid in pids)
    assert server.death() == ""
    server.stop()
    assert gone(pids, 2)
    server.stop()


@pytest.mark.parametrize(
    ("mode", "words"),
    [("crash", "exit code 1.*this option needs that one"), ("oom", "out of memory.*CUDA out of memory"), ("html", "within 0.8 s.*HTML")],
)
def test_a_start_that_fails_says_why_and_quotes_the_log(tmp_path, mode, words):
    limits = {"startup_timeout_s": 0.8} if mode == "html" else {}
    server = StartedServer(side(mode, **limits), role="candidate", folder=tmp_path, poll_s=0.05)
    pids = tree_of(server)
    with pytest.raises(StartFailed, match=words):
        server.wait_until_ready()
    assert gone(pids, 2)


def test_a_server_that_never_answers_is_stopped_at_its_limit(tmp_path):
    server = StartedServer(side("hang", startup_timeout_s=1.0), role="stock", folder=tmp_path, poll_s=0.05)
    pids = tree_of(server)
    with pytest.raises(StartFailed, match="not ready within 1 s"):
        server.wait_until_ready()
    assert gone(pids, 2)


def test_another_model_is_told_apart(tmp_path):
    server = StartedServer(side("good", served_name="other"), role="stock", folder=tmp_path, poll_s=0.05)
    with pytest.raises(StartFailed, match=r"serves \['toy'\], needs 'other'; set served_name"):
        server.wait_until_ready()


def test_a_command_that_does_not_exist_is_named(tmp_path):
    wrong = Side(model="toy", command=("/nowhere/vllm", "{port}"), startup_timeout_s=20)
    with pytest.raises(StartFailed, match=r"could not be started.*nowhere"):
        StartedServer(wrong, role="stock", folder=tmp_path, poll_s=0.05).wait_until_ready()


@pytest.mark.parametrize(
    ("code", "tail", "words"),
    [
        (-signal.SIGKILL, "", "memory"),
        (1, "OSError: [Errno 98] Address already in use", "port"),
        (2, "error: unrecognized arguments: --decode-backend", "option"),
        (1, "ValueError: No available memory for the cache blocks", "cache"),
        (1, "something else", ""),
    ],
)
def test_causes_are_read_from_exit_code_and_log(code, tail, words):
    assert words in cause_of(code, tail)
    assert bool(cause_of(code, tail)) == bool(words)


# ---- both sides ----
def test_one_set_of_gpus_never_holds_both_sides(tmp_path):
    servers = Servers(config(), tmp_path)
    try:
        stock = servers.up("stock")
        pids = tree_of(servers._states["stock"].server)
        assert servers.up("stock")["base_urls"] == stock["base_urls"]  # it stays while nobody needs the other
        servers.up("candidate")
        assert gone(pids, 0.5)
        servers.up("stock")
        assert {role: told["starts"] for role, told in servers.state().items()} == {"stock": 2, "candidate": 1}
    finally:
        servers.close()
    with pytest.raises(StartFailed, match="ending"):
        servers.up("stock")


def test_both_sides_run_together_when_asked(tmp_path):
    servers = Servers(config(together=True), tmp_path)
    try:
        urls = [servers.up(role)["base_urls"][0] for role in ("stock", "candidate", "stock")]
        assert urls[0] == urls[2] != urls[1]
        for url in urls:
            with Endpoint(url) as endpoint:
                endpoint.health()
        assert servers.up("stock", fresh=True)["starts"] == 2
    finally:
        servers.close()


def test_a_death_in_the_middle_is_recorded_and_the_server_comes_back(tmp_path):
    servers = Servers(config(candidate="dies"), tmp_path)
    try:
        for death in range(1, 4):
            url = servers.up("candidate")["base_urls"][0]
            with Endpoint(url, model="toy", retries=0) as endpoint, pytest.raises(ServingError):
                endpoint.completion("x", max_tokens=1)
            deadline = time.monotonic() + 5
            while len(servers.state()["candidate"]["deaths"]) < death and time.monotonic() < deadline:
                time.sleep(0.02)
        told = servers.state()["candidate"]["deaths"]
        assert len(told) == 3
        assert "exit code 9" in told[0]
        assert "engine core died" in told[0]
        with pytest.raises(StartFailed, match="3 times"):
            servers.up("candidate")
    finally:
        servers.close()


def test_a_start_that_keeps_failing_is_not_waited_for_again(tmp_path):
    servers = Servers(config(stock="crash"), tmp_path)
    try:
        for _ in range(2):
            with pytest.raises(StartFailed):
                servers.up("stock")
        started = time.monotonic()
        with pytest.raises(StartFailed, match="this option"):
            servers.up("stock")
        assert time.monotonic() - started < 0.1
        assert len(servers.state()["stock"]["failed_starts"]) == 2
    finally:
        servers.close()


def test_a_server_that_runs_already_is_asked_and_left_alone(tmp_path):
    own = StartedServer(side("good"), role="stock", folder=tmp_path / "own", poll_s=0.05)
    own.wait_until_ready()
    running = Side(model="toy", base_url=(own.base_url,))
    servers = Servers(ServingConfig(baseline=running, candidate=side("good")), tmp_path / "run")
    try:
        told = servers.up("stock")
        assert (told["base_urls"], told["starts"], told["started"], told["log"]) == ([own.base_url], 0, False, "")
        servers.close()
        assert own.death() == ""
    finally:
        own.stop()
        servers.close()


def test_an_address_where_nobody_is_is_named(tmp_path):
    servers = Servers(ServingConfig(baseline=Side(model="toy", base_url=("http://127.0.0.1:9",)), candidate=side("good")), tmp_path)
    with pytest.raises(StartFailed, match=r"127\.0\.0\.1:9"):
        servers.up("stock")


def test_workers_ask_over_the_socket(tmp_path):
    servers = Servers(config(candidate="crash"), tmp_path / "servers")
    broker = Broker(servers)
    try:
        broker.write_address(tmp_path / "servers.json")
        assert (tmp_path / "servers.json").stat().st_mode & 0o077 == 0
        client = BrokerClient(tmp_path / "evals")
        assert client.up("stock")["starts"] == 1
        assert client.state()["stock"]["starts"] == 1
        with pytest.raises(StartFailed, match="this option"):
            client.up("candidate")
    finally:
        broker.close()
        servers.close()
    with pytest.raises(StartFailed, match=r"gone|ending"):
        client.up("stock")


OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from evals.serving.broker import Servers
from tests.serving.test_launch import config
servers = Servers(config(startup_timeout_s=60.0, stock={mode!r}), Path({folder!r}))
try:
    if {mode!r} == "hang":
        import threading
        threading.Thread(target=lambda: servers.up("stock"), daemon=True).start()
    else:
        servers.up("stock")
    print("up", flush=True)
    if {ending!r} == "exception":
        raise RuntimeError("a bug of ours")
    time.sleep(60)
finally:
    servers.close()
"""


@pytest.mark.parametrize(
    ("ending", "mode"), [("SIGINT", "good"), ("SIGTERM", "good"), ("SIGKILL", "good"), ("exception", "good"), ("SIGINT", "hang")]
)
def test_servers_end_however_their_owner_does(tmp_path, ending, mode):
    root = str(Path(__file__).resolve().parents[2])
    script = OWNER.format(root=root, folder=str(tmp_path), ending=ending, mode=mode)
    if ending == "SIGTERM":  # as `fasttrack` does
        script = "import signal\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n" + script
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    deadline = time.monotonic() + 10
    log = tmp_path / "stock.log"
    while "helper" not in (log.read_text() if log.exists() else "") and time.monotonic() < deadline:
        time.sleep(0.02)
    helper = int(re.search(r"helper (\d+)", log.read_text())[1])
    assert ending == "exception" or alive(helper)
    if ending != "exception":
        os.kill(owner.pid, getattr(signal, ending))
    assert gone([helper], 10)
    owner.wait(10)
    owner.stdout.close()
