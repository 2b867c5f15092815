"""Cases at the edges: exact ties, padding that holds NaN, null slots, every accepted count, long contexts, the FP8 cache, other row
counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from kimi_k3_decode.config import K3, NANO, ModelConfig, Shard
from kimi_k3_decode.launches import Launch, layer_plan
from kimi_k3_decode.ops.contract import Contract, Role
from kimi_k3_decode.ops.kda.contract import contract as kda_contract
from kimi_k3_decode.ops.mla import contract as mla
from kimi_k3_decode.ops.route.contract import contract as route_contract
from perf.kernels.check import Outcome, Run, check, patiently
from perf.kernels.operands import Maker, Tensors

POSITIONS = (0, 1, 63, 64, 65535, 65536, 131071, 131072, 1_048_575)
SPLITS = 16


def _ties(tensors: Tensors) -> None:
    tensors["bias_E"].zero_()
    tensors["logits_TE"].copy_(torch.randint(-2, 3, tensors["logits_TE"].shape, device="cuda").float())


def _all_equal(tensors: Tensors) -> None:
    tensors["bias_E"].zero_()
    tensors["logits_TE"].fill_(0.25)


def _zeros(tensors: Tensors) -> None:
    """Zeros of both signs: equal scores."""
    tensors["bias_E"].zero_()
    tensors["logits_TE"].zero_()
    tensors["logits_TE"][:, ::2].neg_()


def _few_live(tensors: Tensors) -> None:
    live = tensors["logits_TE"].shape[0] // 2 + 1
    tensors["live_rows_N"].fill_(live)
    tensors["logits_TE"][live:] = float("nan")


def _null_slots(tensors: Tensors) -> None:
    """Every third request is padding with NaN in its rows; of another, the last token has no slot."""
    slots = tensors["slots_BQ"]
    q = slots.shape[1]
    slots[::3] = 0
    tensors["proj_TP"].view(slots.shape[0], q, -1)[::3] = float("nan")
    tensors["accepted_B"][::3] = 1
    if q > 1:
        slots[1, -1] = 0
        tensors["accepted_B"][1] = 1


def cases() -> Iterator[tuple[str, Any, Contract, dict[str, Any]]]:
    """(name, config, contract, options of `check`)."""
    for config, tp in ((K3, 8), (NANO, 1)):
        shard = Shard(config=config, tp=tp)
        for rows in (1, 5, 8, 64):
            for change in (_ties, _all_equal, _zeros, _few_live):
                yield f"{config.name}-r{rows}-{change.__name__}", config, route_contract(shard, rows=rows), {"change": change}
        for requests, q in ((7, 1), (4, 8), (8, 8)):
            yield f"{config.name}-b{requests}-q{q}-null", config, kda_contract(shard, rows=requests * q, q=q), {"change": _null_slots}
        for count in range(1, 9):

            def accepted(tensors: Tensors, count: int = count) -> None:
                tensors["accepted_B"].fill_(count)

            yield f"{config.name}-accepted{count}", config, kda_contract(shard, rows=16, q=8), {"change": accepted}
        for position in POSITIONS:
            options = {"lengths": [position]}
            yield f"{config.name}-at{position}", config, mla.decode(shard, rows=1, splits=SPLITS), options
            yield f"{config.name}-at{position}", config, mla.query(shard, rows=1), options
        yield f"{config.name}-mixed", config, mla.decode(shard, rows=32, q=8, splits=4), {"lengths": [0, 5, 700, 4097]}
        fp8 = "float8_e4m3fn"
        yield f"{config.name}-fp8", config, mla.decode(shard, rows=8, splits=SPLITS, cache_dtype=fp8), {"cache_scale": 0.5}
        yield f"{config.name}-fp8", config, mla.query(shard, rows=8, cache_dtype=fp8), {"cache_scale": 0.5}
        yield f"{config.name}-forced", config, route_contract(shard, rows=8, forced=True), {"change": _forced}


def _forced(tensors: Tensors) -> None:
    rows, k = tensors["forced_TZ"].shape
    experts = tensors["bias_E"].shape[0]
    for row in range(rows):
        tensors["forced_TZ"][row] = torch.randperm(experts, device="cuda")[:k]


def isolation(config: ModelConfig, tp: int, rows: int) -> Iterator[Outcome]:
    """NaN in one row of every per-row input must leave all other rows' bits alone; one outcome a launch of a layer."""
    for launch in (*layer_plan(config, Shard(config=config, tp=tp), 4, rows), *layer_plan(config, Shard(config=config, tp=tp), 3, rows)):
        if launch.op in ("route", "kda", "mla_query", "mla_decode"):
            continue  # rows meet tables and state there; their padding cases are above
        yield _isolated(config, launch, rows)


def _isolated(config: ModelConfig, launch: Launch, rows: int) -> Outcome:
    poisoned = rows // 2
    others = [r for r in range(rows) if r != poisoned]
    results = []
    for poison in (False, True):
        tensors = Maker(config, launch.contract, 77).all()
        if poison:
            for o in launch.contract.operands:
                if (
                    o.role in (Role.INPUT, Role.MAILBOX)
                    and o.reads
                    and any(a.letter == "T" for a in o.axes)
                    and tensors[o.name].is_floating_point()
                ):
                    axis = [a.letter for a in o.axes].index("T")
                    tensors[o.name].select(axis, poisoned).fill_(float("nan"))
        run = Run(config, launch.contract, tensors)
        run.launch()
        torch.cuda.synchronize()
        found = {}
        for o in launch.contract.operands:
            if o.writes and o.role in (Role.OUTPUT, Role.MAILBOX) and any(a.letter == "T" for a in o.axes):
                tensor = run.boxes[o.name][0] if o.name in run.boxes else tensors[o.name]
                if o.name in run.others:
                    continue
                axis = [a.letter for a in o.axes].index("T")
                found[o.name] = tensor.index_select(axis, torch.tensor(others, device="cuda"))
        results.append((found, run.spec.id))
    (clean, kernel), (dirty, _) = results
    outcome = Outcome(op=launch.op, kernel=kernel, case=f"{config.name}-r{rows}-nan-row")
    for name, tensor in clean.items():
        if not torch.equal(tensor.contiguous().view(torch.uint8), dirty[name].contiguous().view(torch.uint8)):
            outcome.broken.append(f"{name}: NaN in row {poisoned} changed other rows")
    return outcome


ISOLATED = ((NANO, 1, 8), (NANO, 1, 33), (K3, 8, 5), (K3, 8, 16), (K3, 8, 64))


def run(records: Any, worker: int = 0, workers: int = 1) -> int:
    """The share of one of several workers; returns how many cases do not hold."""
    failed = 0
    for number, (name, config, contract, options) in enumerate(cases()):
        if number % workers != worker:
            continue
        try:
            outcome = patiently(partial(check, config, contract, 4242, name, **options))
            record = {**asdict(outcome), "holds": outcome.judged()}
        except Exception as error:
            record = {"op": contract.op, "case": name, "holds": False, "error": f"{type(error).__name__}: {error}"[:500]}
        records.add(record)
        failed += _report(record)
    for number, (config, tp, rows) in enumerate(ISOLATED):
        for outcome in isolation(config, tp, rows) if number % workers == worker else ():
            record = {**asdict(outcome), "holds": outcome.judged()}
            records.add(record)
            failed += _report(record)
    return failed


def _report(record: dict[str, Any]) -> int:
    if not record["holds"]:
        print("BAD", record["op"], record["case"], record.get("error"), record.get("broken"), record.get("errors"), flush=True)
    return int(not record["holds"])
