"""One generation pass that fills both sides' records: each prompt is prefilled once, the caches are forked, and both paths decode.

A session knows two paths ("stock", "candidate") over one engine. It asks the engine only for what the records do not hold yet, writes each
batch for both sides in one go, and turns a path that fails on a prompt into a recorded outcome of that path. Guards that live here:

    an empty prompt, an unknown generation option or a prompt that leaves no room for the answer is an error, never a silent score
    both sides get the same stop strings, limit, temperature and seed; these are part of the key
    repeats at a temperature get different seeds, derived from item and repeat
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from evals.records import RecordFile, Reply, ReplyKey, digest
from validation.core.types import HarnessError

PATHS = ("stock", "candidate")
GIVE_UP_AFTER = 8  # prompts of a path that fail without a single success: asking the rest one by one would only take time


@dataclass(frozen=True, kw_only=True)
class GenerationParams:
    """How a prompt is continued. `temperature` 0 is greedy; `seeds` has one entry a prompt (None where greedy)."""

    max_new_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seeds: tuple[int | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PathReply:
    """What one path made of one prompt. `finish_reason` is "stop" or "length"; `text` ends before the stop string."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    extra: Mapping[str, Any] = field(default_factory=dict)


class PairEngine(Protocol):
    """The engine as the evals need it. `max_context_tokens` counts prompt and answer together."""

    max_context_tokens: int

    def count_tokens(self, prompt: str) -> int: ...

    def generate_pair(self, prompts: Sequence[str], params: GenerationParams) -> Mapping[str, Sequence[PathReply]]:
        """Replies of both paths, decoded from one prefill a prompt."""
        ...

    def generate(self, prompts: Sequence[str], params: GenerationParams, path: str) -> Sequence[PathReply]: ...

    def loglikelihood(self, pairs: Sequence[tuple[str, str]], path: str) -> Sequence[tuple[float, bool]]:
        """Sum of log-probabilities (nats) of each continuation, and whether greedy decoding would produce it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt of one item and repeat, with everything that decides its answer."""

    suite: str
    item: str
    repeat: int
    prompt: str
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    @property
    def decoding(self) -> dict[str, Any]:
        """What must be equal inside a batch."""
        return {"max": self.max_new_tokens, "stop": list(self.stop), "temperature": self.temperature, "top_p": self.top_p}

    def key(self, path: str, fingerprint: str) -> ReplyKey:
        return ReplyKey(
            suite=self.suite,
            item=self.item,
            repeat=self.repeat,
            path=path,
            fingerprint=fingerprint,
            prompt_hash=digest(self.prompt),
            params_hash=digest({**self.decoding, "seed": self.seed}),
        )


def repeat_seed(base: int, suite: str, item: str, repeat: int) -> int:
    """A seed of its own for every item and repeat (lm-eval sends 1234 with every request, which makes repeats copies)."""
    text = f"{base}|{suite}|{item}|{repeat}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1


class Progress(Protocol):
    """Told about every finished batch."""

    def advance(self, suite: str, done: int, total: int) -> None: ...


class Silent:
    """Progress that says nothing."""

    def advance(self, suite: str, done: int, total: int) -> None:
        return None


class PairedSession:
    """Answers requests for either path from the records, and generates what is missing for both paths together."""

    def __init__(
        self,
        engine: PairEngine,
        records: RecordFile,
        fingerprints: Mapping[str, str],
        *,
        base_seed: int = 0,
        max_rows: int = 128,
        max_batch_tokens: int = 131_072,
        progress: Progress | None = None,
    ) -> None:
        absent = [p for p in PATHS if not fingerprints.get(p)]
        if absent:
            raise HarnessError(f"fingerprints: got none for {', '.join(absent)}, needs one a path; replies could not be told apart")
        self.engine = engine
        self.records = records
        self.fingerprints = dict(fingerprints)
        self.base_seed = base_seed
        self._max_rows = max_rows
        self._max_batch_tokens = max_batch_tokens
        self._progress: Progress = progress or Silent()
        self._failures: dict[str, list[str]] = {path: [] for path in PATHS}
        self._succeeded = dict.fromkeys(PATHS, False)

    def replies(self, path: str, requests: Sequence[Request]) -> list[Reply]:
        """One recorded reply a request, in order, for `path` ("stock" or "candidate")."""
        self._generate_missing(requests)
        return [self.records.replies[self._key(path, r)] for r in requests]

    def _key(self, path: str, request: Request) -> ReplyKey:
        return request.key(path, self.fingerprints[path])

    def _generate_missing(self, requests: Sequence[Request]) -> None:
        known = self.records.replies
        missing = [r for r in requests if any(self._key(p, r) not in known for p in PATHS)]
        lengths = self._checked_lengths(missing)
        done = len(requests) - len(missing)
        for batch in self._batches(missing, lengths):
            started = time.perf_counter()
            answers = self._run(batch)
            seconds = (time.perf_counter() - started) / (len(batch) * len(PATHS))
            fresh = [
                self._reply(path, request, answer, lengths[request], seconds)
                for path in PATHS
                for request, answer in zip(batch, answers[path], strict=True)
                if self._key(path, request) not in known
            ]
            self.records.add_replies(fresh)
            done += len(batch)
            self._progress.advance(batch[0].suite, done, len(requests))

    def _checked_lengths(self, requests: Sequence[Request]) -> dict[Request, int]:
        """Prompt lengths in tokens. Raises HarnessError for prompts that a server would silently cut or answer from nothing."""
        lengths, problems = {}, []
        for request in requests:
            n = self.engine.count_tokens(request.prompt) if request.prompt.strip() else 0
            lengths[request] = n
            if n == 0:
                problems.append(f"{request.suite} item {request.item} has an empty prompt")
            elif n + request.max_new_tokens > self.engine.max_context_tokens:
                problems.append(f"{request.suite} item {request.item}: {n} prompt + {request.max_new_tokens} new tokens")
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise HarnessError(
                f"eval requests: got {'; '.join(problems[:5])}{more}, needs a prompt and room for its answer within "
                f"{self.engine.max_context_tokens} tokens; nothing is cut silently, lower max_gen_toks or leave the items out"
            )
        return lengths

    def _batches(self, requests: Sequence[Request], lengths: Mapping[Request, int]) -> Iterator[list[Request]]:
        """Requests that decode alike, of similar length, within the row and token budget."""
        order = sorted(requests, key=lambda r: (digest(r.decoding), lengths[r]))
        batch: list[Request] = []
        for request in order:
            rows = len(batch) + 1
            tokens = rows * (lengths[request] + request.max_new_tokens)
            alike = not batch or batch[0].decoding == request.decoding
            if batch and (rows > self._max_rows or tokens > self._max_batch_tokens or not alike):
                yield batch
                batch = []
            batch.append(request)
        if batch:
            yield batch

    def _run(self, batch: Sequence[Request]) -> dict[str, list[PathReply | str]]:
        """Both paths' replies. Where the pair fails, each path runs on its own and failures are cornered by halving the batch."""
        try:
            pair = self.engine.generate_pair([r.prompt for r in batch], _params(batch))
            made = {path: _complete(path, pair[path], len(batch)) for path in PATHS}
        except (HarnessError, MemoryError):
            raise
        except Exception:  # which path and which prompts are to blame shows below
            made = {path: self._run_path(path, batch) for path in PATHS}
        for path, replies in made.items():
            self._succeeded[path] |= any(isinstance(reply, PathReply) for reply in replies)
        return made

    def _run_path(self, path: str, batch: Sequence[Request]) -> list[PathReply | str]:
        if len(self._failures[path]) >= GIVE_UP_AFTER and not self._succeeded[path]:
            return [f"error: not asked, {GIVE_UP_AFTER} prompts failed before and none succeeded: {self._failures[path][-1]}"] * len(batch)
        try:
            replies = self.engine.generate([r.prompt for r in batch], _params(batch), path)
            made = _complete(path, replies, len(batch))
            self._succeeded[path] = True
            return made
        except (HarnessError, MemoryError):
            raise
        except Exception as error:
            if len(batch) == 1:
                self._failures[path].append(f"{type(error).__name__}: {error}"[:300])
                return [f"error: {self._failures[path][-1]}"]
        half = len(batch) // 2
        return self._run_path(path, batch[:half]) + self._run_path(path, batch[half:])

    def _reply(self, path: str, request: Request, answer: PathReply | str, prompt_tokens: int, seconds: float) -> Reply:
        outcome = PathReply(token_ids=(), text="", finish_reason=answer) if isinstance(answer, str) else answer
        return Reply(
            key=self._key(path, request),
            seed=request.seed,
            token_ids=tuple(outcome.token_ids),
            text=None if isinstance(answer, str) else outcome.text,
            finish_reason=outcome.finish_reason,
            prompt_tokens=prompt_tokens,
            seconds=seconds,
            extra=dict(outcome.extra),
        )


def _params(batch: Sequence[Request]) -> GenerationParams:
    first = batch[0]
    return GenerationParams(
        max_new_tokens=first.max_new_tokens,
        stop=first.stop,
        temperature=first.temperature,
        top_p=first.top_p,
        seeds=tuple(r.seed for r in batch),
    )


def _complete(path: str, replies: Sequence[PathReply | None], expected: int) -> list[PathReply | str]:
    """A path that returns fewer replies than prompts would shift answers onto other items: that is an error, not a shorter list."""
    if len(replies) != expected:
        raise RuntimeError(f"{path}: got {len(replies)} replies for {expected} prompts")
    return [r if r is not None else "error: no reply" for r in replies]
