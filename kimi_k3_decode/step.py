"""Contract execution: the specialised step's plan, launch by launch, through each operation's oracle, on any machine.

`SpecializedPath` has the stock path's interface and caches. It proves the plan, the caches, the mailbox protocol and the rounding
points, not the kernels. Virtual ranks run as separate programs with their own buffers that meet only in mailboxes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kimi_k3_decode.cache import Caches, KdaLayerCache, StepBatch, StepOutput
from kimi_k3_decode.comm import Mailbox
from kimi_k3_decode.config import Shard, Unsupported
from kimi_k3_decode.launches import Launch, launch_graph, layer_plan, plan_digest
from kimi_k3_decode.operand_weights import Tensors, bind_weights, widen
from kimi_k3_decode.ops.arithmetic import CONTRACT, EXACT, Arithmetic
from kimi_k3_decode.ops.contract import Access, Contract, ContractError, Role
from kimi_k3_decode.ops.operands import BF16
from kimi_k3_decode.ops.registry import ORACLES, Oracle
from kimi_k3_decode.plan import padded_requests
from kimi_k3_decode.weights import ModelWeights

__all__ = ["Launch", "SpecializedPath", "launch_graph", "layer_plan", "plan_digest"]

ARITHMETIC = {
    torch.bfloat16: CONTRACT,
    torch.float32: Arithmetic(dtype=torch.float32, rounds=False),
    torch.float64: EXACT,
}


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A launch with everything resolved that does not change from step to step; one a rank and graph."""

    launch: Launch
    oracle: Oracle
    weights: Tensors  # by operand name, unpacked experts included
    inputs: tuple[tuple[str, tuple[str, ...]], ...]  # (operand, buffers); several buffers are stacked
    outputs: tuple[tuple[str, str], ...]
    consumes: tuple[tuple[str, Mailbox, int], ...]  # (operand, mailbox, parity)
    publishes: tuple[tuple[str, Mailbox, int], ...]


@dataclass
class _Rank:
    """One virtual rank: its weights and buffers, and how far it is in the plan."""

    number: int
    weights: Tensors
    buffers: Tensors = field(default_factory=dict)
    done: int = 0


class SpecializedPath:
    """The specialised decode path by contract execution.

    dtype: bfloat16 (rounding points and split sums of the kernels), float32 or float64 (none).
    tp: virtual ranks. order_seed: interleave the ranks at random instead of in turn; results must not change.
    oracles: replacements by op name, weights_change: `f(rank, buffers) -> buffers`; both are how a planted fault is built.
    checked: compare every shape with its contract and fill the padding rows of every output with NaN.
    """

    name = "specialized"

    def __init__(
        self,
        weights: ModelWeights,
        dtype: torch.dtype = torch.bfloat16,
        tp: int = 1,
        *,
        order_seed: int | None = None,
        oracles: Mapping[str, Oracle] | None = None,
        weights_change: Callable[[int, Tensors], Tensors] | None = None,
        checked: bool = False,
        top_k: int = 1,
    ) -> None:
        if dtype not in ARITHMETIC:
            raise Unsupported("SpecializedPath", (f"dtype: got {dtype}, needs one of {[str(d) for d in ARITHMETIC]}",))
        self.config = weights.config
        self.dtype = dtype
        self.tp = tp
        self.arithmetic = ARITHMETIC[dtype]
        self.oracles: dict[str, Oracle] = {**ORACLES, **(oracles or {})}
        self.checked = checked
        self.top_k = top_k
        self.executed: list[str] = []  # launch ids of the last step, each once a rank
        self.top_ids_TZ: torch.Tensor | None = None  # of the last step
        self._order = None if order_seed is None else random.Random(order_seed)
        change = weights_change or (lambda _, bound: bound)
        self._ranks = [_Rank(r, widen(change(r, bind_weights(weights, tp, r)), self.arithmetic.dtype)) for r in range(tp)]
        self._mailboxes: dict[tuple[str, int], Mailbox] = {}
        self._graphs: dict[tuple[int, int, int, frozenset[int]], list[list[_Prepared]]] = {}
        self._steps: dict[int, int] = {}  # by rows: mailboxes, and so parities, belong to a row count

    # ---- the plan ----
    def _graphs_of(self, rows: int, q: int, step: int, forced: frozenset[int]) -> list[list[_Prepared]]:
        """The prepared launches of every rank for `rows` token rows."""
        key = (rows, q, step % 2, forced)
        if key not in self._graphs:
            shards = [Shard(config=self.config, tp=self.tp, rank=r) for r in range(self.tp)]
            made = [launch_graph(self.config, s, rows, q, step=step % 2, forced=forced, top_k=self.top_k) for s in shards]
            self._graphs[key] = [[self._prepare(x, rank) for x in graph] for graph, rank in zip(made, self._ranks, strict=True)]
        return self._graphs[key]

    # ---- one step ----
    @torch.inference_mode()
    def step(self, batch: StepBatch, caches: Caches, *, routing: dict[int, torch.Tensor] | None = None, taps: bool = False) -> StepOutput:
        """Run one decode or verify step and write the caches; the same meaning and shapes as the stock path's `step`.

        routing: forced expert ids [T, top_k] by layer; absent layers choose freely. Raises Unsupported above 64 token rows,
        ContractError when a protocol breaks.
        """
        requests, q = batch.tokens_BQ.shape
        padded = _pad(batch, padded_requests(requests, q) - requests)
        rows, live = padded.rows, batch.rows
        graphs = self._graphs_of(rows, q, self._steps.get(rows, 0), frozenset(routing or ()))
        self._start(padded, live, caches, routing)
        tapped: dict[int, torch.Tensor] = {}
        chosen: dict[int, torch.Tensor] = {}
        wanted = (
            _tap_launches([ready.launch for ready in graphs[0]], self.config.draft.target_layer_ids)
            if taps and self.config.draft is not None
            else {}
        )

        def watch(launch: Launch, buffers: Tensors) -> None:
            if launch.id in wanted:
                layer, buffer = wanted[launch.id]
                tapped[layer] = buffers[buffer][:live]
            elif launch.op == "route" and launch.layer is not None:
                chosen[launch.layer] = buffers["ids"][:live].long()

        try:
            self._run(graphs, live, watch)
        except BaseException:
            # Half a step leaves messages behind; the next step starts from armed mailboxes. What it wrote to the caches stays written.
            self._mailboxes, self._graphs, self._steps = {}, {}, {}
            raise
        self._steps[rows] = self._steps.get(rows, 0) + 1
        first = self._ranks[0].buffers
        self.top_ids_TZ = first["top_ids"][:live]
        logits = first["logits"][:live].to(torch.float64 if self.dtype == torch.float64 else torch.float32)
        return StepOutput(
            logits_BQV=logits.view(requests, q, -1),
            taps_IBQD=self._stack_taps(tapped, requests, q) if taps else None,
            routing=chosen,
        )

    def _start(self, padded: StepBatch, live: int, caches: Caches, routing: dict[int, torch.Tensor] | None) -> None:
        """Every rank at the first launch, holding tables and views of the caches and nothing of the step before."""
        self.executed = []
        for rank in self._ranks:
            rank.done = 0
            rank.buffers = {**_tables(padded, live, routing), **self._states(caches, rank.number)}

    def _stack_taps(self, tapped: dict[int, torch.Tensor], requests: int, q: int) -> torch.Tensor | None:
        if self.config.draft is None:
            return None
        rows = torch.stack([tapped[layer] for layer in self.config.draft.target_layer_ids])
        return rows.view(rows.shape[0], requests, q, -1).to(self.dtype)

    def _states(self, caches: Caches, rank: int) -> Tensors:
        """This rank's views of the caches. Its KDA heads are its own; the MLA pages are replicated, so virtual ranks share one copy."""
        shard = Shard(config=self.config, tp=self.tp, rank=rank)
        heads, width, found = shard.kda_heads, shard.kda_dim, {}
        for layer, cache in enumerate(caches.layers):
            tag = f"state.L{layer:02d}"
            if isinstance(cache, KdaLayerCache):
                conv = cache.conv_SWC.unflatten(2, (3, self.config.kda_dim))
                found[f"{tag}.conv"] = conv[..., rank * width : (rank + 1) * width]
                found[f"{tag}.recurrent"] = cache.state_SHVK[:, rank * heads : (rank + 1) * heads]
            else:
                found[f"{tag}.pages"] = cache.pages_PTC
                found[f"{tag}.scale"] = torch.tensor(cache.scale)
        return found

    # ---- execution ----
    def _run(self, graphs: list[list[_Prepared]], live: int, watch: Callable[[Launch, Tensors], None]) -> None:
        """Advance every rank's program until all are done; a rank whose next launch polls an incomplete mailbox is passed over."""
        pending = list(self._ranks)
        while pending:
            turn = list(pending)
            if self._order is not None:
                self._order.shuffle(turn)
            moved = False
            for rank in turn:
                ready = graphs[rank.number][rank.done]
                # One rank alone never waits for a peer: its own messages are complete once published.
                if self.tp > 1 and not all(box.ready(rank.number, parity) for _, box, parity in ready.consumes):
                    continue
                self._execute(ready, rank, live)
                if rank.number == 0:
                    watch(ready.launch, rank.buffers)
                rank.done += 1
                moved = True
                if self._order is not None:
                    break
            pending = [rank for rank in pending if rank.done < len(graphs[rank.number])]
            if not moved:
                waiting = [f"rank {r.number} waits in {graphs[r.number][r.done].launch.id}" for r in pending]
                raise ContractError("step", [*waiting, "no rank can move"])

    def _prepare(self, launch: Launch, rank: _Rank) -> _Prepared:
        found: dict[str, list[Any]] = {"inputs": [], "outputs": [], "consumes": [], "publishes": []}
        weights: Tensors = {}
        for operand in launch.contract.operands:
            bound = launch.bindings[operand.name]
            if operand.role is Role.WEIGHT:
                weights[operand.name] = rank.weights[bound[0]]
            elif operand.role is Role.MAILBOX:
                side = "publishes" if operand.access is Access.WRITE else "consumes"
                found[side].append((operand.name, *self._mailbox(launch, operand.name)))
            elif operand.role is Role.OUTPUT:
                found["outputs"].append((operand.name, bound[0]))
            elif operand.role is not Role.SCRATCH:
                found["inputs"].append((operand.name, bound))
        if launch.op in ("experts_up", "experts_down"):
            weights.update(_unpacked(launch.id, rank.weights))
        if launch.contract.parameters.get("cache_dtype", BF16) != BF16:
            found["inputs"].append(("cache_scale", (launch.bindings["pages_STM"][0].replace(".pages", ".scale"),)))
        lists = {name: tuple(entries) for name, entries in found.items()}
        return _Prepared(launch=launch, oracle=self.oracles[launch.op], weights=weights, **lists)

    def _mailbox(self, launch: Launch, operand: str) -> tuple[Mailbox, int]:
        """The mailbox behind an operand and its parity; one a name and prepared row count."""
        name, parity = launch.bindings[operand][0].rsplit(".", 1)
        key = (name, launch.contract.parameters["rows"])
        if key not in self._mailboxes:
            dtype = None if self.arithmetic.rounds else self.arithmetic.dtype
            self._mailboxes[key] = Mailbox(name, launch.contract[operand], self.tp, dtype)
        return self._mailboxes[key], int(parity)

    def _execute(self, ready: _Prepared, rank: _Rank, live: int) -> None:
        operands = dict(ready.weights)
        for name, bound in ready.inputs:
            operands[name] = torch.stack([rank.buffers[b] for b in bound]) if name == "blocks_NTD" else rank.buffers[bound[0]]
        for name, box, parity in ready.consumes:
            operands[name] = box.consume(rank.number, parity)
        contract = ready.launch.contract
        found = ready.oracle(self.config, contract, operands, self.arithmetic)
        if self.checked:
            found = _check_shapes(contract, operands, found, live)
        for name, buffer in ready.outputs:
            rank.buffers[buffer] = found[name]
        for name, box, parity in ready.publishes:
            box.publish(rank.number, parity, found[name])
        self.executed.append(ready.launch.id)


def _unpacked(launch_id: str, weights: Tensors) -> Tensors:
    return {name: weights[f"{launch_id}.{name}"] for name in ("w1", "w2", "w3") if f"{launch_id}.{name}" in weights}


def _pad(batch: StepBatch, extra: int) -> StepBatch:
    """`extra` padding requests: token 0, nothing cached, null slots and pages."""
    if extra <= 0:
        return batch

    def longer(x: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat((x, x.new_full((extra, *x.shape[1:]), value)))

    return replace(
        batch,
        tokens_BQ=longer(batch.tokens_BQ, 0),
        lengths_B=longer(batch.lengths_B, 0),
        block_table_BN=longer(batch.block_table_BN, 0),
        slots_BQ=longer(batch.slots_BQ, 0),
        accepted_B=longer(batch.accepted_B, 1),
    )


def _tables(batch: StepBatch, live: int, routing: dict[int, torch.Tensor] | None) -> Tensors:
    """Host metadata under the plan's buffer names. Forced expert ids are padded with expert 0; padding rows reach no list."""
    found = {
        "table.tokens": batch.tokens_BQ.flatten().to(torch.int32),
        "table.lengths": batch.lengths_B,
        "table.block_table": batch.block_table_BN,
        "table.slots": batch.slots_BQ,
        "table.accepted": batch.accepted_B,
        "table.live_rows": torch.tensor([live], dtype=torch.int32),
    }
    for layer, ids_TZ in (routing or {}).items():
        padding = ids_TZ.new_zeros(batch.rows - ids_TZ.shape[0], ids_TZ.shape[1])
        found[f"table.L{layer:02d}.forced"] = torch.cat((ids_TZ, padding)).to(torch.int32)
    return found


def _tap_launches(graph: list[Launch], layers: tuple[int, ...]) -> dict[str, tuple[int, str]]:
    """Launch id -> (layer, buffer): the tap after layer i is the prefix that the next boundary updates (or saves as a block)."""
    wanted = {}
    boundaries = {launch.layer: launch for launch in graph if launch.id.endswith(".attn_res") or launch.id == "final_res"}
    for layer in layers:
        launch = boundaries.get(layer + 1, boundaries[None])
        operand = "block_out_TD" if "block_out_TD" in launch.contract else "prefix_out_TD"
        wanted[launch.id] = (layer, launch.bindings[operand][0])
    return wanted


def _check_shapes(contract: Contract, operands: Tensors, found: Tensors, live: int) -> Tensors:
    """Raises ContractError for every shape that differs from the contract; returns `found` with NaN in the padding rows."""
    reasons = []
    for operand in contract.operands:
        tensor = operands.get(operand.name, found.get(operand.name))
        if tensor is None:
            if operand.role is not Role.SCRATCH:
                reasons.append(f"{operand.name}: got nothing, needs a tensor")
            continue
        need = operand.shape
        if operand.role is Role.MAILBOX and operand.access is Access.WRITE and operand.mailbox is not None:
            # A publisher hands over its own part only.
            slot = operand.mailbox.layout == "slot"
            need = need[1:] if slot else (*need[:-1], (need[-1] or 0) // contract.parameters["tp"])
        if len(need) != tensor.dim() or any(n is not None and n != g for n, g in zip(need, tensor.shape, strict=True)):
            reasons.append(f"{operand.name}.shape: got {list(tensor.shape)}, needs {list(need)}")
    if reasons:
        raise ContractError(f"Contract {contract.op}", reasons)
    rows = contract.parameters["rows"]
    poisoned = dict(found)
    for operand in contract.operands:
        tensor = found.get(operand.name)
        if tensor is None or live == rows or not tensor.is_floating_point() or (operand.name == "out_TC" and contract.op == "kda"):
            continue
        letters = [axis.letter for axis in operand.axes if not (operand.role is Role.MAILBOX and axis.letter == "R")]
        if "T" in letters and operand.role is not Role.STATE:
            changed = tensor.clone()
            changed.movedim(letters.index("T"), 0)[live:] = torch.nan
            poisoned[operand.name] = changed
    return poisoned
