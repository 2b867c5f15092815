"""Answers of OpenAI-compatible routes as frozen dataclasses; whatever does not fit is `Malformed` with the place named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evals.serving.errors import Malformed

TOKEN_ID_PREFIX = "token_id:"  # what vLLM writes with return_tokens_as_token_ids


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """One generated position: its token as the server writes it, its log-probability (nats) and the most likely alternatives.

    A value that the server gives as null or NaN is NaN here. With token ids asked for, keys of `top` are "token_id:17".
    """

    token: str
    logprob: float
    top: Mapping[str, float]

    def top_ids(self) -> dict[int, float]:
        """`top` by token id; entries that are no ids are left out."""
        return {int(key[len(TOKEN_ID_PREFIX) :]): value for key, value in self.top.items() if _is_id(key)}


def _is_id(key: str) -> bool:
    return key.startswith(TOKEN_ID_PREFIX) and key[len(TOKEN_ID_PREFIX) :].isdigit()


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One answer. `token_ids` is None where the server does not tell; `reasoning` is the separate field of a reasoning parser."""

    text: str
    finish_reason: str
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str | None = None
    usage: Mapping[str, int] = field(default_factory=dict)  # prompt_tokens, completion_tokens
    model: str = ""
    latency_s: float = 0.0  # of the attempt that succeeded
    attempts: int = 1

    @property
    def completion_tokens(self) -> int | None:
        return len(self.token_ids) if self.token_ids is not None else self.usage.get("completion_tokens")


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """One entry of /v1/models; `max_model_len` 0 where the server does not tell."""

    id: str
    root: str = ""
    max_model_len: int = 0
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """One reading of /metrics."""

    samples: tuple[Sample, ...]

    def select(self, name: str, **labels: str) -> tuple[Sample, ...]:
        """Samples of one name whose labels include `labels`."""
        return tuple(s for s in self.samples if s.name == name and all(s.labels.get(k) == v for k, v in labels.items()))

    def total(self, name: str, **labels: str) -> float | None:
        """Sum over engines and models; None where the server has no such metric."""
        found = self.select(name, **labels)
        return math.fsum(sample.value for sample in found) if found else None


# ---- reading ----
def field_of(value: Any, key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """`value[key]`, of the kind asked for. Raises Malformed."""
    if not isinstance(value, Mapping) or key not in value or not isinstance(value[key], kind) or isinstance(value[key], bool):
        got = repr(value.get(key))[:80] if isinstance(value, Mapping) else f"a {type(value).__name__}"
        raise Malformed(f"{where}: got {got} for {key!r}, needs an OpenAI-compatible answer")
    return value[key]


def read_models(body: Any) -> tuple[ModelCard, ...]:
    cards = []
    for entry in field_of(body, "data", list, "/v1/models"):
        length = entry.get("max_model_len") if isinstance(entry, Mapping) else None
        cards.append(
            ModelCard(
                id=field_of(entry, "id", str, "/v1/models"),
                root=str(entry.get("root") or ""),
                max_model_len=length if type(length) is int else 0,
                raw=dict(entry),
            )
        )
    return tuple(cards)


def read_completion(body: Any) -> dict[str, Any]:
    """Fields of a Reply from an answer of /v1/completions."""
    choice = _choice(body, "/v1/completions")
    made = _common(body, choice)
    raw = choice.get("logprobs")
    return {**made, "text": field_of(choice, "text", str, "/v1/completions"), "logprobs": _completion_logprobs(raw) if raw else ()}


def read_chat(body: Any) -> dict[str, Any]:
    """Fields of a Reply from an answer of /v1/chat/completions."""
    choice = _choice(body, "/v1/chat/completions")
    message = field_of(choice, "message", Mapping, "/v1/chat/completions")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    raw = choice.get("logprobs")
    return {
        **_common(body, choice),
        "text": message.get("content") or "",
        "reasoning": reasoning if isinstance(reasoning, str) else None,
        "logprobs": _chat_logprobs(raw) if raw else (),
    }


def _choice(body: Any, where: str) -> Mapping[str, Any]:
    choices = field_of(body, "choices", list, where)
    if len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise Malformed(f"{where}: got {len(choices)} choices, needs one")
    return choices[0]


def _common(body: Any, choice: Mapping[str, Any]) -> dict[str, Any]:
    usage = body.get("usage") if isinstance(body.get("usage"), Mapping) else {}
    prompt_ids = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
    return {
        "finish_reason": str(choice.get("finish_reason") or ""),
        "token_ids": _ids(choice.get("token_ids")),
        "prompt_token_ids": _ids(prompt_ids),
        "usage": {key: value for key, value in usage.items() if type(value) is int},
        "model": str(body.get("model") or ""),
    }


def _ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise Malformed(f"token_ids: got {str(value)[:80]}, needs a list of whole numbers")
    return tuple(value)


def _number(value: Any) -> float:
    """NaN for null and for anything that is no number: no limit lets it pass."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _completion_logprobs(raw: Any) -> tuple[TokenLogprob, ...]:
    where = "/v1/completions logprobs"
    tokens, values = field_of(raw, "tokens", list, where), field_of(raw, "token_logprobs", list, where)
    tops = raw.get("top_logprobs") or [None] * len(tokens)
    if not len(tokens) == len(values) == len(tops):
        raise Malformed(f"{where}: got {len(tokens)} tokens, {len(values)} values and {len(tops)} tops, needs as many of each")
    return tuple(
        TokenLogprob(token=str(token), logprob=_number(value), top={str(k): _number(v) for k, v in (top or {}).items()})
        for token, value, top in zip(tokens, values, tops, strict=True)
    )


def _chat_logprobs(raw: Any) -> tuple[TokenLogprob, ...]:
    where = "/v1/chat/completions logprobs"
    return tuple(
        TokenLogprob(
            token=field_of(entry, "token", str, where),
            logprob=_number(entry.get("logprob")),
            top={str(top.get("token")): _number(top.get("logprob")) for top in entry.get("top_logprobs") or () if isinstance(top, Mapping)},
        )
        for entry in field_of(raw, "content", list, where)
    )
