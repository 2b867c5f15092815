"""MRCR at full size: rows streamed from parquet and JSON lines, chosen by needles and tokens, scored by the published rule, clustered."""

import json
import math
import random
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from evals.serving import mrcr_hub
from evals.serving.mrcr_hub import MrcrChoice, prepare
from evals.serving.progress import Silent
from evals.serving.sources import SuiteData
from evals.serving.suite_measure import full_share
from evals.serving.suites import run_suite
from validation.core.types import HarnessError

sys.path.insert(0, str(Path(__file__).parent))
from canned import CannedServer, Script
from suite_parts import mrcr_row, plan, policy, side, write_lines

pytestmark = pytest.mark.timeout(120)


def count_words(text):
    return len(text.split())


@pytest.fixture
def rows():
    """Two, four and eight needles at about 60, 300 and 1,500 words."""
    rng = random.Random(3)
    return [mrcr_row(i, needles, words, rng) for i, (needles, words) in enumerate([(n, w) for n in (2, 4, 8) for w in (60, 300, 1500)] * 3)]


def as_parquet(path, rows, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


CHOICE = MrcrChoice(bins=(250, 800, 3200))


def test_rows_are_chosen_by_needles_and_length(tmp_path, rows):
    path = write_lines(tmp_path / "mrcr.jsonl", rows)
    every = prepare(CHOICE, count_words, "words", tmp_path / "cache", path)
    assert len(every) == len(rows)
    levels = {doc["level"] for doc in every}
    assert levels == {f"{n} needles, {b} tokens" for n in (2, 4, 8) for b in ("0-250", "250-800", "800-3200")}
    some = prepare(MrcrChoice(needles=(4,), bins=(250, 800), per_bin=2), count_words, "words", tmp_path / "cache", path)
    assert [doc["level"] for doc in some] == ["4 needles, 0-250 tokens", "4 needles, 250-800 tokens"] * 2
    for i, doc in enumerate(some):
        words = sum(count_words(m["content"]) for m in json.loads(doc["prompt"])) + count_words(doc["answer"])
        assert doc["tokens"] == some.tokens_of(i) == words
        assert some[i] == doc


def test_published_bins_end_where_the_context_does():
    assert MrcrChoice().ends == (8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
    held = MrcrChoice(context_tokens=131072, max_new_tokens=8192)
    assert held.ends == (8192, 16384, 32768, 65536, 122880)
    assert held.bin_of(65537) == "65536-122880 tokens"
    assert held.bin_of(122881) is held.bin_of(4096) is None
    assert MrcrChoice(context_tokens=8192, max_new_tokens=8192).ends == ()
    with pytest.raises(HarnessError, match="rising bins"):
        MrcrChoice(bins=(800, 200))


@pytest.mark.parametrize(
    ("choice", "context_tokens", "whole"),
    [
        (MrcrChoice(), 0, True),
        (MrcrChoice(), 131072, True),
        (MrcrChoice(bins=(8192, 131072)), 131072, True),
        (MrcrChoice(bins=(8192, 131072)), 262144, False),
        (MrcrChoice(bins=(8192,)), 0, False),
        (MrcrChoice(needles=(2,)), 131072, False),
        (MrcrChoice(per_bin=3), 131072, False),
    ],
)
def test_a_choice_among_the_rows_is_not_the_whole_suite(choice, context_tokens, whole):
    assert choice.is_whole(context_tokens) is whole
    assert (full_share("mrcr", choice.is_whole(context_tokens), 5) == 1.0) is whole
    assert math.isnan(full_share("mrcr", True, 0))


def test_a_file_that_was_cut_short_is_never_the_whole_suite(tmp_path, monkeypatch):
    """As many different rows as are published, of every needle count; a line twice is one row."""
    monkeypatch.setattr(mrcr_hub, "PUBLISHED_ROWS", 5)
    rng = random.Random(5)
    whole = [mrcr_row(i, needles, 60, rng) for needles in (2, 4, 8) for i in range(5)]
    cut = {"whole": whole, "short": whole[:-1], "twice": [*whole[:-1], whole[0]], "without": whole[:10], "longer": [*whole, whole[0]]}
    shares = {}
    for name, rows in cut.items():
        made = prepare(CHOICE, count_words, "words", tmp_path / "cache", write_lines(tmp_path / f"{name}.jsonl", rows))
        again = prepare(CHOICE, count_words, "words", tmp_path / "cache", tmp_path / f"{name}.jsonl")
        assert made.data_share == again.data_share == made.select([0]).data_share
        shares[name] = full_share("mrcr", True, len(made), made.data_share)
    assert shares == {"whole": 1.0, "short": 0.8, "twice": 0.8, "without": 0.0, "longer": 1.0}


def test_rows_that_leave_no_room_for_the_answer_are_not_asked(tmp_path, rows):
    path = write_lines(tmp_path / "mrcr.jsonl", rows)
    held = MrcrChoice(bins=(250, 800, 3200), context_tokens=1000, max_new_tokens=300)
    chosen = prepare(held, count_words, "words", tmp_path / "cache", path)
    assert 0 < len(chosen) < len(rows)
    for doc in chosen:
        assert doc["tokens"] + mrcr_hub.TEMPLATE_TOKENS * len(json.loads(doc["prompt"])) <= 700


def test_parquet_json_lines_and_folders_hold_the_same_rows(tmp_path, rows):
    lines = write_lines(tmp_path / "a" / "mrcr.jsonl", rows)
    as_parquet(tmp_path / "b" / "2needle" / "2needle_0.parquet", rows[:10])
    as_parquet(tmp_path / "b" / "4needle" / "4needle_0.parquet", rows[10:], row_group_size=3)
    made = [list(prepare(CHOICE, count_words, "words", tmp_path / "cache", path)) for path in (lines, tmp_path / "b")]
    assert made[0] == made[1]


def test_a_second_call_reads_the_index_only(tmp_path, rows):
    path = write_lines(tmp_path / "mrcr.jsonl", rows)
    first = prepare(CHOICE, count_words, "words", tmp_path / "cache", path)
    again = prepare(CHOICE, lambda text: pytest.fail("counted again"), "words", tmp_path / "cache", path)
    assert list(again) == list(first)
    counted = []
    prepare(CHOICE, lambda text: counted.append(text) or count_words(text), "other tokenizer", tmp_path / "cache", path)
    assert counted


def test_rows_of_one_conversation_are_one_cluster(tmp_path, rows):
    messages = json.loads(rows[0]["prompt"])
    twin = {**rows[0], "prompt": json.dumps([*messages[:-1], {"role": "user", "content": "Prepend it to the other poem."}])}
    made = prepare(CHOICE, count_words, "words", tmp_path / "cache", write_lines(tmp_path / "m.jsonl", [*rows[:2], twin]))
    clusters = [doc["cluster"] for doc in made]
    assert clusters[0] == clusters[2] != clusters[1]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"prompt": "no list"}, "no JSON list of messages in row 2"),
        ({"answer": "without"}, "does not start with"),
        ({"random_string_to_prepend": ""}, "does not start with"),
    ],
)
def test_damaged_rows_are_named(tmp_path, rows, damage, words):
    path = write_lines(tmp_path / "m.jsonl", [rows[0], {**rows[1], **damage}])
    with pytest.raises(HarnessError, match=words):
        prepare(CHOICE, count_words, "words", tmp_path / "cache", path)
    assert not list((tmp_path / "cache").glob("*.index.json"))


def test_absent_columns_and_files_are_one_clear_error(tmp_path, rows):
    bare = [{k: v for k, v in row.items() if k != "n_needles"} for row in rows]
    for path in (write_lines(tmp_path / "m.jsonl", bare), as_parquet(tmp_path / "m.parquet", bare)):
        with pytest.raises(HarnessError, match="n_needles"):
            prepare(CHOICE, count_words, "words", tmp_path / "cache", path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(HarnessError, match="no parquet or JSON lines"):
        prepare(CHOICE, count_words, "words", tmp_path / "cache", tmp_path / "empty")


def test_the_hub_is_streamed_when_nothing_is_local(tmp_path, rows, monkeypatch):
    monkeypatch.setenv("K3_EVAL_DATA", str(tmp_path / "nothing"))
    asked = []
    monkeypatch.setattr(mrcr_hub.datasets, "load_dataset", lambda name, **options: asked.append((name, options)) or iter(rows[:4]))
    assert len(prepare(CHOICE, count_words, "words", tmp_path / "cache")) == 4
    assert asked == [("openai/mrcr", {"split": "train", "streaming": True})]

    def offline(name, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(mrcr_hub.datasets, "load_dataset", offline)
    with pytest.raises(HarnessError, match=r"ConnectionError.*\[evals.data\] mrcr"):
        prepare(MrcrChoice(bins=(100, 200)), count_words, "words", tmp_path / "cache")


@pytest.mark.parametrize("chat", [True, False])
def test_the_suite_scores_by_the_published_rule(tmp_path, rows, monkeypatch, chat):
    """Right reply 1, another needle its matching ratio, no prefix 0; messages reach the server's template as they are."""
    monkeypatch.setenv("K3_EVAL_DATA", str(tmp_path))
    write_lines(tmp_path / "mrcr" / "rows.jsonl", rows)
    keys = [json.loads(row["prompt"])[-1]["content"] for row in rows]
    replies = {key: row["answer"] for key, row in zip(keys, rows, strict=True)}
    replies[keys[1]] = rows[1]["random_string_to_prepend"] + "amber birch cedar"
    replies[keys[2]] = rows[2]["answer"].removeprefix(rows[2]["random_string_to_prepend"])
    data = SuiteData(mrcr=CHOICE)  # counted by the server's /tokenize
    with CannedServer(Script(answers=replies)) as server:
        sides = {role: side(role, server) for role in ("stock", "candidate")}
        result = run_suite("mrcr", **sides, policy=policy("mrcr"), plan=plan(chat=chat, data=data), folder=tmp_path / "out", shown=Silent())
        request = next(e["request"] for e in server.log if rows[0]["random_string_to_prepend"] in json.dumps(e["request"]))
    assert result.data_share == 9 / 800
    scores = dict(zip(result.pairs.table["item"], result.pairs.table["score_stock"], strict=True))
    content = rows[1]["answer"].removeprefix(rows[1]["random_string_to_prepend"])
    assert scores["00000"] == 1.0
    assert scores["00001"] == SequenceMatcher(None, "amber birch cedar", content).ratio()
    assert scores["00002"] == 0.0
    assert set(result.pairs.table["level_stock"]) == {
        f"{n} needles, {b} tokens" for n in (2, 4, 8) for b in ("0-250", "250-800", "800-3200")
    }
    if chat:
        assert request["messages"] == json.loads(rows[0]["prompt"])
    else:
        assert request["prompt"].endswith("(row 0).\nBot:")


BIG_ROWS = """
import json, sys
from pathlib import Path
from evals.serving.executor import peak_rss_bytes
from evals.serving.http_lm import AskBuilder, WindowedTask, ask_windows
from evals.serving.mrcr_hub import MrcrChoice, prepare
from evals.tasks.loading import bring_up, task_config
folder = Path(sys.argv[1])
base = peak_rss_bytes()
rows = prepare(MrcrChoice(bins=(1 << 21,)), lambda text: len(text) // 4, "quarter", folder / "cache", folder / "big.jsonl")
task = bring_up("mrcr", task_config("mrcr"), lambda config: WindowedTask(config, {"train": rows}))
asks = sum(len(window) for window in ask_windows(task, list(range(len(rows))), AskBuilder(suite="mrcr", chat=True)))
print(json.dumps({"asks": asks, "base": base, "peak": peak_rss_bytes()}))
"""


def test_five_million_characters_stay_out_of_memory(tmp_path):
    """Rows of five megabytes through choosing, windows and prompts: a process that held them all would need far more."""
    row = mrcr_row(0, 2, 100, random.Random(0))
    messages = json.loads(row["prompt"])
    messages[1]["content"] = "lorem ipsum " * (5_000_000 // 12)
    with (tmp_path / "big.jsonl").open("w") as file:
        for i in range(12):
            messages[0]["content"] = f"poem {i}"
            file.write(json.dumps({**row, "prompt": json.dumps(messages)}) + "\n")
    made = subprocess.run([sys.executable, "-c", BIG_ROWS, str(tmp_path)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    told = json.loads(made.stdout.splitlines()[-1])
    assert told["asks"] == 12
    # 60 MB of rows, of which lm-eval alone makes four copies each: row, messages, context, arguments.
    print(told)
    assert told["peak"] - told["base"] < 180e6
