"""Teacher forcing: decode given tokens one step at a time and keep every distribution. Both paths start from one identical prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kimi_k3_decode.cache import Caches, StepBatch, StepOutput
from kimi_k3_decode.stock import StockPath

Routing = dict[int, torch.Tensor]


class DecodePath(Protocol):
    """Anything that decodes: the stock path, the specialised path, or a wrong one."""

    dtype: torch.dtype

    def step(self, batch: StepBatch, caches: Caches, *, routing: Routing | None = None, taps: bool = False) -> StepOutput: ...


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Of B sequences over W forced tokens: logits after each token, [B, W, V], and the expert ids each step chose (layer -> [B, top_k])."""

    logits_BWV: torch.Tensor
    routing: tuple[Routing, ...]


def decode_forced(
    path: DecodePath,
    caches: Caches,
    requests: Sequence[int],
    tokens_BW: torch.Tensor,
    *,
    q: int = 1,
    routing: Sequence[Routing] | None = None,
) -> Trace:
    """Append `tokens_BW` to `requests` by decode steps of `q` tokens (all accepted), advancing `caches`.

    `routing` forces each step's expert ids, as another Trace recorded them. Raises ValueError when q does not divide the window.
    """
    window = tokens_BW.shape[1]
    if window % q or (routing is not None and len(routing) != window // q):
        raise ValueError(f"window: got {window} tokens in steps of {q}, needs a multiple of q and one routing a step")
    logits, chosen = [], []
    for step, begin in enumerate(range(0, window, q)):
        batch = caches.batch(tokens_BW[:, begin : begin + q], requests)
        output = path.step(batch, caches, routing=None if routing is None else routing[step])
        caches.advance(requests, [q] * len(requests))
        logits.append(output.logits_BQV)
        chosen.append(output.routing or {})
    return Trace(logits_BWV=torch.cat(logits, dim=1), routing=tuple(chosen))


def teacher_force(
    stock: StockPath,
    paths: Mapping[str, DecodePath],
    tokens: Sequence[Sequence[int]],
    window: int,
    *,
    q: int = 1,
    routing_of: str | None = None,
    chunk_tokens: int = 2048,
) -> dict[str, Trace]:
    """Prefill all but the last `window` tokens of each sequence once with `stock`, fork, and decode the window with every path.

    A path of another dtype gets the caches converted, so the FP64 oracle continues from the same prefill. With `routing_of` the other
    paths are forced to that path's experts. Raises ValueError for a sequence without a token before the window.
    """
    short = [i for i, sequence in enumerate(tokens) if len(sequence) <= window]
    if short or window < 1:
        raise ValueError(f"tokens: got sequences {short} of <= {window} tokens, need at least one token before a window >= 1")
    longest = max(len(sequence) for sequence in tokens)
    caches = Caches.allocate(stock.config, len(tokens), longest, q, stock.dtype, device=stock.device)
    requests = [caches.acquire() for _ in tokens]
    stock.prefill([sequence[:-window] for sequence in tokens], caches, requests, chunk_tokens=chunk_tokens)
    forced_BW = torch.tensor([list(sequence[-window:]) for sequence in tokens], dtype=torch.int64)
    names = sorted(paths, key=lambda name: name != routing_of)
    traces: dict[str, Trace] = {}
    for name in names:
        forced = traces[routing_of].routing if routing_of is not None and name != routing_of else None
        traces[name] = decode_forced(paths[name], caches.fork(paths[name].dtype), requests, forced_BW, q=q, routing=forced)
    return {name: traces[name] for name in paths}
