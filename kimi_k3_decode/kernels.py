"""Every kernel by launch name: `spec(config, contract)` of the launch's contract gives what to compile and how to bind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.device.launcher import KernelSpec
from kimi_k3_decode.ops.attn_res import launch as attn_res
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.dense import launch as dense
from kimi_k3_decode.ops.embedding import launch as embedding
from kimi_k3_decode.ops.experts import launch as experts
from kimi_k3_decode.ops.head import launch as head
from kimi_k3_decode.ops.in_proj import launch as in_proj
from kimi_k3_decode.ops.kda import launch as kda
from kimi_k3_decode.ops.mla import launch as mla
from kimi_k3_decode.ops.moe_front import launch as moe_front
from kimi_k3_decode.ops.moe_tail import launch as moe_tail
from kimi_k3_decode.ops.o_proj import launch as o_proj
from kimi_k3_decode.ops.route import launch as route
from kimi_k3_decode.ops.shared import launch as shared

SPECS: dict[str, Callable[..., KernelSpec]] = {
    "embedding": embedding.spec,
    "attn_res": attn_res.spec,
    "in_proj": in_proj.spec,
    "kda": kda.spec,
    "mla_query": mla.query,
    "mla_decode": mla.decode,
    "mla_merge": mla.merge,
    "mla_value": mla.value,
    "o_proj": o_proj.spec,
    "moe_front": moe_front.spec,
    "route": route.spec,
    "experts_up": experts.up,
    "experts_down": experts.down,
    "shared_up": shared.up,
    "shared_down": shared.down,
    "latent_reduce": moe_tail.latent_reduce,
    "moe_tail": moe_tail.spec,
    "dense_up": dense.up,
    "dense_down": dense.down,
    "lm_head": head.lm_head,
    "sample": head.sample,
}


def kernel_spec(config: ModelConfig, contract: Contract, **options: Any) -> KernelSpec:
    """The kernel that executes `contract`. Raises ValueError for shapes no kernel supports."""
    return SPECS[contract.op](config, contract, **options)
