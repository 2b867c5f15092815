"""Random weights of a healthy scale: unit-variance activations, decays that neither vanish nor saturate, mixtures that use every source."""

from __future__ import annotations

import torch

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.draft_model import DraftWeights, draft_from_tensors, draft_shapes
from kimi_k3_decode.mxfp4 import Mxfp4
from kimi_k3_decode.weights import (
    DenseWeights,
    KdaWeights,
    LayerWeights,
    MlaWeights,
    ModelWeights,
    MoeWeights,
)


class _Draw:
    """Seeded draws; every BF16 tensor is rounded to BF16 so that all dtypes hold the same values."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(*shape, generator=self.generator)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (self.normal(rows, columns) * (gain * columns**-0.5)).bfloat16()

    def norm(self, size: int) -> torch.Tensor:
        return (1 + 0.1 * self.normal(size)).bfloat16()

    def experts(self, experts: int, rows: int, columns: int) -> Mxfp4:
        return Mxfp4.quantize(self.normal(experts, rows, columns) * columns**-0.5)


def _kda(draw: _Draw, config: ModelConfig) -> KdaWeights:
    hidden, channels, heads, head_dim = config.hidden_size, config.kda_dim, config.kda_heads, config.kda_head_dim
    taps = config.conv_width
    return KdaWeights(
        q_proj_CD=draw.matrix(channels, hidden),
        k_proj_CD=draw.matrix(channels, hidden),
        v_proj_CD=draw.matrix(channels, hidden),
        g_proj_CD=draw.matrix(channels, hidden),
        b_proj_HD=draw.matrix(heads, hidden),
        f_a_KD=draw.matrix(head_dim, hidden),
        f_b_CK=draw.matrix(channels, head_dim),
        q_conv_CW=draw.normal(channels, taps) * taps**-0.5,
        k_conv_CW=draw.normal(channels, taps) * taps**-0.5,
        v_conv_CW=draw.normal(channels, taps) * taps**-0.5,
        A_log_H=draw.uniform(1.0, 4.0, heads).log(),
        # Decays from almost none to some tokens: exp(-5 sigmoid(A (f + bias))).
        dt_bias_C=draw.uniform(-4.0, -0.5, channels),
        o_norm_K=draw.norm(head_dim),
        o_proj_DC=draw.matrix(hidden, channels),
    )


def _mla(draw: _Draw, config: ModelConfig) -> MlaWeights:
    hidden, heads = config.hidden_size, config.mla_heads
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    return MlaWeights(
        q_a_RD=draw.matrix(config.q_lora_rank, hidden),
        q_a_norm_R=draw.norm(config.q_lora_rank),
        q_b_XR=draw.matrix(heads * (nope + rope), config.q_lora_rank),
        kv_a_YD=draw.matrix(config.kv_lora_rank + rope, hidden),
        kv_a_norm_L=draw.norm(config.kv_lora_rank),
        kv_b_ZL=draw.matrix(heads * (nope + value), config.kv_lora_rank),
        g_proj_OD=draw.matrix(heads * value, hidden),
        o_proj_DO=draw.matrix(hidden, heads * value),
    )


def _dense(draw: _Draw, hidden: int, intermediate: int) -> DenseWeights:
    return DenseWeights(
        gate_FD=draw.matrix(intermediate, hidden),
        up_FD=draw.matrix(intermediate, hidden),
        down_DF=draw.matrix(hidden, intermediate),
    )


def _moe(draw: _Draw, config: ModelConfig) -> MoeWeights:
    hidden, latent, experts, width = config.hidden_size, config.moe_latent_size, config.n_experts, config.moe_intermediate_size
    return MoeWeights(
        router_ED=draw.matrix(experts, hidden),
        router_bias_E=0.05 * draw.normal(experts),
        latent_down_LD=draw.matrix(latent, hidden),
        latent_norm_L=draw.norm(latent),
        latent_up_DL=draw.matrix(hidden, latent),
        w1=draw.experts(experts, width, latent),
        w2=draw.experts(experts, latent, width),
        w3=draw.experts(experts, width, latent),
        shared=_dense(draw, hidden, config.shared_intermediate_size),
    )


def _layer(draw: _Draw, config: ModelConfig, layer: int) -> LayerWeights:
    hidden = config.hidden_size
    attn: KdaWeights | MlaWeights
    mlp: DenseWeights | MoeWeights
    attn = _kda(draw, config) if config.is_kda(layer) else _mla(draw, config)
    mlp = _moe(draw, config) if config.is_moe(layer) else _dense(draw, hidden, config.dense_intermediate_size)
    return LayerWeights(
        input_norm=draw.norm(hidden),
        post_norm=draw.norm(hidden),
        attn_res_norm=draw.norm(hidden),
        attn_res_proj=draw.matrix(1, hidden)[0],
        mlp_res_norm=draw.norm(hidden),
        mlp_res_proj=draw.matrix(1, hidden)[0],
        attn=attn,
        mlp=mlp,
    )


def _draft(draw: _Draw, config: ModelConfig) -> DraftWeights:
    """Norms near one, matrices by fan-in, in the order of `draft_shapes`."""
    tensors = {
        name: draw.norm(shape[0]) if len(shape) == 1 else draw.matrix(shape[0], shape[1]) for name, shape in draft_shapes(config).items()
    }
    return draft_from_tensors(tensors, config)


def draw_weights(config: ModelConfig, seed: int) -> ModelWeights:
    """The weights behind `random_weights`, in the published dtypes."""
    draw = _Draw(seed)
    return ModelWeights(
        config=config,
        embed_VD=draw.normal(config.vocab_size, config.hidden_size).bfloat16(),
        layers=tuple(_layer(draw, config, layer) for layer in range(config.n_layers)),
        out_res_norm=draw.norm(config.hidden_size),
        out_res_proj=draw.matrix(1, config.hidden_size)[0],
        norm=draw.norm(config.hidden_size),
        lm_head_VD=draw.matrix(config.vocab_size, config.hidden_size),
        draft=None if config.draft is None else _draft(draw, config),
    )
