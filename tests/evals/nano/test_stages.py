"""The staged recipe: every stage goes on from the one before, what is done is not done again, and the records are of the same recipe."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from evals.nano import stages
from evals.nano.train import Recipe

RECORD = Path(stages.__file__).with_name("record")
BOUNDS = {"minutes", "draft_minutes", "steps", "draft_steps", "workers", "start", "phase_ends", "trial_seconds"}


def tiny(recipe: Recipe) -> Recipe:
    small = {"steps": 1, "draft_steps": min(1, recipe.draft_steps), "rows": 256, "lengths": (256,), "phase_ends": (1.0,)}
    return replace(recipe, **small, workers=1, exam_items=0, compile=False, recall_share=0.0)


@pytest.mark.slow
def test_stages_run_from_nothing_in_turn_and_resume(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    last = stages.run_stages(tmp_path, tiny)
    assert last == tmp_path / "stage3" / "model.safetensors"
    results = [json.loads((tmp_path / f"stage{n}" / "result.json").read_text()) for n in (1, 2, 3)]
    assert [r["recipe"]["start"] for r in results] == ["", *(str(tmp_path / f"stage{n}" / "model.safetensors") for n in (1, 2))]
    first, second, third = (load_file(tmp_path / f"stage{n}" / "model.safetensors") for n in (1, 2, 3))
    norm = "language_model.model.norm.weight"
    assert not torch.equal(first[norm], third[norm]) or not torch.equal(
        first["language_model.lm_head.weight"], third["language_model.lm_head.weight"]
    )
    assert torch.equal(first["draft.fc.weight"], second["draft.fc.weight"])  # the second stage trains no drafter
    assert not torch.equal(second["draft.fc.weight"], third["draft.fc.weight"])
    packed = [name for name in first if name.endswith("weight_packed")]
    assert packed
    assert all(torch.equal(first[name], third[name]) for name in packed)  # experts stay as the first stage made them
    before = last.stat().st_mtime_ns
    assert stages.run_stages(tmp_path, tiny) == last
    assert last.stat().st_mtime_ns == before


@pytest.mark.parametrize(("stage", "name"), [(1, "stage1.json"), (2, "stage2.json"), (3, "result.json")])
def test_recorded_runs_had_the_recipe_of_their_stage(stage: int, name: str) -> None:
    record = json.loads((RECORD / name).read_text())
    recipe = asdict(stages.STAGES[stage - 1])
    assert record["steps"] == recipe["steps"]
    assert record["draft_steps"] == (recipe["draft_steps"] if recipe["draft_minutes"] else 0)
    shared = (record["recipe"].keys() & recipe.keys()) - BOUNDS
    assert len(shared) > 10
    for key in shared:
        recorded = record["recipe"][key]
        assert (tuple(recorded) if isinstance(recorded, list) else recorded) == recipe[key], key
