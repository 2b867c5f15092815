"""The policy's margins agree with the shipped sets: the gate sees a drop of the margin while a healthy candidate turns some replies."""

import json

import numpy as np
import pytest
import yaml

from evals.nano.build import DATA
from evals.policy import suite_policy
from evals.stats.paired import paired_difference
from evals.stats.power import detectable_drop
from evals.tasks import loading
from validation.policy import load_policy

# suite -> replies turned, half of them each way, and by how much; as the policy file says
TURNED = {"gsm8k_nano": (33, 1.0), "gpqa_diamond_nano": (13, 1.0), "aime25_nano": (13, 1.0), "mrcr_nano": (13, 0.5)}


def detectable(suite: str, turned: int, size: float) -> float:
    items = len((DATA / f"{suite}.jsonl").read_text().splitlines())
    text = (DATA.parents[1] / "tasks" / "nano" / f"{suite}.yaml").read_text()
    repeats = next((int(yaml.safe_load(line)["repeats"]) for line in text.splitlines() if line.startswith("repeats:")), 1)
    stock = np.ones((items, repeats))
    candidate = stock.copy()
    for index in range(turned):
        (candidate if index % 2 else stock)[index, index % repeats] = 1.0 - size
    difference = paired_difference(stock, candidate, np.arange(items))
    policy = suite_policy(suite, load_policy(), 4)
    return detectable_drop(difference.se_adjusted, difference.n_clusters, policy.alpha, policy.power)


def test_every_nano_suite_has_its_count() -> None:
    assert set(TURNED) == set(loading.NANO_SUITES)


@pytest.mark.parametrize("suite", TURNED)
def test_margin_is_seen_through_the_stated_number_of_turned_replies(suite: str) -> None:
    delta, (turned, size) = suite_policy(suite, load_policy(), 4).delta, TURNED[suite]
    assert detectable(suite, turned, size) <= delta
    assert detectable(suite, 2 * turned, size) > delta


@pytest.mark.parametrize("suite", TURNED)
def test_shipped_set_has_levels_of_different_difficulty(suite: str) -> None:
    levels = {json.loads(line)["level"] for line in (DATA / f"{suite}.jsonl").read_text().splitlines()}
    assert len(levels) >= 10
