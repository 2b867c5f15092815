"""The lm-eval model over a paired session: lm-eval builds prompts and scores replies, the session generates and keeps the records.

    lm = RecordedLM(session, "stock", items={"gsm8k_nano": [0, 3, 9]})
    lm_eval.simple_evaluate(model=lm, tasks=[task], samples={"gsm8k_nano": [0, 3, 9]}, ...)

Evaluating the second side generates nothing: the first side's pass filled the records of both.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import lm_eval.api.task
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from evals.generation import PairedSession, Request, repeat_seed
from evals.records import Reply
from evals.tasks.docs import chat_messages, transcript
from validation.core.types import HarnessError

_KNOWN_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}


class ChatTemplate(Protocol):
    """Renders chat messages to the model's prompt; `name` identifies it in caches."""

    name: str

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str: ...


def request_from(suite: str, item: str, repeat: int, prompt: str, options: Mapping[str, Any], base_seed: int) -> Request:
    """A request from lm-eval's generation options. An option nobody reads would be dropped silently, so it is an error."""
    unknown = sorted(set(options) - _KNOWN_OPTIONS)
    if unknown or "max_gen_toks" not in options:
        problem = f"unknown generation options {unknown}" if unknown else "no max_gen_toks"
        raise HarnessError(f"task {suite}: got {problem}, needs max_gen_toks and only {sorted(_KNOWN_OPTIONS)}; correct the task file")
    until = options.get("until") or []
    temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
    return Request(
        suite=suite,
        item=item,
        repeat=repeat,
        prompt=prompt,
        max_new_tokens=int(options["max_gen_toks"]),
        stop=tuple([until] if isinstance(until, str) else until),
        temperature=temperature,
        top_p=float(options.get("top_p") or 1.0) if temperature > 0 else 1.0,
        seed=repeat_seed(base_seed, suite, item, repeat) if temperature > 0 else None,
    )


class RecordedLM(LM):
    """One side ("stock" or "candidate") of a session as an lm-eval model.

    `items` maps a suite to the numbers of its rows that are evaluated, in ascending order: lm-eval renumbers a selection from 0, and a
    record must carry the row's own number. `asked` collects the requests of the latest `generate_until`, by suite.
    """

    def __init__(
        self, session: PairedSession, path: str, *, items: Mapping[str, Sequence[int]] | None = None, template: ChatTemplate | None = None
    ) -> None:
        super().__init__()
        self._session = session
        self._path = path
        self._items = dict(items or {})
        self._template = template
        self.asked: dict[str, list[Request]] = {}

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Texts in order; a reply that failed is an empty string here and stays a failure in the records."""
        seen: Counter[tuple[str, int]] = Counter()
        asked = []
        for instance in requests:
            suite, number = str(instance.task_name), int(instance.doc_id or 0)
            repeat = seen[suite, number]
            seen[suite, number] += 1
            context, options = instance.args
            asked.append(request_from(suite, self.item_of(suite, number), repeat, self._plain(context), options, self._session.base_seed))
        self.asked = {}
        for request in asked:
            self.asked.setdefault(request.suite, []).append(request)
        return [reply.text or "" for reply in self._session.replies(self._path, asked)]

    def item_of(self, suite: str, number: int) -> str:
        """Name of the row that lm-eval calls `number`."""
        rows = self._items.get(suite)
        return f"{rows[number] if rows is not None else number:05d}"

    def reply(self, request: Request) -> Reply:
        """The recorded reply of this side."""
        return self._session.replies(self._path, [request])[0]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations, teacher-forced on this side's decode path."""
        pairs = [(str(i.args[0]), str(i.args[1])) for i in requests]
        empty = [str(i.doc_id) for i, (context, _) in zip(requests, pairs, strict=True) if not context]
        if empty:
            raise HarnessError(f"log-likelihood requests: got an empty context for items {empty[:5]}, needs a prompt; correct the task")
        return [(float(value), bool(greedy)) for value, greedy in self._session.engine.loglikelihood(pairs, self._path)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Log-likelihood of a whole text after the first character, which is all the context it has."""
        pairs = [(str(i.args[0])[:1], str(i.args[0])[1:]) for i in requests]
        return [float(value) for value, _ in self._session.engine.loglikelihood(pairs, self._path)]

    # ---- chat ----
    def _plain(self, context: str) -> str:
        messages = chat_messages(context)
        if messages is None:
            return context
        return self._template.render(messages, True) if self._template is not None else transcript(messages)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render messages; a single user message that is itself a JSON list of messages (MRCR) is unfolded first."""
        if self._template is None:
            raise HarnessError("chat template: got none, needs one for apply_chat_template; give the model's template or leave it off")
        inner = chat_messages(chat_history[0]["content"]) if len(chat_history) == 1 else None
        return self._template.render(inner if inner is not None else chat_history, add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        return self._template.name if self._template is not None else ""

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.tokenizer_name if chat_template else ""


@contextlib.contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """lm-eval without its progress bars and chatter; errors stay."""
    logger, task_module = logging.getLogger("lm_eval"), lm_eval.api.task
    level, bar = logger.level, task_module.tqdm
    logger.setLevel(logging.ERROR)
    task_module.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        logger.setLevel(level)
        task_module.tqdm = bar
