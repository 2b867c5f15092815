"""The shipped checkpoint's recipe from nothing, as one command: `python -m evals.nano.stages --out DIR`.

Three stages, each going on from the checkpoint of the one before; see TRAINING.md for what each did. The recorded runs were bounded by the
clock; here the recorded numbers of steps bound them, so that the schedule does not depend on the machine's speed. A stage whose
`result.json` is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from evals.nano.train import Recipe, run

UNBOUNDED_MINUTES = 1e6  # the schedule follows the larger of steps and time: steps alone shall count
FIRST = Recipe(
    seed=17,
    minutes=UNBOUNDED_MINUTES,
    draft_minutes=UNBOUNDED_MINUTES,
    steps=2535,
    draft_steps=917,
    phase_ends=(0.72, 0.897, 1.0),  # in steps: the clock of the recorded run gave long sequences fewer of them
    exam_items=24,
)
SECOND = Recipe(
    seed=18,
    minutes=UNBOUNDED_MINUTES,
    draft_minutes=0.0,
    steps=47,
    rows=24_576,
    lengths=(512,),
    phase_ends=(1.0,),
    rate=5e-4,
    muon_rate=0.006,
    warm_up_steps=10,
    hold=0.3,
    bias_rate=2e-4,
    compile=False,
    plain_kda=True,
    exam_items=0,
    recall_share=0.2,
    word=0.2,
    science=0.6,
    contest=0.2,
)
THIRD = Recipe(
    seed=19,
    minutes=UNBOUNDED_MINUTES,
    draft_minutes=UNBOUNDED_MINUTES,
    steps=641,
    draft_steps=289,
    lengths=(768,),
    phase_ends=(1.0,),
    rate=1e-3,
    muon_rate=0.01,
    warm_up_steps=15,
    bias_rate=5e-4,
    exam_items=0,
    recall_share=0.25,
    word=0.3,
    science=0.45,
    contest=0.25,
)
STAGES = (FIRST, SECOND, THIRD)


def run_stages(out: Path, change: Callable[[Recipe], Recipe] = lambda recipe: recipe, stages: tuple[Recipe, ...] = STAGES) -> Path:
    """Run what is missing under `out`/stage1..; returns the last checkpoint. `change` adapts every recipe to the machine."""
    start = ""
    for number, stage in enumerate(stages, 1):
        folder = out / f"stage{number}"
        if not (folder / "result.json").exists():
            print(json.dumps(run(change(replace(stage, start=start)), folder)), flush=True)
        start = str(folder / "model.safetensors")
    return Path(start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=8, help="processes that make batches")
    parser.add_argument("--no-compile", action="store_true", help="run every stage eagerly")
    given = parser.parse_args()

    def change(recipe: Recipe) -> Recipe:
        return replace(recipe, workers=given.workers, compile=recipe.compile and not given.no_compile)

    print(run_stages(given.out, change))


if __name__ == "__main__":
    main()
