"""Bytes and FLOPs of every launch from its operand contract, and the time no version can beat: the floor.

What must move through HBM in a decode step: each weight once (a routed expert only if some row chose it), the recurrent state read once a
request and written once a token, the cached context read once a request. Activations between launches are small enough to stay in L2 and
do not count; mailboxes move over NVLink. The floor of a launch is the largest of its HBM, NVLink and arithmetic times; the floor of a step
is the sum over its launches, except that launches on different streams may overlap, so it is also given as the sum of HBM bytes over the
HBM rate, which holds however launches overlap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kimi_k3_decode.config import ModelConfig, Shard
from kimi_k3_decode.ops.contract import DTYPE_BYTES, Contract, Operand, Role
from perf.hardware import Gpu

EXPERT_OPS = ("experts_up", "experts_down")


def distinct_experts(n_experts: int, top_k: int, rows: int) -> float:
    """Expected number of distinct experts when each of `rows` rows independently chooses `top_k` of `n_experts` uniformly.

    E [1 - (1 - k/E)^rows]: the probability that one expert is left out by every row, by linearity of expectation.
    """
    return n_experts * (1.0 - (1.0 - top_k / n_experts) ** rows)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one launch must move and compute on one rank. Bytes and floating-point operations."""

    op: str
    weight_bytes: float
    state_bytes: float  # recurrent state and cached context
    link_bytes: float  # sent to other ranks
    flops: float

    @property
    def hbm_bytes(self) -> float:
        return self.weight_bytes + self.state_bytes

    def floor_us(self, gpu: Gpu, hbm_bytes_per_s: float | None = None) -> float:
        """Shortest possible time on `gpu`; `hbm_bytes_per_s` replaces the datasheet's rate by one measured in the same run."""
        seconds = (
            self.hbm_bytes / (hbm_bytes_per_s or gpu.hbm_bytes_per_s),
            self.link_bytes / gpu.nvlink_bytes_per_s,
            self.flops / gpu.bf16_flops_per_s,
        )
        return 1e6 * max(seconds)

    def bound_by(self, gpu: Gpu) -> str:
        times = {
            "HBM": self.hbm_bytes / gpu.hbm_bytes_per_s,
            "NVLink": self.link_bytes / gpu.nvlink_bytes_per_s,
            "arithmetic": self.flops / gpu.bf16_flops_per_s,
        }
        return max(times, key=lambda name: times[name])


def _elements(operand: Operand) -> int:
    return (operand.bytes or 0) // DTYPE_BYTES[operand.dtype]


def _weight_traffic(contract: Contract, config: ModelConfig, rows: int, distinct: float | None) -> tuple[float, float]:
    """(bytes, flops) of the weights. Every weight with two axes or more is a matrix product over the rows; vectors cost no product."""
    if contract.op in EXPERT_OPS:
        used = distinct_experts(config.n_experts, config.n_experts_per_token, rows) if distinct is None else distinct
        codes = sum(_elements(o) for o in contract.of_role(Role.WEIGHT) if "scale" not in o.name)
        flops = 2.0 * rows * config.n_experts_per_token * 2 * codes / config.n_experts  # two codes a byte
        return contract.weight_bytes * used / config.n_experts, flops
    if contract.op == "embedding":
        return float(rows * config.hidden_size * 2), 0.0  # a gather reads one row of the table a token
    products = sum(_elements(o) for o in contract.of_role(Role.WEIGHT) if len(o.axes) > 1 and o.name != "conv_weight_CW")
    return float(contract.weight_bytes), 2.0 * rows * products


def _state_traffic(contract: Contract, shard: Shard, rows: int, q: int, context_tokens: int) -> tuple[float, float]:
    """(bytes, flops) of state: KDA reads a request's state once and writes it once a token; MLA reads the context once a request."""
    c, requests = shard.config, rows // q
    if contract.op == "kda":
        state_elements = shard.kda_heads * c.kda_head_dim**2
        window = 3 * shard.kda_dim * (c.conv_width - 1)
        moved = (requests + rows) * (state_elements * DTYPE_BYTES["float32"] + window * DTYPE_BYTES["bfloat16"])
        return float(moved), 7.0 * rows * state_elements  # decay, k^T S, rank-one update, q^T S
    if contract.op == "mla_decode":
        pages = contract["pages_STM"]
        moved = requests * context_tokens * c.mla_cache_dim * DTYPE_BYTES[pages.dtype]
        return float(moved), 2.0 * rows * shard.mla_heads * context_tokens * (c.mla_cache_dim + c.kv_lora_rank)
    if contract.op == "mla_query":
        return float(rows * c.mla_cache_dim * DTYPE_BYTES[contract["pages_STM"].dtype]), 0.0
    return 0.0, 0.0


def _link_bytes(contract: Contract, shard: Shard) -> float:
    """A published slot or column block goes to each of the other ranks; the local copy costs no link."""
    sent = 0.0
    for operand in contract.of_role(Role.MAILBOX):
        if operand.mailbox is not None and not operand.reads and operand.bytes:
            sent += operand.bytes / shard.tp * (shard.tp - 1)
    return sent


def traffic(contract: Contract, shard: Shard, *, rows: int, q: int = 1, context_tokens: int = 0, distinct: float | None = None) -> Traffic:
    """What one launch must move.

    Args:
        rows: token rows of the step (requests x q).
        context_tokens: cached tokens of each request.
        distinct: distinct experts the given routing uses; None takes the expectation under uniform routing.
    """
    weight_bytes, weight_flops = _weight_traffic(contract, shard.config, rows, distinct)
    state_bytes, state_flops = _state_traffic(contract, shard, rows, q, context_tokens)
    return Traffic(
        op=contract.op,
        weight_bytes=weight_bytes,
        state_bytes=state_bytes,
        link_bytes=_link_bytes(contract, shard),
        flops=weight_flops + state_flops,
    )


@dataclass(frozen=True, kw_only=True)
class StepFloor:
    """The floor of a whole step on one rank. Microseconds and bytes."""

    launches: tuple[Traffic, ...]
    serial_us: float  # sum of the launches' floors: nothing overlaps
    hbm_us: float  # all HBM bytes over the HBM rate: everything else overlaps

    @cached_property
    def hbm_bytes(self) -> float:
        return sum(launch.hbm_bytes for launch in self.launches)

    @cached_property
    def expert_bytes(self) -> float:
        return expert_bytes(self.launches)


def expert_bytes(launches: Iterable[Traffic]) -> float:
    """HBM bytes of the routed experts among `launches`."""
    return sum(launch.hbm_bytes for launch in launches if launch.op in EXPERT_OPS)


def step_floor(launches: Iterable[Traffic], gpu: Gpu, hbm_bytes_per_s: float | None = None) -> StepFloor:
    kept = tuple(launches)
    rate = hbm_bytes_per_s or gpu.hbm_bytes_per_s
    return StepFloor(
        launches=kept,
        serial_us=sum(launch.floor_us(gpu, hbm_bytes_per_s) for launch in kept),
        hbm_us=1e6 * sum(launch.hbm_bytes for launch in kept) / rate,
    )


def parameter_counts(config: ModelConfig) -> dict[str, Any]:
    """Parameters of the whole model by part, and what one token activates.

    Returns:
        total, active: parameters (the input embedding counts in total only: a token reads one row of it);
        bf16_bytes_per_step: bytes of all BF16 weights one step reads, i.e. without the routed experts and the embedding table.
    """
    c = config
    kda = c.hidden_size * (4 * c.kda_dim + c.kda_head_dim + c.kda_heads) + c.kda_dim * (c.kda_head_dim + c.hidden_size)
    mla = c.hidden_size * (c.q_lora_rank + c.mla_cache_dim + c.mla_heads * c.v_head_dim)
    mla += c.mla_heads * (
        c.q_lora_rank * c.qk_head_dim + c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim) + c.v_head_dim * c.hidden_size
    )
    expert = 3 * c.moe_intermediate_size * c.moe_latent_size
    moe_common = c.hidden_size * (c.n_experts + 2 * c.moe_latent_size + 3 * c.shared_intermediate_size)
    dense = 3 * c.dense_intermediate_size * c.hidden_size
    table = c.vocab_size * c.hidden_size
    n_moe = c.n_layers - c.n_dense_layers
    common = len(c.kda_layers) * kda + len(c.mla_layers) * mla + n_moe * moe_common + c.n_dense_layers * dense + table
    return {
        "total": common + table + n_moe * c.n_experts * expert,
        "active": common + n_moe * c.n_experts_per_token * expert,
        "bf16_bytes_per_step": 2 * common,
        "expert_parameters": expert,
    }
