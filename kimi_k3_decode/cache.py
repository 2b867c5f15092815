"""Caches and the per-step batch both decode paths read: paged MLA latents, KDA conv windows and recurrent states, slots.

Layout (axes: P pages, S slots, B requests, Q tokens a request in this step, H heads, V and K state dims, W window, C channels):

* MLA, one layer: `pages_PTC` [P, page_tokens, kv_lora_rank + qk_rope_head_dim]; a request's token t lives in page
  `block_table_BN[b, t // page_tokens]`, row `t % page_tokens`. Page 0 is the null page and is never written.
* KDA, one layer: `conv_SWC` [S, q_max + 2, 3 * kda_dim] raw q | k | v projections (3 kept taps plus the drafts) and
  `state_SHVK` [S, H, V, K] float32 (float64 in the oracle). Slot 0 is the null slot: slots <= 0 are padding, never written.

Slot semantics of a step (kimi-k3 verify rules): `slots_BQ` and `accepted_B` (counts the anchor, >= 1). The recurrent state is read from
`slots[b, accepted - 1]`; token t writes `slots[b, t]` if > 0. The conv window of a request lives in `slots[b, 0]` and is read from offset
`accepted - 1`. Plain decode is q = 1, accepted = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NULL_SLOT = 0
NULL_PAGE = 0


@dataclass
class MlaLayerCache:
    pages_PTC: torch.Tensor
    scale: float = 1.0  # of the FP8 form; 1.0 otherwise


@dataclass
class KdaLayerCache:
    conv_SWC: torch.Tensor
    state_SHVK: torch.Tensor


@dataclass
class StepBatch:
    """One decode or verify step. `lengths_B` is the number of tokens already cached, so token t of request b has position lengths[b] + t."""

    tokens_BQ: torch.Tensor  # int64
    lengths_B: torch.Tensor  # int32
    block_table_BN: torch.Tensor  # int32
    slots_BQ: torch.Tensor  # int32
    accepted_B: torch.Tensor  # int32
    uniform: bool = True  # every request brings exactly Q tokens and none is still prefilling

    @property
    def rows(self) -> int:
        return self.tokens_BQ.numel()

    @property
    def q(self) -> int:
        return self.tokens_BQ.shape[1]


@dataclass
class StepOutput:
    """What a path returns. `taps_IBQD` are the DSpark taps; `routing` maps layer -> expert ids [T, top_k] in rank order of the scores."""

    logits_BQV: torch.Tensor  # float32 (float64 in the oracle)
    taps_IBQD: torch.Tensor | None = None
    routing: dict[int, torch.Tensor] | None = None
