"""Small local copies of the public suites in their published forms, with their right answers, and sides over canned servers."""

from __future__ import annotations

import json
import random
from pathlib import Path

from evals.policy import SuitePolicy
from evals.serving.asking import Replica
from evals.serving.suites import ServedPlan, SuiteSide

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty", "knoll", "ledge"]


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gsm8k(folder: Path, rows: int = 24) -> dict[str, str]:
    """Question -> right reply."""
    made = [{"question": f"Row {i:05d}: what is {i} + {i % 7}?", "answer": f"{i} + {i % 7}\n#### {i + i % 7}"} for i in range(rows)]
    shots = [{"question": f"Shot {i:05d}: what is {i} + 2?", "answer": f"#### {i + 2}"} for i in range(20)]
    write_lines(folder / "gsm8k" / "test.jsonl", made)
    write_lines(folder / "gsm8k" / "train64.jsonl", shots)
    return {row["question"]: f"So it is.\n{row['answer']}" for row in made}


def aime25(folder: Path, rows: int = 6) -> dict[str, str]:
    made = [{"index": i, "question": f"Problem {i:03d}: find $x$ with $x={i}$.", "true_answer": str(i)} for i in range(rows)]
    write_lines(folder / "aime25" / "test.jsonl", made)
    return {row["question"]: rf"Therefore \boxed{{{row['true_answer']}}}" for row in made}


def gpqa(folder: Path, rows: int = 12) -> Path:
    """Invented questions: the real ones are gated."""
    made = [
        {
            "Question": f"Invented {i:03d}: which?",
            "Correct Answer": f"right {i}",
            **{f"Incorrect Answer {k}": f"wrong {i}-{k}" for k in (1, 2, 3)},
        }
        for i in range(rows)
    ]
    return write_lines(folder / "gpqa" / "gpqa_diamond.jsonl", made)


def mrcr_row(number: int, needles: int, words: int, rng: random.Random) -> dict:
    """A row in the published form with about `words` words of conversation."""
    prefix = f"{rng.getrandbits(40):010x}"
    replies = [" ".join(rng.choice(WORDS) for _ in range(8)) for _ in range(needles)]
    messages = []
    for i, reply in enumerate(replies):
        messages += [{"role": "user", "content": "write a poem about tapirs"}, {"role": "assistant", "content": reply}]
        filler = " ".join(rng.choice(WORDS) for _ in range(max(1, words // needles)))
        messages += [{"role": "user", "content": f"write a list {i}"}, {"role": "assistant", "content": filler}]
    asked = rng.randrange(needles)
    messages.append({"role": "user", "content": f"Prepend {prefix} to poem {asked + 1} about tapirs (row {number})."})
    return {"prompt": json.dumps(messages), "answer": prefix + replies[asked], "random_string_to_prepend": prefix, "n_needles": needles}


def side(role: str, *servers, concurrency: int = 8, fingerprint: str = "", **options) -> SuiteSide:
    replicas = tuple(Replica(base_url=s.url, model="canned", retries=0, timeout_s=20.0) for s in servers)
    return SuiteSide(role=role, fingerprint=fingerprint or f"of {role}", replicas=replicas, concurrency=concurrency, **options)


def policy(suite: str, **changes) -> SuitePolicy:
    return SuitePolicy(**{"suite": suite, "delta": 0.3, "floor": 0.05, "ceiling": 0.999, **changes})


def plan(**changes) -> ServedPlan:
    return ServedPlan(**{"chat": False, **changes})
