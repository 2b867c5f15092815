"""lm-eval over servers: its tasks build the prompts and score the replies, window by window, so that no suite lies in memory as a whole.

Prompts are those of lm-eval's own single pass over the rows: windows follow one another in one pass, because few-shot examples are drawn
from a generator that moves on from row to row. Two passes are made: one to ask (`ask_windows`), one to score what was recorded
(`score_windows`). An empty prompt, or one without room for its answer, is an error before anything is sent.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lm_eval
import lm_eval.utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.filters import build_filter_ensemble

from evals.lm import request_from
from evals.records import Reply
from evals.serving.asking import Ask
from evals.serving.items import ItemStore
from evals.tasks.docs import chat_messages, transcript
from evals.tasks.loading import BY_REPEAT, RepeatedTask
from validation.core.types import HarnessError

WINDOW_ROWS = 32  # asked together: the first request waits for its window
WINDOW_REPLIES = 512  # rows times repeats that are scored together
WINDOW_CHARACTERS = 24 << 20
Scores = dict[str, float | None]


class WindowedTask(RepeatedTask):
    """A task of which only a window of rows is open. `given` replaces the data set of its configuration (split -> rows)."""

    def __init__(self, config: dict[str, Any], given: Mapping[str, Any] | None = None) -> None:
        self._given = given
        self._rows: Any = None
        self._window: Any = None
        super().__init__(config=config)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self._given is None:
            super().download(dataset_kwargs, **kwargs)
        else:
            self.dataset = dict(self._given)

    def fewshot_docs(self) -> Any:
        """None without few-shot examples: lm-eval would otherwise read the whole suite into memory as a pool of examples."""
        return super().fewshot_docs() if self.config.num_fewshot else None

    @property
    def all_docs(self) -> Any:
        if self._rows is None:
            self._rows = RepeatedTask.eval_docs.fget(self)
        return self._rows

    @property
    def eval_docs(self) -> Any:
        return self._window if self._window is not None else self.all_docs

    def open_window(self, rows: Sequence[int] | None) -> None:
        """Show only `rows` (all when None); a window's documents are numbered from 0."""
        self._window = None if rows is None else self.all_docs.select(list(rows))

    def begin_pass(self) -> None:
        """Rewind the generator of few-shot examples, as lm-eval does at the start of a run."""
        if self.config.num_fewshot is None:
            self.set_config(key="num_fewshot", value=0)
        self.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)


@contextlib.contextmanager
def templates_compiled_once() -> Iterator[None]:
    """lm-eval compiles a row's template anew for every field of every row, which could keep sixty-four slots waiting for prompts."""
    environment = lm_eval.utils.env
    compile_template = environment.from_string
    environment.from_string = functools.lru_cache(maxsize=512)(compile_template)
    try:
        yield
    finally:
        environment.from_string = compile_template


def windows(task: WindowedTask, rows: Sequence[int], most_rows: int) -> Iterator[list[int]]:
    """Consecutive runs of `rows` that are small enough to be held at once."""
    most = max(1, min(most_rows, WINDOW_REPLIES // int(task.config.repeats)))
    size_of: Callable[[int], int] = getattr(task.all_docs, "size_of", lambda row: 0)
    window: list[int] = []
    characters = 0
    for row in rows:
        if window and (len(window) >= most or characters + size_of(row) > WINDOW_CHARACTERS):
            yield window
            window, characters = [], 0
        window.append(row)
        characters += size_of(row)
    if window:
        yield window


@dataclass(frozen=True, kw_only=True)
class AskBuilder:
    """Turns lm-eval's requests into asks, the same for both sides.

    `context_tokens` is what the server holds (0: unknown); `stop` replaces the task's stop strings, None keeps them; `count` gives the
    number of tokens of a prompt where that is known beforehand.
    """

    suite: str
    chat: bool
    base_seed: int = 0
    context_tokens: int = 0
    stop: tuple[str, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    count: Callable[[int], int] | None = None  # row -> tokens of its prompt

    def build(self, instance: Instance, row: int, repeat: int) -> Ask:
        """Raises HarnessError for a prompt that a server would cut silently or answer from nothing."""
        context, options = instance.args
        item = f"{row:05d}"
        prompt = str(context) if self.chat else _plain(str(context))
        plain = request_from(self.suite, item, repeat, prompt, options, self.base_seed)
        self._check(item, prompt, plain.max_new_tokens, row)
        asked = vars(plain) if self.stop is None else {**vars(plain), "stop": self.stop}
        return Ask(**asked, chat=self.chat, extra=json.dumps(dict(self.extra), sort_keys=True))

    def _check(self, item: str, prompt: str, max_new_tokens: int, row: int) -> None:
        problem = ""
        if not (any(m["content"].strip() for m in chat_messages(prompt) or ()) if self.chat else prompt.strip()):
            problem = "an empty prompt"
        elif self.context_tokens:
            tokens = self.count(row) if self.count is not None else 1
            if tokens + max_new_tokens > self.context_tokens:
                problem = f"{tokens if self.count is not None else 'any'} prompt + {max_new_tokens} new tokens"
        if problem:
            raise HarnessError(
                f"{self.suite} item {item}: got {problem}, needs a prompt and room for its answer in {self.context_tokens or 'the'} tokens"
                " of context; nothing is cut silently, lower max_new_tokens, raise the served context or leave the item out"
            )


def _plain(context: str) -> str:
    messages = chat_messages(context)
    return context if messages is None else transcript(messages)


def as_messages(chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """Messages as JSON, for the server's own template; a single message that is itself a JSON list of messages (MRCR) is unfolded."""
    if not add_generation_prompt:
        raise HarnessError("chat: got a task with a prefix of the reply (gen_prefix), needs one without; no chat route continues a message")
    inner = chat_messages(chat_history[0]["content"]) if len(chat_history) == 1 else None
    chosen = inner if inner is not None else [{"role": m["role"], "content": m["content"]} for m in chat_history]
    return json.dumps(chosen, ensure_ascii=False)


def ask_windows(
    task: WindowedTask, rows: Sequence[int], builder: AskBuilder, wanted: Callable[[Ask], bool] = lambda ask: True
) -> Iterator[list[Ask]]:
    """The requests of `rows` that are `wanted`, in order, repeats of an item together. Every row is built, wanted or not."""
    task.begin_pass()
    for window in windows(task, rows, WINDOW_ROWS):
        task.open_window(window)
        task.build_all_requests(
            apply_chat_template=builder.chat,
            fewshot_as_multiturn=builder.chat,
            chat_template=as_messages if builder.chat else None,
            tokenizer_name="server" if builder.chat else "",
        )
        asks = []
        for instance in task.instances:
            row = window[int(instance.doc_id or 0)]
            asks += [ask for repeat in range(instance.repeats) if wanted(ask := builder.build(instance, row, repeat))]
        yield asks
    task.open_window(None)


class ServedLM(LM):
    """One side as an lm-eval model. Replies come from `store`; what is not there is asked through `generate`, or is an error without it.

    `rows` are the numbers of the rows that lm-eval calls 0, 1, 2, …; identity when None. `replies` holds those of the latest call.
    """

    def __init__(
        self,
        builder: AskBuilder,
        store: ItemStore,
        path: str,
        fingerprint: str,
        *,
        rows: Sequence[int] | None = None,
        generate: Callable[[Sequence[Ask]], None] | None = None,
    ) -> None:
        super().__init__()
        self._builder, self._store, self._path, self._fingerprint = builder, store, path, fingerprint
        self._rows, self._generate = rows, generate
        self.replies: dict[tuple[int, int], Reply | None] = {}
        self.asks: dict[tuple[int, int], Ask] = {}

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Texts in order; a reply that failed, or was never asked, is an empty string here and stays a failure in the records."""
        seen: Counter[int] = Counter()
        places = []
        self.replies, self.asks = {}, {}
        for instance in requests:
            number = int(instance.doc_id or 0)
            row = self._rows[number] if self._rows is not None else number
            self.asks[row, seen[row]] = self._builder.build(instance, row, seen[row])
            places.append((row, seen[row]))
            seen[row] += 1
        if self._generate is not None:
            self._generate([ask for ask in self.asks.values() if not self._store.answered(self._key(ask))])
        self.replies = {place: self._store.get(self._key(self.asks[place])) for place in places}
        return [(reply.text or "") if (reply := self.replies[place]) is not None else "" for place in places]

    def _key(self, ask: Ask) -> Any:
        return ask.key(self._path, self._fingerprint)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise HarnessError(f"{self._builder.suite}: got log-likelihood requests, needs a generative task; the served suites generate")

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise HarnessError(f"{self._builder.suite}: got log-likelihood requests, needs a generative task; the served suites generate")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return as_messages(chat_history, add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        return "server"


@dataclass(frozen=True, kw_only=True)
class ScoredReply:
    """One reply of one side with all its metrics ("metric,filter" -> score, None where there is none)."""

    row: int
    repeat: int
    ask: Ask
    reply: Reply | None  # None: never asked
    doc: Mapping[str, Any]
    scores: Scores


def score_windows(
    task: WindowedTask, rows: Sequence[int], builder: AskBuilder, store: ItemStore, path: str, fingerprint: str
) -> Iterator[ScoredReply]:
    """lm-eval's evaluation of what is recorded, one reply after the other."""
    task.begin_pass()
    for window in windows(task, rows, WINDOW_REPLIES):
        task.open_window(window)
        lm = ServedLM(builder, store, path, fingerprint, rows=window)
        outcome = lm_eval.evaluate(
            lm=lm,
            task_dict={"tasks": {builder.suite: task}},
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=builder.chat,
            fewshot_as_multiturn=builder.chat,
        )
        samples = outcome["samples"][builder.suite] if outcome is not None else []
        yield from _scored(window, lm, samples)
    task.open_window(None)


def _scored(window: Sequence[int], lm: ServedLM, samples: Sequence[Mapping[str, Any]]) -> Iterator[ScoredReply]:
    scores: dict[tuple[int, int], Scores] = {place: {} for place in lm.replies}
    docs: dict[int, Mapping[str, Any]] = {}
    for sample in samples:
        row = window[int(sample["doc_id"])]
        docs[row] = sample["doc"]
        for name in (name for name in sample["metrics"] if name.endswith(BY_REPEAT)):
            for repeat, value in enumerate(sample[name]):
                reply = lm.replies[row, repeat]
                failed = reply is None or reply.text is None or math.isnan(value)
                scores[row, repeat][f"{name.removesuffix(BY_REPEAT)},{sample['filter']}"] = None if failed else float(value)
    for (row, repeat), reply in lm.replies.items():
        yield ScoredReply(row=row, repeat=repeat, ask=lm.asks[row, repeat], reply=reply, doc=docs[row], scores=scores[row, repeat])


class RunningScorer:
    """The primary metric of single replies while they come in, for the display; the verdict's scores come from `score_windows`."""

    def __init__(self, task: WindowedTask) -> None:
        self._task = task
        metric, name = task.primary
        self._metric = metric
        chosen = next(one for one in task.config.filter_list or [] if one["name"] == name)
        steps = [(step["function"], {k: v for k, v in step.items() if k != "function"}) for step in chosen["filter"]]
        self._filters = build_filter_ensemble(name, [step for step in steps if step[0] != "take_first_k"]).filters

    def score(self, row: int, text: str) -> float:
        """In [0, 1] for the tasks of this project."""
        doc = self._task.all_docs[row]
        replies: list[Any] = [[text]]
        for step in self._filters:
            replies = list(step().apply(replies, [doc]))
        scored: float = self._task.process_results(doc, [replies[0]])[self._metric]
        return float(scored)
