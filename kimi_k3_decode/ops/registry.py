"""Every launch of the plan by name: the function that gives its contract, and its oracle."""

from __future__ import annotations

from collections.abc import Callable

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.ops.arithmetic import Arithmetic, Operands, Outputs
from kimi_k3_decode.ops.attn_res import contract as attn_res
from kimi_k3_decode.ops.attn_res import oracle as attn_res_oracle
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.dense import contract as dense
from kimi_k3_decode.ops.dense import oracle as dense_oracle
from kimi_k3_decode.ops.embedding import contract as embedding
from kimi_k3_decode.ops.embedding import oracle as embedding_oracle
from kimi_k3_decode.ops.experts import contract as experts
from kimi_k3_decode.ops.experts import oracle as experts_oracle
from kimi_k3_decode.ops.head import contract as head
from kimi_k3_decode.ops.head import oracle as head_oracle
from kimi_k3_decode.ops.in_proj import contract as in_proj
from kimi_k3_decode.ops.in_proj import oracle as in_proj_oracle
from kimi_k3_decode.ops.kda import contract as kda
from kimi_k3_decode.ops.kda import oracle as kda_oracle
from kimi_k3_decode.ops.mla import contract as mla
from kimi_k3_decode.ops.mla import oracle as mla_oracle
from kimi_k3_decode.ops.moe_front import contract as moe_front
from kimi_k3_decode.ops.moe_front import oracle as moe_front_oracle
from kimi_k3_decode.ops.moe_tail import contract as moe_tail
from kimi_k3_decode.ops.moe_tail import oracle as moe_tail_oracle
from kimi_k3_decode.ops.o_proj import contract as o_proj
from kimi_k3_decode.ops.o_proj import oracle as o_proj_oracle
from kimi_k3_decode.ops.route import contract as route
from kimi_k3_decode.ops.route import oracle as route_oracle
from kimi_k3_decode.ops.shared import contract as shared
from kimi_k3_decode.ops.shared import oracle as shared_oracle

CONTRACTS: dict[str, Callable[..., Contract]] = {
    "embedding": embedding.contract,
    "attn_res": attn_res.contract,
    "in_proj": in_proj.contract,
    "kda": kda.contract,
    "mla_query": mla.query,
    "mla_decode": mla.decode,
    "mla_merge": mla.merge,
    "mla_value": mla.value,
    "o_proj": o_proj.contract,
    "moe_front": moe_front.contract,
    "route": route.contract,
    "experts_up": experts.up,
    "experts_down": experts.down,
    "shared_up": shared.up,
    "shared_down": shared.down,
    "latent_reduce": moe_tail.latent_reduce,
    "moe_tail": moe_tail.contract,
    "dense_up": dense.up,
    "dense_down": dense.down,
    "lm_head": head.lm_head,
    "sample": head.sample,
}

# (config, contract, operands by name, arithmetic) -> outputs by operand name.
# A mailbox output is this rank's part: its slot or its columns.
Oracle = Callable[[ModelConfig, Contract, Operands, Arithmetic], Outputs]

ORACLES: dict[str, Oracle] = {
    "embedding": embedding_oracle.oracle,
    "attn_res": attn_res_oracle.oracle,
    "in_proj": in_proj_oracle.oracle,
    "kda": kda_oracle.oracle,
    "mla_query": mla_oracle.query,
    "mla_decode": mla_oracle.decode,
    "mla_merge": mla_oracle.merge,
    "mla_value": mla_oracle.value,
    "o_proj": o_proj_oracle.oracle,
    "moe_front": moe_front_oracle.oracle,
    "route": route_oracle.oracle,
    "experts_up": experts_oracle.up,
    "experts_down": experts_oracle.down,
    "shared_up": shared_oracle.up,
    "shared_down": shared_oracle.down,
    "latent_reduce": moe_tail_oracle.latent_reduce,
    "moe_tail": moe_tail_oracle.oracle,
    "dense_up": dense_oracle.up,
    "dense_down": dense_oracle.down,
    "lm_head": head_oracle.lm_head,
    "sample": head_oracle.sample,
}
