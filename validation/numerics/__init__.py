"""Numerics: is the candidate as close to an FP64 oracle as stock is? Per sublayer, end to end, and per token over long contexts."""
