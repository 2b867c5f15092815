"""A generated suite that a model of 135 M parameters can half do, as an lm-eval task, so that the gate has something to decide."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pandas as pd
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from evals.lm import quiet_lm_eval

NAME = "easy_generated"
ITEMS = 120
WORDS = ("river", "stone", "table", "window", "garden", "apple", "silver", "tiger", "music", "winter", "candle", "bridge", "forest")
TASK = f"""
task: {NAME}
dataset_path: json
dataset_kwargs:
  data_files:
    test: FILE
output_type: generate_until
test_split: test
doc_to_text: prompt
doc_to_target: target
num_fewshot: 0
filter_list:
  - name: first-number
    filter:
      - function: regex
        regex_pattern: "([0-9]+)"
      - function: take_first
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
generation_kwargs:
  until: ["\\n", ","]
  do_sample: false
  temperature: 0.0
  max_gen_toks: 8
metadata:
  version: 1.0
"""


def rows() -> Iterator[dict[str, str]]:
    """Half continue a row of numbers, half look a number up among six."""
    chance = random.Random(5)
    for place in range(ITEMS):
        if place % 2:
            words = chance.sample(WORDS, 6)
            numbers = [chance.randrange(10, 99) for _ in words]
            asked = chance.randrange(6)
            listed = "\n".join(f"{word}: {number}" for word, number in zip(words, numbers, strict=True))
            yield {"prompt": f"The numbers of things:\n{listed}\nThe number of {words[asked]} is", "target": str(numbers[asked])}
        else:
            first = chance.randrange(10, 95)
            yield {"prompt": f"3, 4, 5, 6\n21, 22, 23, 24\n47, 48, 49, 50\n{first}, {first + 1}, {first + 2},", "target": str(first + 3)}


def answers(url: str, model: str, folder: Path) -> pd.DataFrame:
    """Ask a server through lm-eval's own client; one row an item, as `evals.pairing` wants them."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "easy.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (folder / f"{NAME}.yaml").write_text(TASK.replace("FILE", str(data)))
    client = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model=model, num_concurrent=4, tokenizer_backend=None, tokenized_requests=False, max_length=2048
    )
    with quiet_lm_eval():
        found = lm_eval.simple_evaluate(
            model=client,
            tasks=[NAME],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )
    assert found is not None
    return pd.DataFrame([_row(sample) for sample in found["samples"][NAME]])


def _row(sample: dict[str, Any]) -> dict[str, Any]:
    text = str(sample["resps"][0][0])
    return {
        "item": f"{sample['doc_id']:04d}",
        "repeat": 0,
        "cluster": f"{sample['doc_id']:04d}",
        "prompt_hash": hashlib.sha256(sample["doc"]["prompt"].encode()).hexdigest(),
        "score": float(sample["exact_match"]),
        "tokens": len(text),
        "truncated": False,
        "text": text,
    }
