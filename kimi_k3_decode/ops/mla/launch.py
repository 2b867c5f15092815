"""Launch parameters of the four MLA launches."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.device.launcher import PDL, ROWS, KernelSpec, float32, int32, no_scalars, operand
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.mla.decode_kernel import MlaDecode, MlaMerge
from kimi_k3_decode.ops.mla.kernel import MlaQuery, MlaValue

PAGE_TOKENS = 64


def query(config: ModelConfig, contract: Contract, page_tokens: int = PAGE_TOKENS) -> KernelSpec:
    heads, q = contract["w_uk_HKL"].shape[0], contract.parameters["q"]
    fp8 = contract.parameters["cache_dtype"] == "float8_e4m3fn"
    columns = contract["proj_TP"].shape[1]
    c = config
    kernel = MlaQuery(
        heads, c.q_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank, columns, q, c.rms_norm_eps, page_tokens, fp8
    )
    names = ("proj_TP", "q_norm_P", "q_b_PC", "kv_norm_L", "w_uk_HKL", "lengths_B", "block_table_BN", "pages_STM", "q_THM")
    return KernelSpec(
        op="mla_query",
        variant=f"h{heads}-p{columns}-q{q}-page{page_tokens}{'-fp8' if fp8 else ''}",
        make=lambda: kernel,
        params=(*(operand(contract, name) for name in names), ROWS, int32("table_width"), float32("inverse_scale"), PDL),
        scalars=lambda given: {
            "table_width": given["tensors"]["block_table_BN"].shape[1],
            "inverse_scale": 1.0 / given.get("cache_scale", 1.0),
        },
    )


def decode(config: ModelConfig, contract: Contract, page_tokens: int = PAGE_TOKENS) -> KernelSpec:
    heads, q, splits = contract["q_THM"].shape[1], contract.parameters["q"], contract.parameters["splits"]
    fp8 = contract.parameters["cache_dtype"] == "float8_e4m3fn"
    kernel = MlaDecode(heads, config.kv_lora_rank, config.qk_rope_head_dim, q, splits, page_tokens, config.qk_head_dim**-0.5, fp8)
    names = ("q_THM", "lengths_B", "block_table_BN", "pages_STM", "partial_XTHL", "lse_XTH")
    return KernelSpec(
        op="mla_decode",
        variant=f"h{heads}-l{config.kv_lora_rank}-q{q}-x{splits}-page{page_tokens}{'-fp8' if fp8 else ''}",
        make=lambda: kernel,
        params=(*(operand(contract, name) for name in names), ROWS, int32("table_width"), float32("cache_scale"), PDL),
        scalars=lambda given: {
            "table_width": given["tensors"]["block_table_BN"].shape[1],
            "cache_scale": given.get("cache_scale", 1.0),
        },
    )


def merge(config: ModelConfig, contract: Contract) -> KernelSpec:
    heads, splits = contract["lse_XTH"].shape[2], contract.parameters["splits"]
    kernel = MlaMerge(splits, config.kv_lora_rank)
    return KernelSpec(
        op="mla_merge",
        variant=f"l{config.kv_lora_rank}-x{splits}",
        make=lambda: kernel,
        params=(*(operand(contract, name) for name in ("partial_XTHL", "lse_XTH", "latent_THL")), int32("row_heads"), PDL),
        scalars=lambda given: {"row_heads": given["rows"] * heads},
    )


def value(config: ModelConfig, contract: Contract) -> KernelSpec:
    heads, channels, latent = contract["w_uv_HVL"].shape
    columns = contract["proj_TP"].shape[1]
    kernel = MlaValue(heads, channels, latent, columns)
    return KernelSpec(
        op="mla_value",
        variant=f"h{heads}-v{channels}-l{latent}-p{columns}",
        make=lambda: kernel,
        params=(*(operand(contract, name) for name in ("latent_THL", "proj_TP", "w_uv_HVL", "out_TC")), ROWS, PDL),
        scalars=no_scalars,
    )
