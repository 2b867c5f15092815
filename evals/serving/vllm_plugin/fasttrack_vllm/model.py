"""vLLM runs nano-K3 through `kimi_k3_decode`: vLLM schedules, samples and serves; prefill and decode steps are the project's own.

The model keeps its own caches, because vLLM's pages know neither KDA states nor this project's layout. One attention layer stands in for
them: it is never computed, but its metadata tell, step by step, which tokens belong to which request and how many came before. A request
is recognised by its first cache block, which no other live request holds while prefix caching is off.

A prompt's chunk, whole or in parts, is prefilled by the stock path. Requests that bring one token are decoded together, on the path that
`--additional-config '{"decode_backend": "latency_specialized"}'` opts into ("auto" is stock). `kimi_k3_decode` must be importable.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention

from kimi_k3_decode.cache import Caches
from kimi_k3_decode.checkpoint import check_tensors
from kimi_k3_decode.config_io import read_config
from kimi_k3_decode.names import from_tensors
from kimi_k3_decode.plan import AUTO, SPECIALIZED, SPECIALIZED_BACKEND, Deployment, Plan
from kimi_k3_decode.stock import StockPath

log = logging.getLogger("vllm.fasttrack")

PLACES_PER_REQUEST = 2  # a finished request leaves its place only when another needs it
LOG_EVERY_STEPS = 100


class FasttrackK3ForCausalLM(nn.Module):
    """Returns logits in the place of hidden states; `compute_logits` passes them on."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Raises ValueError with every reason when the server was started in a way that this class cannot serve."""
        super().__init__()
        reasons = _refusals(vllm_config)
        if reasons:
            raise ValueError("; ".join(reasons))
        model = vllm_config.model_config
        self.config = read_config(f"{model.model}/config.json")
        self.identity = Attention(
            num_heads=1, head_size=32, scale=1.0, num_kv_heads=1, cache_config=vllm_config.cache_config, prefix="model.layers.0.identity"
        )
        self._rows = vllm_config.scheduler_config.max_num_seqs
        self._context = model.max_model_len
        asked = (vllm_config.additional_config or {}).get("decode_backend", AUTO)
        self._plan = Plan.make(self.config, Deployment(decode_backend=asked))
        self._backend = asked
        self._places: OrderedDict[int, int] = OrderedDict()  # first block -> place, least recently used first
        self.steps: Counter[str] = Counter()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Build both paths from the tensors that vLLM read. Raises ValueError naming every tensor that is wrong."""
        tensors = dict(weights)
        wrong = check_tensors(self.config, tensors)
        if wrong:
            raise ValueError("; ".join(wrong))
        loaded = from_tensors(self.config, tensors)
        self._stock = StockPath(loaded, torch.bfloat16)
        self._candidate: Any = None
        if self._backend == SPECIALIZED_BACKEND:
            from kimi_k3_decode.step import SpecializedPath

            self._candidate = SpecializedPath(loaded)
        self._caches = Caches.allocate(self.config, PLACES_PER_REQUEST * self._rows, self._context)
        log.warning("fasttrack: nano-K3 through kimi_k3_decode, decode_backend=%s", self._backend)
        return set(tensors)

    # ---- what vLLM calls ----
    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(input_ids), self.config.hidden_size)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> torch.Tensor:
        """Logits [T, V] of all T tokens of the step, in vLLM's order."""
        logits_TV = torch.zeros(len(input_ids), self.config.vocab_size)
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures its memory
            return logits_TV
        told = metadata[self.identity.layer_name]
        starts = told.query_start_loc.tolist()
        totals = told.seq_lens.tolist()
        keys = told.block_table[:, 0].tolist()
        tokens = input_ids.tolist()
        decoding: list[tuple[int, int]] = []  # place, row
        with torch.inference_mode():
            for begin, end, total, key in zip(starts[:-1], starts[1:], totals, keys, strict=False):
                if end == begin:
                    continue
                before = total - (end - begin)
                place = self._place(key, new=before == 0)
                if self._caches.lengths_R[place] != before:
                    raise ValueError(
                        f"caches: got {self._caches.lengths_R[place]} tokens of a request, needs {before}; its blocks were shared"
                    )
                if before and end - begin == 1:
                    decoding.append((place, begin))
                    continue
                out = self._stock.prefill([tokens[begin:end]], self._caches, [place], all_logits=True)
                assert out.all_logits is not None
                logits_TV[begin:end] = out.all_logits[0]
            if decoding:
                self._decode(decoding, tokens, logits_TV)
        return logits_TV

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    # ---- inside ----
    def _place(self, key: int, *, new: bool) -> int:
        if new:
            if key in self._places:
                self._caches.release(self._places.pop(key))
            elif not self._caches.free_requests:
                self._caches.release(self._places.popitem(last=False)[1])
            self._places[key] = self._caches.acquire()
        self._places.move_to_end(key)
        return self._places[key]

    def _decode(self, decoding: list[tuple[int, int]], tokens: list[int], logits_TV: torch.Tensor) -> None:
        places, rows = [place for place, _ in decoding], [row for _, row in decoding]
        batch = self._caches.batch([[tokens[row]] for row in rows], places)
        chosen = self._plan.decide(batch).path
        path = self._candidate if chosen == SPECIALIZED else self._stock
        logits_TV[rows] = path.step(batch, self._caches).logits_BQV[:, 0].to(logits_TV.dtype)
        self._caches.advance(places, [1] * len(places))
        self.steps[chosen] += 1
        if sum(self.steps.values()) % LOG_EVERY_STEPS == 1:
            log.warning("fasttrack: decode path: %d specialized steps, %d stock steps", self.steps[SPECIALIZED], self.steps["stock"])


def _refusals(vllm_config: VllmConfig) -> list[str]:
    parallel = vllm_config.parallel_config
    checks = (
        (vllm_config.cache_config.enable_prefix_caching, "prefix caching: got on, needs --no-enable-prefix-caching"),
        (vllm_config.speculative_config is not None, "speculation: got on, needs it off; verify steps cannot be told from chunks here"),
        (parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1, "parallelism: got more than one rank, needs one"),
    )
    return [text for wrong, text in checks if wrong]
