"""Operands of the four MLA launches between the input projection and o_proj: query, split decode, merge, value."""

from __future__ import annotations

from kimi_k3_decode.config import Shard
from kimi_k3_decode.ops.contract import Access, Contract, ContractError, Operand
from kimi_k3_decode.ops.operands import BF16, FP32, given, output, state, table, weight

CACHE_DTYPES = (BF16, "float8_e4m3fn")


def _pages(shard: Shard, cache_dtype: str, access: Access) -> Operand:
    if cache_dtype not in CACHE_DTYPES:
        raise ContractError("Contract mla", [f"cache_dtype: got {cache_dtype!r}, needs one of {CACHE_DTYPES}"])
    return state(
        "pages_STM", cache_dtype, access=access, S=None, T0=None, M=shard.config.mla_cache_dim, note="page 0 is null, never written"
    )


def _tables(rows: int, q: int) -> tuple[Operand, Operand]:
    if rows % q:
        raise ContractError("Contract mla", [f"rows: got {rows}, needs a multiple of q={q}; pad by whole requests"])
    return table("lengths_B", B=rows // q), table("block_table_BN", B=rows // q, N=None)


def _parameters(shard: Shard, rows: int, q: int, **more: object) -> dict[str, object]:
    return {"model": shard.config.name, "tp": shard.tp, "rows": rows, "q": q, **more}


def query(shard: Shard, *, rows: int, q: int = 1, cache_dtype: str = BF16) -> Contract:
    """q_a norm, q_b, absorbed W_UK; writes the token's latent and key channels to the cache (rows on page 0 are padding, not written)."""
    c, heads = shard.config, shard.mla_heads
    return Contract(
        op="mla_query",
        operands=(
            given("proj_TP", T=rows, P=shard.mla_in_rows),
            weight("q_norm_P", P=c.q_lora_rank),
            weight("q_b_PC", P=heads * c.qk_head_dim, C=c.q_lora_rank, note="per head: nope then key channels"),
            weight("kv_norm_L", L=c.kv_lora_rank),
            weight("w_uk_HKL", H=heads, K=c.qk_nope_head_dim, L=c.kv_lora_rank),
            *_tables(rows, q),
            _pages(shard, cache_dtype, Access.WRITE),
            output("q_THM", T=rows, H=heads, M=c.mla_cache_dim),
        ),
        parameters=_parameters(shard, rows, q, cache_dtype=cache_dtype),
    )


def decode(shard: Shard, *, rows: int, q: int = 1, splits: int = 1, cache_dtype: str = BF16) -> Contract:
    """Flash decode over one context split each: unnormalised-softmax partials (divided by their own sum) and their log-sum-exp."""
    c, heads = shard.config, shard.mla_heads
    return Contract(
        op="mla_decode",
        operands=(
            given("q_THM", T=rows, H=heads, M=c.mla_cache_dim),
            *_tables(rows, q),
            _pages(shard, cache_dtype, Access.READ),
            output("partial_XTHL", FP32, X=splits, T=rows, H=heads, L=c.kv_lora_rank),
            output("lse_XTH", FP32, X=splits, T=rows, H=heads, note="natural log; -inf for an empty split"),
        ),
        parameters=_parameters(shard, rows, q, splits=splits, cache_dtype=cache_dtype),
    )


def merge(shard: Shard, *, rows: int, q: int = 1, splits: int = 1) -> Contract:
    """Combines the splits by their log-sum-exp, in split order."""
    c, heads = shard.config, shard.mla_heads
    return Contract(
        op="mla_merge",
        operands=(
            given("partial_XTHL", FP32, X=splits, T=rows, H=heads, L=c.kv_lora_rank),
            given("lse_XTH", FP32, X=splits, T=rows, H=heads),
            output("latent_THL", T=rows, H=heads, L=c.kv_lora_rank),
        ),
        parameters=_parameters(shard, rows, q, splits=splits),
    )


def value(shard: Shard, *, rows: int, q: int = 1) -> Contract:
    """W_UV per head, then the output gate (the last columns of the input projection)."""
    c, heads = shard.config, shard.mla_heads
    return Contract(
        op="mla_value",
        operands=(
            given("latent_THL", T=rows, H=heads, L=c.kv_lora_rank),
            given("proj_TP", T=rows, P=shard.mla_in_rows),
            weight("w_uv_HVL", H=heads, V=c.v_head_dim, L=c.kv_lora_rank),
            output("out_TC", T=rows, C=heads * c.v_head_dim),
        ),
        parameters=_parameters(shard, rows, q),
    )
