"""Which of the project's own kernels the audit looks at: every variant that the schedules can choose, or a sample of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_k3_decode.config import ModelConfig, Shard
    from kimi_k3_decode.device.launcher import KernelSpec
    from kimi_k3_decode.ops.contract import Contract

MAX_Q = 8
# A scope names (model, tensor-parallel degrees, row buckets, tokens a request).
FULL_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
SCOPES: dict[str, tuple[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]] = {
    "full": (("kimi-k3", (8, 16), FULL_ROWS, tuple(range(1, MAX_Q + 1))), ("nano-k3", (1, 2), FULL_ROWS, (1, 4, 8))),
    "deployed": (("kimi-k3", (8,), FULL_ROWS, (1, 4, 8)),),
    "ends": (("kimi-k3", (8,), (1,), (1,)), ("kimi-k3", (8,), (64,), (1,))),  # one variant an operation, fewest and most rows
    "ops": (("kimi-k3", (8,), (8,), (1,)),),  # one variant an operation
}
SAMPLES = ("ends", "ops")  # scopes that stop at one variant an operation and row


def variants(scope: str) -> Iterator[tuple[KernelSpec, Mapping[str, Any]]]:
    """Each distinct compiled variant of a scope once, with the model it belongs to and whether the plan launches it programmatically."""
    from kimi_k3_decode.config import K3, NANO, Shard
    from kimi_k3_decode.kernels import kernel_spec

    configs = {config.name: config for config in (K3, NANO)}
    seen: set[str] = set()
    for number, (model, degrees, buckets, tokens) in enumerate(SCOPES[scope]):
        config = configs[model]
        for tp in degrees:
            contracts: set[str] = set()
            for contract, pdl in _contracts(config, Shard(config=config, tp=tp, rank=0), buckets, tokens):
                identity = f"{contract.op} {sorted(contract.parameters.items(), key=str)}"
                sample = f"{number} {contract.op}"
                if identity in contracts or (scope in SAMPLES and sample in seen):
                    continue
                contracts.add(identity)
                spec = kernel_spec(config, contract)
                key = f"{config.name} {spec.id}"
                if key not in seen:
                    seen |= {key, sample}
                    yield spec, {"model": config.name, "pdl": pdl}


def _contracts(config: ModelConfig, shard: Shard, buckets: tuple[int, ...], tokens: tuple[int, ...]) -> Iterator[tuple[Contract, bool]]:
    """Contracts of one whole step, then of every other row count and q: a layer of each kind and both ends."""
    from kimi_k3_decode.launches import launch_graph, layer_plan
    from kimi_k3_decode.ops.registry import CONTRACTS

    rows = min(buckets)
    yield from ((launch.contract, launch.pdl) for launch in launch_graph(config, shard, rows, 1))
    kinds = {(config.is_moe(layer), config.is_kda(layer)): layer for layer in reversed(range(config.n_layers))}
    for q in tokens:
        for rows in sorted({bucket // q * q for bucket in buckets if bucket >= q}):
            for layer in sorted(kinds.values()):
                yield from ((launch.contract, launch.pdl) for launch in layer_plan(config, shard, layer, rows, q))
            yield CONTRACTS["embedding"](shard, rows=rows), False
            yield CONTRACTS["lm_head"](shard, rows=rows), True
            yield CONTRACTS["sample"](shard, rows=rows, top_k=1), True
