"""The in-process engine as the evals see it, with the proof of which path decoded each reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evals.generation import GenerationParams, PathReply
from kimi_k3_decode.engine import CANDIDATE, STOCK, Engine
from kimi_k3_decode.plan import SPECIALIZED, SPECIALIZED_BACKEND, Deployment, Plan
from kimi_k3_decode.sampling import SamplingParams
from kimi_k3_decode.tokenizer import FileTokenizer, TextTokenizer
from validation.core.types import HarnessError


class EmbeddedEngine:
    """A `PairEngine` over `kimi_k3_decode.engine.Engine`. Each candidate reply's `extra["path_share"]` is the share of its batch's decode
    rows that ran on the candidate path; the rest fell back to stock.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.max_context_tokens = min(engine.max_context_tokens, engine.max_cached_tokens)

    def count_tokens(self, prompt: str) -> int:
        return self._engine.count_tokens(prompt)

    def generate_pair(self, prompts: Sequence[str], params: GenerationParams) -> Mapping[str, Sequence[PathReply]]:
        before = dict(self._engine.row_counts[CANDIDATE])
        replies = self._engine.generate_pair(prompts, _sampling(params))
        made = {path: [_reply(completion) for completion in replies[path]] for path in (STOCK, CANDIDATE)}
        return {**made, CANDIDATE: self._with_share(made[CANDIDATE], before)}

    def generate(self, prompts: Sequence[str], params: GenerationParams, path: str) -> Sequence[PathReply]:
        before = dict(self._engine.row_counts[CANDIDATE])
        made = [_reply(completion) for completion in self._engine.generate(prompts, _sampling(params), path)]
        return self._with_share(made, before) if path == CANDIDATE else made

    def loglikelihood(self, pairs: Sequence[tuple[str, str]], path: str) -> Sequence[tuple[float, bool]]:
        return self._engine.loglikelihood(pairs, path)

    def _with_share(self, replies: Sequence[PathReply], before: Mapping[str, int]) -> list[PathReply]:
        after = self._engine.row_counts[CANDIDATE]
        rows = {path: after[path] - before.get(path, 0) for path in after}
        share = rows.get(SPECIALIZED, 0) / sum(rows.values()) if sum(rows.values()) else 0.0
        return [replace(reply, extra={**reply.extra, "path_share": share}) for reply in replies]


def _sampling(params: GenerationParams) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=params.max_new_tokens,
        stop=params.stop,
        temperature=params.temperature,
        top_p=params.top_p,
        seeds=params.seeds,
    )


def _reply(completion: Any) -> PathReply:
    return PathReply(token_ids=completion.token_ids, text=completion.text, finish_reason=completion.finish_reason)


def embedded_engine(targets: Mapping[str, Any], tokenizer: TextTokenizer | None = None) -> EmbeddedEngine:
    """Engine over the stock and candidate targets of one checkpoint; `tokenizer` default: the checkpoint's. Raises HarnessError."""
    stock, candidate = targets["stock"], targets["candidate"]
    if tokenizer is None:
        try:
            tokenizer = FileTokenizer(stock.settings.path(stock.settings.checkpoint))
        except ValueError as error:
            raise HarnessError(str(error)) from error
    plan = Plan.make(stock.weights.config, Deployment(decode_backend=SPECIALIZED_BACKEND))
    return EmbeddedEngine(Engine(stock.path, candidate.path, plan, tokenizer))
