"""OpenAI reply bodies: whole, and in chunks. Field names and orders are those of vLLM's server."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from evals.serving.server.job import Delta
from evals.serving.server.model import ServedModel
from evals.serving.server.protocol import Asked
from kimi_k3_decode.sampling import TokenLogprob

Body = dict[str, Any]


@dataclass(kw_only=True)
class Choice:
    """One choice as it grows. `offset` counts the characters of its text before the next token, for completions' text_offset."""

    prompt: tuple[int, ...]
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    offset: int = 0

    def add(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.text += delta.text
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Replies:
    """Builds the bodies of one request. `chat` chooses between the two routes' forms."""

    def __init__(self, model: ServedModel, asked: Asked, *, chat: bool) -> None:
        self._model, self._asked, self._chat = model, asked, chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._begun: set[int] = set()

    # ---- whole ----
    def whole(self, choices: Sequence[Choice]) -> Body:
        made = [self._chat_choice(choice) if self._chat else self._completion_choice(choice) for choice in choices]
        body = self._head("chat.completion" if self._chat else "text_completion") | {"choices": made, "usage": self.usage(choices)}
        if self._chat:
            ids = list(choices[0].prompt) if self._asked.return_token_ids else None
            body |= {"prompt_logprobs": self._prompt_logprobs(choices[0]), "prompt_token_ids": ids}
        return body

    def _head(self, kind: str) -> Body:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model.name}

    def usage(self, choices: Sequence[Choice]) -> Body:
        """Tokens of prompts (once each) and of all choices."""
        prompt = sum(len(prompt) for prompt in self._asked.prompts)
        made = sum(len(choice.token_ids) for choice in choices)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    def _completion_choice(self, choice: Choice) -> Body:
        asked = self._asked
        text = self._echoed(choice) + choice.text if asked.echo else choice.text
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._completion_logprobs(choice, choice.token_ids, choice.logprobs, with_prompt=asked.echo),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "prompt_logprobs": None if asked.echo else self._prompt_logprobs(choice),
            "token_ids": list(choice.token_ids) if asked.return_token_ids else None,
            "prompt_token_ids": list(choice.prompt) if asked.return_token_ids else None,
        }

    def _chat_choice(self, choice: Choice) -> Body:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "reasoning": None, "tool_calls": []},
            "logprobs": self._chat_logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": list(choice.token_ids) if self._asked.return_token_ids else None,
        }

    # ---- in chunks ----
    def chunk(self, choice: Choice, delta: Delta, choices: Sequence[Choice]) -> Body:
        """The part of a stream that `delta` makes; `choice` has taken it already."""
        first = choice.index not in self._begun
        self._begun.add(choice.index)
        asked = self._asked
        ids: Body = {"token_ids": list(delta.token_ids) if asked.return_token_ids else None}
        part: Body = {"index": choice.index}
        if self._chat:
            content: Body = {"content": delta.text} | ({"role": "assistant"} if first else {})
            part |= {"delta": content, "logprobs": self._chat_logprobs(delta.token_ids, delta.logprobs)}
        else:
            echoed = first and asked.echo
            scored = self._completion_logprobs(choice, delta.token_ids, delta.logprobs, with_prompt=echoed)
            part |= {"text": (self._echoed(choice) if echoed else "") + delta.text, "logprobs": scored}
            if first and asked.return_token_ids:
                ids["prompt_token_ids"] = list(choice.prompt)
        part |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason} | ids
        body = self._head("chat.completion.chunk" if self._chat else "text_completion") | {"choices": [part]}
        if self._chat and first and asked.return_token_ids:
            body["prompt_token_ids"] = list(choice.prompt)
        if asked.continuous_usage:
            body["usage"] = self.usage(choices)
        return body

    def usage_chunk(self, choices: Sequence[Choice]) -> Body:
        """The last chunk of a stream that asked for usage."""
        return self._head("chat.completion.chunk" if self._chat else "text_completion") | {"choices": [], "usage": self.usage(choices)}

    # ---- log-probabilities ----
    def _token(self, token: int) -> str:
        return f"token_id:{token}" if self._asked.tokens_as_ids else self._model.piece(token)

    def _echoed(self, choice: Choice) -> str:
        return self._model.tokenizer.decode(choice.prompt)

    def _completion_logprobs(
        self, choice: Choice, token_ids: Sequence[int], made: Sequence[TokenLogprob], *, with_prompt: bool
    ) -> Body | None:
        if self._asked.sampling.logprobs is None:
            return None
        scored: list[tuple[int, TokenLogprob | None]] = list(zip(token_ids, made, strict=True))
        if with_prompt:
            scored = [*zip(choice.prompt, choice.prompt_logprobs or (None,) * len(choice.prompt), strict=True), *scored]
        body: Body = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, logprob in scored:
            body["text_offset"].append(choice.offset)
            choice.offset += len(self._model.tokenizer.decode([token]))
            body["tokens"].append(self._token(token))
            body["token_logprobs"].append(None if logprob is None else logprob.logprob)
            body["top_logprobs"].append(None if logprob is None else self._top(token, logprob))
        return body

    def _top(self, token: int, logprob: TokenLogprob) -> dict[str, float]:
        """The chosen token first, then the largest; as many as were asked for, and the chosen one."""
        return {self._token(token): logprob.logprob} | {self._token(other): value for other, value in logprob.top}

    def _chat_logprobs(self, token_ids: Sequence[int], made: Sequence[TokenLogprob]) -> Body | None:
        if self._asked.sampling.logprobs is None:
            return None
        return {
            "content": [
                self._chat_token(token, item.logprob) | {"top_logprobs": [self._chat_token(*pair) for pair in item.top]}
                for token, item in zip(token_ids, made, strict=True)
            ]
        }

    def _chat_token(self, token: int, logprob: float) -> Body:
        text = self._token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _prompt_logprobs(self, choice: Choice) -> list[Body | None] | None:
        if choice.prompt_logprobs is None:
            return None
        return [
            None if item is None else self._ranked(token, item) for token, item in zip(choice.prompt, choice.prompt_logprobs, strict=True)
        ]

    def _ranked(self, token: int, item: TokenLogprob) -> Body:
        """Token id -> log-probability, rank among all that were reported (None for a token outside them), and text."""
        places = {other: place for place, (other, _) in enumerate(item.top, start=1)}
        values = {token: item.logprob} | dict(item.top)
        return {
            str(other): {"logprob": value, "rank": places.get(other), "decoded_token": self._model.piece(other)}
            for other, value in values.items()
        }
