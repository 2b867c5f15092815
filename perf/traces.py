"""The two workloads beside pure decode as subjects of adversarial timing: one request, one answer that can be checked.

mixed     users arrive one after the other with a prompt, and those who are there decode in between. A request is one stretch of it: an
          arrival's prefill, or some decode steps of everyone. So decode alone is timed by itself, and end to end is the sum of a trace.
agentic   one turn of a conversation: the output of a tool is prefilled behind what there is, then an answer is decoded.

A subject may keep its caches from one request to the next; what it does not hold is prefilled from the start, in the time of that request.
Tokens are given, not chosen, so that both sides do the same work and a reply can be compared with the oracle's: logits [U, V] of the last
token of each user that the request touched. They are problems as the model knows them: on random tokens BF16 drifts from the oracle until
no limit tells a right reply from a wrong one. Tokens of later requests are not in a request. Prefill is stock's on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kimi_k3_decode.cache import Caches
from kimi_k3_decode.config import NANO
from kimi_k3_decode.stock import StockPath
from perf import nano_subject
from perf.subject import Arrays

Run = Callable[[Arrays], dict[str, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """`between` decode steps of everyone behind each arrival but the last, then `after` of them in each of `stretches` requests."""

    users: int = 3
    prompt_tokens: int = 128
    between: int = 4
    after: int = 8
    stretches: int = 1
    earlier_prompt_tokens: int | None = None  # of all arrivals but the last; None: as long as the last one's

    @property
    def decoded_tokens(self) -> int:
        """Over all users of one trace."""
        return self.between * sum(range(1, self.users)) + self.stretches * self.after * self.users

    @property
    def decodes(self) -> tuple[bool, ...]:
        """For each request of a trace whether it decodes; the others are arrivals."""
        return (False, True) * (self.users - 1) + (False,) + (True,) * self.stretches

    def lengths(self) -> list[list[int]]:
        """Cached tokens of each user before the first request and behind each request of a trace."""
        earlier = self.earlier_prompt_tokens or self.prompt_tokens
        now = [0] * self.users
        found = [list(now)]
        for user in range(self.users):
            last = user == self.users - 1
            now[user] = self.prompt_tokens if last else earlier
            found.append(list(now))
            for _ in range(self.stretches if last else 1):
                now = [n + (self.after if last else self.between) * (n > 0) for n in now]
                found.append(list(now))
        return found

    def requests(self) -> Callable[[int], dict[str, np.ndarray]]:
        """`inputs(seed)` of an endless run of traces: each call is the next request, the first of a trace on fresh tokens.

        tokens int64 [U, N] of each user up to the end of the request, zeros behind; before, after [U] cached tokens; room, for all.
        """
        lengths = np.array(self.lengths())

        def traces() -> Generator[Any, int, None]:
            answer: Any = None
            while True:
                tokens: np.ndarray = np.empty(0)
                for before, after in pairwise(lengths):
                    seed = yield answer
                    if not before.any():
                        tokens = nano_subject.texts(np.random.default_rng(seed), self.users, int(lengths[-1].max()))
                    given = np.where(np.arange(after.max()) < after[:, None], tokens[:, : after.max()], 0)
                    answer = {"tokens": given, "before": before, "after": after, "room": lengths[-1].max(keepdims=True)}

        made = traces()
        next(made)
        return lambda seed: made.send(seed)


@dataclass(frozen=True, kw_only=True)
class Agentic:
    users: int = 3
    turns: int = 3
    tool_tokens: int = 48
    answer_tokens: int = 8

    def requests(self) -> Callable[[int], dict[str, np.ndarray]]:
        """`inputs(seed)` of an endless run of conversations: each call is the next turn, the first of a conversation on fresh tokens.

        history int64 [U, N] with the tool's output, its last `tool` tokens; answer [U, A]; turn; room for the whole conversation.
        """
        fixed = {"tool": np.array([self.tool_tokens]), "room": np.array([self.turns * (self.tool_tokens + self.answer_tokens)])}

        def turns() -> Generator[Any, int, None]:
            answer: Any = None
            while True:
                history = np.empty((self.users, 0), dtype=np.int64)
                for turn in range(self.turns):
                    seed = yield answer
                    rng = np.random.default_rng([seed, turn])
                    tool, said = (nano_subject.texts(rng, self.users, n) for n in (self.tool_tokens, self.answer_tokens))
                    history = np.concatenate([history, tool], axis=1)
                    answer = {"history": history, "answer": said, "turn": np.array([turn]), **fixed}
                    history = np.concatenate([history, said], axis=1)

        made = turns()
        next(made)
        return lambda seed: made.send(seed)


class _Replay:
    """Runs requests on one path over caches of one dtype."""

    def __init__(self, path: Any, prefiller: StockPath, dtype: torch.dtype) -> None:
        self.path, self.prefiller, self.dtype = path, prefiller, dtype
        self.held: tuple[Caches, list[np.ndarray]] | None = None  # caches of a trace or conversation, and each user's tokens in them

    def __call__(self, inputs: Arrays) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            logits_UV = self._agentic(inputs) if "history" in inputs else self._mixed(inputs)
        return {"logits": logits_UV.float().numpy()}

    def _prefill(self, caches: Caches, tokens: list[np.ndarray], users: list[int]) -> torch.Tensor:
        return self.prefiller.prefill([one.tolist() for one in tokens], caches, users).logits_RV

    def _step(self, caches: Caches, tokens_U: np.ndarray, users: list[int]) -> torch.Tensor:
        output = self.path.step(caches.batch([[int(token)] for token in tokens_U], users), caches)
        caches.advance(users, [1] * len(users))
        return output.logits_BQV[:, 0]

    def _mixed(self, inputs: Arrays) -> torch.Tensor:
        tokens, before, after = (np.array(inputs[name]) for name in ("tokens", "before", "after"))
        history = [row[:n] for row, n in zip(tokens, before, strict=True)]
        caches = self._caches(history, int(inputs["room"][0]) + 1)
        arrived = [int(user) for user in np.flatnonzero((before == 0) & (after > 0))]
        if arrived:
            rows = self._prefill(caches, [tokens[user, : after[user]] for user in arrived], arrived)
        else:
            users = [int(user) for user in np.flatnonzero(before)]
            for step in range(int((after - before).max())):
                rows = self._step(caches, tokens[users, before[users] + step], users)
        self.held = (caches, [row[:n] for row, n in zip(tokens, after, strict=True)])
        return rows

    def _caches(self, history: list[np.ndarray], room: int) -> Caches:
        """Caches that hold each user's tokens `history`: those at hand where they are these, else new ones, prefilled."""
        if self.held is not None and any(map(len, history)) and len(self.held[1]) == len(history):
            caches, tokens = self.held
            if all(np.array_equal(there, one) for there, one in zip(tokens, history, strict=True)):
                return caches
        caches = Caches.allocate(NANO, len(history), room, 1, self.dtype)
        there = [user for user, one in enumerate(history) if len(one)]
        if there:
            self._prefill(caches, [history[user] for user in there], there)
        return caches

    def _agentic(self, inputs: Arrays) -> torch.Tensor:
        history, answer = np.array(inputs["history"]), np.array(inputs["answer"])
        tool, users = int(inputs["tool"][0]), list(range(len(history)))
        caches = self._caches([row[:-tool] for row in history], int(inputs["room"][0]) + 1)
        rows = self._prefill(caches, [row[-tool:] for row in history], users)
        for place in range(answer.shape[1]):
            rows = self._step(caches, answer[:, place], users)
        self.held = (caches, list(np.concatenate([history, answer], axis=1)))
        return rows


def stock(config: Mapping[str, Any]) -> Run:
    torch.set_num_threads(1)
    path = StockPath(nano_subject.weights(), torch.bfloat16)
    return _Replay(path, path, torch.bfloat16)


def candidate(config: Mapping[str, Any]) -> Run:
    """config: {"candidate": a name as on the command line}."""
    from validation.targets.engine import find_candidate

    torch.set_num_threads(1)
    weights = nano_subject.weights()
    return _Replay(find_candidate(config["candidate"])(weights), StockPath(weights, torch.bfloat16), torch.bfloat16)


def oracle() -> Run:
    """The stock code in FP64, prefill and decode."""
    path = StockPath(nano_subject.weights().to(torch.float64), torch.float64)
    return _Replay(path, path, torch.float64)
