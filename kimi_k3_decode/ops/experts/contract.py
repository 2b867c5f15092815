"""Operands of the routed experts: MXFP4 weights (E2M1 codes, two a byte, low nibble first; E8M0 scales) times BF16 activations."""

from __future__ import annotations

from kimi_k3_decode.config import Shard
from kimi_k3_decode.ops.contract import Contract, Operand
from kimi_k3_decode.ops.operands import FP32, INT32, MXFP4_CODES_PER_BYTE, UINT8, given, output, publishes, scratch, weight


def _packed(name: str, shard: Shard, out_letter: str, out_size: int, in_size: int) -> tuple[Operand, Operand]:
    """Codes [E, out, in / 2] and scales [E, out, in / group], packed along the input dimension."""
    c = shard.config
    codes = weight(f"{name}_E{out_letter}J", UINT8, E=c.n_experts, **{out_letter: out_size}, J=in_size // MXFP4_CODES_PER_BYTE)  # type: ignore[arg-type]
    scales = weight(f"{name}_scale_E{out_letter}G", UINT8, E=c.n_experts, **{out_letter: out_size}, G=in_size // c.mxfp4_group)  # type: ignore[arg-type]
    return codes, scales


def up(shard: Shard, *, rows: int) -> Contract:
    """SiTU(w1 z, w3 z) for every (row, chosen expert), rounded to BF16, stored by pair number t * top_k + z."""
    c, inner, top_k = shard.config, shard.expert_intermediate, shard.config.n_experts_per_token
    return Contract(
        op="experts_up",
        operands=(
            given("latent_TL", T=rows, L=c.moe_latent_size),
            given("ids_TZ", INT32, T=rows, Z=top_k),
            given("offsets_E", INT32, E=c.n_experts + 1),
            given("pairs_N", INT32, N=rows * top_k),
            *_packed("w1", shard, "I", inner, c.moe_latent_size),
            *_packed("w3", shard, "I", inner, c.moe_latent_size),
            output("hidden_TZI", T=rows, Z=top_k, I=inner),
        ),
        parameters={"model": c.name, "tp": shard.tp, "rows": rows},
    )


def down(shard: Shard, *, rows: int) -> Contract:
    """w2 of every pair times its routing weight, summed over the chosen experts in rank order; FP32 partial published to every rank."""
    c, inner, top_k = shard.config, shard.expert_intermediate, shard.config.n_experts_per_token
    return Contract(
        op="experts_down",
        operands=(
            given("hidden_TZI", T=rows, Z=top_k, I=inner),
            given("ids_TZ", INT32, T=rows, Z=top_k),
            given("weights_TZ", T=rows, Z=top_k),
            given("offsets_E", INT32, E=c.n_experts + 1),
            given("pairs_N", INT32, N=rows * top_k),
            *_packed("w2", shard, "L", c.moe_latent_size, inner),
            scratch("pair_out_TZL", FP32, T=rows, Z=top_k, L=c.moe_latent_size, note="weighted; combined in rank order, never by atomics"),
            scratch("tickets_N", INT32, N=None, note="arrival counters; the last arriver combines and resets them"),
            publishes(
                "latent_RTL", FP32, writer="experts_down", reader="latent_reduce", layout="slot", R=shard.tp, T=rows, L=c.moe_latent_size
            ),
        ),
        parameters={"model": c.name, "tp": shard.tp, "rows": rows},
    )
