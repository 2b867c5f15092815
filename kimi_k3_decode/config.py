"""Every dimension of Kimi K3 and of nano-K3, its tensor-parallel shards, and the deployments the specialised path accepts.

This is the only file that spells a model dimension. Source of the K3 numbers: the published `config.json` of Kimi K3
(`text_config`); of the sharding rules: vLLM's column- and row-parallel layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


class Unsupported(ValueError):
    """Raised when a deployment or a checkpoint is outside the supported set. `reasons` holds every reason, not the first."""

    def __init__(self, what: str, reasons: tuple[str, ...]) -> None:
        self.reasons = reasons
        super().__init__(f"{what}: {len(reasons)} reason(s): " + "; ".join(reasons))


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The DSpark drafter: MLA layers over target taps, plus a low-rank Markov head (all lengths in tokens)."""

    n_layers: int
    n_drafts: int  # tokens proposed in one pass
    target_layer_ids: tuple[int, ...]  # 0-based; a tap is taken after the layer: prefix + MLP output
    n_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # rotated here (interleaved pairs), unlike the target's
    v_head_dim: int
    intermediate_size: int
    markov_rank: int
    rope_theta: float = 50000.0
    mask_token_id: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Dimensions of one model. Layer numbers in fields are 0-based; `config.json` lists are 1-based and converted on the way."""

    name: str
    n_layers: int
    hidden_size: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    max_position_embeddings: int = 1_048_576
    # KDA
    kda_layers: tuple[int, ...]
    kda_heads: int
    kda_head_dim: int = 128
    conv_width: int = 4
    gate_lower_bound: float = -5.0
    # MLA (the "rope" channels are never rotated in the target model)
    mla_layers: tuple[int, ...]
    mla_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    # MLP and latent MoE
    n_dense_layers: int = 1
    dense_intermediate_size: int
    n_experts: int
    n_experts_per_token: int
    n_shared_experts: int
    moe_intermediate_size: int
    moe_latent_size: int
    routed_scaling_factor: float = 1.0
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    mxfp4_group: int = 32
    # Attention Residuals
    attn_res_block_size: int
    draft: DraftConfig | None = field(default=None)

    # ---- derived ----
    @property
    def kda_dim(self) -> int:
        """Width of q, k, v and of the output gate over all heads."""
        return self.kda_heads * self.kda_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mla_cache_dim(self) -> int:
        """Values the MLA cache holds per token: the latent and the shared, unrotated key channels."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def n_blocks(self) -> int:
        """Residual blocks written over the whole depth."""
        return math.ceil(self.n_layers / self.attn_res_block_size)

    def is_kda(self, layer: int) -> bool:
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        return layer >= self.n_dense_layers

    def writes_block(self, layer: int) -> bool:
        """True where the pre-attention boundary saves the prefix as a block and restarts it."""
        return layer % self.attn_res_block_size == 0

    def n_blocks_before_attention(self, layer: int) -> int:
        """Saved blocks that are sources of the pre-attention mixture (the running prefix is one source more)."""
        return math.ceil(layer / self.attn_res_block_size)

    def n_blocks_before_mlp(self, layer: int) -> int:
        return self.n_blocks_before_attention(layer) + (1 if self.writes_block(layer) else 0)

    def unsupported(self) -> tuple[str, ...]:
        """Every reason this configuration cannot be built; empty when it can."""
        reasons = []
        layers = set(range(self.n_layers))
        if set(self.kda_layers) | set(self.mla_layers) != layers or set(self.kda_layers) & set(self.mla_layers):
            reasons.append(
                f"kda_layers and mla_layers: got {self.kda_layers} and {self.mla_layers}, need each of 0..{self.n_layers - 1} once"
            )
        if self.n_experts_per_token > self.n_experts:
            reasons.append(f"n_experts_per_token: got {self.n_experts_per_token}, needs <= n_experts {self.n_experts}")
        for what, size in (("moe_latent_size", self.moe_latent_size), ("moe_intermediate_size", self.moe_intermediate_size)):
            if size % self.mxfp4_group:
                reasons.append(f"{what}: got {size}, needs a multiple of the MXFP4 group {self.mxfp4_group}")
        if self.gate_lower_bound >= 0:
            reasons.append(f"gate_lower_bound: got {self.gate_lower_bound}, needs a negative number (an absent bound is another gate)")
        if self.draft is not None and any(not 0 <= i < self.n_layers for i in self.draft.target_layer_ids):
            reasons.append(f"draft.target_layer_ids: got {self.draft.target_layer_ids}, needs 0-based layers below {self.n_layers}")
        return tuple(reasons)


K3 = ModelConfig(
    name="kimi-k3",
    n_layers=93,
    hidden_size=7168,
    vocab_size=163840,
    bos_token_id=163584,
    eos_token_id=163586,
    pad_token_id=163839,
    kda_layers=tuple(i for i in range(93) if (i + 1) % 4 and i != 92),
    kda_heads=96,
    mla_layers=tuple(i for i in range(93) if not (i + 1) % 4 or i == 92),
    mla_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    dense_intermediate_size=33792,
    n_experts=896,
    n_experts_per_token=16,
    n_shared_experts=2,
    moe_intermediate_size=3072,
    moe_latent_size=3584,
    attn_res_block_size=12,
    draft=DraftConfig(
        n_layers=5,
        n_drafts=7,
        target_layer_ids=(2, 23, 47, 71, 89),
        n_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=33792,
        markov_rank=256,
        mask_token_id=163838,
    ),
)

# The same architecture, small enough to ship. Layers 4, 7 and 8 (1-based) are MLA, so the last two are, as in K3.
NANO = ModelConfig(
    name="nano-k3",
    n_layers=8,
    hidden_size=256,
    vocab_size=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    kda_layers=(0, 1, 2, 4, 5),
    kda_heads=2,
    mla_layers=(3, 6, 7),
    mla_heads=4,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    dense_intermediate_size=384,
    n_experts=24,
    n_experts_per_token=4,
    n_shared_experts=2,
    moe_intermediate_size=64,
    moe_latent_size=128,
    attn_res_block_size=3,
    draft=DraftConfig(
        n_layers=1,
        n_drafts=7,
        target_layer_ids=(1, 4, 7),
        n_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        intermediate_size=192,
        markov_rank=32,
        mask_token_id=3,
    ),
)


def _split(what: str, size: int, tp: int) -> int:
    if size % tp:
        raise Unsupported("Shard", (f"{what}: got {size} over tp={tp}, needs a multiple; choose a tp that divides it",))
    return size // tp


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One tensor-parallel rank's share. Column-parallel rows and row-parallel columns are contiguous blocks in rank order."""

    config: ModelConfig
    tp: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.tp < 1 or not 0 <= self.rank < self.tp:
            raise Unsupported("Shard", (f"rank: got {self.rank} of tp={self.tp}, needs 0 <= rank < tp",))

    @property
    def kda_heads(self) -> int:
        return _split("kda_heads", self.config.kda_heads, self.tp)

    @property
    def kda_dim(self) -> int:
        return self.kda_heads * self.config.kda_head_dim

    @property
    def in_proj_rows(self) -> int:
        """Rows of the fused KDA input projection: q, k, v, gate, the replicated F_A and beta, padded to 16."""
        rows = 4 * self.kda_dim + self.config.kda_head_dim + self.kda_heads
        return -(-rows // 16) * 16

    @property
    def mla_heads(self) -> int:
        return _split("mla_heads", self.config.mla_heads, self.tp)

    @property
    def mla_in_rows(self) -> int:
        """Rows of the fused MLA input projection: the replicated q_a and kv_a, then this rank's output gate."""
        c = self.config
        return c.q_lora_rank + c.mla_cache_dim + self.mla_heads * c.v_head_dim

    @property
    def attn_out_dim(self) -> int:
        """Columns of o_proj (KDA and MLA differ in nano; K3 has the same 96 x 128 in both)."""
        return self.kda_dim

    @property
    def router_rows(self) -> int:
        return _split("n_experts", self.config.n_experts, self.tp)

    @property
    def latent_rows(self) -> int:
        return _split("moe_latent_size", self.config.moe_latent_size, self.tp)

    @property
    def expert_intermediate(self) -> int:
        return _split("moe_intermediate_size", self.config.moe_intermediate_size, self.tp)

    @property
    def shared_intermediate(self) -> int:
        return _split("shared_intermediate_size", self.config.shared_intermediate_size, self.tp)

    @property
    def dense_intermediate(self) -> int:
        return _split("dense_intermediate_size", self.config.dense_intermediate_size, self.tp)

    @property
    def up_rows(self) -> int:
        """Rows of the latent up-projection this rank computes (it holds all of them)."""
        return _split("hidden_size", self.config.hidden_size, self.tp)

    @property
    def vocab_rows(self) -> int:
        return _split("vocab_size", self.config.vocab_size, self.tp)
