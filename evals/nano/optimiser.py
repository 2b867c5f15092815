"""Two optimisers of one step: Muon (orthogonalised momentum) on hidden matrices, AdamW on everything else.

Muon: Jordan et al. 2024, kellerjordan.github.io/posts/muon — the quintic Newton-Schulz coefficients below are from there.
"""

from __future__ import annotations

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
MOMENTUM = 0.95
ADAM_ONLY = (
    "embed_tokens.weight",
    "lm_head.weight",
    "conv1d.weight",
    "res_proj.weight",
    "b_proj.weight",
    "markov_head.w1.weight",
    "markov_head.w2.weight",
)


def orthogonalise(x: torch.Tensor) -> torch.Tensor:
    """Singular values of every matrix in [..., rows, columns] pushed towards 1, in bf16."""
    a, b, c = NEWTON_SCHULZ
    y = x.bfloat16()
    wide = y.shape[-2] > y.shape[-1]
    y = y.mT if wide else y
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if wide else y).to(x.dtype)


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim >= 2 and not name.endswith(ADAM_ONLY)


class Muon:
    """Parameters of one shape share a stacked momentum, so a step is a handful of batched products per shape."""

    def __init__(self, parameters: list[torch.Tensor], rate: float) -> None:
        shapes: dict[torch.Size, list[torch.Tensor]] = {}
        for parameter in parameters:
            shapes.setdefault(parameter.shape, []).append(parameter)
        self._groups = list(shapes.values())
        self._momenta = [torch.zeros_like(torch.stack([p.detach() for p in group])) for group in self._groups]
        self._rate = rate

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at `scale` times the base learning rate."""
        for group, momentum in zip(self._groups, self._momenta, strict=True):
            gradient = torch.stack([p.grad for p in group])  # type: ignore[misc]  # a missing one is an error there
            momentum.lerp_(gradient, 1 - MOMENTUM)
            rows, columns = group[0].shape[-2:]
            update = orthogonalise(gradient.lerp_(momentum, MOMENTUM))
            torch._foreach_add_(group, list(update.unbind(0)), alpha=-self._rate * scale * max(1.0, rows / columns) ** 0.5)


class Optimiser:
    """`rate` is AdamW's; `muon_rate` 0 gives every parameter to AdamW."""

    def __init__(self, parameters: dict[str, torch.Tensor], rate: float, muon_rate: float) -> None:
        matrices = [p for name, p in parameters.items() if muon_rate > 0 and is_matrix(name, p)]
        chosen = {id(p) for p in matrices}
        rest = [p for p in parameters.values() if id(p) not in chosen]
        self._parameters = list(parameters.values())
        self._rate = rate
        self._adam = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.01, fused=rest[0].is_cuda)
        self._muon = Muon(matrices, muon_rate) if matrices else None

    def step(self, scale: float) -> None:
        """Clip the global norm to 1, update, clear the gradients. `scale` is the schedule's factor in [0, 1]."""
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0, foreach=True)
        for group in self._adam.param_groups:
            group["lr"] = self._rate * scale
        self._adam.step()
        if self._muon is not None:
            self._muon.step(scale)
        for parameter in self._parameters:
            parameter.grad = None
