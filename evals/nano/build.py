"""Write the shipped test sets: `python -m evals.nano.build`. Seeded, so the files are a function of `difficulty.py` and this code.

One JSON object a line, read by `datasets`: `id`, `level`, `prompt` (what the model sees after `<bos>`), `target` (what the score compares)
and `answer` (the reference continuation, with its leading space); MRCR rows also carry the published columns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evals.nano import aime, gpqa, gsm8k, mrcr
from evals.nano.difficulty import CONTEST_TEST, RECALL_TEST, SCIENCE_TEST, WORD_TEST
from evals.nano.items import Item, Maker, draw

DATA = Path(__file__).with_name("data")
SEED = 2025
SETS: dict[str, tuple[Maker, Sequence[tuple[Any, int]]]] = {
    "gsm8k_nano": (gsm8k.make, WORD_TEST),
    "gpqa_diamond_nano": (gpqa.make, SCIENCE_TEST),
    "aime25_nano": (aime.make, CONTEST_TEST),
    "mrcr_nano": (mrcr.make, RECALL_TEST),
}


def test_items(suite: str) -> list[Item]:
    """The suite's test set, levels interleaved, no content twice. A level's items do not depend on the other levels' counts."""
    make, mixture = SETS[suite]
    items, seen = [], set()
    for level, count in mixture:
        rng = random.Random(f"{SEED}/{suite}/{level.name}")
        while count:
            item = draw(make, rng, level, test=True)
            if item.key not in seen:
                seen.add(item.key)
                items.append(item)
                count -= 1
    random.Random(f"{SEED}/{suite}").shuffle(items)
    return items


def rows(suite: str) -> list[dict[str, Any]]:
    """What the file holds, in order."""
    kept = ("choices", "random_string_to_prepend", "n_needles", "desired_msg_index")
    return [
        {"id": f"{suite}-{index:04d}", "level": item.level, "prompt": item.prompt, "target": item.fields["target"], "answer": item.answer}
        | {name: item.fields[name] for name in kept if name in item.fields}
        for index, item in enumerate(test_items(suite))
    ]


def write(folder: Path = DATA) -> dict[str, int]:
    """Write every set; returns the number of rows a suite."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for suite in SETS:
        lines = [json.dumps(row) for row in rows(suite)]
        temporary = folder / f"{suite}.tmp"
        temporary.write_text("\n".join(lines) + "\n")
        os.replace(temporary, folder / f"{suite}.jsonl")
        counts[suite] = len(lines)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=DATA)
    print(json.dumps(write(parser.parse_args().folder)))


if __name__ == "__main__":
    main()
