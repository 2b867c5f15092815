"""Every launch of the plan by name, and the function that gives its contract."""

from __future__ import annotations

from collections.abc import Callable

from kimi_k3_decode.ops.attn_res import contract as attn_res
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.dense import contract as dense
from kimi_k3_decode.ops.embedding import contract as embedding
from kimi_k3_decode.ops.experts import contract as experts
from kimi_k3_decode.ops.head import contract as head
from kimi_k3_decode.ops.in_proj import contract as in_proj
from kimi_k3_decode.ops.kda import contract as kda
from kimi_k3_decode.ops.mla import contract as mla
from kimi_k3_decode.ops.moe_front import contract as moe_front
from kimi_k3_decode.ops.moe_tail import contract as moe_tail
from kimi_k3_decode.ops.o_proj import contract as o_proj
from kimi_k3_decode.ops.route import contract as route
from kimi_k3_decode.ops.shared import contract as shared

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
