"""Tensor-parallel shards: blocks put together give the whole, and partial results summed over ranks give the whole's results."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kimi_k3_decode.config import K3, NANO, Unsupported
from kimi_k3_decode.mxfp4 import Mxfp4
from kimi_k3_decode.sharding import SPLIT_COLUMNS, SPLIT_ROWS, shard_reasons
from kimi_k3_decode.stock import kda, kda_chunk, mla, moe
from kimi_k3_decode.stock.basic import linear
from kimi_k3_decode.weights import named_tensors, random_weights

sys.path.insert(0, str(Path(__file__).parent))
from models import TINY, relative

TP = 2


@pytest.fixture(scope="module")
def whole():
    return random_weights(TINY, 0).to(torch.float64)


@pytest.fixture(scope="module")
def ranks(whole):
    return [whole.shard(TP, rank) for rank in range(TP)]


def test_blocks_put_together_give_every_tensor(whole, ranks):
    tables = [dict(named_tensors(rank)) for rank in ranks]
    split = 0
    for path, tensor in named_tensors(whole):
        field = path.split(".")[-2] if path.endswith(("codes_EOI", "scales_EOG")) else path.split(".")[-1]
        parts = [table[path] for table in tables]
        if field in SPLIT_ROWS | SPLIT_COLUMNS:
            axis = (0 if field in SPLIT_ROWS else 1) + (1 if path.endswith(("codes_EOI", "scales_EOG")) else 0)
            assert torch.equal(torch.cat(parts, dim=axis), tensor), path
            assert all(part.is_contiguous() for part in parts)
            split += 1
        else:
            assert all(torch.equal(part, tensor) for part in parts), path
    assert split > 50


def test_every_split_field_exists(whole):
    fields = {path.split(".")[-1] for path, _ in named_tensors(whole)} | {"w1", "w2", "w3"}
    assert fields >= SPLIT_ROWS | SPLIT_COLUMNS


def test_kda_partials_sum_to_the_whole(whole, ranks):
    x = torch.randn(70, TINY.hidden_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run(weights):
        ops = kda.KdaOperands.prepare(weights.layers[1].attn, TINY, torch.float64)
        raw, gate, f_a, b = kda.project(ops, x)
        convolved = kda.short_conv(ops, torch.cat((raw.new_zeros(3, raw.shape[1]), raw)))
        inputs = kda.recurrence_inputs(ops, convolved, f_a, b)
        index = kda_chunk.ChunkIndex.build([70], x.device)
        start = x.new_zeros(1, ops.heads, ops.head_dim, ops.head_dim)
        return kda.gated_output(ops, kda_chunk.chunked(inputs, index, start, -5.0)[0], gate)

    assert relative(sum(run(rank) for rank in ranks), run(whole)) < 1e-12


def test_mla_partials_sum_to_the_whole(whole, ranks):
    x = torch.randn(20, TINY.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(weights):
        ops = mla.MlaOperands.prepare(weights.layers[3].attn, TINY, torch.float64)
        queries, entries, gate = mla.project(ops, x)
        return mla.gated_output(ops, mla.prefill_attention(ops, queries, entries), gate)

    assert relative(sum(run(rank) for rank in ranks), run(whole)) < 1e-12


def test_dense_shared_and_routed_experts_sum_to_the_whole(whole, ranks):
    x = torch.randn(9, TINY.hidden_size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def dense(weights):
        return moe.dense_mlp(moe.DenseOperands.prepare(weights, torch.float64), TINY, x)

    assert relative(sum(dense(rank.layers[0].mlp) for rank in ranks), dense(whole.layers[0].mlp)) < 1e-12
    assert relative(sum(dense(rank.layers[1].mlp.shared) for rank in ranks), dense(whole.layers[1].mlp.shared)) < 1e-12
    ops = moe.MoeOperands.prepare(whole.layers[1].mlp, TINY, torch.float64)
    ids, shares = moe.route(ops, x)
    z = linear(x, ops.latent_down_LD)
    parts = [moe.MoeOperands.prepare(rank.layers[1].mlp, TINY, torch.float64) for rank in ranks]
    # Not bit for bit: how a library sums a product may depend on its width.
    assert relative(torch.cat([linear(x, part.latent_down_LD) for part in parts], dim=1), z) < 1e-14
    assert torch.allclose(torch.cat([x @ part.router_ED.T for part in parts], dim=1), x @ ops.router_ED.T, rtol=1e-13)
    summed = sum(moe.experts(part, TINY, z, ids, shares) for part in parts)
    assert relative(summed, moe.experts(ops, TINY, z, ids, shares)) < 1e-12


def test_what_does_not_divide_is_refused_with_every_reason():
    assert shard_reasons(K3, 8, 7) == ()
    assert shard_reasons(K3, 16, 0) == ()
    assert shard_reasons(NANO, 2, 1) == ()
    reasons = shard_reasons(NANO, 3, 0)
    assert {r.split(":")[0] for r in reasons} >= {"kda_heads", "mla_heads", "vocab_size", "moe_latent_size", "moe_intermediate_size"}
    with pytest.raises(Unsupported, match="MXFP4 scale"):
        random_weights(replace(TINY, kda_heads=4, mla_heads=4), 0).shard(4, 0)
    with pytest.raises(Unsupported, match="rank"):
        random_weights(TINY, 0).shard(2, 2)


def test_expert_codes_and_scales_are_split_alike():
    stack = Mxfp4.quantize(torch.randn(2, 4, 128))
    assert torch.equal(stack.columns(64, 128).dequantize(torch.float32), stack.dequantize(torch.float32)[..., 64:])
    assert torch.equal(stack.rows(1, 3).dequantize(torch.float32), stack.dequantize(torch.float32)[:, 1:3])
