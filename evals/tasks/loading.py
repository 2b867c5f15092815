"""Brings up tasks with the guards that lm-eval leaves to the user.

    every task states its limit of new tokens (API models default to 256 and cut chains of thought)
    repeats are sampled, never greedy copies, and every repeat is scored (lm-eval scores the first one)
    data come from local files where they are (K3_EVAL_DATA, or shared/data beside the checkout), else from the hub

A YAML of `real/` may name a `shipped` file of lm-eval's own that it extends, and `local_files` candidates for each split.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import lm_eval
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from validation.core.types import HarnessError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
SHIPPED = Path(lm_eval.__file__).resolve().parent / "tasks"
NANO_SUITES = ("gsm8k_nano", "gpqa_diamond_nano", "aime25_nano", "mrcr_nano")
REAL_SUITES = ("gsm8k", "gpqa_diamond_cot_zeroshot", "aime25", "mrcr")
SUITES = NANO_SUITES + REAL_SUITES
BY_REPEAT = "_by_repeat"


class RepeatedTask(ConfigurableTask):
    """A task that scores all K repeats of an item: each metric is their mean, `<metric>_by_repeat` holds the K values."""

    def process_results(self, doc: Mapping[str, Any], results: list[Any]) -> dict[str, Any]:
        replies = results[0] if isinstance(results[0], list) else [results[0]]
        scored = [ConfigurableTask.process_results(self, doc, [reply]) for reply in replies]
        merged: dict[str, Any] = {}
        for name in scored[0]:
            values = [float(one[name]) for one in scored]
            merged[name] = sum(values) / len(values)
            merged[name + BY_REPEAT] = values
            self._aggregation_list[name + BY_REPEAT] = _mean_of_lists
            self._higher_is_better[name + BY_REPEAT] = self._higher_is_better.get(name, True)
        return merged

    @property
    def primary(self) -> tuple[str, str]:
        """Metric and filter that the gate judges."""
        metric, _, name = str(self.config.metadata["primary"]).partition(",")
        return metric, name


def _mean_of_lists(values: list[list[float]]) -> float:
    flat = [v for row in values for v in row]
    return sum(flat) / len(flat)


def data_roots() -> list[Path]:
    """Folders that may hold public eval data, in order of preference."""
    named = os.environ.get("K3_EVAL_DATA")
    return [Path(named)] if named else [ROOT.parent / "shared" / "data"]


def local_files(candidates: Mapping[str, list[str]], data: Path | None = None, evaluated: str = "test") -> dict[str, list[str]] | None:
    """Files for every split (the first candidate pattern that matches), or None when some split has none.

    `data` is the user's own folder of one suite, or the file of its `evaluated` split; other splits are then looked for beside it. Raises
    HarnessError when `data` does not hold what it should.
    """
    roots = data_roots() if data is None else [data if data.is_dir() else data.parent]
    found: dict[str, list[str]] = {}
    for split, patterns in candidates.items():
        if data is not None:
            patterns = [*patterns, *(p.partition("/")[2] for p in patterns)]
        if data is not None and data.is_file() and split == evaluated:
            matches = [str(data)]
        else:
            matches = next((m for root in roots for p in patterns if (m := sorted(map(str, root.glob(p))))), [])
        if not matches and data is not None:
            raise HarnessError(f"eval data: got nothing for split {split!r} at {data}, needs one of {', '.join(patterns)}")
        if not matches:
            return None
        found[split] = matches
    return found


def task_config(
    suite: str, repeats: int | None = None, *, generation: Mapping[str, Any] | None = None, data: Path | None = None
) -> dict[str, Any]:
    """The resolved lm-eval configuration of a suite. Raises HarnessError for an unknown suite or one without its guards.

    `generation` overrides generation options (None removes one); greedy decoding then means one repeat, unless `repeats` says otherwise,
    which is refused. `data` is the user's own copy (see `local_files`).
    """
    if suite not in SUITES:
        raise HarnessError(f"suite: got {suite!r}, needs one of {', '.join(SUITES)}")
    config = load_yaml(FOLDER / ("nano" if suite in NANO_SUITES else "real") / f"{suite}.yaml")
    if "shipped" in config:
        base = load_yaml(SHIPPED / config.pop("shipped"))
        config["generation_kwargs"] = {**base.get("generation_kwargs", {}), **config.get("generation_kwargs", {})}
        config = {**base, **config}
    config.pop("tag", None)
    candidates = config.pop("local_files", None)
    files = local_files(candidates, data, str(config.get("test_split") or config.get("validation_split"))) if candidates else None
    if files is not None:
        config["dataset_path"] = _format(suite, files)
        config["dataset_name"] = None
        config["dataset_kwargs"] = {"data_files": files}
    elif config["dataset_path"] == "json":
        named = {split: str(ROOT / name) for split, name in config["dataset_kwargs"]["data_files"].items()}
        config["dataset_kwargs"] = {"data_files": named}
    if generation is not None:
        merged = {**config.get("generation_kwargs", {}), **generation}
        config["generation_kwargs"] = {key: value for key, value in merged.items() if value is not None}
        if not merged.get("do_sample"):
            config["repeats"] = 1
    config["repeats"] = repeats if repeats is not None else config.get("repeats", 1)
    config["filter_list"] = _keep_all_repeats(config.get("filter_list"), config["repeats"])
    _guard(suite, config)
    return config


def _format(suite: str, files: Mapping[str, list[str]]) -> str:
    """The reader of `datasets` for these files, which must be of one kind."""
    kinds = {Path(name).suffix.lstrip(".").replace("jsonl", "json") for names in files.values() for name in names}
    if len(kinds) != 1:
        raise HarnessError(f"{suite} data: got files of the kinds {sorted(kinds)}, needs one kind; keep the splits in one format")
    return kinds.pop()


def _keep_all_repeats(filters: list[dict[str, Any]] | None, repeats: int) -> list[dict[str, Any]]:
    """Replace `take_first` by `take_first_k`, so that no repeat is thrown away before it is scored."""
    kept = []
    for one in filters or [{"name": "all", "filter": []}]:
        steps = [step for step in one["filter"] if step["function"] != "take_first"]
        kept.append({"name": one["name"], "filter": [*steps, {"function": "take_first_k", "k": repeats}]})
    return kept


def _guard(suite: str, config: Mapping[str, Any]) -> None:
    generation = config.get("generation_kwargs") or {}
    problems = []
    if not isinstance(generation.get("max_gen_toks"), int) or generation["max_gen_toks"] < 1:
        problems.append("no max_gen_toks: the default of 256 would cut reasoning")
    sampled = bool(generation.get("do_sample")) and float(generation.get("temperature") or 0) > 0
    if config["repeats"] > 1 and not sampled:
        problems.append(f"{config['repeats']} repeats without sampling: they would be copies")
    if config["repeats"] < 1:
        problems.append(f"repeats {config['repeats']}")
    if problems:
        raise HarnessError(f"task {suite}: got {'; '.join(problems)}, needs a complete task file; correct its YAML")


def load_task(suite: str, repeats: int | None = None) -> RepeatedTask:
    """A task with its data. Raises HarnessError when the data are neither local nor reachable."""
    return bring_up(suite, task_config(suite, repeats), lambda config: RepeatedTask(config=config))


def bring_up(suite: str, config: dict[str, Any], make: Callable[[dict[str, Any]], RepeatedTask]) -> RepeatedTask:
    """Build a task from its configuration. Raises HarnessError when its data cannot be had."""
    noisy = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return make(config)
    except HarnessError:
        raise
    except Exception as error:
        where = (config.get("dataset_kwargs") or {}).get("data_files") or config["dataset_path"]
        raise HarnessError(
            f"task {suite}: got {type(error).__name__}: {error} while loading {where}, needs its data; "
            "put the files under K3_EVAL_DATA or allow access to the hub"
        ) from error
    finally:
        if noisy:
            datasets.enable_progress_bars()
