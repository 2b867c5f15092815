"""Two workloads beside pure decode, small, on the nano engine: prefill mixed in, and an agentic trace of several turns.

Both sides replay the same trace in this process, alternately (ABBA), through the plan: a step that the specialised path does not take runs
stock, and prefill always does. A test of the accounting; its numbers say nothing about a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from kimi_k3_decode.cache import Caches
from kimi_k3_decode.config import NANO
from kimi_k3_decode.engine import CANDIDATE, STOCK, Engine
from kimi_k3_decode.plan import SPECIALIZED_BACKEND, Deployment, Plan
from kimi_k3_decode.stock import StockPath

SEED = 5
ROUNDS = 2  # times each side replays the trace


@dataclass
class Clock:
    """Seconds by kind of work, tokens by user and turn, on one side of one replay."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    decoded_tokens: int = 0
    turns: list[tuple[int, int, float]] = field(default_factory=list)  # user, tokens generated, seconds from its request to its last token

    def timed(self, kind: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        done = work()
        setattr(self, kind, getattr(self, kind) + time.perf_counter() - began)
        return done


def make_engine(candidate: str = "specialized") -> Engine:
    from perf import nano_subject
    from validation.targets.engine import find_candidate

    weights = nano_subject.weights()
    plan = Plan.make(NANO, Deployment(decode_backend=SPECIALIZED_BACKEND))
    return Engine(StockPath(weights), find_candidate(candidate)(weights), plan)


def _tokens(user: int, turn: int, n: int) -> list[int]:
    return np.random.default_rng([SEED, user, turn]).integers(4, NANO.vocab_size, size=n).tolist()


def _decode(engine: Engine, side: str, caches: Caches, clock: Clock, pending: dict[int, int]) -> None:
    """One step of all users in `pending` (user -> its next token), in place."""
    users = list(pending)
    batch = caches.batch([[pending[user]] for user in users], users)
    output = clock.timed("decode_s", partial(engine.run_step, side, batch, caches))
    caches.advance(users, [1] * len(users))
    clock.decoded_tokens += len(users)
    pending.update(zip(users, output.logits_BQV[:, 0].argmax(-1).tolist(), strict=True))


def mixed_prefill(engine: Engine, side: str, *, users: int = 4, prompt_tokens: int = 256, between: int = 6, after: int = 12) -> Clock:
    """Users arrive one after the other with a long prompt; the others decode `between` steps in the meantime, all `after` at the end."""
    clock, pending = Clock(), {}
    caches = Caches.allocate(NANO, users, prompt_tokens + users * between + after + 1, 1, torch.bfloat16)
    for user in range(users):
        prompt = _tokens(user, 0, prompt_tokens)
        out = clock.timed("prefill_s", partial(engine.stock.prefill, [prompt], caches, [user]))
        pending[user] = int(out.logits_RV[0].argmax())
        for _ in range(between if user < users - 1 else after):
            _decode(engine, side, caches, clock, pending)
    return clock


def agentic(engine: Engine, side: str, *, users: int = 3, turns: int = 3, tool_tokens: int = 48, answer_tokens: int = 8) -> Clock:
    """Each turn every user sends the output of a tool, which is prefilled behind what it has, and gets an answer."""
    clock = Clock()
    caches = Caches.allocate(NANO, users, turns * (tool_tokens + answer_tokens) + 1, 1, torch.bfloat16)
    for turn in range(turns):
        began = time.perf_counter()
        prompts = [_tokens(user, turn, tool_tokens) for user in range(users)]
        out = clock.timed("prefill_s", partial(engine.stock.prefill, prompts, caches, list(range(users))))
        pending = dict(enumerate(out.logits_RV.argmax(-1).tolist()))
        for _ in range(answer_tokens):
            _decode(engine, side, caches, clock, pending)
        clock.turns += [(user, answer_tokens, time.perf_counter() - began) for user in range(users)]
    return clock


def interactivity_p90(turns: Sequence[tuple[int, int, float]]) -> float:
    """Tokens per second of a user that nine turns in ten reach or exceed, from request to last token. Raises ValueError for no turn."""
    if not turns:
        raise ValueError("interactivity: got no turn, needs at least one")
    return float(np.percentile([tokens / seconds for _, tokens, seconds in turns], 10))


def measure(candidate: str = "specialized") -> dict[str, Any]:
    """Both workloads on both sides: decode alone and end to end for mixed prefill, P90 interactivity for the trace, and which path ran."""
    engine = make_engine(candidate)
    made: dict[str, Any] = {"source": "cpu_engine", "candidate": candidate, "rounds": ROUNDS}
    with torch.inference_mode():
        for name, replay in (("mixed_prefill", mixed_prefill), ("agentic", agentic)):
            clocks: dict[str, list[Clock]] = {STOCK: [], CANDIDATE: []}
            for turn in range(ROUNDS):
                for side in (STOCK, CANDIDATE) if turn % 2 == 0 else (CANDIDATE, STOCK):
                    clocks[side].append(replay(engine, side))
            made[name] = {side: _summary(found) for side, found in clocks.items()}
    counted = engine.step_counts[CANDIDATE]
    made["candidate_steps"] = {path: sum(n for (p, _), n in counted.items() if p == path) for path in ("specialized", "stock")}
    return made


def _summary(clocks: Sequence[Clock]) -> dict[str, float]:
    alone = statistics.median(c.decoded_tokens / c.decode_s for c in clocks)
    whole = statistics.median(c.decoded_tokens / (c.decode_s + c.prefill_s) for c in clocks)
    made = {"decode_alone_tokens_per_s": alone, "end_to_end_tokens_per_s": whole, "decoded_tokens": float(clocks[0].decoded_tokens)}
    turns = [turn for clock in clocks for turn in clock.turns]
    return made | ({"p90_tokens_per_s_per_user": interactivity_p90(turns)} if turns else {})
