"""A logits processor that forces the output tokens a request names in `vllm_xargs: {"force_ids": [...]}`.

Start the server with `--logits-processors fasttrack_vllm.forcing:ForceTokens`. The server computes its log-probabilities before
processors run (`--logprobs-mode raw_logprobs`, the default), so they stay those of the model. vLLM ignores `vllm_xargs` that nobody
reads: whether forcing happened shows only in the returned token ids (`return_token_ids: true`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

ARGUMENT = "force_ids"


class ForceTokens(AdapterLogitsProcessor):
    """Output token i of a request becomes `force_ids[i]`; after the last one the model continues freely.

    An id outside the vocabulary forces nothing: raising here would end the server for every user, and the returned ids show it.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError, which the server answers with 400, for anything but a list of token ids."""
        asked = (sampling_params.extra_args or {}).get(ARGUMENT)
        if asked is not None and (not isinstance(asked, list) or not asked or not all(_is_id(token) for token in asked)):
            raise ValueError(f"vllm_xargs.{ARGUMENT}: got {str(asked)[:60]}, needs a list of token ids that is not empty")

    def is_argmax_invariant(self) -> bool:
        return False  # greedy sampling must not skip it

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        forced = (params.extra_args or {}).get(ARGUMENT)
        return _forcer(forced) if forced else None


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _forcer(forced: Sequence[int]) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    def force(output_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        place = len(output_ids)
        if place >= len(forced) or forced[place] >= logits_V.shape[-1]:
            return logits_V
        only = torch.full_like(logits_V, -torch.inf)
        only[forced[place]] = 0.0
        return only

    return force
