"""Rules of the schedule that need no checkpoint: messages between ranks, prefetch ranges, and races of the launch graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kimi_k3_decode.config import K3, NANO, ModelConfig, Shard
from kimi_k3_decode.ops.contract import Access, Contract, ContractError, Operand, Role
from validation.core.types import Case, Measurement

Result = tuple[tuple[Measurement, ...], Mapping[str, Any]]
ROUNDS = 6
L2_BYTES = 8 << 20  # budget of one prefetch; only its order of magnitude matters here


def _counts(values: Mapping[str, int]) -> tuple[Measurement, ...]:
    return tuple(Measurement(name=name, value=value, unit="count") for name, value in values.items())


def _config(case: Case) -> ModelConfig:
    return K3 if case.subject == "k3" else NANO


# ---- messages ----
def measure_messages(case: Case, targets: Mapping[str, Any]) -> Result:
    """Every kind of mailbox of the plan, several rounds with ranks in a seeded order, over data that holds every awkward bit pattern."""
    from kimi_k3_decode.step import Mailbox

    tp = int(case.params["tp"])
    found = dict.fromkeys(("bits_lost", "nan_lost", "stuck", "early", "overwritten", "messages"), 0)
    notes: list[str] = []
    for name, operand in _mailbox_operands(tp):
        box = Mailbox(name, operand, tp)
        for round_ in range(ROUNDS):
            generator = torch.Generator().manual_seed(case.seed * 100 + round_)
            try:
                _one_message(box, operand, tp, round_ % 2, generator, found)
            except ContractError as error:
                found["overwritten"] += 1
                notes.append(str(error)[:200])
                break
    return _counts(found), {"notes": notes}


def _mailbox_operands(tp: int) -> Iterator[tuple[str, Operand]]:
    """The consumer's operand of each mailbox of a step, once; the model has dimensions that split over `tp`."""
    from kimi_k3_decode.launches import launch_graph
    from validation.schedule.execution import FOUR_RANKS

    seen = set()
    for launch in launch_graph(FOUR_RANKS, Shard(config=FOUR_RANKS, tp=tp), 8):
        for operand in launch.contract.of_role(Role.MAILBOX):
            name = launch.bindings[operand.name][0].rsplit(".", 1)[0]
            if operand.access is not Access.WRITE and name not in seen:
                seen.add(name)
                yield name, operand


def _one_message(box: Any, operand: Operand, tp: int, parity: int, generator: torch.Generator, found: dict[str, int]) -> None:
    if operand.mailbox is None:
        raise ContractError("messages", [f"{operand.name}: got role {operand.role}, needs mailbox"])
    shapes = [box._part(box.buffers[0][parity], writer).shape for writer in range(tp)]
    parts = [awkward(shape, operand.dtype, generator, int(operand.mailbox.sentinel, 16)) for shape in shapes]
    order = torch.randperm(tp, generator=generator).tolist()
    for place, writer in enumerate(order):
        found["early"] += sum(box.ready(reader, parity) for reader in range(tp)) if place else 0
        box.publish(writer, parity, parts[writer].clone())
    for reader in range(tp):
        found["messages"] += 1
        if not box.ready(reader, parity):
            found["stuck"] += 1
            continue
        message = box.consume(reader, parity)
        for writer in range(tp):
            got, sent = box._part(message, writer), parts[writer]
            numbers = ~sent.isnan()
            words = torch.int32 if sent.dtype == torch.float32 else torch.int16
            found["bits_lost"] += int((got.contiguous().view(words) != sent.view(words))[numbers].sum())
            found["nan_lost"] += int((~got.isnan() & ~numbers).sum())


def awkward(shape: torch.Size, dtype: str, generator: torch.Generator, sentinel: int) -> torch.Tensor:
    """Noise with zeros of both signs, infinities, the largest and smallest numbers, NaN of several patterns, and two words of 32 bits:
    0xFFFFFFFF, and the one that the protocol takes for "not arrived".
    """
    kind = getattr(torch, dtype)
    words, n_bits = (torch.int32, 32) if kind == torch.float32 else (torch.int16, 16)
    value = torch.randn(tuple(shape), generator=generator).to(kind).contiguous()
    flat = value.view(words).view(-1)
    top = 1 << (n_bits - 1)
    infinity = 0x7F800000 if n_bits == 32 else 0x7F80
    patterns = [0, -top, infinity, infinity - top, infinity - 1, 1, 1 - top, infinity + 1, -1, -1, -2, top - 1]
    places = torch.randperm(flat.numel() - 1, generator=generator)[: len(patterns)]
    flat[places] = torch.tensor(patterns[: len(places)], dtype=words)
    wide = value.view(torch.int32).view(-1)
    first, second = torch.randperm(wide.numel(), generator=generator)[:2].tolist()
    wide[first], wide[second] = -1, sentinel - (1 << 32) if sentinel >> 31 else sentinel
    return value


# ---- prefetch ----
def measure_prefetch(case: Case, targets: Mapping[str, Any]) -> Result:
    """Every range of the prefetch plan against the roles of all launches of the step."""
    from kimi_k3_decode.launches import launch_graph
    from kimi_k3_decode.prefetch import prefetch_plan

    config, tp = _config(case), int(case.params["tp"])
    launches = launch_graph(config, Shard(config=config, tp=tp), 8)
    by_id = {launch.id: launch for launch in launches}
    written = {name for launch in launches for name in launch.writes}
    ranges = [item for prefetch in prefetch_plan(launches, L2_BYTES) for item in prefetch.ranges]
    wrong = [r for r in ranges if by_id[r.launch].role_of(r.buffer) is not Role.WEIGHT]
    outside = [r for r in ranges if r.begin_bytes < 0 or r.begin_bytes + r.size_bytes > _size(by_id[r.launch].contract, r.operand)]
    measured = {
        "not_weights": len(wrong),
        "written": sum(r.buffer in written for r in ranges),
        "out_of_bounds": len(outside),
        "ranges": len(ranges),
    }
    return _counts(measured), {"wrong": sorted({f"{r.launch}.{r.operand}" for r in wrong})[:10]}


def _size(contract: Contract, operand: str) -> int:
    return contract[operand].bytes or 0


# ---- launch graph ----
def measure_graph(case: Case, targets: Mapping[str, Any]) -> Result:
    """Races of several steps in a row, with the early accesses and waits that the contracts promise."""
    from kimi_k3_decode.launches import launch_graph
    from validation.ordering.graph_inputs import from_plan
    from validation.ordering.launch_graph import check_graph

    ranks = int(case.params["ranks"])
    shards = [Shard(config=NANO, tp=ranks, rank=rank) for rank in range(ranks)]
    graph = from_plan([[launch_graph(NANO, shard, 8, 4, step=step) for shard in shards] for step in range(3)])
    findings = check_graph(graph, "kimi_k3_decode/launches.py")
    shown = [f"{f.parameter}: {f.message}" for f in findings[:5]]
    return _counts({"races": len(findings), "launches": len(graph.nodes)}), {"first": shown}
