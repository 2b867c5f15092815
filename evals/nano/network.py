"""The trainable nano-K3: the published equations over whole sequences, as functions of a dictionary of parameters.

Parameters carry the checkpoint's names (below `language_model.model.`), except that routed experts are stacked over MoE layers.
`prepare` casts the float32 masters to what the checkpoint holds — bf16, or MXFP4 for experts, with straight-through gradients — and
everything after it computes in that dtype, with norms, gates and mixtures in float32. In float64 the same code is the reference.

Axes: B sequences, T tokens, N = B * T rows, D hidden, H heads, E experts, L latent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from evals.nano import kda_train, quantise
from kimi_k3_decode.config import ModelConfig

Parameters = dict[str, torch.Tensor]
FLOAT32_NAMES = ("A_log", "dt_bias", "conv1d.weight")
EXPERTS = ("experts.w1", "experts.w2", "experts.w3")


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every trained parameter (the routers' correction biases are state, not parameters)."""
    c, d = config, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c.vocab_size, d)}
    for n in range(c.n_layers):
        layer = f"layers.{n}."
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            shapes[f"{layer}{norm}.weight"] = (d,)
        for proj in ("self_attention_res_proj", "mlp_res_proj"):
            shapes[f"{layer}{proj}.weight"] = (1, d)
        shapes |= {f"{layer}self_attn.{k}": v for k, v in (_kda_shapes(c) if c.is_kda(n) else _mla_shapes(c)).items()}
        inner = c.shared_intermediate_size if c.is_moe(n) else c.dense_intermediate_size
        mlp = f"{layer}block_sparse_moe.shared_experts." if c.is_moe(n) else f"{layer}mlp."
        shapes |= {f"{mlp}gate_proj.weight": (inner, d), f"{mlp}up_proj.weight": (inner, d), f"{mlp}down_proj.weight": (d, inner)}
        if c.is_moe(n):
            moe = f"{layer}block_sparse_moe."
            shapes[f"{moe}gate.weight"] = (c.n_experts, d)
            shapes[f"{moe}routed_expert_down_proj.weight"] = (c.moe_latent_size, d)
            shapes[f"{moe}routed_expert_norm.weight"] = (c.moe_latent_size,)
            shapes[f"{moe}routed_expert_up_proj.weight"] = (d, c.moe_latent_size)
    n_moe = c.n_layers - c.n_dense_layers
    shapes["experts.w1"] = shapes["experts.w3"] = (n_moe, c.n_experts, c.moe_intermediate_size, c.moe_latent_size)
    shapes["experts.w2"] = (n_moe, c.n_experts, c.moe_latent_size, c.moe_intermediate_size)
    shapes |= {"output_attn_res_norm.weight": (d,), "output_attn_res_proj.weight": (1, d), "norm.weight": (d,)}
    shapes["lm_head.weight"] = (c.vocab_size, d)
    return shapes


def _kda_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, inner, head = c.hidden_size, c.kda_dim, c.kda_head_dim
    shapes: dict[str, tuple[int, ...]] = {f"{x}_proj.weight": (inner, d) for x in "qkvg"}
    shapes |= {f"{x}_conv1d.weight": (inner, 1, c.conv_width) for x in "qkv"}
    shapes |= {"b_proj.weight": (c.kda_heads, d), "f_a_proj.weight": (head, d), "f_b_proj.weight": (inner, head)}
    return shapes | {"A_log": (c.kda_heads,), "dt_bias": (inner,), "o_norm.weight": (head,), "o_proj.weight": (d, inner)}


def _mla_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, value = c.hidden_size, c.mla_heads * c.v_head_dim
    return {
        "q_a_proj.weight": (c.q_lora_rank, d),
        "q_a_layernorm.weight": (c.q_lora_rank,),
        "q_b_proj.weight": (c.mla_heads * c.qk_head_dim, c.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (c.mla_cache_dim, d),
        "kv_a_layernorm.weight": (c.kv_lora_rank,),
        "kv_b_proj.weight": (c.mla_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "g_proj.weight": (value, d),
        "o_proj.weight": (d, value),
    }


def initial_parameters(config: ModelConfig, seed: int) -> Parameters:
    """Float32 masters. Mixture projections start at zero (a plain mean of the sources), decays spread from fast to very slow."""
    generator = torch.Generator().manual_seed(seed)
    params: Parameters = {}
    for name, shape in parameter_shapes(config).items():
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if leaf.endswith("norm"):
            value = torch.ones(shape)
        elif leaf.endswith("res_proj") or leaf == "A_log":
            value = torch.zeros(shape)
        elif leaf == "dt_bias":
            value = torch.empty(shape).uniform_(-9.0, -1.0, generator=generator)
        elif leaf.endswith("conv1d"):
            value = torch.randn(shape, generator=generator) * 0.2
            value[..., -1] += 1.0
        else:
            std = {"embed_tokens": 0.5, "lm_head": 0.02}.get(
                leaf, shape[-1] ** -0.5 * (0.5 if leaf in ("o_proj", "down_proj", "w2") else 1.0)
            )
            value = torch.randn(shape, generator=generator) * std
        params[name] = value
    return params


def prepare(params: Parameters, dtype: torch.dtype) -> Parameters:
    """The weights as the checkpoint will hold them, differentiable with respect to the masters."""
    ready: Parameters = {}
    narrow: list[str] = []
    for name, value in params.items():
        if name.endswith(FLOAT32_NAMES):
            ready[name] = value if dtype == torch.bfloat16 else value.to(dtype)
        else:
            narrow.append(name)
            ready[name] = quantise.straight_through(value) if name in EXPERTS else value
    # one cast of one flat buffer instead of one a tensor: at this size the launches would cost more than the work
    flat = torch.cat([ready[name].flatten() for name in narrow]).to(torch.bfloat16).to(dtype)
    for name, part in zip(narrow, flat.split([ready[name].numel() for name in narrow]), strict=True):
        ready[name] = part.view_as(params[name])
    return ready


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float32 (float64), not rounded back."""
    y = _wide(x)
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * _wide(weight)


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    g, u = _wide(gate), _wide(up)
    return beta * torch.tanh(g / beta) * torch.sigmoid(g) * (linear_beta * torch.tanh(u / linear_beta))


def mixture(sources: list[torch.Tensor], norm: torch.Tensor, proj: torch.Tensor, eps: float) -> torch.Tensor:
    """Attention Residuals: a softmax-weighted sum of the sources, float32 [N, D]."""
    if len(sources) == 1:
        return _wide(sources[0])
    query = _wide(norm) * _wide(proj).squeeze(0)
    logits = torch.stack([(_wide(x) * query).sum(-1) * torch.rsqrt(_wide(x).pow(2).mean(-1) + eps) for x in sources])
    shares = logits.softmax(0).unsqueeze(-1)
    mixed = shares[0] * _wide(sources[0])
    for share, x in zip(shares[1:], sources[1:], strict=True):
        mixed = mixed + share * _wide(x)
    return mixed


def boundary(sources: list[torch.Tensor], norm: torch.Tensor, proj: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Mixture and the sublayer's norm, rounded once."""
    return rms_norm(mixture(sources, norm, proj, eps), weight, eps).to(sources[0].dtype)


def _shifted_conv(x_BTC: torch.Tensor, weight_C1W: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution as a sum of shifts; the last tap is the current token. Then SiLU."""
    x, width = _wide(x_BTC), weight_C1W.shape[-1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    out = padded[:, : x.shape[1]] * weight_C1W[:, 0, 0]
    for i in range(1, width):
        out = out + padded[:, i : i + x.shape[1]] * weight_C1W[:, 0, i]
    return F.silu(out).to(x_BTC.dtype)


def kda_inputs(x_ND: torch.Tensor, w: Parameters, batch: int, heads: int) -> tuple[torch.Tensor, ...]:
    """q, k, v after convolution, the raw decay gate and beta as [B, T, H, *], and the output gate [N, H, K]."""
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
    weights = [w[f"{name}.weight"] for name in names]
    fused = torch.cat(weights)
    parts = (x_ND @ F.pad(fused, (0, 0, 0, -len(fused) % 16)).T)[:, : len(fused)].split([len(weight) for weight in weights], dim=-1)
    q, k, v = (
        _shifted_conv(part.unflatten(0, (batch, -1)), _wide(w[f"{name}_conv1d.weight"])).unflatten(-1, (heads, -1))
        for part, name in zip(parts[:3], "qkv", strict=True)
    )
    raw = (parts[4] @ w["f_b_proj.weight"].T).view(batch, -1, heads, q.shape[-1])
    beta = torch.sigmoid(_wide(parts[5])).to(x_ND.dtype).view(batch, -1, heads)
    return q, k, v, raw, beta, parts[3].unflatten(-1, (heads, -1))


def gated_output(o_NHV: torch.Tensor, gate_NHV: torch.Tensor, w: Parameters, eps: float) -> torch.Tensor:
    y = rms_norm(o_NHV, w["o_norm.weight"], eps) * torch.sigmoid(_wide(gate_NHV))
    return y.to(gate_NHV.dtype).flatten(1) @ w["o_proj.weight"].T


def mla_inputs(x_ND: torch.Tensor, w: Parameters, c: ModelConfig, batch: int) -> tuple[torch.Tensor, ...]:
    """q, k [B, H, T, 64], v padded to the same width, and the output gate [N, H * V]."""
    fused = torch.cat([w[f"{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")])
    q_a, latent, shared, gate = (x_ND @ fused.T).split(
        (c.q_lora_rank, c.kv_lora_rank, c.qk_rope_head_dim, c.mla_heads * c.v_head_dim), dim=-1
    )
    q = rms_norm(q_a, w["q_a_layernorm.weight"], c.rms_norm_eps).to(x_ND.dtype) @ w["q_b_proj.weight"].T
    kv = rms_norm(latent, w["kv_a_layernorm.weight"], c.rms_norm_eps).to(x_ND.dtype) @ w["kv_b_proj.weight"].T
    k_nope, v = kv.view(batch, -1, c.mla_heads, c.qk_nope_head_dim + c.v_head_dim).split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
    k_shared = shared.view(batch, -1, 1, c.qk_rope_head_dim).expand(-1, -1, c.mla_heads, -1)
    k = torch.cat((k_nope, k_shared), dim=-1)
    v = F.pad(v, (0, c.qk_head_dim - c.v_head_dim))
    return q.view(batch, -1, c.mla_heads, c.qk_head_dim).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate


def mla_output(o_BHTV: torch.Tensor, gate_NV: torch.Tensor, w: Parameters, v_dim: int) -> torch.Tensor:
    o = o_BHTV[..., :v_dim].transpose(1, 2).flatten(2).flatten(0, 1)
    return (_wide(o) * torch.sigmoid(_wide(gate_NV))).to(o.dtype) @ w["o_proj.weight"].T


def gated_mlp(
    x_ND: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, beta: float, linear_beta: float
) -> torch.Tensor:
    g, u = (x_ND @ torch.cat((gate, up)).T).chunk(2, dim=-1)
    return situ(g, u, beta, linear_beta).to(x_ND.dtype) @ down.T


def latent_moe(
    x_ND: torch.Tensor, w: Parameters, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor, bias_E: torch.Tensor, c: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routed plus shared experts, and how many rows chose each expert. All experts run on all rows: they are small and 24."""
    scores = torch.sigmoid(_wide(x_ND) @ _wide(w["gate.weight"]).T)
    chosen = (scores.detach() + bias_E).topk(c.n_experts_per_token, dim=-1).indices
    mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
    shares = scores * mask
    shares = shares / shares.sum(-1, keepdim=True) * c.routed_scaling_factor
    z = x_ND @ w["routed_expert_down_proj.weight"].T
    g, u = (z @ torch.cat((w1.flatten(0, 1), w3.flatten(0, 1))).T).chunk(2, dim=-1)
    inner = situ(g, u, c.situ_beta, c.situ_linear_beta).unflatten(-1, (c.n_experts, -1)) * shares.unsqueeze(-1)
    routed = inner.to(x_ND.dtype).flatten(1) @ w2.transpose(1, 2).flatten(0, 1)
    latent = rms_norm(routed, w["routed_expert_norm.weight"], c.rms_norm_eps).to(x_ND.dtype)
    gate, up, down = (w[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
    out = latent @ w["routed_expert_up_proj.weight"].T + gated_mlp(x_ND, gate, up, down, c.situ_beta, c.situ_linear_beta)
    return out, mask.sum(0)


def add_delta(prefix: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    return (_wide(prefix) + _wide(delta)).to(prefix.dtype)


@dataclass
class Pieces:
    """The functions of one layer, each replaced by its compiled form on a GPU."""

    boundary: Callable = boundary
    kda_inputs: Callable = kda_inputs
    gated_output: Callable = gated_output
    mla_inputs: Callable = mla_inputs
    mla_output: Callable = mla_output
    gated_mlp: Callable = gated_mlp
    latent_moe: Callable = latent_moe

    @classmethod
    def compiled(cls) -> Pieces:
        names = ("boundary", "kda_inputs", "gated_output", "mla_inputs", "mla_output", "gated_mlp", "latent_moe")
        return cls(**{name: torch.compile(globals()[name], dynamic=False) for name in names})


def _below(weights: Parameters, prefix: str) -> Parameters:
    return {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}


def _attention(x: torch.Tensor, w: Parameters, c: ModelConfig, batch: int, layer: int, pieces: Pieces) -> torch.Tensor:
    if c.is_kda(layer):
        q, k, v, raw, beta, gate = pieces.kda_inputs(x, w, batch, c.kda_heads)
        o = kda_train.kda(q, k, v, raw, beta, w["A_log"], w["dt_bias"].view(c.kda_heads, -1), c.gate_lower_bound)
        return pieces.gated_output(o.flatten(0, 1), gate, w, c.rms_norm_eps)
    q, k, v, gate = pieces.mla_inputs(x, w, c, batch)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=c.qk_head_dim**-0.5)
    return pieces.mla_output(o, gate, w, c.v_head_dim)


def forward(
    weights: Parameters,
    biases: torch.Tensor,
    ids_BT: torch.Tensor,
    config: ModelConfig,
    pieces: Pieces | None = None,
    taps: tuple[int, ...] = (),
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Normed final hidden [N, D], taps [B, T, D], expert loads [n_moe, E]; `weights` come from `prepare`, `biases` are [n_moe, E]."""
    c, batch, eps = config, ids_BT.shape[0], config.rms_norm_eps
    pieces = pieces or Pieces()
    prefix = weights["embed_tokens.weight"][ids_BT.flatten()]
    blocks: list[torch.Tensor] = []
    tapped, loads = [], []
    for n in range(c.n_layers):
        w = _below(weights, f"layers.{n}.")
        norm, proj = w["self_attention_res_norm.weight"], w["self_attention_res_proj.weight"]
        x = pieces.boundary([*blocks, prefix], norm, proj, w["input_layernorm.weight"], eps)
        delta = _attention(x, _below(w, "self_attn."), c, batch, n, pieces)
        if c.writes_block(n):
            blocks.append(prefix)
            prefix = delta
        else:
            prefix = add_delta(prefix, delta)
        norm, proj = w["mlp_res_norm.weight"], w["mlp_res_proj.weight"]
        x = pieces.boundary([*blocks, prefix], norm, proj, w["post_attention_layernorm.weight"], eps)
        if c.is_moe(n):
            index = n - c.n_dense_layers
            experts = [weights[name][index] for name in ("experts.w1", "experts.w3", "experts.w2")]
            delta, load = pieces.latent_moe(x, _below(w, "block_sparse_moe."), *experts, biases[index], c)
            loads.append(load)
        else:
            delta = pieces.gated_mlp(x, *(w[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")), c.situ_beta, c.situ_linear_beta)
        prefix = add_delta(prefix, delta)
        if n in taps:
            tapped.append(prefix.unflatten(0, (batch, -1)))
    mixed = mixture([*blocks, prefix], weights["output_attn_res_norm.weight"], weights["output_attn_res_proj.weight"], eps).to(prefix.dtype)
    hidden = rms_norm(mixed, weights["norm.weight"], eps).to(prefix.dtype)
    return hidden, tapped, torch.stack(loads).detach()


def logits_of(hidden_ND: torch.Tensor, weights: Parameters) -> torch.Tensor:
    return _wide(hidden_ND @ weights["lm_head.weight"].T)
