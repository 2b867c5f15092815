"""The stock step of one rank at full depth: stock layers for KDA and MoE, and MLA, dense and end parts of the same kind, in one CUDA graph.

It reads the weights of the kernels' step where they lie, so that both stand in one memory and are timed in turns. The context of MLA is one
contiguous block a request (no pages), in stock's favour.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, linear

from kimi_k3_decode.config import ModelConfig
from perf.kernels import triton_ops as ops
from perf.kernels.stock_layer import StockLayer, Tensors, adopt_routing, state_for


class StockMlaLayer(StockLayer):
    """Latent attention with W_UK and W_UV absorbed: batched cuBLAS products over the whole context."""

    def prepare(self, context_tokens: int) -> None:
        """Random cached context of every row; the step writes one more entry behind it."""
        c = self.config
        self.context = context_tokens
        shape = (self.rows, context_tokens + 1, c.mla_cache_dim)
        self.cache = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        self.qa = torch.empty(self.rows, c.q_lora_rank, dtype=torch.bfloat16, device="cuda")

    def attention(self, prefix: torch.Tensor) -> torch.Tensor:
        c, s, b, w = self.config, self.shard, self.b, self.w
        ops.residual(prefix, self.delta, self.blocks, w["attn_res.res_score_D"], w["attn_res.norm_D"], b["prefix"], b["x"], c.rms_norm_eps)
        proj = linear(b["x"], w["in_proj.weight_PD"])
        ops.mla_prepare(proj, w["mla_query.q_norm_P"], w["mla_query.kv_norm_L"], self.qa, self.cache, self.context, c.rms_norm_eps)
        q_THK = linear(self.qa, w["mla_query.q_b_PC"]).view(self.rows, s.mla_heads, c.qk_head_dim)
        nope, pe = q_THK[..., : c.qk_nope_head_dim], q_THK[..., c.qk_nope_head_dim :]
        latent = torch.bmm(nope.transpose(0, 1), w["mla_query.w_uk_HKL"]).transpose(0, 1)
        keys, tail = self.cache[..., : c.kv_lora_rank], self.cache[..., c.kv_lora_rank :]
        scores = torch.baddbmm(torch.bmm(latent, keys.transpose(1, 2)), pe, tail.transpose(1, 2))
        found = torch.bmm(torch.softmax(scores.mul_(c.qk_head_dim**-0.5), -1), keys)
        values = torch.bmm(found.transpose(0, 1), w["mla_value.w_uv_HVL"].transpose(1, 2))
        ops.mla_gate(values, proj, b["a"], c.q_lora_rank + c.mla_cache_dim)
        return linear(b["a"], w["o_proj.weight_DC"])


class StockDenseLayer(StockLayer):
    """A KDA layer with a dense MLP."""

    def moe(self, delta: torch.Tensor) -> torch.Tensor:
        c, b, w = self.config, self.b, self.w
        ops.residual(b["prefix"], delta, self.blocks, w["mlp_res.res_score_D"], w["mlp_res.norm_D"], b["x2"], b["x"], c.rms_norm_eps)
        gate_up = linear(b["x"], w["dense_up.gate_up_ID"])
        hidden = torch.empty(self.rows, gate_up.shape[1] // 2, dtype=torch.bfloat16, device="cuda")
        ops.situ(gate_up, hidden, c.situ_beta, c.situ_linear_beta)
        return linear(hidden, w["dense_down.down_DI"])


class StockStep:
    """Every layer, embedding, final norm, LM head and argmax of one rank; one token a request.

    weights: by the plan's buffer names; read, never changed. chosen: layer -> expert ids, so that both sides read the same experts.
    """

    def __init__(self, config: ModelConfig, tp: int, rows: int, weights: Tensors, chosen: dict[int, torch.Tensor], context: int) -> None:
        self.config, self.w = config, weights
        self.layers: list[StockLayer] = []
        for layer in range(config.n_layers):
            kind = StockMlaLayer if not config.is_kda(layer) else StockLayer if config.is_moe(layer) else StockDenseLayer
            state = state_for(config, tp, rows) if config.is_kda(layer) else {}
            made = kind(config, tp, layer, rows, weights, state)
            if isinstance(made, StockMlaLayer):
                made.prepare(context)
            if layer in chosen:
                adopt_routing(made, chosen[layer])
            self.layers.append(made)
        self.tokens = torch.randint(0, config.vocab_size, (rows,), device="cuda")
        shape = (config.n_blocks, rows, config.hidden_size)
        self.blocks = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        self.out = [torch.empty(shape[1:], dtype=torch.bfloat16, device="cuda") for _ in range(2)]

    def experts_read(self) -> float:
        """Distinct experts a MoE layer read in the last pass, the mean over layers."""
        found = [layer.experts_read() for layer in self.layers if self.config.is_moe(layer.layer)]
        return sum(found) / len(found)

    def issue(self) -> torch.Tensor:
        """The whole step; returns the argmax of this rank's share of the vocabulary."""
        c, w = self.config, self.w
        prefix = embedding(self.tokens, w["embedding.embed_VD"])
        delta = torch.zeros_like(prefix)
        for layer in self.layers:
            layer.delta = delta
            delta = layer.moe(layer.attention(prefix))
            prefix = layer.b["x2"]
        kept, x = self.out
        ops.residual(prefix, delta, self.blocks, w["final_res.res_score_D"], w["final_res.norm_D"], kept, x, c.rms_norm_eps)
        return linear(x, w["lm_head.lm_head_VD"]).argmax(-1)
