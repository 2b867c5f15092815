"""Ranks of real layers and whole steps on GPUs: the plan's launches with random weights, as CUDA graphs.

Alone, a rank sends its messages back to itself. A rank of a group of R publishes its part R times, once into every rank's box; here the R
copies fall into the R parts of its own box, so the rank writes and reads as many bytes as in a group, through the same kernels, and its
consumers find all parts without a peer. `connect` joins several ranks instead, on one device or on one each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kimi_k3_decode.config import ModelConfig, Shard
from kimi_k3_decode.device.launcher import HEALTH, Kind, Launcher
from kimi_k3_decode.kernels import kernel_spec
from kimi_k3_decode.launches import MAIN, Launch, launch_graph, layer_plan, other_parity
from kimi_k3_decode.ops.contract import Access, Operand, Role
from perf.kernels.operands import Maker, Tensors, armed, poisoned

RANK_SEED = 7919  # matrices differ between ranks, everything else is the same on all


def layers_of(config: ModelConfig, tp: int, layers: Sequence[int], rows: int, q: int = 1, rank: int = 0) -> list[Launch]:
    """Launches of consecutive layers. An even number of them leaves every mailbox parity where it began, so a graph can be replayed."""
    shard = Shard(config=config, tp=tp, rank=rank)
    return [launch for layer in layers for launch in layer_plan(config, shard, layer, rows, q)]


def two_steps(config: ModelConfig, tp: int, rows: int, q: int = 1, rank: int = 0) -> list[Launch]:
    """Two whole steps after each other, the second with the parities that the first leaves."""
    shard = Shard(config=config, tp=tp, rank=rank)
    return [launch for step in (0, 1) for launch in launch_graph(config, shard, rows, q, step=step)]


@dataclass(kw_only=True)
class Bound:
    launch: Launch
    launcher: Launcher
    tensors: Tensors


class RankLoop:
    """The launches `plan` of one rank on the current device, in order. Weights and states are random and distinct by layer.

    `shared_weights`: kept over several loops by buffer name, filled as needed. Call `connect` before `issue`.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: Sequence[Launch],
        *,
        pdl: bool = True,
        side: bool = True,
        seed: int = 1,
        lengths: list[int] | None = None,
        options: dict[str, dict[str, Any]] | None = None,
        shared_weights: Tensors | None = None,
    ) -> None:
        first = plan[0].contract.parameters
        self.config, self.plan, self.pdl, self.side = config, list(plan), pdl, side
        self.tp, self.rows = first["tp"], first["rows"]
        self.rank = max(launch.contract.parameters.get("rank", 0) for launch in plan)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.options, self.seed, self.lengths = options or {}, seed, lengths
        self.buffers: Tensors = {}
        self.weights: Tensors = shared_weights if shared_weights is not None else {}
        self.health = torch.zeros(4, dtype=torch.int32, device=self.device)
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.side_stream = torch.cuda.Stream()
        self.bound: list[Bound] = []
        for launch in self.plan:
            for o in launch.contract.operands:
                for name in launch.bindings[o.name]:
                    self._allocate(launch, o, name)
        if "delta_RTD" in self.plan[0].contract.names:
            # What the last layer's tail will send in every later replay, the first replay finds here.
            box = self.buffers[self.plan[0].bindings["delta_RTD"][0]]
            box.copy_(torch.randn(box.shape, device=self.device, generator=torch.Generator(self.device).manual_seed(seed)))

    def _allocate(self, launch: Launch, o: Operand, name: str) -> None:
        if name in self.buffers or name in self.weights or o.role is Role.SCRATCH:
            return
        seed = self.seed + sum(ord(c) * 31**i for i, c in enumerate(reversed(name))) % 1_000_003
        matrix = o.role is Role.WEIGHT and len(o.axes) > 1
        maker = Maker(self.config, launch.contract, seed + matrix * self.rank * RANK_SEED, str(self.device), self.lengths)
        if o.role is Role.WEIGHT:
            self.weights[name] = maker.operand(o)
        elif o.role is Role.MAILBOX:
            for box in (name, other_parity(name)):
                self.buffers.setdefault(box, armed(o.shape, getattr(torch, o.dtype), str(self.device)))
        elif name.startswith("block."):
            blocks = maker.normal(self.config.n_blocks, self.rows, self.config.hidden_size, dtype=torch.bfloat16)
            self.buffers |= {f"block.{n}": blocks[n] for n in range(self.config.n_blocks)}
        elif o.role is Role.OUTPUT and not name.startswith("prefix."):
            self.buffers[name] = poisoned(o.shape, getattr(torch, o.dtype), str(self.device))
        else:
            self.buffers[name] = maker.operand(o)
        if name.startswith("prefix."):
            self.buffers[name] = maker.normal(self.rows, self.config.hidden_size, dtype=torch.bfloat16)

    # ---- binding ----
    def connect(self, peers: Sequence[RankLoop] | None = None) -> RankLoop:
        """Bind every launch; messages go to `peers` in rank order, or back to this rank alone."""
        self.bound = [self._bind(launch, peers) for launch in self.plan]
        return self

    def _loopback(self, o: Operand, name: str) -> list[int]:
        """Addresses at which the R copies of this rank's part land in all R parts of its own box."""
        box = self.buffers[name]
        slots = o.mailbox is not None and o.mailbox.layout == "slot"
        step = box[0].numel() if slots else box.shape[-1] // self.tp
        return [box.data_ptr() + (r - self.rank) * step * box.element_size() for r in range(self.tp)]

    def _bind(self, launch: Launch, peers: Sequence[RankLoop] | None) -> Bound:
        spec = kernel_spec(self.config, launch.contract, **self.options.get(launch.op, {}))
        tensors: Tensors = {HEALTH: self.health}
        others: Tensors = {}
        boxes = {}
        for o in launch.contract.operands:
            name = launch.bindings[o.name][0]
            if o.role is Role.WEIGHT:
                tensors[o.name] = self.weights[name]
            elif o.role is Role.MAILBOX and o.access is Access.WRITE:
                boxes[o.name] = self._loopback(o, name) if peers is None else [peer.buffers[name].data_ptr() for peer in peers]
            elif o.role is not Role.SCRATCH:
                tensors[o.name] = self.buffers[name]
                if o.role is Role.MAILBOX:
                    others[o.name] = self.buffers[other_parity(name)]
        missing = [p.name for p in spec.params if p.kind is Kind.BOXES and p.name not in boxes]
        if missing:
            raise ValueError(f"{launch.id}: got no boxes for {missing}, needs one a destination")
        scalars = {"rows": self.rows, "rank": self.rank, "processors": self.processors, "pdl": int(self.pdl and launch.pdl)}
        launcher = Launcher(spec).prepare().bind(tensors, others=others, boxes=boxes, scalars=scalars)
        return Bound(launch=launch, launcher=launcher, tensors=tensors)

    # ---- execution ----
    def issue(self, after: Callable[[Bound], None] | None = None) -> None:
        """Launch everything from the current stream; the side stream is forked and joined by the plan's edges.

        `after(bound)` is called behind each launch with its stream current.
        """
        from cuda.bindings import driver

        main = torch.cuda.current_stream()
        side = self.side_stream if self.side else main
        events: dict[str, Any] = {}
        awaited = {name for bound in self.bound for name in bound.launch.waits_on}
        for bound in self.bound:
            stream = main if bound.launch.stream == MAIN else side
            for name in bound.launch.waits_on:
                stream.wait_event(events[name])
            bound.launcher.run(driver.CUstream(stream.cuda_stream))
            if after is not None:
                with torch.cuda.stream(stream):
                    after(bound)
            if bound.launch.id in awaited:
                events[bound.launch.id] = torch.cuda.Event()
                events[bound.launch.id].record(stream)

    def issue_one(self, bound: Bound) -> None:
        """Launch one of `bound` on the current stream."""
        from cuda.bindings import driver

        bound.launcher.run(driver.CUstream(torch.cuda.current_stream().cuda_stream))

    def chosen_experts(self) -> dict[int, torch.Tensor]:
        """Layer -> the ids its routing chose in one pass [rows, k]: what decides how many experts are read."""
        found: dict[int, torch.Tensor] = {}

        def keep(bound: Bound) -> None:
            if bound.launch.op == "route" and bound.launch.layer is not None:
                found[bound.launch.layer] = self.buffers["ids"].clone()

        self.issue(keep)
        torch.cuda.synchronize()
        return found


class LayerLoop(RankLoop):
    """Rank 0 alone over layers `layers`, ready to issue."""

    def __init__(self, config: ModelConfig, tp: int, layers: Sequence[int], rows: int, q: int = 1, **options: Any) -> None:
        super().__init__(config, layers_of(config, tp, layers, rows, q), **options)
        self.connect()
