"""What is served: checkpoint, engine, tokenizer, chat template and the scheduler over them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2.sandbox
import torch
from tokenizers import Tokenizer

from evals.serving.server.metrics import Metrics
from evals.serving.server.scheduler import Scheduler, side_of
from kimi_k3_decode.config import Unsupported
from kimi_k3_decode.dspark import DsparkProposer
from kimi_k3_decode.engine import Engine
from kimi_k3_decode.plan import AUTO, MAX_Q, SPECIALIZED, SPECIALIZED_BACKEND, Deployment, Plan
from kimi_k3_decode.stock import StockPath
from kimi_k3_decode.tokenizer import FileTokenizer
from validation.core.settings import PROJECT_ROOT
from validation.core.types import HarnessError
from validation.targets.engine import find_candidate, read_checkpoint

log = logging.getLogger("fasttrack.serve")

# nano-K3 was trained on plain prompts: one user message is the prompt itself, and a conversation is a transcript.
CHAT_TEMPLATE = (
    "{%- if messages | length == 1 and messages[0]['role'] == 'user' -%}{{ messages[0]['content'] }}"
    "{%- else -%}{%- set names = {'user': 'User', 'assistant': 'Bot', 'system': 'System'} -%}"
    "{%- for message in messages -%}{{ names.get(message['role'], message['role']) }}: {{ message['content'] }}"
    "{%- if not loop.last -%}{{ '\\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '\\nBot:' }}{%- endif -%}{%- endif -%}"
)
MAX_ROWS = 64
MAX_REQUESTS = 1024  # each takes a slot of state: a typing error must not fill the memory
MAX_TOKENS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How the server was started. `decode_backend`: "auto", "latency_specialized", or a candidate's name, which opts in."""

    checkpoint: Path
    decode_backend: str = AUTO
    speculation: str = "none"  # "none" | "dspark"
    drafts: int | None = None  # None: all the drafter has
    max_model_len: int = 32_768
    max_num_seqs: int | None = None  # None: what fills 64 rows
    max_cached_tokens: int = 262_144
    max_logprobs: int = 128
    served_model_name: str | None = None

    @property
    def candidate(self) -> str | None:
        if self.decode_backend == AUTO:
            return None
        return SPECIALIZED if self.decode_backend == SPECIALIZED_BACKEND else self.decode_backend

    def unsupported(self) -> tuple[str, ...]:
        """Every reason these options cannot be served, whatever the checkpoint; empty when they can."""
        numbers: tuple[tuple[str, int | None, int, int], ...] = (
            ("drafts", self.drafts, 1, MAX_Q - 1),
            ("max-model-len", self.max_model_len, 1, MAX_TOKENS),
            ("max-num-seqs", self.max_num_seqs, 1, MAX_REQUESTS),
            ("max-logprobs", self.max_logprobs, 0, MAX_TOKENS),
        )
        wrong = ((name, got, least, most) for name, got, least, most in numbers if got is not None and not least <= got <= most)
        reasons = [f"{name}: got {got}, needs {least}..{most}" for name, got, least, most in wrong]
        if self.drafts is not None and self.speculation == "none":
            reasons.append(f"drafts: got {self.drafts} without speculation, needs --spec dspark; leave --drafts off otherwise")
        if self.served_model_name is not None and not self.served_model_name.strip():
            reasons.append(f"served-model-name: got {self.served_model_name!r}, needs a name; leave it off for the checkpoint's")
        return tuple(reasons)


class ServedModel:
    """Loads everything; raises HarnessError with the reason when it cannot be served."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        reasons = options.unsupported()
        if reasons:
            raise HarnessError("serve: " + "; ".join(reasons))
        weights = read_checkpoint(options.checkpoint)
        self.config = weights.config
        self.name = options.served_model_name or weights.config.name
        try:
            self.tokenizer = FileTokenizer(options.checkpoint)
            self.vocabulary = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
            self.drafts = self._count_drafts()
            self.engine = self._engine(weights)
            self.proposer = None
            jobs = options.max_num_seqs or max(1, MAX_ROWS // (1 + self.drafts))
            limit = min(options.max_model_len, self.config.max_position_embeddings)
            if self.drafts:
                self.proposer = DsparkProposer(weights, jobs, limit + self.drafts + 1, n_drafts=self.drafts)
        except (Unsupported, ValueError) as error:
            raise HarnessError(f"serve: {error}") from error
        self.max_model_len = limit
        self.weights_digest = weights.digest()
        self.metrics = Metrics(
            self.name,
            candidate=options.candidate or "none",
            speculation=options.speculation,
            drafts=self.drafts,
            facts=self.facts(),
        )
        self.scheduler = Scheduler(
            self.engine,
            self.metrics,
            side=side_of(self.engine),
            max_jobs=jobs,
            max_job_tokens=limit,
            max_cached_tokens=max(options.max_cached_tokens, limit),
            proposer=self.proposer,
        )
        template = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = template.from_string(CHAT_TEMPLATE)

    def _count_drafts(self) -> int:
        options = self.options
        if options.speculation == "none":
            return 0
        if options.speculation != "dspark":
            raise ValueError(f"spec: got {options.speculation!r}, needs none or dspark")
        if self.config.draft is None:
            raise ValueError("spec: got dspark for a checkpoint without a drafter, needs one; leave --spec off")
        return options.drafts if options.drafts is not None else min(self.config.draft.n_drafts, MAX_Q - 1)

    def _engine(self, weights: Any) -> Engine:
        options = self.options
        stock = StockPath(weights, torch.bfloat16)
        if options.candidate is None:
            return Engine(stock, tokenizer=self.tokenizer, max_context_tokens=options.max_model_len)
        deployment = Deployment(decode_backend=SPECIALIZED_BACKEND, speculation="dspark" if self.drafts else "none", drafts=self.drafts)
        path = find_candidate(options.candidate)(weights)
        plan = Plan.make(self.config, deployment)
        return Engine(stock, path, plan, self.tokenizer, max_context_tokens=options.max_model_len)

    # ---- what clients ask about it ----
    def facts(self) -> dict[str, str]:
        """How decode runs, for logs, /version and the info metric; all text."""
        options = self.options
        return {
            "model": self.name,
            "decode_backend": options.decode_backend if options.candidate is None else SPECIALIZED_BACKEND,
            "candidate": options.candidate or "none",
            "speculation": options.speculation,
            "drafts": str(self.drafts),
            "dtype": "bfloat16",
            "weights_digest": self.weights_digest,
            "execution": "contract" if options.candidate is not None else "stock",
        }

    def steps(self) -> dict[str, int]:
        """Decode steps by path so far."""
        counted = self.engine.step_counts[side_of(self.engine)]
        made = {SPECIALIZED: 0, "stock": 0}
        for (path, _), count in counted.items():
            made[path] += count
        return made

    def refusals(self) -> dict[str, int]:
        """Why steps ran stock, with counts."""
        counted = self.engine.step_counts[side_of(self.engine)]
        return {reason: count for (path, reason), count in counted.items() if path != SPECIALIZED}

    @property
    def root(self) -> str:
        """Where the checkpoint lies, relative to the project when inside."""
        folder = self.options.checkpoint.resolve()
        return str(folder.relative_to(PROJECT_ROOT)) if folder.is_relative_to(PROJECT_ROOT) else folder.name

    # ---- text ----
    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        return str(self._template.render(messages=messages, add_generation_prompt=add_generation_prompt))

    def piece(self, token: int) -> str:
        """A token as text; special tokens, which decode to nothing, by their name in the vocabulary."""
        return self.tokenizer.decode([token]) or self.vocabulary.id_to_token(token) or f"<id {token}>"

    def special(self, token: int) -> str | None:
        return self.vocabulary.id_to_token(token)
