"""What a server's own counters say between two readings: which grew, and how far drafts were accepted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evals.serving.answers import Metrics, Sample
from evals.serving.client import Endpoint

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Increase of every counter of a side, over all its replicas. Keys are written as `name{label="value",...}`."""

    by_key: Mapping[str, float]

    def total(self, pattern: str) -> float:
        """Increase of all counters that a regular expression finds."""
        found = re.compile(pattern)
        return sum(value for key, value in self.by_key.items() if found.search(key))

    def __add__(self, other: Growth) -> Growth:
        keys = {*self.by_key, *other.by_key}
        return Growth(by_key={key: self.by_key.get(key, 0.0) + other.by_key.get(key, 0.0) for key in keys})


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Of speculative decoding: 1 + accepted drafts a verify step, and the share of steps in which each place was accepted."""

    length: float
    per_position: tuple[float, ...]
    verify_steps: float
    drafts_a_step: float

    def plain(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "per_position": list(self.per_position),
            "verify_steps": self.verify_steps,
            "drafts_a_step": self.drafts_a_step,
        }


def key_of(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}"


def is_counter(sample: Sample) -> bool:
    """By the endings that the exposition format reserves; gauges go up and down and prove nothing."""
    return sample.name.endswith(("_total", "_count"))


def read_counters(endpoints: Sequence[Endpoint]) -> dict[str, float]:
    """Counters of all replicas, summed. Raises ServingError."""
    found: dict[str, float] = {}
    for endpoint in endpoints:
        for sample in counters_of(endpoint.metrics()):
            found[key_of(sample)] = found.get(key_of(sample), 0.0) + sample.value
    return found


def counters_of(metrics: Metrics) -> list[Sample]:
    return [sample for sample in metrics.samples if is_counter(sample)]


def growth(before: Mapping[str, float], after: Mapping[str, float]) -> Growth:
    """What was added. A counter that fell belongs to a server that was started again: all it shows now is new."""
    return Growth(by_key={key: value - before.get(key, 0.0) if value >= before.get(key, 0.0) else value for key, value in after.items()})


def acceptance_of(grown: Growth) -> Acceptance | None:
    """None where the server verified no draft in between."""
    steps, drafted, accepted = (_sum(grown, name) for name in (DRAFTS, DRAFT_TOKENS, ACCEPTED))
    if steps <= 0:
        return None
    positions: dict[int, float] = {}
    for key, value in grown.by_key.items():
        place = re.search(r'position="(\d+)"', key)
        if key.startswith(PER_POSITION + "{") and place:
            positions[int(place[1])] = positions.get(int(place[1]), 0.0) + value
    return Acceptance(
        length=1.0 + accepted / steps,
        per_position=tuple(positions[place] / steps for place in sorted(positions)),
        verify_steps=steps,
        drafts_a_step=drafted / steps,
    )


def _sum(grown: Growth, name: str) -> float:
    return sum(value for key, value in grown.by_key.items() if key.startswith(name + "{"))


def acceptance_tables(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The servers' own counters of speculative decoding over what was asked; none without speculation."""
    rows = [
        [side, told["length"], told["drafts_a_step"], ", ".join(f"{share:.3f}" for share in told["per_position"]), told["verify_steps"]]
        for side, told in found.items()
    ]
    columns = ["side", "acceptance length", "drafts a step", "accepted at each place", "verify steps"]
    return [{"title": "Speculative decoding, from the servers' metrics", "columns": columns, "rows": rows}] if rows else []
