"""One rank's share of real layers on one GPU: the plan's launches in a CUDA graph, with this rank's messages looped back.

A rank of a group of R publishes its part R times, once into every rank's box. Here the R copies fall into the R parts of its own box, so
the rank writes and reads as many bytes as in a group, through the same kernels, and its consumers find all parts without a peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kimi_k3_decode.config import ModelConfig, Shard
from kimi_k3_decode.device.launcher import HEALTH, Kind, Launcher
from kimi_k3_decode.kernels import kernel_spec
from kimi_k3_decode.launches import MAIN, Launch, layer_plan, other_parity
from kimi_k3_decode.ops.contract import Access, Operand, Role
from perf.kernels.operands import Maker, Tensors, armed, poisoned


@dataclass(kw_only=True)
class Bound:
    launch: Launch
    launcher: Launcher
    tensors: Tensors


class LayerLoop:
    """Layers `layers` of `config` on one rank, `rows` rows, in order. Weights and states are random and distinct per layer.

    A graph of an even number of layers leaves every mailbox parity where it began, so it can be replayed.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: int,
        layers: Sequence[int],
        rows: int,
        q: int = 1,
        *,
        pdl: bool = True,
        side: bool = True,
        seed: int = 1,
        lengths: list[int] | None = None,
        options: dict[str, dict[str, Any]] | None = None,
        shared_weights: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.config, self.rows, self.q, self.pdl, self.side = config, rows, q, pdl, side
        self.shard = Shard(config=config, tp=tp, rank=0)
        self.options = options or {}
        self.device = "cuda"
        self.seed, self.lengths = seed, lengths
        self.buffers: Tensors = {}
        self.weights: Tensors = shared_weights if shared_weights is not None else {}
        self.health = torch.zeros(4, dtype=torch.int32, device=self.device)
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count
        self.streams = torch.cuda.Stream(), torch.cuda.Stream()
        self._prime(layers)
        self.bound = [self._bind(launch) for launch in self.plan]

    def _prime(self, layers: Sequence[int]) -> None:
        """The plan, renumbered so that consecutive layers use alternating parities and each its own weights, and all buffers."""
        self.plan: list[Launch] = []
        for layer in layers:
            self.plan += layer_plan(self.config, self.shard, layer, self.rows, self.q)
        for launch in self.plan:
            for o in launch.contract.operands:
                for name in launch.bindings[o.name]:
                    self._allocate(launch, o, name)
        first = self.plan[0]
        if "delta_RTD" in first.contract.names:
            # What the last layer's tail will send in every later replay, the first replay finds here.
            self.buffers[first.bindings["delta_RTD"][0]].normal_()

    def _allocate(self, launch: Launch, o: Operand, name: str) -> None:
        if name in self.buffers or name in self.weights or o.role is Role.SCRATCH:
            return
        maker = Maker(self.config, launch.contract, self.seed + len(self.buffers) + len(self.weights), self.device, self.lengths)
        if o.role is Role.WEIGHT:
            self.weights[name] = maker.operand(o)
        elif o.role is Role.MAILBOX:
            for box in (name, other_parity(name)):
                self.buffers.setdefault(box, armed(o.shape, getattr(torch, o.dtype), self.device))
        elif name.startswith("block."):
            blocks = torch.randn(self.config.n_blocks, self.rows, self.config.hidden_size, device=self.device).to(torch.bfloat16)
            self.buffers |= {f"block.{n}": blocks[n] for n in range(self.config.n_blocks)}
        elif o.role is Role.OUTPUT:
            self.buffers[name] = poisoned(o.shape, getattr(torch, o.dtype), self.device)
        else:
            self.buffers[name] = maker.operand(o)
        if name.startswith("prefix."):
            self.buffers[name] = maker.normal(self.rows, self.config.hidden_size, dtype=torch.bfloat16)

    def _loopback(self, o: Operand, name: str) -> list[int]:
        """Addresses at which the R copies of part 0 land in parts 0..R-1 of this rank's own box."""
        box, tp = self.buffers[name], self.shard.tp
        slots = o.mailbox is not None and o.mailbox.layout == "slot"
        step = box[0].numel() if slots else box.shape[-1] // tp
        return [box.data_ptr() + r * step * box.element_size() for r in range(tp)]

    def _bind(self, launch: Launch) -> Bound:
        spec = kernel_spec(self.config, launch.contract, **self.options.get(launch.op, {}))
        tensors: Tensors = {HEALTH: self.health}
        others: Tensors = {}
        boxes = {}
        for o in launch.contract.operands:
            name = launch.bindings[o.name][0]
            if o.role is Role.WEIGHT:
                tensors[o.name] = self.weights[name]
            elif o.role is Role.MAILBOX and o.access is Access.WRITE:
                boxes[o.name] = self._loopback(o, name)
            elif o.role is not Role.SCRATCH:
                tensors[o.name] = self.buffers[name]
                if o.role is Role.MAILBOX:
                    others[o.name] = self.buffers[other_parity(name)]
        missing = [p.name for p in spec.params if p.kind is Kind.BOXES and p.name not in boxes]
        if missing:
            raise ValueError(f"{launch.id}: got no boxes for {missing}, needs one a destination")
        scalars = {"rows": self.rows, "rank": 0, "processors": self.processors, "pdl": int(self.pdl and launch.pdl)}
        launcher = Launcher(spec).prepare().bind(tensors, others=others, boxes=boxes, scalars=scalars)
        return Bound(launch=launch, launcher=launcher, tensors=tensors)

    def issue(self) -> None:
        """Launch everything from the current stream; the side stream is forked and joined by the plan's edges."""
        from cuda.bindings import driver

        main = torch.cuda.current_stream()
        side = self.streams[1] if self.side else main
        events: dict[str, Any] = {}
        awaited = {name for bound in self.bound for name in bound.launch.waits_on}
        for bound in self.bound:
            stream = main if bound.launch.stream == MAIN else side
            for name in bound.launch.waits_on:
                stream.wait_event(events[name])
            bound.launcher.run(driver.CUstream(stream.cuda_stream))
            if bound.launch.id in awaited:
                events[bound.launch.id] = torch.cuda.Event()
                events[bound.launch.id].record(stream)
