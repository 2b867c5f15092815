"""The floor against numbers known from elsewhere: published totals, hand-computed bytes, closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from kimi_k3_decode.config import K3, NANO, Shard, Unsupported
from kimi_k3_decode.ops.registry import CONTRACTS
from perf.hardware import GPUS, gpu
from perf.roofline import distinct_experts, parameter_counts, step_floor, traffic


def test_published_totals() -> None:
    """2.78 T parameters, 104 B active, 111 GB of BF16 weights a step (published facts of Kimi K3)."""
    counts = parameter_counts(K3)
    assert round(counts["total"] / 1e12, 2) == 2.78
    assert round(counts["active"] / 1e9) == 104
    assert round(counts["bf16_bytes_per_step"] / 1e9) == 111


def test_distinct_experts_equals_simulation() -> None:
    rng = np.random.default_rng(0)
    for rows in (1, 7, 64):
        seen = [len({int(e) for _ in range(rows) for e in rng.choice(NANO.n_experts, 4, replace=False)}) for _ in range(400)]
        assert distinct_experts(NANO.n_experts, 4, rows) == pytest.approx(np.mean(seen), abs=4 * np.std(seen) / 20 + 1e-2)


def test_in_proj_bytes_by_hand() -> None:
    shard = Shard(config=K3, tp=16)
    got = traffic(CONTRACTS["in_proj"](shard, rows=8, attention="kda"), shard, rows=8)
    assert got.weight_bytes == 3216 * 7168 * 2
    assert got.flops == 2 * 8 * 3216 * 7168
    assert got.floor_us(GPUS["H200"]) == pytest.approx(3216 * 7168 * 2 / 4.8e12 * 1e6)
    assert got.bound_by(GPUS["H200"]) == "HBM"


def test_experts_count_only_what_the_routing_uses() -> None:
    shard = Shard(config=K3, tp=8)
    contract = CONTRACTS["experts_up"](shard, rows=1)
    got = traffic(contract, shard, rows=1)
    one_expert_bytes = 2 * 384 * 3584 * (0.5 + 1 / 32)
    assert got.weight_bytes == pytest.approx(16 * one_expert_bytes)
    assert got.flops == pytest.approx(2 * 16 * 2 * 384 * 3584)
    assert traffic(contract, shard, rows=1, distinct=896).weight_bytes == pytest.approx(896 * one_expert_bytes)


def test_kda_state_and_mla_context_by_hand() -> None:
    shard = Shard(config=K3, tp=8)
    kda = traffic(CONTRACTS["kda"](shard, rows=16, q=8), shard, rows=16, q=8)
    assert kda.state_bytes == (2 + 16) * (12 * 128 * 128 * 4 + 3 * 1536 * 3 * 2)
    mla = traffic(CONTRACTS["mla_decode"](shard, rows=4), shard, rows=4, context_tokens=1000)
    assert mla.state_bytes == 4 * 1000 * 576 * 2
    assert mla.flops == 2 * 4 * 12 * 1000 * (576 + 512)


def test_mailbox_bytes_leave_for_the_other_ranks_only() -> None:
    shard = Shard(config=K3, tp=8)
    got = traffic(CONTRACTS["o_proj"](shard, rows=2, attention="kda"), shard, rows=2)
    assert got.link_bytes == 7 * 2 * 7168 * 4
    alone = Shard(config=NANO)
    assert traffic(CONTRACTS["o_proj"](alone, rows=2, attention="kda"), alone, rows=2).link_bytes == 0


def test_step_floor_adds_up_and_uses_a_measured_rate() -> None:
    shard = Shard(config=K3, tp=8)
    parts = [traffic(CONTRACTS[op](shard, rows=1), shard, rows=1) for op in ("experts_up", "experts_down")]
    floor = step_floor(parts, GPUS["H200"])
    assert floor.hbm_us == pytest.approx(floor.hbm_bytes / 4.8e12 * 1e6)
    assert step_floor(parts, GPUS["H200"], hbm_bytes_per_s=2.4e12).hbm_us == pytest.approx(2 * floor.hbm_us)


def test_an_unknown_gpu_lists_the_known_ones() -> None:
    with pytest.raises(Unsupported, match=r"'H900'.*H200"):
        gpu("H900")
