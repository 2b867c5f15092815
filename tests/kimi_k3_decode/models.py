"""Small models for tests: every mechanism of K3, dimensions that keep FP64 cheap."""

from __future__ import annotations

from dataclasses import replace

import torch

from kimi_k3_decode.cache import Caches
from kimi_k3_decode.config import NANO, ModelConfig
from kimi_k3_decode.stock import StockPath
from kimi_k3_decode.weights import ModelWeights, random_weights

# Two blocks, both kinds of attention, a block-write layer of each kind of MLP, the last two layers MLA.
TINY = replace(
    NANO,
    name="tiny-k3",
    n_layers=5,
    hidden_size=64,
    vocab_size=64,
    kda_layers=(0, 1, 2),
    kda_heads=2,
    kda_head_dim=32,
    mla_layers=(3, 4),
    mla_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    dense_intermediate_size=64,
    n_experts=6,
    n_experts_per_token=2,
    moe_intermediate_size=64,
    moe_latent_size=64,
    attn_res_block_size=3,
    draft=replace(NANO.draft, target_layer_ids=(0, 2, 4), intermediate_size=64, markov_rank=8),
)


def oracle(config: ModelConfig = TINY, seed: int = 0) -> StockPath:
    return StockPath(random_weights(config, seed).to(torch.float64), torch.float64)


def fp64_caches(config: ModelConfig = TINY, n_requests: int = 4, max_tokens: int = 512, q_max: int = 8) -> Caches:
    return Caches.allocate(config, n_requests, max_tokens, q_max, torch.float64)


def prompt(length: int, seed: int = 0, vocab: int = 64) -> list[int]:
    return torch.randint(4, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def decode_all(path: StockPath, caches: Caches, request: int, tokens: list[int]) -> torch.Tensor:
    """[n, V] logits of decoding tokens one at a time."""
    rows = []
    for token in tokens:
        rows.append(path.step(caches.batch([[token]], [request]), caches).logits_BQV[0, 0])
        caches.advance([request], [1])
    return torch.stack(rows)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest error over the largest value; NaN stays NaN, so a comparison with it fails."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


__all__ = ["TINY", "ModelWeights", "decode_all", "fp64_caches", "oracle", "prompt", "relative"]
