"""Request bodies, checked: every field is read, refused or known to change nothing. A field nobody reads would be dropped silently."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from evals.serving.server.errors import NOT_FOUND, RequestError
from evals.serving.server.model import ServedModel
from evals.serving.server.sampling import Sampling

COMPLETION_TOKENS = 16  # the OpenAI default of max_tokens
MAX_CHOICES = 128
# Accepted, and without a meaning here.
_INERT = {"user", "metadata", "store", "service_tier", "request_id", "priority", "cache_salt", "safety_identifier", "prompt_cache_key"}
# Features that are not served: the values that leave them off.
_OFF: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True, False),
    "truncate_prompt_tokens": (None,),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "reasoning_effort": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "modalities": (None, ["text"]),
    "add_special_tokens": (None,),
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A checked completion or chat request. `prompts` are token ids; choice i * n + j continues prompt i."""

    prompts: tuple[tuple[int, ...], ...]
    n: int
    sampling: Sampling
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    return_token_ids: bool
    tokens_as_ids: bool


class Fields:
    """Reads a JSON object field by field and collects every problem."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._read: set[str] = set()
        self.problems: list[tuple[str, str]] = []

    def refuse(self, name: str, message: str) -> None:
        self.problems.append((name, message))

    def raw(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        value = self._body.get(name)
        return default if value is None else value

    def number(self, name: str, default: Any, low: float, high: float = math.inf, *, whole: bool = False) -> Any:
        """A number in low..high, the default when absent or null."""
        value = self.raw(name)
        if value is None:
            return default
        kinds: Any = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or not low <= value <= high:
            kind = "a whole number" if whole else "a number"
            self.refuse(name, f"{name}: got {_short(value)}, needs {kind} {_range(low, high)}")
            return default
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw(name, default)
        if not isinstance(value, bool):
            self.refuse(name, f"{name}: got {_short(value)}, needs true or false")
            return default
        return value

    def ids(self, name: str, vocab: int, *, empty: bool = False) -> tuple[int, ...] | None:
        """A list of token ids, None when absent or null; an `empty` one may be allowed."""
        value = self.raw(name)
        if value is None:
            return None
        if not is_ids(value) or not (value or empty) or not all(0 <= token < vocab for token in value):
            self.refuse(name, f"{name}: got {_short(value)}, needs a list of token ids 0..{vocab - 1}")
            return None
        return tuple(value)

    def finish(self) -> None:
        """Refuse what was not read. Raises RequestError with every problem in one message."""
        for name, value in self._body.items():
            if name in self._read or name in _INERT:
                continue
            if name in _OFF:
                if value not in _OFF[name]:
                    self.refuse(name, f"{name}: got {_short(value)}, needs {_OFF[name][-1]!r}; it is not served, leave it out")
            else:
                self.refuse(name, f"{name}: got an unknown field, needs one of this route's; leave it out")
        if self.problems:
            raise RequestError("; ".join(text for _, text in self.problems), param=self.problems[0][0])


def parse_completion(body: Any, model: ServedModel) -> Asked:
    """A body of /v1/completions. Raises RequestError."""
    fields = _open(body, model)
    prompts = _prompts(fields, model)
    echo = fields.flag("echo")
    logprobs = fields.number("logprobs", None, 0, model.options.max_logprobs, whole=True)
    tokens = fields.number("max_tokens", COMPLETION_TOKENS, 0 if echo else 1, whole=True)
    return _asked(fields, model, prompts, logprobs=logprobs, max_new_tokens=tokens, echo=echo)


def parse_chat(body: Any, model: ServedModel) -> Asked:
    """A body of /v1/chat/completions. Raises RequestError."""
    fields = _open(body, model)
    messages = read_messages(fields.raw("messages"), fields.refuse)
    add_prompt = fields.flag("add_generation_prompt", True)
    prompts: tuple[tuple[int, ...], ...] = ()
    if messages:
        prompts = (tuple(model.tokenizer.encode(model.render(messages, add_prompt))),)
    wanted = fields.flag("logprobs")
    top = fields.number("top_logprobs", 0, 0, model.options.max_logprobs, whole=True)
    if top and not wanted:
        fields.refuse("top_logprobs", f"top_logprobs: got {top} without logprobs, needs logprobs true as well")
    longest = max((len(prompt) for prompt in prompts), default=0)
    room = max(1, model.max_model_len - longest)
    tokens = fields.number("max_completion_tokens", None, 1, whole=True)
    older = fields.number("max_tokens", None, 1, whole=True)
    chosen = next((count for count in (tokens, older) if count is not None), room)
    return _asked(fields, model, prompts, logprobs=top if wanted else None, max_new_tokens=chosen, echo=fields.flag("echo"))


def _open(body: Any, model: ServedModel) -> Fields:
    if not isinstance(body, dict):
        raise RequestError(f"body: got {_kind(body)}, needs a JSON object")
    fields = Fields(body)
    name = fields.raw("model", model.name)
    if name != model.name:
        raise RequestError(f"model: got {_short(name)}, needs {model.name!r}; see /v1/models", status=NOT_FOUND, param="model")
    return fields


def _asked(
    fields: Fields, model: ServedModel, prompts: tuple[tuple[int, ...], ...], *, logprobs: int | None, max_new_tokens: int, echo: bool
) -> Asked:
    n = fields.number("n", 1, 1, MAX_CHOICES, whole=True)
    vocab = model.config.vocab_size
    xargs = fields.raw("vllm_xargs", {})
    if not isinstance(xargs, dict):
        fields.refuse("vllm_xargs", f"vllm_xargs: got {_kind(xargs)}, needs an object")
        xargs = {}
    inner = Fields(xargs)
    force = inner.ids("force_ids", vocab) or ()
    unknown = sorted(set(xargs) - {"force_ids"})
    if unknown:
        inner.refuse("vllm_xargs", f"vllm_xargs: got {unknown}, needs only force_ids; an argument that nobody reads would do nothing")
    fields.problems += inner.problems
    top_k = fields.number("top_k", 0, -1, whole=True)
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=float(fields.number("temperature", 1.0, 0, 100)),
        top_p=float(fields.number("top_p", 1.0, 1e-9, 1)),
        top_k=max(0, top_k),
        seed=fields.number("seed", None, -(2**63), 2**63 - 1, whole=True),
        stop=_stops(fields),
        stop_token_ids=fields.ids("stop_token_ids", vocab, empty=True) or (),
        include_stop=fields.flag("include_stop_str_in_output"),
        ignore_eos=fields.flag("ignore_eos"),
        min_tokens=fields.number("min_tokens", 0, 0, max_new_tokens, whole=True),
        allowed=fields.ids("allowed_token_ids", vocab),
        force=force,
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(fields, model, echo, logprobs),
    )
    stream = fields.flag("stream")
    options = fields.raw("stream_options", {})
    if not isinstance(options, dict) or set(options) - {"include_usage", "continuous_usage_stats", "include_obfuscation"}:
        fields.refuse("stream_options", f"stream_options: got {_short(options)}, needs include_usage or continuous_usage_stats")
        options = {}
    elif options and not stream:
        fields.refuse("stream_options", "stream_options: got options without stream, needs stream true as well")
    asked = Asked(
        prompts=prompts,
        n=n,
        sampling=sampling,
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        echo=echo,
        return_token_ids=fields.flag("return_token_ids"),
        tokens_as_ids=fields.flag("return_tokens_as_token_ids"),
    )
    _check_lengths(fields, model, asked)
    fields.finish()
    return asked


def _prompt_logprobs(fields: Fields, model: ServedModel, echo: bool, logprobs: int | None) -> int | None:
    asked = fields.number("prompt_logprobs", None, 0, model.options.max_logprobs, whole=True)
    return logprobs if asked is None and echo else asked


def _check_lengths(fields: Fields, model: ServedModel, asked: Asked) -> None:
    for index, prompt in enumerate(asked.prompts):
        total = len(prompt) + asked.sampling.max_new_tokens
        if not prompt:
            fields.refuse("prompt", f"prompt {index}: got no tokens, needs at least one")
        elif total > model.max_model_len:
            new = asked.sampling.max_new_tokens
            remedy = "shorten the prompt or lower max_tokens"
            got = f"{len(prompt)} prompt and {new} new tokens"
            fields.refuse("prompt", f"prompt {index}: got {got}, needs at most {model.max_model_len} in all; {remedy}")


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop", [])
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list):
        texts = [text for text in texts if text is not None]  # lm-eval's chat client sends [null] for no stop string
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        fields.refuse("stop", f"stop: got {_short(value)}, needs a text or a list of texts that are not empty")
        return ()
    return tuple(texts)


def _prompts(fields: Fields, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    value, vocab = fields.raw("prompt"), model.config.vocab_size
    special = fields.flag("add_special_tokens", True)
    items = value if isinstance(value, list) and value and not is_ids(value) else [value]
    encode: Callable[[str], list[int]] = model.tokenizer.encode if special else model.tokenizer.encode_continuation
    made = []
    for index, item in enumerate(items):
        if isinstance(item, str) and item:
            made.append(tuple(encode(item)))
        elif is_ids(item) and item and all(0 <= token < vocab for token in item):
            made.append(tuple(item))
        else:
            rule = f"a text, or token ids 0..{vocab - 1}, or a list of either, not empty"
            fields.refuse("prompt", f"prompt {index}: got {_short(item)}, needs {rule}")
    return tuple(made)


def read_messages(value: Any, refuse: Callable[[str, str], None]) -> list[dict[str, str]]:
    """Chat messages with text content; parts of type text are joined."""
    made = []
    for index, message in enumerate(value if isinstance(value, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            refuse("messages", f"messages[{index}]: got {_short(message)}, needs a role and text content")
            continue
        made.append({"role": message["role"], "content": content})
    if not isinstance(value, list) or not value:
        refuse("messages", f"messages: got {_short(value)}, needs a list with at least one message")
    elif not any(message["content"] for message in made):
        refuse("messages", "messages: got no content, needs text in at least one message")
    return made


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _range(low: float, high: float) -> str:
    return f">= {low:g}" if high == math.inf else f"{low:g}..{high:g}"
