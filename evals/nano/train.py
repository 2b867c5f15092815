"""Train nano-K3 from nothing to the shipped checkpoint: `python -m evals.nano.train --out DIR --minutes 8`.

On a CUDA GPU the recurrence runs through `fla-core` (pinned in the `gpu` extra), elsewhere through the plain chunked form. Several GPUs
share the work under `torchrun`. The schedule follows progress: the larger of steps done and of the wall-clock budget spent, so a run always
ends in time with a decayed learning rate. DIR receives `model.safetensors`,
`tokenizer.json`, `train.jsonl` (the log) and `result.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file

from evals.nano import export, kda_train, network, train_draft
from evals.nano.examine import examine
from evals.nano.optimiser import Optimiser
from evals.nano.stream import Mixture, Stream
from evals.nano.tokenizer import save_tokenizer
from kimi_k3_decode.config import NANO, ModelConfig

LOG_EVERY, SAVE_EVERY_S = 50, 120.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that shapes a run. The target trains until `minutes` after the start, then the drafter for `draft_minutes`."""

    seed: int = 17
    minutes: float = 7.0
    draft_minutes: float = 1.3
    steps: int = 1_000_000
    draft_steps: int = 1_000_000
    rows: int = 49_152  # tokens a step and rank: 64 x 768 = 24 x 2048 = 12 x 4096
    lengths: tuple[int, ...] = (768, 2048, 4096)
    phase_ends: tuple[float, ...] = (0.70, 0.88, 1.0)  # progress at which each length ends
    rate: float = 1.5e-3
    muon_rate: float = 0.02
    trial_seconds: float = 0.0  # above 0: first train this long with and without Muon, and go on with the better of the two
    warm_up_steps: int = 60
    hold: float = 0.35  # share of progress at full rate, then linear decay
    bias_rate: float = 1e-3
    bias_freeze: float = 0.9
    compile: bool = True
    workers: int = 8
    exam_items: int = 32
    start: str = ""  # a checkpoint to go on from; its experts stay as they are, its drafter is kept when `draft_minutes` is 0
    recall_share: float = 0.45  # see `Mixture`
    word: float = 0.45
    science: float = 0.25
    contest: float = 0.30
    plain_kda: bool = False  # see `kda_train.USE_KERNEL`


@dataclass
class Rank:
    """This process among the data-parallel ones."""

    index: int
    count: int
    device: torch.device

    @classmethod
    def start(cls) -> Rank:
        count, index = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if count > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(index, count, device)

    def mean_(self, tensors: list[torch.Tensor]) -> None:
        """Average in place over ranks, through one flat buffer."""
        if self.count == 1:
            return
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        flat /= self.count
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def agree(self, value: float) -> float:
        """Rank 0's value on every rank, so that all leave a loop together."""
        if self.count == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared)


def phase_of(recipe: Recipe, progress: float) -> int:
    return next((i for i, end in enumerate(recipe.phase_ends) if progress < end), len(recipe.lengths) - 1)


def mixture_of(recipe: Recipe, phase: int) -> Mixture:
    length = recipe.lengths[phase]
    shares = {"recall_share": recipe.recall_share, "word": recipe.word, "science": recipe.science, "contest": recipe.contest}
    return Mixture(batch=max(1, recipe.rows // length), length=length, **shares)


def rate_scale(recipe: Recipe, step: int, progress: float) -> float:
    warm = min(1.0, (step + 1) / recipe.warm_up_steps)
    return warm * min(1.0, max(0.0, 1.0 - progress) / (1.0 - recipe.hold))


def to_device(batch: tuple[np.ndarray, np.ndarray], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = torch.from_numpy(batch[0]), torch.from_numpy(batch[1])
    if device.type == "cuda":
        ids, weights = ids.pin_memory(), weights.pin_memory()
    return ids.to(device, non_blocking=True).long(), weights.to(device, non_blocking=True)


def weighted_loss(hidden_ND: torch.Tensor, head_VD: torch.Tensor, ids_BT: torch.Tensor, weights_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token, weighted; the last position of a sequence predicts nothing."""
    logits = (hidden_ND @ head_VD.T).float()
    targets = F.pad(ids_BT[:, 1:], (0, 1))
    shares = F.pad(weights_BT[:, 1:], (0, 1))
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(shares)
    return (losses * shares).sum() / shares.sum()


class Trainer:
    """Parameters, routers' biases, optimiser and pieces of one target training run."""

    def __init__(self, recipe: Recipe, config: ModelConfig, rank: Rank, compiled_by: Trainer | None = None) -> None:
        self.recipe, self.config, self.rank = recipe, config, rank
        self.draft: network.Parameters = {}
        biases = torch.zeros(config.n_layers - config.n_dense_layers, config.n_experts)
        if recipe.start:
            initial, biases, self.draft = export.trained_parameters(load_file(recipe.start), config)
        else:
            initial = network.initial_parameters(config, recipe.seed)
        self.params = {name: value.to(rank.device) for name, value in initial.items()}
        for name, value in self.params.items():
            value.requires_grad_(not (recipe.start and name in network.EXPERTS))
        self.trained = {name: value for name, value in self.params.items() if value.requires_grad}
        self.biases = biases.to(rank.device)
        self.dtype = torch.bfloat16 if rank.device.type == "cuda" else torch.float32
        self.compiled = compiled = recipe.compile and rank.device.type == "cuda"
        self.pieces = network.Pieces.compiled() if compiled else network.Pieces()
        self.loss_of: Callable[..., torch.Tensor] = torch.compile(weighted_loss, dynamic=False) if compiled else weighted_loss
        if compiled_by is not None:
            self.compiled, self.pieces, self.loss_of = compiled_by.compiled, compiled_by.pieces, compiled_by.loss_of
        self.optimiser = Optimiser(self.trained, recipe.rate, recipe.muon_rate)

    def try_compiled(self, ids: torch.Tensor, shares: torch.Tensor) -> str:
        """One forward and backward before training; a compiler that fails here is replaced by eager execution. Returns what will run."""
        try:
            weights = network.prepare(self.params, self.dtype)
            hidden, _, _ = network.forward(weights, self.biases, ids, self.config, self.pieces)
            self.loss_of(hidden, weights["lm_head.weight"], ids, shares).backward()
        except Exception as error:
            if not self.compiled:
                raise
            self.compiled, self.pieces, self.loss_of = False, network.Pieces(), weighted_loss
            return f"eager, because compiling failed: {type(error).__name__}: {str(error)[-600:]}"
        finally:
            for parameter in self.params.values():
                parameter.grad = None
        return "compiled" if self.compiled else "eager"

    def step(self, ids: torch.Tensor, shares: torch.Tensor, scale: float, bias_rate: float) -> torch.Tensor:
        weights = network.prepare(self.params, self.dtype)
        hidden, _, loads = network.forward(weights, self.biases, ids, self.config, self.pieces)
        loss = self.loss_of(hidden, weights["lm_head.weight"], ids, shares)
        loss.backward()
        gradients: list[torch.Tensor] = []
        for parameter in self.trained.values():
            if parameter.grad is None:  # the first boundary has one source: its mixture gets no gradient
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self.rank.mean_([*gradients, loads])
        self.optimiser.step(scale)
        self.biases += bias_rate * torch.sign(loads.mean(-1, keepdim=True) - loads)
        return loss.detach()


def train_target(trainer: Trainer, stream: Stream, out: Path, end: float) -> int:
    """Run the schedule until `end` on the monotonic clock or the last step; returns the number of steps."""
    recipe, rank = trainer.recipe, trainer.rank
    started, saved, step, phase = time.monotonic(), time.monotonic(), 0, -1
    batches: Iterator[tuple[np.ndarray, np.ndarray]] = iter(())
    log = out / "train.jsonl"
    while True:
        elapsed = time.monotonic() - started
        progress = rank.agree(max(step / recipe.steps, elapsed / max(end - started, 1e-3)))
        if progress >= 1.0:
            return step
        if phase_of(recipe, progress) != phase:
            phase = phase_of(recipe, progress)
            batches = stream.batches(mixture_of(recipe, phase))
        ids, shares = to_device(next(batches), rank.device)
        scale = rate_scale(recipe, step, progress)
        loss = trainer.step(ids, shares, scale, recipe.bias_rate if progress < recipe.bias_freeze else 0.0)
        if step % LOG_EVERY == 0 and rank.index == 0:
            record: dict[str, Any] = {"phase": "target", "step": step, "seconds": round(elapsed, 2), "length": recipe.lengths[phase]}
            record |= {"loss": round(float(loss), 4), "rate_scale": round(scale, 4), "tokens": (step + 1) * ids.numel() * rank.count}
            export.append_json(log, record)
            print(json.dumps(record), flush=True)
            if not math.isfinite(record["loss"]):
                raise FloatingPointError(f"loss at step {step}: got {record['loss']}, needs a finite number; lower the learning rates")
            if time.monotonic() - saved > SAVE_EVERY_S:
                save(trainer, {}, out)
                saved = time.monotonic()
        step += 1


def choose_optimiser(trainer: Trainer, stream: Stream, log: Path) -> Trainer:
    """A fresh trainer with the optimiser whose loss was lower after `trial_seconds`; NaN loses."""
    recipe, rank, outcomes = trainer.recipe, trainer.rank, {}
    for muon_rate in (recipe.muon_rate, 0.0):
        candidate = Trainer(replace(recipe, muon_rate=muon_rate), trainer.config, rank, trainer)
        losses: list[torch.Tensor] = []
        started = time.monotonic()
        for batch in stream.batches(mixture_of(recipe, 0)):
            losses.append(candidate.step(*to_device(batch, rank.device), rate_scale(recipe, len(losses), 0.0), recipe.bias_rate))
            if len(losses) % 10 == 0 and rank.agree(time.monotonic() - started) > recipe.trial_seconds:
                break
        loss = float(torch.stack(losses[-10:]).mean())
        outcomes[muon_rate] = loss if math.isfinite(loss) else math.inf
        record = {"phase": "trial", "muon_rate": muon_rate, "steps": len(losses), "loss": round(loss, 4)}
        if rank.index == 0:
            export.append_json(log, record)
            print(json.dumps(record), flush=True)
    best = min(outcomes, key=lambda muon_rate: outcomes[muon_rate])
    return Trainer(replace(recipe, muon_rate=best), trainer.config, rank, trainer)


def save(trainer: Trainer, draft: network.Parameters, out: Path) -> str:
    tensors = export.checkpoint_tensors(trainer.params, trainer.biases, draft, trainer.config)
    return export.save_tensors(tensors, out / "model.safetensors")


def environment(rank: Rank) -> dict[str, object]:
    device = torch.cuda.get_device_name(rank.device) if rank.device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": device, "devices": rank.count, "torch": torch.__version__, "python": platform.python_version()}


def run(recipe: Recipe, out: Path, config: ModelConfig = NANO) -> dict[str, object]:
    """The whole recipe; returns what `result.json` holds."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(recipe.seed)
    kda_train.USE_KERNEL = not recipe.plain_kda
    rank, begun = Rank.start(), time.monotonic()
    if recipe.compile and rank.device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64
    stream = Stream(recipe.seed, recipe.workers, rank.index, rank.count)
    trainer = Trainer(recipe, config, rank)
    log = out / "train.jsonl"
    if rank.index == 0:
        export.append_json(log, {"phase": "start", "recipe": asdict(recipe), **environment(rank)})
    begin = time.monotonic()
    execution = trainer.try_compiled(*to_device(next(stream.batches(mixture_of(recipe, 0))), rank.device))
    if rank.index == 0:
        export.append_json(log, {"phase": "compile", "seconds": round(time.monotonic() - begin, 1), "execution": execution})
        print(execution, round(time.monotonic() - begin, 1), "s", flush=True)
    if recipe.trial_seconds > 0:
        trainer = choose_optimiser(trainer, stream, log)
    steps = train_target(trainer, stream, out, begun + 60 * recipe.minutes)
    if rank.index == 0:
        save(trainer, {}, out)
    if rank.count > 1:
        dist.barrier()
    draft_params, embedding, draft_steps = trainer.draft, trainer.params["embed_tokens.weight"], 0
    if recipe.draft_minutes > 0:
        draft_params, embedding, draft_steps = train_draft.train(trainer, stream, log)
    result: dict[str, object] = {}
    if rank.index == 0:
        trainer.params["embed_tokens.weight"] = embedding
        digest = save(trainer, draft_params, out)
        save_tokenizer(out / "tokenizer.json")
        exam = examine(trainer, draft_params, recipe.exam_items) if recipe.exam_items else None
        result = {"steps": steps, "draft_steps": draft_steps, "sha256": digest, "seconds": round(time.monotonic() - begun, 1)}
        result |= {"recipe": asdict(trainer.recipe), "exam": exam, **environment(rank)}
        (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        export.append_json(log, {"phase": "end", **result})
    stream.close()
    if rank.count > 1:
        dist.destroy_process_group()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    for name, kind in (("seed", int), ("minutes", float), ("draft-minutes", float), ("steps", int), ("rows", int), ("rate", float)):
        parser.add_argument(f"--{name}", type=kind)
    more: tuple[tuple[str, type], ...] = (
        ("recall-share", float),
        ("word", float),
        ("science", float),
        ("contest", float),
        ("bias-rate", float),
        ("start", str),
        ("warm-up-steps", int),
        ("hold", float),
    )
    for name, given_as in more:
        parser.add_argument(f"--{name}", type=given_as)
    for name, kind in (("muon-rate", float), ("trial-seconds", float), ("workers", int), ("exam-items", int), ("draft-steps", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--lengths", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--phase-ends", type=lambda text: tuple(map(float, text.split(","))))
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--plain-kda", action="store_true")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    out, plain = given.pop("out"), given.pop("no_compile")
    print(json.dumps(run(replace(Recipe(), **given, compile=not plain), out)), flush=True)


if __name__ == "__main__":
    main()
