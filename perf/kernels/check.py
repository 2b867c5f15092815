"""One launch on the GPU against its oracle in FP64: errors of the kernel and of the same operation at BF16, and what else it promised.

Promises checked beside the numbers: every output element is written (outputs start as NaN), a publisher writes its own part of every rank's
box and nothing else, a consumer re-arms the other parity, state outside the step's slots stays as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.device.launcher import HEALTH, KernelSpec, Kind, Launcher
from kimi_k3_decode.kernels import kernel_spec
from kimi_k3_decode.ops.arithmetic import CONTRACT, EXACT, Arithmetic
from kimi_k3_decode.ops.contract import Access, Contract, Operand, Role
from kimi_k3_decode.ops.operands import SENTINEL_WORD
from kimi_k3_decode.ops.registry import ORACLES
from perf.kernels.operands import Maker, Tensors, armed


@dataclass(kw_only=True)
class Outcome:
    """`errors`: operand -> relative RMS error of the kernel and of the BF16 reference against FP64; `broken`: promises not kept."""

    op: str
    kernel: str
    case: str
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def judged(self, factor: float = 1.5, floor: float = 2e-6) -> bool:
        """True when every promise holds and each error is within `factor` of the reference's (a NaN fails)."""
        return not self.broken and all(e["kernel"] <= factor * e["reference"] + floor for e in self.errors.values())


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """RMS of the difference over RMS of the exact value; NaN anywhere gives NaN."""
    found, exact = found.double(), exact.double()
    scale = float(exact.square().mean().sqrt())
    return float((found - exact).square().mean().sqrt()) / (scale if scale > 0 else 1.0)


def part_of(o: Operand, box: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """What rank `rank` writes of a mailbox buffer."""
    if o.mailbox is not None and o.mailbox.layout == "slot":
        return box[rank]
    width = box.shape[-1] // tp
    return box[..., rank * width : (rank + 1) * width]


class Run:
    """Operands of one case, and the launch. `stream` is the current one."""

    def __init__(
        self,
        config: ModelConfig,
        contract: Contract,
        tensors: Tensors,
        *,
        rank: int = 0,
        pdl: bool = False,
        options: dict[str, Any] | None = None,
        scalars: dict[str, float] | None = None,
    ) -> None:
        self.config, self.contract, self.tensors = config, contract, tensors
        self.spec: KernelSpec = kernel_spec(config, contract, **(options or {}))
        self.tp, self.rank = contract.parameters["tp"], contract.parameters.get("rank", rank)
        self.boxes: dict[str, list[torch.Tensor]] = {}
        self.others: Tensors = {}
        device = next(iter(tensors.values())).device
        for o in contract.operands:
            if o.role is Role.MAILBOX and o.access is Access.WRITE:
                self.boxes[o.name] = [armed(o.shape, getattr(torch, o.dtype), str(device)) for _ in range(self.tp)]
            elif o.role is Role.MAILBOX:
                self.others[o.name] = torch.zeros_like(tensors[o.name])
        self.health = torch.zeros(4, dtype=torch.int32, device=device)
        scalars = {
            **(scalars or {}),
            "rows": contract.parameters["rows"],
            "rank": self.rank,
            "processors": torch.cuda.get_device_properties(device).multi_processor_count,
            "pdl": int(pdl),
        }
        addresses = {p.name: [box.data_ptr() for box in self.boxes[p.name]] for p in self.spec.params if p.kind is Kind.BOXES}
        self.launcher = Launcher(self.spec).prepare()
        self.launcher.bind({**tensors, HEALTH: self.health}, others=self.others, boxes=addresses, scalars=scalars)

    def launch(self) -> None:
        from cuda.bindings import driver

        self.launcher.run(driver.CUstream(torch.cuda.current_stream().cuda_stream))


def _oracle(config: ModelConfig, contract: Contract, tensors: Tensors, arithmetic: Arithmetic) -> tuple[Tensors, Tensors]:
    """(outputs, state after) of the oracle on copies of the state."""
    states = {}
    for o in contract.of_role(Role.STATE):
        exact = arithmetic is EXACT and tensors[o.name].dtype == torch.float32
        states[o.name] = tensors[o.name].double() if exact else tensors[o.name].clone()
    previous = torch.get_default_device()
    torch.set_default_device(next(iter(tensors.values())).device)
    try:
        found = ORACLES[contract.op](config, contract, {**tensors, **states}, arithmetic)
    finally:
        torch.set_default_device(previous)
    return found, states


def check(
    config: ModelConfig,
    contract: Contract,
    seed: int,
    case: str,
    *,
    rank: int = 0,
    lengths: list[int] | None = None,
    options: dict[str, Any] | None = None,
    change: Any = None,
    cache_scale: float | None = None,
) -> Outcome:
    """Run one case. `change(tensors)` edits the operands first (ties, padding, NaN)."""
    tensors = Maker(config, contract, seed, lengths=lengths).all()
    if change is not None:
        change(tensors)
    extra = {} if cache_scale is None else {"cache_scale": torch.tensor(cache_scale)}
    exact, exact_state = _oracle(config, contract, {**tensors, **extra}, EXACT)
    reference, reference_state = _oracle(config, contract, {**tensors, **extra}, CONTRACT)
    run = Run(config, contract, tensors, rank=rank, options=options, scalars={} if cache_scale is None else {"cache_scale": cache_scale})
    run.launch()
    torch.cuda.synchronize()
    outcome = Outcome(op=contract.op, kernel=run.spec.id, case=case)
    live = int(tensors["live_rows_N"]) if "live_rows_N" in tensors else contract.parameters["rows"]
    for o in contract.operands:
        if o.role is Role.OUTPUT:
            _compare(outcome, o.name, tensors[o.name], exact[o.name], reference[o.name], live)
        elif o.role is Role.STATE and o.access is not Access.READ:
            _compare(outcome, o.name, tensors[o.name], exact_state[o.name], reference_state[o.name], live)
        elif o.name in run.boxes:
            _published(outcome, o, run, exact[o.name], reference[o.name])
        elif o.name in run.others and not bool((run.others[o.name].view(torch.int32) == SENTINEL_WORD).all()):
            outcome.broken.append(f"{o.name}: the other parity is not re-armed")
    if int(run.health[0]):
        outcome.broken.append("health: a wait ran out")
    return outcome


def patiently(case: Callable[[], Outcome], attempts: int = 6) -> Outcome:
    """Run one case; several processes share the memory, so one that finds none waits for the others and tries again."""
    for _ in range(attempts - 1):
        try:
            return case()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            time.sleep(3.0)
        finally:
            torch.cuda.empty_cache()
    return case()


def _compare(outcome: Outcome, name: str, found: torch.Tensor, exact: torch.Tensor, reference: torch.Tensor, live: int) -> None:
    if not found.dtype.is_floating_point:
        wrong = int((found != exact.to(found.dtype)).sum())
        if wrong:
            outcome.broken.append(f"{name}: {wrong} of {found.numel()} integers differ")
        return
    stored = reference.to(found.dtype)
    if name == "lse_XTH":
        if not bool((torch.isneginf(found) == torch.isneginf(exact)).all()):
            outcome.broken.append(f"{name}: empty splits differ")
        found, exact, stored = (torch.where(torch.isneginf(x), 0.0, x) for x in (found, exact, stored))
    outcome.errors[name] = {
        "kernel": relative(found, exact.view_as(found)),
        "reference": relative(stored.view_as(found), exact.view_as(found)),
    }


def _published(outcome: Outcome, o: Operand, run: Run, exact: torch.Tensor, reference: torch.Tensor) -> None:
    first = part_of(o, run.boxes[o.name][0], run.tp, run.rank).clone()
    stored = reference.to(first.dtype)
    outcome.errors[o.name] = {"kernel": relative(first, exact), "reference": relative(stored, exact)}
    for peer, box in enumerate(run.boxes[o.name]):
        mine = part_of(o, box, run.tp, run.rank)
        if not torch.equal(mine.contiguous().view(torch.uint8), first.contiguous().view(torch.uint8)):
            outcome.broken.append(f"{o.name}: rank {peer}'s copy differs from rank 0's")
        mine.zero_()
        part = armed(mine.shape, mine.dtype, str(mine.device))
        mine.copy_(part)
        if not bool((box.view(torch.int32) == SENTINEL_WORD).all()):
            outcome.broken.append(f"{o.name}: rank {peer}'s box was written outside this rank's part")
