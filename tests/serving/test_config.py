"""`validate.toml`: what is right is read, and every mistake is named with its line, all at once."""

from __future__ import annotations

import re
import tomllib

import pytest

from evals.serving.config import ServingConfig, read_config
from evals.serving.names import NANO_SUITES
from evals.serving.template import init
from validation.core import jsonio
from validation.core.toml_lines import KeyLines
from validation.core.types import HarnessError

GOOD = """\
profile = "serving"

[baseline]
model = "weights/k3"
served_name = "k3"
command = ["vllm", "serve", "weights/k3",
           "--port", "{port}"]
env = { OMP_NUM_THREADS = "1" }

[candidate]
model = "weights/k3"
base_url = ["http://a:8000", "http://b:8000"]
proof_metrics = "decode_steps_total.*specialized"
accept_differences = ["version"]

[evals]
suites = ["gsm8k"]
concurrency = [1, 32]

[evals.per_suite.gsm8k]
rows = 100

[numerics]
bins = [1024, 4096]

[gate]
margin = { gsm8k = 0.01 }
"""


def write(tmp_path, text):
    path = tmp_path / "validate.toml"
    path.write_text(text)
    return path


def problems_of(tmp_path, text) -> list[tuple[int, str]]:
    with pytest.raises(HarnessError) as caught:
        read_config(write(tmp_path, text))
    return [(int(n), words) for n, words in re.findall(r"validate\.toml:(\d+): (.*)", str(caught.value))]


def test_a_good_file_is_read_and_survives_json(tmp_path):
    config = read_config(write(tmp_path, GOOD))
    assert config.baseline.command[-1] == "{port}"
    assert config.baseline.name == "k3"
    assert config.candidate.name == "weights/k3"
    assert config.candidate.base_url == ("http://a:8000", "http://b:8000")
    assert config.evals.per_suite == {"gsm8k": {"rows": 100}}
    assert config.side("stock") is config.baseline
    assert not config.servers.together
    assert jsonio.decode(ServingConfig, jsonio.loads(jsonio.dumps(config)), "config") == config


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ('served_name = "k3"', 'server_name = "k3"', 5, "did you mean served_name"),
        ("[gate]", "[gate]\nnoise = 2", 27, "unknown key"),
        ("concurrency = [1, 32]", 'concurrency = [1, "x"]', 18, "whole number"),
        ("concurrency = [1, 32]", "concurrency = [32, 1]", 18, "rising"),
        ("concurrency = [1, 32]", "concurrency = [0]", 18, "at least 1"),
        ('suites = ["gsm8k"]', 'suites = ["gsm9k"]', 17, "needs one of"),
        ('suites = ["gsm8k"]', 'suites = ["gsm8k", "gsm8k_nano"]', 17, "no model can do both"),
        ("[evals]\n", "[evals]\ntemperature = 0.6\n", 17, 'sampling = "task"'),
        ("[evals]\n", '[evals]\nsampling = "greedy"\nmax_repeats = 4\n', 18, "would be copies"),
        ('served_name = "k3"', 'base_url = "http://c:1"', 6, "base_url and command"),
        ('base_url = ["http://a:8000", "http://b:8000"]', "", 10, "neither base_url nor command"),
        ('base_url = ["http://a:8000", "http://b:8000"]', 'base_url = "ftp://a"', 12, "http"),
        ('base_url = ["http://a:8000", "http://b:8000"]', 'base_url = ["http://a:1", "http://a:1"]', 12, "twice"),
        ('base_url = ["http://a:8000", "http://b:8000"]', 'base_url = "http://[::1"', 12, "http"),
        ('base_url = ["http://a:8000", "http://b:8000"]', 'base_url = "http://a:99999"', 12, "http"),
        ('"--port", "{port}"]', '"--port"]', 6, "{port}"),
        ('command = ["vllm", "serve", "weights/k3",\n           "--port", "{port}"]', 'command = "vllm serve x"', 6, "list of words"),
        ('proof_metrics = "decode_steps_total.*specialized"', 'proof_log = "(("', 13, "regular expression"),
        ('proof_metrics = "decode_steps_total.*specialized"', 'proof_trace = "t.json"', 13, "together"),
        ('accept_differences = ["version"]', 'accept_differences = ["colour"]', 14, "needs one of"),
        ('served_name = "k3"', 'accept_differences = ["dtype"]', 5, "belongs to [candidate]"),
        ("rows = 100", "rowz = 100", 21, "unknown key"),
        ("[evals.per_suite.gsm8k]", "[evals.per_suite.aime25]", 20, "not asked for"),
        ('model = "weights/k3"\nserved_name', "served_name", 3, "got no model"),
        ("bins = [1024, 4096]", "bins = 5", 24, "needs a list"),
        ("[numerics]\nbins = [1024, 4096]", 'perf = "x"', 20, "whole number"),
        ("[gate]", '[perf]\nbench = ["b"]\n[gate]', 27, "cell"),
        ("margin = { gsm8k = 0.01 }", "noise_factor = 3.0", 27, "at most 2.0"),
        ("margin = { gsm8k = 0.01 }", "margin = { gsm9k = 0.01 }", 27, "unknown suite"),
        ("margin = { gsm8k = 0.01 }", "margin = { gsm8k = 0.5 }", 27, "at most the policy's 0.02"),
        ("margin = { gsm8k = 0.01 }", "margin = { gsm8k = -0.01 }", 27, "above 0"),
        ("margin = { gsm8k = 0.01 }", "margin = { gsm8k = nan }", 27, "needs a number up to"),
        ("concurrency = [1, 32]", "concurrency = []", 18, "needs some"),
        ("concurrency = [1, 32]", "request_timeout_s = inf", 18, "needs a number up to"),
        ("concurrency = [1, 32]", "rows = 99999999999999999999", 18, "needs a number up to"),
        ("concurrency = [1, 32]", "mrcr_needles = [3]", 18, "needs one of"),
        ('suites = ["gsm8k"]', "suites = []", 17, "needs some"),
        ("bins = [1024, 4096]", "bins = []", 24, "needs some"),
        ("bins = [1024, 4096]", "bins = [64]\nwindow_tokens = 64", 25, "needs contexts of at least 130"),
        ("rows = 100", "rows = -5", 21, "at least 0"),
        ("rows = 100", "repeats = 4\nmax_repeats = 2", 20, "at least as many"),
        ('model = "weights/k3"\nserved_name', 'model = ""\nserved_name', 4, "needs some"),
        ('served_name = "k3"', 'served_name = "k\\u00003"', 5, "without NUL"),
        ('base_url = ["http://a:8000", "http://b:8000"]', "base_url = []", 12, "needs some"),
        ('base_url = ["http://a:8000", "http://b:8000"]', 'base_url = "http://me:key@a:8000"', 12, "api_key_env"),
        ('base_url = ["http://a:8000", "http://b:8000"]', 'base_url = "http://a :8000"', 12, "http"),
        ('base_url = ["http://a:8000", "http://b:8000"]', 'base_url = ["http://a:1", "http://A:1/v1/"]', 12, "twice"),
        ("[gate]", '[perf]\nbaseline_cell = "x"\n[gate]', 27, "needs an id such as"),
        ("bins = [1024, 4096]", 'text = "no/such.txt"', 24, "not there"),
        ('served_name = "k3"', 'cwd = "no/such"', 5, "not there"),
        ('served_name = "k3"', 'tokenizer = "no/such"', 5, "not there"),
        ("[gate]", '[perf]\nbaseline_result = "no.json"\n[gate]', 27, "not there"),
        ("[gate]", "[perf]\nwaves = 3\n[gate]", 27, "at least 8"),
        ("[gate]", '[perf]\nbaseline_result = "a.json"\nbaseline_cell = "k3-H200-tp8-b1-q1-c64-al1-auto"\n[gate]', 27, "both"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path, old, new, line, words):
    assert old in GOOD
    found = problems_of(tmp_path, GOOD.replace(old, new, 1))
    assert any(at == line and words in text for at, text in found), found


def test_all_mistakes_are_told_at_once(tmp_path):
    text = GOOD.replace('served_name = "k3"', 'nome = "k3"').replace("bins = [1024, 4096]", "bins = true")
    assert [line for line, _ in problems_of(tmp_path, text.replace("[gate]", "[gate]\nother = 1"))] == [5, 24, 27]


def test_a_side_that_is_missing_is_an_error(tmp_path):
    found = problems_of(tmp_path, GOOD[: GOOD.index("[candidate]")])
    assert found == [(1, "file: got no [candidate], needs both [baseline] and [candidate]")]


def test_both_sides_cannot_be_one_server(tmp_path):
    text = '[baseline]\nmodel = "m"\nbase_url = "http://a:1"\n[candidate]\nmodel = "m"\nbase_url = "http://a:1"\n'
    assert problems_of(tmp_path, text)[0][0] == 6
    assert problems_of(tmp_path, text.replace('"http://a:1"\n[', '"http://a:1/v1"\n['))[0][0] == 6  # the same server, written otherwise


@pytest.mark.parametrize(("text", "words"), [("[baseline\n", "line 1"), ("\x00", "TOML"), ("a = 1\na = 2\n", "line 2")])
def test_a_file_that_is_no_toml_is_named(tmp_path, text, words):
    with pytest.raises(HarnessError, match=words):
        read_config(write(tmp_path, text))


def test_a_missing_file_and_bytes_that_are_no_text_are_errors(tmp_path):
    with pytest.raises(HarnessError, match="fasttrack init"):
        read_config(tmp_path / "absent.toml")
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HarnessError, match="readable"):
        read_config(tmp_path / "x.toml")


def test_a_written_file_is_whole_and_replaces_nothing(tmp_path):
    with pytest.raises(HarnessError, match="is a folder"):
        init(template="nano", output=tmp_path, force=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(HarnessError, match="--force"):
        init(template="nano", output=tmp_path / "file", force=False)
    with pytest.raises(HarnessError, match=r"Not a directory|File exists"):
        init(template="nano", output=tmp_path / "file" / "validate.toml", force=False)
    assert (tmp_path / "file").read_text() == "mine"
    init(template="nano", output=tmp_path / "new" / "validate.toml", force=False)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "new", "validate.toml"]


def test_every_line_of_a_document_is_found():
    text = 'a = """\nx = 1\n[no]\n"""\n# c\n\n[t."q.r"]\nb.c = [\n  1,\n]\nd = { e = 2 }\n[[list]]\nf = 1\n'
    lines = KeyLines(text)
    assert tomllib.loads(text)
    assert [lines.of(*p) for p in (("a",), ("t", "q.r", "b", "c"), ("t", "q.r", "d", "e"), ("list", "f"))] == [1, 8, 11, 13]
    assert lines.of("t", "q.r", "nothing") == 7
    assert lines.of("nowhere") == 1


def test_the_suites_are_those_of_the_policy():
    from validation.policy import load_policy

    assert set(NANO_SUITES) < set(load_policy().limits["evals"]["margin"])
