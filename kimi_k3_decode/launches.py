"""The plan of a specialised step: every launch in order, with its stream, its edges, and the buffer behind each operand.

A KDA + MoE layer is 13 launches; an MLA layer has four in place of `kda`; the dense first layer has two in place of the MoE's eight.
Everything here is data and the same on every rank: the executor, the CUDA graph and the memory-ordering audit read the same list.

Streams: "main" carries the chain, "side" the shared experts. On one stream a launch follows the launch before it: with `pdl` by a
programmatic edge (it may start early and must wait inside), else by a full edge. `waits_on` are full edges from other streams.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kimi_k3_decode.config import ModelConfig, Shard
from kimi_k3_decode.ops.contract import Access, Contract, Role
from kimi_k3_decode.ops.mla.schedule import CONTEXT_SPLITS
from kimi_k3_decode.ops.operands import BF16
from kimi_k3_decode.ops.registry import CONTRACTS

MAIN, SIDE = "main", "side"
# Mailboxes by name -> how many messages a step sends through one: all layers, or the MoE layers, or one.
PER_LAYER = ("attn_out", "mlp_out")
PER_MOE_LAYER = ("router_logits", "router_latent", "expert_latent")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel launch. `bindings` maps each operand to its buffers: one, or for `blocks_NTD` one a saved block."""

    id: str
    op: str
    contract: Contract
    bindings: Mapping[str, tuple[str, ...]]
    stream: str = MAIN
    pdl: bool = True
    waits_on: tuple[str, ...] = ()
    layer: int | None = None

    @property
    def reads(self) -> frozenset[str]:
        """Buffers this launch loads from. A consumed mailbox counts with the parity it polls."""
        return frozenset(name for o in self.contract.operands if o.reads for name in self.bindings[o.name])

    @property
    def writes(self) -> frozenset[str]:
        """Buffers this launch stores to. A consumer of a mailbox re-arms the other parity, so that is what it writes."""
        names: set[str] = set()
        for operand in self.contract.operands:
            if not operand.writes:
                continue
            bound = self.bindings[operand.name]
            consumes = operand.role is Role.MAILBOX and operand.access is Access.READ_WRITE
            names.update(other_parity(name) if consumes else name for name in bound)
        return frozenset(names)

    def role_of(self, buffer: str) -> Role:
        """The role under which this launch sees `buffer`."""
        return next(self.contract[name].role for name, bound in self.bindings.items() if buffer in bound)


def other_parity(mailbox: str) -> str:
    """`mailbox.attn_out.0` -> `mailbox.attn_out.1` and back."""
    base, parity = mailbox.rsplit(".", 1)
    return f"{base}.{1 - int(parity)}"


@dataclass(frozen=True, kw_only=True)
class _Builder:
    """Names buffers and makes launches for one rank, row count and step."""

    config: ModelConfig
    shard: Shard
    rows: int
    q: int
    step: int
    forced: frozenset[int]
    cache_dtype: str

    def mailbox(self, name: str, message: int) -> str:
        """The buffer of message number `message` of this step. Parity runs on over steps, so an odd count alternates graphs."""
        per_step = {**dict.fromkeys(PER_LAYER, self.config.n_layers), **dict.fromkeys(PER_MOE_LAYER, self._moe_layers)}.get(name, 1)
        return f"mailbox.{name}.{(self.step * per_step + message) % 2}"

    @property
    def _moe_layers(self) -> int:
        return self.config.n_layers - self.config.n_dense_layers

    def launch(
        self,
        launch_id: str,
        op: str,
        bound: Mapping[str, str | tuple[str, ...]],
        layer: int | None = None,
        *,
        stream: str = MAIN,
        pdl: bool = True,
        waits_on: tuple[str, ...] = (),
        **parameters: object,
    ) -> Launch:
        """`bound` names the buffers of all operands but weights and scratch, which belong to the launch itself."""
        contract = CONTRACTS[op](self.shard, rows=self.rows, **parameters)
        bindings: dict[str, tuple[str, ...]] = {}
        for operand in contract.operands:
            if operand.role in (Role.WEIGHT, Role.SCRATCH):
                bindings[operand.name] = (f"{launch_id}.{operand.name}",)
            else:
                names = bound[operand.name]
                bindings[operand.name] = (names,) if isinstance(names, str) else tuple(names)
        return Launch(id=launch_id, op=op, contract=contract, bindings=bindings, stream=stream, pdl=pdl, waits_on=waits_on, layer=layer)

    # ---- boundaries: number 2 * layer before attention, 2 * layer + 1 before the MLP, 2 * n_layers at the end ----
    def boundary(self, number: int) -> Launch:
        layer, before_mlp = divmod(number, 2)
        final = layer == self.config.n_layers
        writes_block = not final and not before_mlp and self.config.writes_block(layer)
        n_blocks = (
            self.config.n_blocks
            if final
            else self.config.n_blocks_before_mlp(layer)
            if before_mlp
            else self.config.n_blocks_before_attention(layer)
        )
        first = number == 0
        writer = "o_proj" if before_mlp else "moe_tail" if self.config.is_moe(layer - 1) else "dense_down"
        bound: dict[str, str | tuple[str, ...]] = {
            "prefix_TD": f"prefix.{(number - 1) % 2}",
            "prefix_out_TD": f"prefix.{number % 2}",
            "blocks_NTD": tuple(f"block.{n}" for n in range(n_blocks)),
            "block_out_TD": f"block.{n_blocks}",
            "x_TD": "x_mlp" if before_mlp else "x_attn",
        }
        if not first:
            bound["delta_RTD"] = self.mailbox("attn_out", layer) if before_mlp else self.mailbox("mlp_out", layer - 1)
        name = "final_res" if final else f"L{layer:02d}.{'mlp_res' if before_mlp else 'attn_res'}"
        return self.launch(
            name,
            "attn_res",
            bound,
            None if final else layer,
            n_blocks=n_blocks,
            delta="none" if first else "mailbox",
            restart=bool(before_mlp) and self.config.writes_block(layer),
            writes_block=writes_block,
            final=final,
            writer="" if first else writer,
        )

    def attention(self, layer: int) -> list[Launch]:
        tag, kind = f"L{layer:02d}", "kda" if self.config.is_kda(layer) else "mla"
        launches = [self.launch(f"{tag}.in_proj", "in_proj", {"x_TD": "x_attn", "proj_TP": "proj"}, layer, attention=kind)]
        launches += self._kda(tag, layer) if kind == "kda" else self._mla(tag, layer)
        bound = {"a_TC": "attn_out", "delta_RTD": self.mailbox("attn_out", layer)}
        return [*launches, self.launch(f"{tag}.o_proj", "o_proj", bound, layer, attention=kind)]

    def _kda(self, tag: str, layer: int) -> list[Launch]:
        bound = {
            "proj_TP": "proj", "slots_BQ": "table.slots", "accepted_B": "table.accepted",
            "conv_SW3C": f"state.{tag}.conv", "state_SHVK": f"state.{tag}.recurrent", "out_TC": "attn_out",
        }  # fmt: skip
        return [self.launch(f"{tag}.kda", "kda", bound, layer, q=self.q)]

    def _mla(self, tag: str, layer: int) -> list[Launch]:
        splits = CONTEXT_SPLITS.at(self.rows)
        tables = {"lengths_B": "table.lengths", "block_table_BN": "table.block_table", "pages_STM": f"state.{tag}.pages"}
        partials = {"partial_XTHL": "mla_partial", "lse_XTH": "mla_lse"}
        cache: dict[str, Any] = {"cache_dtype": self.cache_dtype}
        return [
            self.launch(f"{tag}.mla_query", "mla_query", {"proj_TP": "proj", "q_THM": "mla_q", **tables}, layer, q=self.q, **cache),
            self.launch(
                f"{tag}.mla_decode", "mla_decode", {"q_THM": "mla_q", **tables, **partials}, layer, q=self.q, splits=splits, **cache
            ),
            self.launch(f"{tag}.mla_merge", "mla_merge", {**partials, "latent_THL": "mla_latent"}, layer, q=self.q, splits=splits),
            self.launch(
                f"{tag}.mla_value", "mla_value", {"latent_THL": "mla_latent", "proj_TP": "proj", "out_TC": "attn_out"}, layer, q=self.q
            ),
        ]

    def dense(self, layer: int) -> list[Launch]:
        tag = f"L{layer:02d}"
        return [
            self.launch(f"{tag}.dense_up", "dense_up", {"x_TD": "x_mlp", "hidden_TI": "dense_hidden"}, layer),
            self.launch(
                f"{tag}.dense_down", "dense_down", {"hidden_TI": "dense_hidden", "delta_RTD": self.mailbox("mlp_out", layer)}, layer
            ),
        ]

    def moe(self, layer: int) -> list[Launch]:
        tag, message = f"L{layer:02d}", layer - self.config.n_dense_layers
        front = {"logits_TE": self.mailbox("router_logits", message), "latent_box_TL": self.mailbox("router_latent", message)}
        lists = {"offsets_E": "offsets", "pairs_N": "pairs"}
        chosen = {"ids_TZ": "ids", "weights_TZ": "weights"}
        partial = {"latent_RTL": self.mailbox("expert_latent", message)}
        tables = {"live_rows_N": "table.live_rows", **({"forced_TZ": f"table.{tag}.forced"} if layer in self.forced else {})}
        routed = {**front, **tables, **lists, **chosen, "latent_TL": "latent"}
        up = {"latent_TL": "latent", "ids_TZ": "ids", **lists, "hidden_TZI": "expert_hidden"}
        down = {"hidden_TZI": "expert_hidden", **lists, **chosen, **partial}
        tail = {"latent_normed_TL": "latent_normed", "shared_TD": "shared", "delta_RTD": self.mailbox("mlp_out", layer)}
        return [
            self.launch(f"{tag}.moe_front", "moe_front", {"x_TD": "x_mlp", **front}, layer),
            self.launch(f"{tag}.route", "route", routed, layer, forced=layer in self.forced),
            self.launch(f"{tag}.experts_up", "experts_up", up, layer),
            self.launch(f"{tag}.experts_down", "experts_down", down, layer),
            # Joining streams takes a full edge, so neither end of the side stream's detour is a programmatic launch. The join is one launch
            # before the reader of `shared`, because that one has weights to fetch ahead and the small reduction has not.
            self.launch(
                f"{tag}.shared_up", "shared_up", {"x_TD": "x_mlp", "hidden_TI": "shared_hidden"}, layer,
                stream=SIDE, pdl=False, waits_on=(f"{tag}.mlp_res",),
            ),
            self.launch(f"{tag}.shared_down", "shared_down", {"hidden_TI": "shared_hidden", "shared_TD": "shared"}, layer, stream=SIDE),
            self.launch(
                f"{tag}.latent_reduce", "latent_reduce", {**partial, "latent_normed_TL": "latent_normed"}, layer,
                pdl=False, waits_on=(f"{tag}.shared_down",),
            ),
            self.launch(f"{tag}.moe_tail", "moe_tail", tail, layer),
        ]  # fmt: skip


def _builder(config: ModelConfig, shard: Shard | None, rows: int, q: int, step: int, forced: frozenset[int], cache_dtype: str) -> _Builder:
    return _Builder(config=config, shard=shard or Shard(config=config), rows=rows, q=q, step=step, forced=forced, cache_dtype=cache_dtype)


def layer_plan(
    config: ModelConfig,
    shard: Shard | None,
    layer: int,
    rows: int,
    q: int = 1,
    *,
    step: int = 0,
    forced: frozenset[int] = frozenset(),
    cache_dtype: str = BF16,
) -> tuple[Launch, ...]:
    """Launches of one layer: 13 for KDA + MoE, 16 for MLA + MoE, 7 for KDA + dense.

    `step` fixes mailbox parities; `forced` names the layers whose experts are given.
    """
    build = _builder(config, shard, rows, q, step, forced, cache_dtype)
    mlp = build.moe(layer) if config.is_moe(layer) else build.dense(layer)
    return (build.boundary(2 * layer), *build.attention(layer), build.boundary(2 * layer + 1), *mlp)


def launch_graph(
    config: ModelConfig,
    shard: Shard | None,
    rows: int,
    q: int = 1,
    *,
    step: int = 0,
    forced: frozenset[int] = frozenset(),
    cache_dtype: str = BF16,
    top_k: int = 1,
) -> list[Launch]:
    """Every launch of a whole step in issue order: embedding, all layers, final residual and norm, LM head, sample."""
    build = _builder(config, shard, rows, q, step, forced, cache_dtype)
    # The first launch takes a full edge: what the host and the step before wrote (tables, states) is then complete for the whole graph.
    launches = [build.launch("embedding", "embedding", {"tokens_T": "table.tokens", "prefix_TD": "prefix.1"}, pdl=False)]
    for layer in range(config.n_layers):
        launches += layer_plan(config, shard, layer, rows, q, step=step, forced=forced, cache_dtype=cache_dtype)
    logits = build.mailbox("logits", 0)
    launches.append(build.boundary(2 * config.n_layers))
    launches.append(build.launch("lm_head", "lm_head", {"x_TD": "x_attn", "logits_box_TV": logits}))
    bound = {"logits_box_TV": logits, "logits_TV": "logits", "top_ids_TZ": "top_ids", "top_logits_TZ": "top_logits"}
    launches.append(build.launch("sample", "sample", bound, top_k=top_k))
    return launches


def plan_digest(launches: list[Launch]) -> str:
    """SHA-256 (hex) of a plan, equal on every rank: the rank number itself is left out of each contract's parameters."""
    rows = []
    for launch in launches:
        contract = launch.contract.to_json()
        contract["parameters"].pop("rank", None)
        rows.append([launch.id, launch.op, contract, dict(launch.bindings), launch.stream, launch.pdl, launch.waits_on])
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
