"""Ways to run a path that must not matter: ranks in any order, one rank always last, and with everything stale replaced by NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kimi_k3_decode.config import NANO, ModelConfig
from kimi_k3_decode.weights import ModelWeights, random_weights
from validation.numerics.slices import LAYERS, slice_model

# Four ranks need four KDA heads and whole groups of the expert scales a rank, which nano has not: this model is only for them.
FOUR_RANKS = dataclasses.replace(
    NANO, name="nano-four-ranks", n_layers=3, kda_layers=(0, 1), mla_layers=(2,), kda_heads=4, moe_intermediate_size=128, draft=None
)


def model_for(weights: ModelWeights, tp: int, layers: Sequence[int] = LAYERS) -> ModelWeights:
    """A few layers of the checkpoint, or a seeded random model where its dimensions do not split over `tp` ranks."""
    small = slice_model(weights, layers)
    return small if _splits(small.config, tp) else random_weights(FOUR_RANKS, seed=tp)


def _splits(config: ModelConfig, tp: int) -> bool:
    parts = (config.kda_heads, config.mla_heads, config.n_experts, config.vocab_size, config.moe_latent_size)
    return all(part % tp == 0 for part in parts) and config.moe_intermediate_size // tp % config.mxfp4_group == 0


def build(target: Any, weights: ModelWeights, tp: int = 1) -> tuple[Any, int]:
    """(the target's path over `weights`, its ranks). A path that knows no ranks is built as it is, on one."""
    if tp > 1:
        try:
            return target.build(weights, tp=tp), tp
        except TypeError:  # its factory has no such option
            pass
    return target.build(weights), 1


class LastOfAll:
    """An order in which one rank moves only when no other can: the longest delay the protocol allows."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def shuffle(self, turn: list[Any]) -> None:
        turn.sort(key=lambda rank: (rank.number == self._rank, rank.number))


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Uninitialised tensors hold NaN (integers: their largest value) instead of whatever lay there, in any path."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class Poison:
    """Fills a contract execution's buffers with NaN whenever they hold nothing that may still be read.

    Before a step: every buffer the last step wrote. Within a step: each buffer as soon as the last launch that reads its value has run.
    `unwritten` counts output elements of real rows that hold NaN after their launch, or are not there.
    """

    def __init__(self, path: Any) -> None:
        self.poisoned = 0
        self.unwritten = 0
        self._shapes: dict[str, torch.Tensor] = {}
        self._dead: dict[int, dict[int, tuple[str, ...]]] = {}
        real_start, real_execute, real_run = path._start, path._execute, path._run

        def start(*arguments: Any) -> None:
            real_start(*arguments)
            for rank in path._ranks:
                for name, value in self._shapes.items():
                    if name not in rank.buffers:
                        rank.buffers[name] = value
                        self.poisoned += 1

        def run(graphs: Any, live: int, watch: Any) -> None:
            self._dead = {number: dead_buffers(graph) for number, graph in enumerate(graphs)}
            real_run(graphs, live, watch)

        def execute(ready: Any, rank: Any, live: int) -> None:
            place = rank.done
            real_execute(ready, rank, live)
            for operand, name in ready.outputs:
                self._look(ready.launch.contract, operand, rank.buffers[name], live)
                self._shapes[name] = poison_like(rank.buffers[name])
            for name in self._dead[rank.number].get(place, ()):
                rank.buffers[name] = poison_like(rank.buffers[name])
                self.poisoned += 1

        path._start, path._execute, path._run = start, execute, run

    def _look(self, contract: Any, name: str, value: torch.Tensor, live: int) -> None:
        operand = contract[name]
        if tuple(value.shape) != operand.sizes:
            self.unwritten += abs(value.numel() - torch.Size(operand.sizes).numel()) or 1
        letters = [axis.letter for axis in operand.axes]
        if not value.is_floating_point():
            self.unwritten += int((value == torch.iinfo(value.dtype).max).sum())
        elif "T" in letters:
            self.unwritten += int(value.narrow(letters.index("T"), 0, min(live, value.shape[letters.index("T")])).isnan().sum())


def poison_like(value: torch.Tensor) -> torch.Tensor:
    """NaN, or the smallest integer, which is no index of anything."""
    return torch.full_like(value, torch.nan if value.is_floating_point() else torch.iinfo(value.dtype).min)


def dead_buffers(graph: Sequence[Any]) -> dict[int, tuple[str, ...]]:
    """Launch number -> buffers whose value nobody reads after it (and somebody read). States and tables never die."""
    last: dict[str, int] = {}
    found: dict[int, list[str]] = {}

    def bury(name: str) -> None:
        if name in last:
            found.setdefault(last.pop(name), []).append(name)

    for place, ready in enumerate(graph):
        for _, bound in ready.inputs:
            last |= {name: place for name in bound if not name.startswith(("state.", "table."))}
        for _, name in ready.outputs:
            if last.get(name) != place:
                bury(name)
            else:  # read and written by the same launch: the old value is gone with it
                last.pop(name)
    for name in list(last):
        bury(name)
    return {place: tuple(names) for place, names in found.items()}
