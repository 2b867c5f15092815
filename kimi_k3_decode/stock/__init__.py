"""The baseline path: one operation a function, plain PyTorch, at bf16, fp32 or fp64 (the oracle)."""

from kimi_k3_decode.stock.model import Observer, PrefillOutput, StockPath

__all__ = ["Observer", "PrefillOutput", "StockPath"]
