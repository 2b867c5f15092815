"""Subjects for timing on this machine: one decode or verify step of the nano model, stock or a candidate, from fixed caches.

Every call starts from a copy of the same caches, so a reply depends on its inputs alone and can be checked against the oracle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from kimi_k3_decode.cache import Caches, KdaLayerCache
from kimi_k3_decode.config import NANO
from kimi_k3_decode.stock import StockPath
from kimi_k3_decode.weights import ModelWeights, load_checkpoint
from perf.subject import Arrays
from validation.core.settings import PROJECT_ROOT

CHECKPOINT = PROJECT_ROOT / "kimi_k3_decode" / "checkpoints" / "nano"
WORD_PROBLEMS = PROJECT_ROOT / "evals" / "nano" / "data" / "gsm8k_nano.jsonl"
CONTEXT_TOKENS = 64
SEED = 11


@lru_cache(maxsize=8)
def started(requests: int, q: int, dtype: torch.dtype = torch.bfloat16) -> Caches:
    """Caches of `requests` requests with about CONTEXT_TOKENS tokens each: random, valid contents, the same in every process."""
    caches = Caches.allocate(NANO, requests, CONTEXT_TOKENS + 16, q_max=q, dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(SEED)
    for request in range(requests):
        length = CONTEXT_TOKENS - request % 7
        caches.reserve(request, length)
        caches.lengths_R[request] = length
    for cache in caches.layers:
        if isinstance(cache, KdaLayerCache):
            cache.conv_SWC.copy_(torch.randn(cache.conv_SWC.shape, generator=random))
            cache.state_SHVK.copy_(torch.randn(cache.state_SHVK.shape, generator=random) * 0.2)
        else:
            cache.pages_PTC.copy_(torch.randn(cache.pages_PTC.shape, generator=random))
    return caches.fork(dtype)


def stepper(path: Any, dtype: torch.dtype = torch.bfloat16) -> Callable[[Arrays], dict[str, np.ndarray]]:
    """`run({"tokens": int64 [B, Q]}) -> {"logits": float32 [B, Q * V]}` over a path."""

    def run(inputs: Arrays) -> dict[str, np.ndarray]:
        tokens_BQ = torch.from_numpy(np.array(inputs["tokens"]))
        caches = started(tokens_BQ.shape[0], tokens_BQ.shape[1], dtype).fork()
        with torch.inference_mode():
            logits_BQV = path.step(caches.batch(tokens_BQ), caches).logits_BQV
        return {"logits": logits_BQV.float().flatten(1).numpy()}

    return run


def tokens(requests: int, q: int) -> Callable[[int], Arrays]:
    """Fresh random tokens for each seed."""
    return lambda seed: {"tokens": np.random.default_rng(seed).integers(4, NANO.vocab_size, size=(requests, q))}


@lru_cache(maxsize=1)
def weights() -> ModelWeights:
    return load_checkpoint(CHECKPOINT)


@lru_cache(maxsize=1)
def documents() -> tuple[np.ndarray, ...]:
    """Token ids of word problems with their answers, as the model was trained on: on them BF16 stays near the oracle at any length."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    rows = [json.loads(line) for line in WORD_PROBLEMS.read_text().splitlines()]
    return tuple(np.array(tokenizer.encode(f"{row['prompt']}{row['answer']}\n").ids, dtype=np.int64) for row in rows)


def texts(rng: np.random.Generator, users: int, n_tokens: int) -> np.ndarray:
    """int64 [U, N]: for each user problems drawn at random, one behind the other."""
    known = documents()
    made = np.empty((users, n_tokens), dtype=np.int64)
    for row in made:
        filled = 0
        while filled < n_tokens:
            drawn = known[rng.integers(len(known))][: n_tokens - filled]
            row[filled : filled + len(drawn)] = drawn
            filled += len(drawn)
    return made


def stock(config: Mapping[str, Any]) -> Callable[[Arrays], dict[str, np.ndarray]]:
    torch.set_num_threads(1)
    return stepper(StockPath(weights(), torch.bfloat16))


def candidate(config: Mapping[str, Any]) -> Callable[[Arrays], dict[str, np.ndarray]]:
    """config: {"candidate": a name as on the command line}."""
    from validation.targets.engine import find_candidate

    torch.set_num_threads(1)
    return stepper(find_candidate(config["candidate"])(weights()))


def oracle() -> Callable[[Arrays], dict[str, np.ndarray]]:
    """The stock code in FP64 on the same caches."""
    return stepper(StockPath(weights().to(torch.float64), torch.float64), torch.float64)
