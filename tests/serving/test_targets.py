"""Who the servers are, which path decodes, what forcing proves, and what is made of the differences."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evals.serving.bench import measure_bench, run_bench
from evals.serving.broker import Broker, Servers
from evals.serving.client import Endpoint
from evals.serving.config import EvalsConfig, NumericsConfig, PerfConfig, ServersConfig, ServingConfig, Side
from evals.serving.counters import Growth, acceptance_of, growth
from evals.serving.differences import position_errors
from evals.serving.forced import NotForced, Position, force_window
from evals.serving.identity import compare, log_facts, option_of, refusals
from evals.serving.noise import measure_contexts, measure_overall
from evals.serving.passes import NOISE, PASSES, STOCK, Passes, long_text
from evals.serving.path_proof import Sign, log_sign, metrics_sign, shown_by_stock, trace_sign
from evals.serving.request_times import measure_times
from evals.serving.targets import open_targets
from evals.serving.template import templates
from validation.core import jsonio
from validation.core.settings import PROJECT_ROOT, Settings, load_settings
from validation.core.types import Case, HarnessError
from validation.core.worker import Refused

PATH_OF = {"baseline": "auto", "candidate": "latency_specialized"}
TOY = Path(__file__).with_name("toy_server.py")
FACTS = {
    "model": "w", "revision": "r", "dtype": "bf16", "tensor_parallel": "8", "quantization": "none", "max_model_len": "8192",
    "tokenizer": "t", "chat_template": "c", "version": "1",
}  # fmt: skip


# ---- identity ----
def test_equal_sides_have_nothing_to_accept():
    assert compare(FACTS, FACTS, ()) == compare(FACTS, dict(FACTS), ("dtype",))
    assert not compare(FACTS, FACTS, ()).refused


@pytest.mark.parametrize("fact", sorted(FACTS))
def test_every_fact_that_differs_is_refused_until_it_is_accepted(fact):
    other = {**FACTS, fact: "other"}
    refused = compare(FACTS, other, ()).refused
    assert [d.fact for d in refused] == [fact]
    assert f"accept_differences = ['{fact}']" in refusals(compare(FACTS, other, ()))[0]
    assert compare(FACTS, other, (fact,)).refused == ()


def test_a_fact_that_one_side_does_not_tell_is_open():
    told = compare(FACTS, {**FACTS, "revision": ""}, ())
    assert (told.refused, told.open_facts) == ((), ("revision",))


def test_facts_are_read_from_the_command_and_the_log(tmp_path):
    command = ("vllm", "serve", "m", "-tp", "16", "--dtype=float16")
    assert option_of(command, ("--tensor-parallel-size", "-tp")) == "16"
    assert option_of(command, ("--dtype",)) == "float16"
    assert option_of(command, ("--revision",)) == "default"
    log = tmp_path / "server.log"
    line = "INFO Initializing a V1 LLM engine (v0.32) with config: model='m', revision=abc, dtype=torch.bfloat16, max_seq_len=8,"
    log.write_text(f"dtype=torch.float32, before\n{line} tensor_parallel_size=8, quantization=mxfp4, seed=0\n")
    assert log_facts(log) == {"revision": "abc", "dtype": "bfloat16", "tensor_parallel": "8", "quantization": "mxfp4"}
    assert log_facts(tmp_path / "absent") == {}


# ---- which path ----
def test_a_log_proves_only_what_stands_in_it(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("non-default args: {'decode_backend': 'latency_specialized active'}\ndecode_backend=latency_specialized active\n")
    assert log_sign("latency_specialized active", log).count == 1
    assert log_sign("other", log).count == 0
    assert not log_sign("x", None).looked


def test_counters_count_only_when_they_grow():
    grown = growth(
        {'steps_total{path="fast"}': 5.0, 'steps_total{path="slow"}': 1.0},
        {'steps_total{path="fast"}': 5.0, 'steps_total{path="slow"}': 4.0},
    )
    assert metrics_sign("fast", grown).count == 0
    assert metrics_sign("slow", grown).count == 3
    assert not metrics_sign("slow", "unreachable").looked
    assert growth({"a_total{}": 9.0}, {"a_total{}": 2.0}).by_key == {"a_total{}": 2.0}  # started again in between


@pytest.mark.parametrize("zipped", [False, True])
def test_a_trace_proves_by_kernel_names(tmp_path, zipped):
    events = [{"ph": "X", "cat": "kernel", "name": "k3_kda_step"}] * 3 + [{"cat": "cpu_op", "name": "k3_route"}]
    data = json.dumps({"traceEvents": events}).encode()
    path = tmp_path / "t.json"
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert trace_sign("k3_kda", path).count == 3
    assert trace_sign("k3_route", path).count == 0  # on the host: nothing ran


@pytest.mark.parametrize("data", [b"", b"{", b"[1, 2", b'{"a": 1}', b"\x1f\x8bbroken"])
def test_a_file_that_is_no_trace_proves_nothing(tmp_path, data):
    path = tmp_path / "t.json"
    path.write_bytes(data)
    sign = trace_sign("x", path)
    assert (sign.count, sign.looked) == (0, False)
    assert sign.reason


def test_stock_is_cleared_only_by_a_way_that_showed_the_path():
    def sign(way: str, count: float, looked: bool = True) -> Sign:
        return Sign(way=way, count=count, shown=(), where="", looked=looked)

    proven = [sign("log", 2), sign("metrics", 0)]
    assert shown_by_stock(proven, [sign("log", 0), sign("metrics", 0)]) == 0
    assert shown_by_stock(proven, [sign("log", 3), sign("metrics", 0)]) == 3
    assert shown_by_stock(proven, [sign("log", 0, looked=False), sign("metrics", 0)]) is None
    assert shown_by_stock([sign("trace", 9), sign("metrics", 0)], [sign("metrics", 0)]) is None


def test_acceptance_is_read_from_the_servers_counters():
    per_position = {f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{p}"}}': n for p, n in enumerate((9.0, 6.0, 3.0))}
    counts = {"drafts": 10.0, "draft_tokens": 30.0, "accepted_tokens": 18.0}
    told = acceptance_of(Growth(by_key={**{f"vllm:spec_decode_num_{k}_total{{}}": v for k, v in counts.items()}, **per_position}))
    assert told is not None
    assert (told.length, told.per_position, told.drafts_a_step) == (2.8, (0.9, 0.6, 0.3), 3.0)
    assert acceptance_of(Growth(by_key={"other_total{}": 3.0})) is None


# ---- differences ----
def position(*logits: float, told: int = 3) -> Position:
    total = math.log(sum(math.exp(x) for x in logits))
    values = {i: x - total for i, x in enumerate(logits)}
    top = dict(sorted(values.items(), key=lambda item: -item[1])[:told])
    return Position(token=0, logprob=values[0], top=top)


def test_equal_distributions_have_no_error():
    errors = position_errors([position(3, 2, 1, 0)], [position(3, 2, 1, 0)])
    assert (float(errors.rms), float(errors.kl), bool(errors.agrees), errors.non_finite) == (0.0, 0.0, True, 0)


def test_a_known_shift_is_measured():
    ours, theirs = position(1, 0, told=2), position(0, 0, told=2)
    errors = position_errors([ours], [theirs])
    differences = [theirs.top[i] - ours.top[i] for i in (0, 1)]
    assert float(errors.largest) == pytest.approx(max(abs(d) for d in differences))
    expected = sum(math.exp(ours.top[i]) * (ours.top[i] - theirs.top[i]) for i in (0, 1))
    assert float(errors.kl) == pytest.approx(expected)


def test_what_the_other_side_leaves_out_is_bounded_not_ignored():
    errors = position_errors([position(9, 8, 0, 0, 0, 0)], [position(0, 0, 0, 9, 8, 7)])
    assert float(errors.largest) > 1.5  # its least told value bounds what it left out
    assert not bool(errors.agrees)
    assert float(errors.lead_lost) > 0


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_a_value_that_is_no_number_is_counted_and_never_zero(bad):
    broken = Position(token=0, logprob=bad, top={0: bad, 1: -1.0})
    errors = position_errors([position(1, 0)], [broken])
    assert errors.non_finite == 1
    assert math.isnan(float(errors.rms))


def test_another_text_is_no_comparison():
    with pytest.raises(ValueError, match="same text"):
        position_errors([position(1, 0)], [dataclasses.replace(position(1, 0), token=1)])


# ---- forcing, on a server ----
def toy(*options: str) -> Side:
    command = ("{python}", str(TOY), "--port", "{port}", *options)
    return Side(model="toy", command=command, startup_timeout_s=60, stop_timeout_s=2)


NUMERICS = NumericsConfig(bins=(64, 256, 8192, 9000), window_tokens=8, windows=1, text="chat", neighbours=2, request_timeout_s=30)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Two sound sides that differ as two paths do, behind a broker."""
    folder = tmp_path_factory.mktemp("served")
    config = ServingConfig(baseline=toy(), candidate=toy("--path", "specialized"), servers=ServersConfig(together=True, poll_s=0.1))
    config = dataclasses.replace(config, numerics=NUMERICS)
    servers = Servers(config, folder / "servers")
    broker = Broker(servers)
    broker.write_address(folder / "servers.json")
    yield folder, config
    broker.close()
    servers.close()


def targets_of(config: ServingConfig, monkeypatch, folder: Path):
    monkeypatch.setenv("FASTTRACK_SCRATCH", str(folder / "numerics"))
    opened = open_targets(Settings(profile="serving", serving=jsonio.plain(config)))
    return {role: opened.get(role) for role in ("stock", "candidate")}


def test_passes_over_servers_give_ratios_and_are_kept(served, monkeypatch, tmp_path):
    folder, config = served
    targets = targets_of(config, monkeypatch, folder)
    passes = Passes(config.numerics, targets, tmp_path)
    passes.collect()
    assert passes.restarted
    measured, details = measure_contexts(passes, (64, 256))
    found = {m.name: m.value for m in measured}
    assert 0.5 < found["noise_ratio"] < 1.5
    assert found["tokens"] == 16
    assert found["noise_floor"] > 0
    assert [row[0] for row in details["tables"][0]["rows"]] == [one.name for one in PASSES]
    with pytest.raises(Refused, match="serves 8192 tokens, the context needs 9000"):
        measure_overall(passes, 0.95, 10.0)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    Passes(config.numerics, targets, tmp_path).collect()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == before
    assert len(passes.positions(NOISE, passes.places[0])) > len(passes.positions(STOCK, passes.places[0]))


def test_request_times_are_kept_and_lost_requests_are_no_times(served, monkeypatch, tmp_path):
    folder, config = served
    config = dataclasses.replace(config, perf=PerfConfig(waves=8, prompt_tokens=32, new_tokens=4), evals=EvalsConfig(concurrency=(1, 4)))
    case = Case(subject="requests", params={"concurrency": 4})

    def measured(changed: ServingConfig) -> tuple[dict[str, float], Mapping[str, Any]]:
        measurements, details = measure_times(case, targets_of(changed, monkeypatch, folder), 0.03)
        return {m.name: m.value for m in measurements}, details

    found, details = measured(config)
    assert (found["waves"], found["lost_requests"], found["lost_requests_stock"]) == (8, 0, 0)
    assert "slowdown_low" in found
    assert [row[2] for row in details["tables"][0]["rows"]] == [32, 32, 32]
    kept = {path: path.stat().st_mtime_ns for path in (folder / "numerics" / "times").rglob("*.json")}
    assert len(kept) == 6  # three passes of two loads
    assert measured(config)[0] == found
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    late = dataclasses.replace(
        config, evals=EvalsConfig(concurrency=(4,), request_timeout_s=1e-4), perf=PerfConfig(waves=2, prompt_tokens=32)
    )
    found, details = measured(late)
    assert (found["waves_too_few"], found["lost_requests"], found["lost_requests_stock"]) == (0, 8, 16)
    assert not {"waves", "slowdown_low", "slowdown_high"} & found.keys()
    assert "open, for only 0 waves" in details["reasons"][0]
    assert "no whole answer within" in details["reasons"][1]
    with pytest.raises(Refused, match="needs some to be timed"):
        measured(dataclasses.replace(config, perf=PerfConfig(waves=0)))
    with pytest.raises(Refused, match="needs both within the 8192"):
        measured(dataclasses.replace(config, perf=PerfConfig(prompt_tokens=9000)))


def test_a_server_that_ignores_forcing_is_found_out_and_one_that_speculates_is_asked_token_by_token(tmp_path):
    async def ask(url: str, method: str):
        async with Endpoint(url, model="toy", timeout_s=20) as endpoint:
            return await force_window(endpoint, list(range(40)), [5, 6, 7, 8], method=method, logprobs=5, timeout_s=20)

    together = ServersConfig(together=True, poll_s=0.1)
    config = ServingConfig(baseline=toy("--mode", "speculative"), candidate=toy("--mode", "unforced"), servers=together)
    servers = Servers(config, tmp_path)
    try:
        one = asyncio.run(ask(servers.up("stock")["base_urls"][0], "auto"))
        assert one.method == "one_token"  # speculation refuses the plug-in
        assert [p.token for p in one.positions] == [6, 7, 8]
        url = servers.up("candidate")["base_urls"][0]
        for method in ("logits_processor", "one_token", "auto"):
            with pytest.raises(NotForced, match="leave the forced text"):
                asyncio.run(ask(url, method))
    finally:
        servers.close()


# ---- text, bench, templates ----
def test_long_text_is_real_long_and_different_for_each_number():
    first, second = (long_text("", 2_000_000, n, 2) for n in (0, 1))
    assert len(first) == len(second) == 2_000_000
    assert first[:1000] != second[:1000]
    with pytest.raises(HarnessError, match="readable"):
        long_text("no/such/file", 10, 0, 1)


def test_a_bench_command_that_fails_says_how():
    with pytest.raises(RuntimeError, match=r"exit code 3: .*wrong option"):
        run_bench([sys.executable, "-c", "import sys; print('wrong option'); sys.exit(3)"], 20, "stock")
    with pytest.raises(RuntimeError, match=r"exit code 1: it printed nothing"):
        run_bench([sys.executable, "-c", "import sys; sys.exit(1)"], 20, "stock")
    with pytest.raises(RuntimeError, match=r"longer than 0\.3 s"):
        run_bench([sys.executable, "-c", "import time; time.sleep(30)"], 0.3, "stock")
    with pytest.raises(RuntimeError, match="could not be started"):
        run_bench(["/nowhere/bench"], 5, "stock")


def test_two_servers_of_any_model_and_gpu_are_benched(served, monkeypatch, tmp_path):
    """The matrix knows a few of each; a comparison of two servers needs neither."""
    folder, config = served
    told = {"completed": 8, "num_prompts": 8, "duration": 2.0, "output_throughput": 64.0, "total_token_throughput": 320.0}
    (tmp_path / "a.json").write_text(json.dumps({**told, "median_tpot_ms": 9.0, "median_ttft_ms": 30.0, "median_itl_ms": 9.0}))
    cells = {f"{table}_cell": f"some-model-B999-tp2-b1-q1-c64-al1-{path}" for table, path in PATH_OF.items()}
    results = {f"{table}_result": str(tmp_path / "a.json") for table in PATH_OF}
    config = dataclasses.replace(config, perf=PerfConfig(**cells, **results))
    measurements, details = measure_bench(targets_of(config, monkeypatch, folder))
    found = {m.name: m.value for m in measurements}
    assert (found["objections"], found["completed_requests"], found["speed_up"]) == (0, 8, 1), details["reasons"]
    assert [row[1] for row in details["tables"][0]["rows"]] == ["1 of 1", "1 of 1"]


@pytest.mark.parametrize("name", sorted(templates()))
def test_every_template_is_a_file_that_the_suite_reads(name):
    settings = load_settings(templates()[name], {})
    assert settings.profile == "serving"
    assert settings.serving["candidate"]["model"]


def test_a_settings_file_in_the_project_is_no_part_of_the_change():
    """Scope looks at what git sees: a run must not fail because of the file that it is told to read."""
    names = [f"{name}.toml" for name in templates()]
    seen = subprocess.run(
        ["git", "check-ignore", *names, "pyproject.toml", "rfc/policy.toml"], cwd=PROJECT_ROOT, capture_output=True, text=True, check=False
    )
    if seen.returncode == 128:
        pytest.skip("no git checkout")
    assert seen.stdout.split() == names


def test_init_writes_a_file_once(tmp_path):
    def init(*options: str) -> tuple[int, str]:
        words = [sys.executable, "-m", "validation", "init", "--output", str(tmp_path / "v.toml"), *options]
        done = subprocess.run(words, capture_output=True, text=True, cwd=PROJECT_ROOT, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr

    assert init("--template", "nano")[0] == 0
    written = (tmp_path / "v.toml").read_text()
    code, told = init("--template", "generic")
    assert (code, (tmp_path / "v.toml").read_text()) == (3, written)
    assert "--force" in told
    assert init("--template", "generic", "--force")[0] == 0
    assert (tmp_path / "v.toml").read_text() != written
    assert "needs one of" in init("--template", "k9")[1]
