"""The candidate `kernels`: the compiled kernels on this machine's GPU behind the interface of every lane; callers keep their caches.

The lanes keep caches in host memory. A step copies them to the GPU, runs there, and copies back what a step may change; copies keep every
bit. Slow beside a server, but the results are the kernels' own: the numerics and evals lanes can be run on them as on any candidate.
"""

from __future__ import annotations

from typing import Any

import torch

from kimi_k3_decode.cache import Caches, StepBatch, StepOutput
from kimi_k3_decode.weights import ModelWeights
from validation.schedule.gpu_runs import on_device, parts_of

DEVICE = "cuda"


class KernelPath:
    """One rank. Raises Unsupported without a GPU, or for weights that the kernels cannot read."""

    name = "kernels"

    def __init__(self, weights: ModelWeights) -> None:
        from kimi_k3_decode.gpu_step import GpuPath

        self.config = weights.config
        self._path = GpuPath(weights)
        self._mirrors: dict[tuple[Any, ...], Caches] = {}

    def step(self, batch: StepBatch, caches: Caches, *, routing: dict[int, torch.Tensor] | None = None, taps: bool = False) -> StepOutput:
        """As `GpuPath.step`; `caches` and the results are in host memory."""
        mirror = self._mirror(caches)
        for there, here in zip(parts_of(mirror), parts_of(caches), strict=True):
            there.copy_(here)
        chosen = {layer: ids.to(DEVICE) for layer, ids in routing.items()} if routing else None
        output = self._path.step(batch, mirror, routing=chosen, taps=taps)
        for there, here in zip(parts_of(mirror), parts_of(caches), strict=True):
            here.copy_(there)
        return StepOutput(
            logits_BQV=output.logits_BQV.cpu(),
            taps_IBQD=None if output.taps_IBQD is None else output.taps_IBQD.cpu(),
            routing={layer: ids.cpu() for layer, ids in output.routing.items()} if output.routing is not None else None,
        )

    def _mirror(self, caches: Caches) -> Caches:
        """Caches of the same shapes on the GPU: graphs belong to addresses, so one copy serves all caches of a shape."""
        key = (caches.dtype, *(tuple(part.shape) for part in parts_of(caches)))
        if key not in self._mirrors:
            self._mirrors[key] = on_device(caches, DEVICE)
        return self._mirrors[key]
