"""Generation: prefill once, fork, and decode with one or both paths, each in its own continuous batch.

Each side (a name and the way its steps run) keeps at most `max_rows` requests in flight. Prompts are prefilled by the stock path into a
pool; a side adopts a copy when it has room, and the pool forgets a prompt when every side has taken it. So memory is bounded by what is
in flight, and both sides start from the same bits.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kimi_k3_decode.cache import Caches, StepBatch
from kimi_k3_decode.forcing import DecodePath, Trace, decode_forced, teacher_force
from kimi_k3_decode.sampling import SamplingParams, TokenLogprob, choose, logprobs_of
from kimi_k3_decode.stock import StockPath
from kimi_k3_decode.tokenizer import TextTokenizer

STOCK, CANDIDATE = "stock", "candidate"
MAX_ROWS = 64
STOP_TAIL_TOKENS = 8  # tokens beyond the stop string's own length that are decoded to look for it


class StepPlan(Protocol):
    """Decides where a step of the candidate side runs (plan.Plan). The decision has `path` ("stock" or "specialized") and `reason`."""

    def decide(self, batch: StepBatch) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One prompt continued. `token_ids` are all generated tokens; `text` ends before the stop string or the end-of-sequence token.

    finish_reason: "stop" (end of sequence or a stop string) or "length". `extra` says which stop it was and the prompt's tokens.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class _Request:
    """A prompt in flight on one side."""

    index: int
    place: int
    generator: random.Random
    pending: int = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(kw_only=True)
class _Prefilled:
    """A prompt waiting in the pool for `waiting` sides."""

    place: int
    logits_V: torch.Tensor
    waiting: int


@dataclass(kw_only=True)
class _Side:
    name: str
    caches: Caches
    next: int = 0  # the first prompt it has not taken
    active: list[_Request] = field(default_factory=list)
    done: dict[int, Completion] = field(default_factory=dict)


class Engine:
    """Batched generation over a stock path and, when given, a candidate whose steps `plan` admits; every other step runs stock.

    `step_counts[side]` counts (path, reason) of every decode step, and `rows_counts[side]` the token rows of those steps: the proof of
    which path ran.
    """

    def __init__(
        self,
        stock: StockPath,
        candidate: DecodePath | None = None,
        plan: StepPlan | None = None,
        tokenizer: TextTokenizer | None = None,
        *,
        max_rows: int = MAX_ROWS,
        max_context_tokens: int | None = None,
        max_cached_tokens: int = 262_144,
        chunk_tokens: int = 2048,
    ) -> None:
        """`max_cached_tokens` bounds prompt and answer tokens in flight on a side. Raises ValueError for a candidate without a plan."""
        if (candidate is None) != (plan is None):
            raise ValueError("engine: got only one of candidate and plan, needs both or neither; the plan decides which steps it runs")
        self.stock, self.candidate, self.plan = stock, candidate, plan
        self._tokenizer = tokenizer
        self.config = stock.config
        self.max_rows, self.max_cached_tokens, self.chunk_tokens = max_rows, max_cached_tokens, chunk_tokens
        self.max_context_tokens = min(max_context_tokens or stock.config.max_position_embeddings, stock.config.max_position_embeddings)
        self.step_counts: dict[str, Counter[tuple[str, str]]] = {STOCK: Counter(), CANDIDATE: Counter()}
        self.row_counts: dict[str, Counter[str]] = {STOCK: Counter(), CANDIDATE: Counter()}

    @property
    def tokenizer(self) -> TextTokenizer:
        if self._tokenizer is None:
            raise ValueError("tokenizer: got None, needs one to read or write text; give token ids and no stop strings, or a tokenizer")
        return self._tokenizer

    def count_tokens(self, prompt: str) -> int:
        return len(self.tokenizer.encode(prompt))

    # ---- generation ----
    def generate(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams, path: str = STOCK) -> list[Completion]:
        """Continue every prompt (text or token ids) on one side, "stock" or "candidate". Raises ValueError with every reason."""
        return self._generate(prompts, params, (path,))[path]

    def generate_pair(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams) -> dict[str, list[Completion]]:
        """Continue every prompt on both sides from one prefill each."""
        return self._generate(prompts, params, (STOCK, CANDIDATE))

    def _generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams, names: tuple[str, ...]
    ) -> dict[str, list[Completion]]:
        tokens = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        self._check(tokens, params, names)
        run = _Run(self, tokens, params, names)
        with torch.inference_mode():
            run.to_the_end()
        return {side.name: [side.done[index] for index in range(len(tokens))] for side in run.sides}

    def _check(self, tokens: Sequence[Sequence[int]], params: SamplingParams, names: tuple[str, ...]) -> None:
        wrong = params.reasons(len(tokens))
        vocab = self.config.vocab_size
        for index, prompt in enumerate(tokens):
            total = len(prompt) + params.max_new_tokens
            limit = min(self.max_context_tokens, self.max_cached_tokens)
            if not prompt:
                wrong.append(f"prompt {index}: got no tokens, needs at least one")
            elif not 0 <= min(prompt) <= max(prompt) < vocab:
                wrong.append(f"prompt {index}: got token ids {min(prompt)}..{max(prompt)}, needs 0..{vocab - 1}")
            if total > limit:
                wrong.append(f"prompt {index}: got {len(prompt)} + {params.max_new_tokens} new tokens, needs <= {limit}")
        for name in names:
            if name not in (STOCK, CANDIDATE) or (name == CANDIDATE and self.candidate is None):
                known = (STOCK, CANDIDATE) if self.candidate is not None else (STOCK,)
                wrong.append(f"path: got {name!r}, needs one of {known}")
        if params.stop and self._tokenizer is None:
            wrong.append("stop: got stop strings without a tokenizer, needs one to find them")
        if wrong:
            raise ValueError("generate: " + "; ".join(wrong))

    def run_step(self, side: str, batch: StepBatch, caches: Caches, **options: Any) -> Any:
        """One decode or verify step of `side` on the path the plan decides; counts path and reason. Returns the StepOutput."""
        path: DecodePath = self.stock
        chosen, reason = STOCK, "stock side"
        if side == CANDIDATE and self.plan is not None and self.candidate is not None:
            decision = self.plan.decide(batch)
            chosen, reason = decision.path, decision.reason
            path = self.stock if chosen == STOCK else self.candidate
        self.step_counts[side][(chosen, reason)] += 1
        self.row_counts[side][chosen] += batch.rows
        return path.step(batch, caches, **options)

    def side_path(self, side: str) -> DecodePath:
        """A DecodePath that runs `side`'s steps through the plan and counts them; what speculation and forcing drive."""
        return _PlannedPath(self, side)

    # ---- forced tokens ----
    def teacher_force(
        self, tokens: Sequence[Sequence[int]], window: int, paths: Mapping[str, DecodePath] | None = None, **options: Any
    ) -> dict[str, Trace]:
        """See `forcing.teacher_force`. `paths` None: both sides of this engine, through the plan."""
        if paths is None:
            paths = {name: self.side_path(name) for name in (STOCK, CANDIDATE) if name == STOCK or self.candidate is not None}
        return teacher_force(self.stock, paths, tokens, window, chunk_tokens=self.chunk_tokens, **options)

    def loglikelihood(self, pairs: Sequence[tuple[str, str]], path: str = STOCK) -> list[tuple[float, bool]]:
        """Of each (context, continuation): summed log-probability in nats, and whether greedy decoding would produce it.

        The context is prefilled by stock; the continuation's tokens after the first are decode steps of `path`.
        """
        results = []
        for context, continuation in pairs:
            prompt, forced = self.tokenizer.encode(context), self.tokenizer.encode_continuation(continuation)
            if not prompt or not forced:
                raise ValueError(f"loglikelihood: got {len(prompt)} context and {len(forced)} continuation tokens, needs one of each")
            caches = Caches.allocate(self.config, 1, len(prompt) + len(forced), 1, self.stock.dtype, device=self.stock.device)
            place = caches.acquire()
            logits = [self.stock.prefill([prompt], caches, [place], chunk_tokens=self.chunk_tokens).logits_RV]
            if len(forced) > 1:
                trace = decode_forced(self.side_path(path), caches, [place], torch.tensor([forced[:-1]]))
                logits.append(trace.logits_BWV[0])
            rows = torch.cat(logits)
            scored = logprobs_of(rows, forced, 1)
            results.append((sum(item.logprob for item in scored), rows.argmax(-1).tolist() == forced))
        return results


class _PlannedPath:
    """A side of the engine as a DecodePath."""

    def __init__(self, engine: Engine, side: str) -> None:
        self._engine, self._side = engine, side
        self.dtype = engine.stock.dtype

    def step(self, batch: StepBatch, caches: Caches, *, routing: dict[int, torch.Tensor] | None = None, taps: bool = False) -> Any:
        return self._engine.run_step(self._side, batch, caches, routing=routing, taps=taps)


class _Run:
    """One call of generate: the pool, the sides, and the loop over both."""

    def __init__(self, engine: Engine, tokens: list[list[int]], params: SamplingParams, names: tuple[str, ...]) -> None:
        self.engine, self.tokens, self.params = engine, tokens, params
        self.totals = [len(prompt) + params.max_new_tokens for prompt in tokens]
        self.prefilled: dict[int, _Prefilled] = {}
        self.pool = self._caches(len(names) * engine.max_rows)
        self.sides = [_Side(name=name, caches=self._caches(engine.max_rows)) for name in names]

    def _caches(self, places: int) -> Caches:
        engine = self.engine
        places = min(places, len(self.tokens))
        page_tokens = 64
        # Whole pages a request, so one more than the token budget divided by the page for every place.
        pages = min(engine.max_cached_tokens // page_tokens + places, sum(-(-total // page_tokens) for total in self.totals))
        return Caches.allocate(
            engine.config, places, max(self.totals), 1, engine.stock.dtype, page_tokens, n_pages=pages, device=engine.stock.device
        )

    def to_the_end(self) -> None:
        while any(len(side.done) < len(self.tokens) for side in self.sides):
            for side in self.sides:
                self._admit(side)
                if side.active:
                    self._step(side)

    # ---- admission ----
    def _admit(self, side: _Side) -> None:
        """Take prompts in order while there is room; the next one waits when it does not fit, so order never depends on size."""
        while side.next < len(self.tokens) and side.caches.room_for(self.totals[side.next]):
            if side.next not in self.prefilled:
                self._prefill(side)
                if side.next not in self.prefilled:
                    return  # the pool is full of prompts that another side has not taken yet
            index, entry = side.next, self.prefilled[side.next]
            place = side.caches.adopt(self.pool, entry.place, self.totals[index])
            entry.waiting -= 1
            if not entry.waiting:
                self.pool.release(entry.place)
                del self.prefilled[index]
            side.next += 1
            request = _Request(index=index, place=place, generator=self.params.generator(index))
            side.active.append(request)
            self._take(side, [request], entry.logits_V.unsqueeze(0))

    def _prefill(self, side: _Side) -> None:
        """Prefill the prompts this side can take now, in one call."""
        caches = side.caches
        indices: list[int] = []
        rows, pages = len(caches.free_requests), len(caches.free_pages)
        pool_pages = len(self.pool.free_pages)
        for index in range(side.next, len(self.tokens)):
            need = -(-self.totals[index] // caches.page_tokens)
            need_pool = -(-len(self.tokens[index]) // caches.page_tokens)
            if index in self.prefilled or len(indices) >= min(rows, len(self.pool.free_requests)) or need > pages or need_pool > pool_pages:
                break
            pages, pool_pages = pages - need, pool_pages - need_pool
            indices.append(index)
        if not indices:
            return
        places = [self.pool.acquire() for _ in indices]
        prompts = [self.tokens[index] for index in indices]
        output = self.engine.stock.prefill(prompts, self.pool, places, chunk_tokens=self.engine.chunk_tokens)
        for index, place, logits_V in zip(indices, places, output.logits_RV, strict=True):
            self.prefilled[index] = _Prefilled(place=place, logits_V=logits_V, waiting=len(self.sides))

    # ---- decoding ----
    def _step(self, side: _Side) -> None:
        places = [request.place for request in side.active]
        batch = side.caches.batch([[request.pending] for request in side.active], places)
        output = self.engine.run_step(side.name, batch, side.caches)
        side.caches.advance(places, [1] * len(places))
        self._take(side, list(side.active), output.logits_BQV[:, 0])

    def _take(self, side: _Side, requests: list[_Request], logits_BV: torch.Tensor) -> None:
        """Choose each request's next token; finish the requests that end with it."""
        params = self.params
        tokens = choose(logits_BV, params, [request.generator for request in requests])
        recorded = logprobs_of(logits_BV, tokens, params.logprobs) if params.logprobs is not None else None
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            request.tokens.append(token)
            request.pending = token
            if recorded is not None:
                request.logprobs.append(recorded[row])
            finished = self._finished(request)
            if finished is not None:
                side.done[request.index] = finished
                side.active.remove(request)
                side.caches.release(request.place)

    def _finished(self, request: _Request) -> Completion | None:
        params, tokens = self.params, request.tokens
        if tokens[-1] == self.engine.config.eos_token_id and not params.ignore_eos:
            return self._completion(request, self._text(tokens[:-1]), "stop", "end of sequence")
        if params.stop:
            longest = max(len(text) for text in params.stop)
            tail = self._text(tokens[-(longest + STOP_TAIL_TOKENS) :])
            if any(text in tail for text in params.stop):
                text = self._text(tokens)
                found = [(text.find(stop), stop) for stop in params.stop if stop in text]
                if found:
                    at, stop = min(found)
                    return self._completion(request, text[:at], "stop", stop)
        if len(tokens) >= params.max_new_tokens:
            return self._completion(request, self._text(tokens), "length", None)
        return None

    def _text(self, tokens: Sequence[int]) -> str:
        """Text of generated tokens; empty without a tokenizer (token ids in, token ids out)."""
        return self.engine.tokenizer.decode(tokens) if self.engine._tokenizer is not None else ""

    def _completion(self, request: _Request, text: str, reason: str, stop: str | None) -> Completion:
        return Completion(
            token_ids=tuple(request.tokens),
            text=text,
            finish_reason=reason,
            logprobs=tuple(request.logprobs) if self.params.logprobs is not None else None,
            extra={"stop": stop, "prompt_tokens": len(self.tokens[request.index])},
        )
