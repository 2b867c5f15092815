"""The DSpark drafter's forward pass, as pure differentiable functions: the same code trains it and serves it.

One call proposes every draft at once. Its rows are the anchor (the newest token, not yet seen by the target) and `n_drafts` mask
embeddings; the rows see each other without a causal order, and the *context*: one latent per committed position, made from the
target's tapped hidden states. Row `1 + i` yields the base logits of draft `i`; a low-rank Markov head then corrects them with the
token decoded before: `logits_i + W2 · W1[previous]`.

Differences from the target's MLA: the 32 (K3: 64) shared key channels are rotated (interleaved RoPE), and there is no output gate.
Everything runs in the dtype of the weights; norms, scores and softmax in float32 (float64 when the weights are float64).

Axes: B requests, T context tokens, R draft rows, S = T + R keys, C = kv_lora_rank + qk_rope_head_dim, I taps, L draft layers,
H heads, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kimi_k3_decode.config import DraftConfig, ModelConfig, Unsupported


@dataclass(frozen=True, kw_only=True)
class DraftLayerWeights:
    """One drafter layer; matrices are [out, in] as in the checkpoint."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_a: torch.Tensor
    q_a_norm: torch.Tensor
    q_b: torch.Tensor
    kv_a: torch.Tensor
    kv_a_norm: torch.Tensor
    kv_b: torch.Tensor
    o: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class DraftWeights:
    """The drafter. Embedding and LM head are the target's and are passed to the functions that need them."""

    fc: torch.Tensor  # [D, I * D] over the taps concatenated in `target_layer_ids` order
    tap_norm: torch.Tensor  # [D]
    layers: tuple[DraftLayerWeights, ...]
    norm: torch.Tensor  # [D]
    markov_in: torch.Tensor  # W1 [V, rank]
    markov_out: torch.Tensor  # W2 [V, rank]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> DraftWeights:
        """A copy with `change` applied to every tensor."""

        def mapped(part: Any) -> dict[str, torch.Tensor]:
            return {f.name: change(getattr(part, f.name)) for f in fields(part) if f.name != "layers"}

        return replace(self, layers=tuple(replace(layer, **mapped(layer)) for layer in self.layers), **mapped(self))

    def to(self, dtype: torch.dtype) -> DraftWeights:
        return self.map(lambda tensor: tensor.to(dtype))


# field of DraftLayerWeights -> checkpoint name below `draft.layers.N.`
LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "q_a": "self_attn.q_a_proj.weight",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "q_b": "self_attn.q_b_proj.weight",
    "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "kv_b": "self_attn.kv_b_proj.weight",
    "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
# field of DraftWeights -> checkpoint name below `draft.`
TOP_NAMES = {
    "fc": "fc.weight",
    "tap_norm": "hidden_norm.weight",
    "norm": "norm.weight",
    "markov_in": "markov_head.w1.weight",
    "markov_out": "markov_head.w2.weight",
}


def draft_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Checkpoint name (with the `draft.` prefix) -> shape; the drafter's whole content."""
    d = draft_config(config)
    hidden, qk = config.hidden_size, d.qk_nope_head_dim + d.qk_rope_head_dim
    layer = {
        "input_norm": (hidden,),
        "post_norm": (hidden,),
        "q_a": (d.q_lora_rank, hidden),
        "q_a_norm": (d.q_lora_rank,),
        "q_b": (d.n_heads * qk, d.q_lora_rank),
        "kv_a": (d.kv_lora_rank + d.qk_rope_head_dim, hidden),
        "kv_a_norm": (d.kv_lora_rank,),
        "kv_b": (d.n_heads * (d.qk_nope_head_dim + d.v_head_dim), d.kv_lora_rank),
        "o": (hidden, d.n_heads * d.v_head_dim),
        "gate": (d.intermediate_size, hidden),
        "up": (d.intermediate_size, hidden),
        "down": (hidden, d.intermediate_size),
    }
    top = {
        "fc": (hidden, len(d.target_layer_ids) * hidden),
        "tap_norm": (hidden,),
        "norm": (hidden,),
        "markov_in": (config.vocab_size, d.markov_rank),
        "markov_out": (config.vocab_size, d.markov_rank),
    }
    shapes: dict[str, tuple[int, ...]] = {f"draft.{TOP_NAMES[name]}": shape for name, shape in top.items()}
    for index in range(d.n_layers):
        shapes |= {f"draft.layers.{index}.{LAYER_NAMES[name]}": shape for name, shape in layer.items()}
    return shapes


def draft_from_tensors(tensors: dict[str, torch.Tensor], config: ModelConfig) -> DraftWeights:
    """Build from checkpoint names. Raises `Unsupported` naming every missing or mis-shaped tensor."""
    reasons = []
    for name, shape in draft_shapes(config).items():
        if name not in tensors:
            reasons.append(f"{name}: got nothing, needs shape {shape}")
        elif tuple(tensors[name].shape) != shape:
            reasons.append(f"{name}: got shape {tuple(tensors[name].shape)}, needs {shape}")
    if reasons:
        raise Unsupported("draft weights", tuple(reasons))
    layers = tuple(
        DraftLayerWeights(**{field: tensors[f"draft.layers.{index}.{name}"] for field, name in LAYER_NAMES.items()})
        for index in range(draft_config(config).n_layers)
    )
    return DraftWeights(layers=layers, **{field: tensors[f"draft.{name}"] for field, name in TOP_NAMES.items()})


def draft_to_tensors(weights: DraftWeights) -> dict[str, torch.Tensor]:
    """The inverse of `draft_from_tensors`."""
    tensors = {f"draft.{name}": getattr(weights, field) for field, name in TOP_NAMES.items()}
    for index, layer in enumerate(weights.layers):
        tensors |= {f"draft.layers.{index}.{name}": getattr(layer, field) for field, name in LAYER_NAMES.items()}
    return tensors


def draft_config(config: ModelConfig) -> DraftConfig:
    if config.draft is None:
        raise Unsupported("drafter", ("config.draft: got None, needs a DraftConfig; this checkpoint has no drafter",))
    return config.draft


def _accumulator(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = x.to(_accumulator(x))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight.to(y.dtype)).to(x.dtype)


def rotate_pairs(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Interleaved RoPE (Su et al. 2021, arXiv 2104.09864): channels (2j, 2j+1) turn by `position * theta^(-2j/dim)`.

    `x` is [..., dim], `positions` broadcasts against `x` without its last axis. Angles are taken in float64: positions reach 1 M.
    """
    dim = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim)
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    y = x.to(_accumulator(x))
    cos, sin = angles.cos().to(y.dtype), angles.sin().to(y.dtype)
    even, odd = y[..., 0::2], y[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def _latents(layer: DraftLayerWeights, config: ModelConfig, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[..., D] -> [..., C]: the normed latent and the rotated shared key channels."""
    d = draft_config(config)
    latent, key = (x @ layer.kv_a.T).split((d.kv_lora_rank, d.qk_rope_head_dim), dim=-1)
    return torch.cat((_rms_norm(latent, layer.kv_a_norm, config.rms_norm_eps), rotate_pairs(key, positions, d.rope_theta)), dim=-1)


def context_latents(weights: DraftWeights, config: ModelConfig, taps_IBTD: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
    """Target taps of committed positions -> `context_LBTC`, what the drafter caches per position and layer."""
    taps = torch.cat(tuple(taps_IBTD.to(weights.fc.dtype)), dim=-1)
    hidden_BTD = _rms_norm(taps @ weights.fc.T, weights.tap_norm, config.rms_norm_eps)
    return torch.stack([_latents(layer, config, hidden_BTD, positions_BT) for layer in weights.layers])


def _attention(
    layer: DraftLayerWeights,
    config: ModelConfig,
    x_BRD: torch.Tensor,
    positions_BR: torch.Tensor,
    context_BTC: torch.Tensor,
    mask_BRS: torch.Tensor,
) -> torch.Tensor:
    """Absorbed MLA of the draft rows over context and one another; `mask_BRS` is True where a row may look."""
    d = draft_config(config)
    batch, rows, _ = x_BRD.shape
    keys_BSC = torch.cat((context_BTC.to(x_BRD.dtype), _latents(layer, config, x_BRD, positions_BR)), dim=1)
    query = _rms_norm(x_BRD @ layer.q_a.T, layer.q_a_norm, config.rms_norm_eps) @ layer.q_b.T
    nope, rope = query.view(batch, rows, d.n_heads, -1).split((d.qk_nope_head_dim, d.qk_rope_head_dim), dim=-1)
    rope = rotate_pairs(rope, positions_BR.unsqueeze(-1), d.rope_theta)
    key_up, value_up = layer.kv_b.view(d.n_heads, -1, d.kv_lora_rank).split((d.qk_nope_head_dim, d.v_head_dim), dim=1)
    absorbed = torch.cat((torch.einsum("brhn,hnc->brhc", nope, key_up), rope), dim=-1)
    scores = torch.einsum("brhc,bsc->bhrs", absorbed, keys_BSC).to(_accumulator(x_BRD))
    scores = scores * (d.qk_nope_head_dim + d.qk_rope_head_dim) ** -0.5
    weights = scores.masked_fill(~mask_BRS.unsqueeze(1), float("-inf")).softmax(-1).to(x_BRD.dtype)
    mixed = torch.einsum("bhrs,bsc->brhc", weights, keys_BSC[..., : d.kv_lora_rank])
    values = torch.einsum("brhc,hvc->brhv", mixed, value_up)
    return values.flatten(2) @ layer.o.T


def _mlp(layer: DraftLayerWeights, config: ModelConfig, x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ layer.gate.T).to(_accumulator(x)), (x @ layer.up.T).to(_accumulator(x))
    bounded = config.situ_beta * torch.tanh(gate / config.situ_beta) * torch.sigmoid(gate)
    linear = config.situ_linear_beta * torch.tanh(up / config.situ_linear_beta)
    return (bounded * linear).to(x.dtype) @ layer.down.T


def draft_hidden(
    weights: DraftWeights,
    config: ModelConfig,
    x_BRD: torch.Tensor,
    positions_BR: torch.Tensor,
    context_LBTC: torch.Tensor,
    mask_BRS: torch.Tensor,
) -> torch.Tensor:
    """The drafter's layers over any set of rows -> normed hidden [B, R, D]. Training lays the rows of many anchors side by side."""
    x = x_BRD
    for layer, context_BTC in zip(weights.layers, context_LBTC, strict=True):
        normed = _rms_norm(x, layer.input_norm, config.rms_norm_eps)
        x = x + _attention(layer, config, normed, positions_BR, context_BTC, mask_BRS)
        x = x + _mlp(layer, config, _rms_norm(x, layer.post_norm, config.rms_norm_eps))
    return _rms_norm(x, weights.norm, config.rms_norm_eps)


def block_rows(config: ModelConfig, embed_VD: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Anchor ids [...] -> input rows [..., 1 + n_drafts, D]: the anchor's embedding, then the mask embedding."""
    d = draft_config(config)
    ids = torch.full((*anchor.shape, 1 + d.n_drafts), d.mask_token_id, dtype=torch.long, device=anchor.device)
    ids[..., 0] = anchor
    return embed_VD[ids]


def draft_step(
    weights: DraftWeights,
    config: ModelConfig,
    embed_VD: torch.Tensor,
    lm_head_VD: torch.Tensor,
    context_LBTC: torch.Tensor,
    lengths_B: torch.Tensor,
    anchor_B: torch.Tensor,
) -> torch.Tensor:
    """Base logits of every draft, float32 [B, n_drafts, V], before the Markov correction.

    `context_LBTC` holds the latents of positions 0 .. lengths_B - 1 (rows beyond are padding and are not read); the anchor stands at
    position `lengths_B`, draft i at `lengths_B + 1 + i`.
    """
    d = draft_config(config)
    rows = 1 + d.n_drafts
    x_BRD = block_rows(config, embed_VD, anchor_B).to(weights.fc.dtype)
    lengths = lengths_B.to(torch.long)
    positions_BR = lengths.unsqueeze(1) + torch.arange(rows, device=lengths.device)
    seen_BT = torch.arange(context_LBTC.shape[2], device=lengths.device) < lengths.unsqueeze(1)
    mask_BS = torch.cat((seen_BT, seen_BT.new_ones(len(lengths), rows)), dim=1)
    hidden = draft_hidden(weights, config, x_BRD, positions_BR, context_LBTC, mask_BS.unsqueeze(1).expand(-1, rows, -1))
    return (hidden[:, 1:] @ lm_head_VD.to(hidden.dtype).T).to(_accumulator(hidden))


def markov_correct(weights: DraftWeights, logits: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """`logits [..., V] + W2 · W1[previous]`, with `previous` [...] the token decoded just before."""
    return logits + (weights.markov_in[previous] @ weights.markov_out.T).to(logits.dtype)


def propose(
    weights: DraftWeights,
    base_BNV: torch.Tensor,
    anchor_B: torch.Tensor,
    choose: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits.argmax(-1),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode the drafts one after another. Returns ids [B, n_drafts] and the corrected logits they were chosen from [B, n_drafts, V].

    `choose` maps logits [B, V] to ids [B]: arg-max by default, or a sampler.
    """
    previous, ids, corrected = anchor_B, [], []
    for base_BV in base_BNV.unbind(1):
        logits_BV = markov_correct(weights, base_BV, previous)
        previous = choose(logits_BV)
        ids.append(previous)
        corrected.append(logits_BV)
    return torch.stack(ids, dim=1), torch.stack(corrected, dim=1)


@dataclass
class DraftCache:
    """Context latents of a batch of requests: `context_LBTC` and how many positions of each are filled."""

    context_LBTC: torch.Tensor
    lengths_B: torch.Tensor  # int64

    @classmethod
    def allocate(cls, config: ModelConfig, n_requests: int, max_tokens: int, dtype: torch.dtype = torch.bfloat16) -> DraftCache:
        d = draft_config(config)
        shape = (d.n_layers, n_requests, max_tokens, d.kv_lora_rank + d.qk_rope_head_dim)
        return cls(torch.zeros(shape, dtype=dtype), torch.zeros(n_requests, dtype=torch.long))

    def append(
        self, weights: DraftWeights, config: ModelConfig, taps_IBTD: torch.Tensor, count_B: torch.Tensor, rows: torch.Tensor | None = None
    ) -> None:
        """Commit the first `count_B[b]` positions of `taps_IBTD` to request `rows[b]` (all requests in order when `rows` is None).

        Raises ValueError when a request would outgrow the cache; nothing is written then.
        """
        rows = torch.arange(len(self.lengths_B)) if rows is None else rows.to(torch.long)
        counts = count_B.to(torch.long)
        start = self.lengths_B[rows]
        room = self.context_LBTC.shape[2]
        if bool((start + counts > room).any()):
            longest = int((start + counts).max())
            raise ValueError(f"draft cache: got {longest} tokens for a request, needs <= {room}; allocate more max_tokens")
        steps = torch.arange(taps_IBTD.shape[2])
        positions_BT = start.unsqueeze(1) + steps
        latents = context_latents(weights, config, taps_IBTD, positions_BT).to(self.context_LBTC.dtype)
        batch_index, step_index = (steps < counts.unsqueeze(1)).nonzero(as_tuple=True)
        self.context_LBTC[:, rows[batch_index], positions_BT[batch_index, step_index]] = latents[:, batch_index, step_index]
        self.lengths_B[rows] = start + counts

    def fork(self) -> DraftCache:
        return DraftCache(self.context_LBTC.clone(), self.lengths_B.clone())
