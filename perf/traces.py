"""The two workloads beside pure decode as subjects of adversarial timing: one request, one answer that can be checked.

mixed     users arrive one after the other with a long prompt; those who are there decode `between` steps after each arrival, all of them
          `after` at the end. With no step at all the request is the prefill alone.
agentic   one turn of a conversation: the output of a tool is prefilled behind what there is, then an answer is decoded. A subject may keep
          its caches from one turn to the next; a turn whose history it does not hold is prefilled from the start.

Tokens are given, not chosen, so that both sides do the same work and a reply can be compared with the oracle's: logits [U, V] of each
user's last token. Prefill is stock's on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
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
    users: int = 3
    prompt_tokens: int = 128
    between: int = 4
    after: int = 8
    earlier_prompt_tokens: int | None = None  # of all arrivals but the last; None: as long as the last one's

    @property
    def decoded_tokens(self) -> int:
        """Over all users: each arrival but the last is followed by `between` steps of those who are there."""
        return self.between * sum(range(1, self.users)) + self.after * self.users

    def inputs(self, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        longest = self.between * (self.users - 1) + self.after
        return {
            "prompts": rng.integers(4, NANO.vocab_size, size=(self.users, self.prompt_tokens)),
            "decode": rng.integers(4, NANO.vocab_size, size=(self.users, longest)),
            "steps": np.array([self.between, self.after]),
            "lengths": np.array([self.earlier_prompt_tokens or self.prompt_tokens] * (self.users - 1) + [self.prompt_tokens]),
        }


@dataclass(frozen=True, kw_only=True)
class Agentic:
    users: int = 3
    turns: int = 3
    tool_tokens: int = 48
    answer_tokens: int = 8

    def requests(self) -> Callable[[int], dict[str, np.ndarray]]:
        """`inputs(seed)` of an endless run of conversations: each call is the next turn, the first of a conversation on fresh tokens."""
        made = self._turns()
        return lambda seed: made.send(seed)

    def _turns(self) -> Any:
        def turns() -> Generator[Any, int, None]:
            answer: Any = None
            while True:
                history = np.empty((self.users, 0), dtype=np.int64)
                for turn in range(self.turns):
                    seed = yield answer
                    rng = np.random.default_rng([seed, turn])
                    tool, said = (rng.integers(4, NANO.vocab_size, size=(self.users, n)) for n in (self.tool_tokens, self.answer_tokens))
                    history = np.concatenate([history, tool], axis=1)
                    answer = {"history": history, "answer": said, "turn": np.array([turn]), "turns": np.array([self.turns])}
                    history = np.concatenate([history, said], axis=1)

        made = turns()
        next(made)
        return made


class _Replay:
    """Runs requests on one path over caches of one dtype."""

    def __init__(self, path: Any, prefiller: StockPath, dtype: torch.dtype) -> None:
        self.path, self.prefiller, self.dtype = path, prefiller, dtype
        self.held: tuple[Caches, np.ndarray] | None = None  # caches of a conversation, and the tokens in them

    def __call__(self, inputs: Arrays) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            logits_UV = self._agentic(inputs) if "history" in inputs else self._mixed(inputs)
        return {"logits": logits_UV.float().numpy()}

    def _prefill(self, caches: Caches, tokens_UN: np.ndarray, users: list[int]) -> torch.Tensor:
        return self.prefiller.prefill(tokens_UN.tolist(), caches, users).logits_RV

    def _step(self, caches: Caches, tokens_U: np.ndarray, users: list[int]) -> torch.Tensor:
        output = self.path.step(caches.batch([[int(token)] for token in tokens_U], users), caches)
        caches.advance(users, [1] * len(users))
        return output.logits_BQV[:, 0]

    def _mixed(self, inputs: Arrays) -> torch.Tensor:
        prompts, decode = inputs["prompts"], inputs["decode"]
        between, after = (int(n) for n in inputs["steps"])
        n_users = len(prompts)
        caches = Caches.allocate(NANO, n_users, prompts.shape[1] + decode.shape[1] + 1, 1, self.dtype)
        last: dict[int, torch.Tensor] = {}
        done = [0] * n_users
        for user in range(n_users):
            last[user] = self._prefill(caches, prompts[user : user + 1, : int(inputs["lengths"][user])], [user])[0]
            here = list(range(user + 1))
            for _ in range(between if user < n_users - 1 else after):
                rows = self._step(caches, np.array([decode[u, done[u]] for u in here]), here)
                last.update(zip(here, rows, strict=True))
                done = [n + (u in here) for u, n in enumerate(done)]
        return torch.stack([last[user] for user in range(n_users)])

    def _agentic(self, inputs: Arrays) -> torch.Tensor:
        history, answer = np.array(inputs["history"]), np.array(inputs["answer"])
        n_users, users = len(history), list(range(len(history)))
        caches, there = self._conversation(history, answer, int(inputs["turns"][0]), int(inputs["turn"][0]))
        rows = self._prefill(caches, history[:, there:], users)
        for place in range(answer.shape[1]):
            rows = self._step(caches, answer[:, place], users)
        self.held = (caches, np.concatenate([history, answer], axis=1))
        return rows[:n_users]

    def _conversation(self, history: np.ndarray, answer: np.ndarray, turns: int, turn: int) -> tuple[Caches, int]:
        """The caches to go on with and how many tokens of `history` are in them."""
        if turn and self.held is not None:
            caches, tokens = self.held
            n = tokens.shape[1]
            if len(tokens) == len(history) and n < history.shape[1] and np.array_equal(tokens, history[:, :n]):
                return caches, n
        a_turn = history.shape[1] + answer.shape[1] if turn == 0 else (history.shape[1] + answer.shape[1]) // (turn + 1) + answer.shape[1]
        return Caches.allocate(NANO, len(history), turns * a_turn + 1, 1, self.dtype), 0


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
