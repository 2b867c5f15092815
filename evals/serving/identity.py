"""What a server is: read first, from its routes, its log, its command and what the file declares; compared between the sides.

A fact nobody tells is "": with one of them open, two sides are not known to be alike, and nothing is proven.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.serving.client import Endpoint
from evals.serving.config import Side
from evals.serving.errors import HttpStatus, Malformed, ServingError
from evals.serving.names import IDENTITY_FIELDS

PROBE_TEXT = "The 3 quick brown foxes (née «volpes») jump over 13 lazy dogs.\n\tx = {'y': [1.5e-3]}  # 東京 🙂\n"
PROBE_CHAT = (
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And 3 + 3?"},
)
# Facts by the command's own option; an option that is absent leaves the server's default, the same for both sides.
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "revision": ("--revision",),
    "dtype": ("--dtype",),
    "tensor_parallel": ("--tensor-parallel-size", "-tp"),
    "quantization": ("--quantization", "-q"),
}
DEFAULT = "default"
# vLLM writes its resolved configuration into its log; what stands there is what runs.
LOG_FACTS: Mapping[str, str] = {
    "revision": r"\brevision=([^,\s]+),",
    "dtype": r"\bdtype=(?:torch\.)?(\w+),",
    "tensor_parallel": r"\btensor_parallel_size=(\d+),",
    "quantization": r"\bquantization=([^,\s]+),",
}
LOG_LINE = re.compile(r"engine .*with config:")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One fact in which the sides differ, or which one of them does not tell."""

    fact: str
    stock: str
    candidate: str
    accepted: bool

    @property
    def words(self) -> str:
        return f"{self.fact}: stock {self.stock or 'does not tell'}, candidate {self.candidate or 'does not tell'}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`open_facts` are told by neither or only one side; `refused` differ and are not accepted."""

    differences: tuple[Difference, ...]
    open_facts: tuple[str, ...]

    @property
    def refused(self) -> tuple[Difference, ...]:
        return tuple(d for d in self.differences if not d.accepted)


def read_facts(endpoints: Iterable[Endpoint], side: Side, log: Path | None) -> dict[str, str]:
    """Every fact of a side. Raises ServingError when a route that must answer does not, ValueError when its replicas differ."""
    per_replica = [_facts_of(endpoint, side) for endpoint in endpoints]
    first = per_replica[0]
    unlike = sorted({key for facts in per_replica for key in facts if facts[key] != first[key]})
    if unlike:
        raise ValueError(f"replicas: got {', '.join(unlike)} that differ between the addresses of one side, needs equal servers")
    return {**first, **_told_facts(side, log)}


def _facts_of(endpoint: Endpoint, side: Side) -> dict[str, str]:
    endpoint.health()
    card = next((card for card in endpoint.models() if card.id == side.name), None)
    if card is None:
        raise Malformed(f"{endpoint.base_url}: got a model list without {side.name!r}, needs served_name to be one of it")
    return {
        "model": card.root or side.model,
        "max_model_len": str(card.max_model_len or side.context or ""),
        "version": endpoint.version() or "none",
        "tokenizer": _digest_or_word(lambda: endpoint.tokenize(PROBE_TEXT)),
        "chat_template": side.chat_template or _digest_or_word(lambda: endpoint.tokenize_chat(PROBE_CHAT)),
    }


def _digest_or_word(call: Callable[[], Sequence[int]]) -> str:
    """A digest of token ids: equal tokens of one conversation mean equal template and tokenizer. A route that is absent tells nothing."""
    try:
        ids = call()
    except HttpStatus as error:
        return "" if error.status == 404 else f"refused (HTTP {error.status})"
    except ServingError:
        return ""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def _told_facts(side: Side, log: Path | None) -> dict[str, str]:
    """What no route tells: the log first, then the file, then the command."""
    logged = log_facts(log)
    declared: Mapping[str, Any] = {"revision": side.revision, "dtype": side.dtype, "quantization": side.quantization}
    declared = {**declared, "tensor_parallel": str(side.tensor_parallel or "")}
    given = {fact: option_of(side.command, names) for fact, names in OPTIONS.items()} if side.command else {}
    return {fact: logged.get(fact) or str(declared[fact] or "") or given.get(fact, "") for fact in OPTIONS}


def option_of(command: Sequence[str], names: Sequence[str]) -> str:
    """The value of a command's option, `--name value` or `--name=value`; "default" when it is absent."""
    value = DEFAULT
    for place, word in enumerate(command):
        for name in names:
            if word == name and place + 1 < len(command):
                value = command[place + 1]
            elif word.startswith(f"{name}="):
                value = word.partition("=")[2]
    return value


def log_facts(log: Path | None) -> dict[str, str]:
    """Facts from the last line of a log in which a vLLM engine states its configuration."""
    found: dict[str, str] = {}
    for line in lines_of(log):
        if LOG_LINE.search(line):
            matches = {fact: re.search(pattern, line) for fact, pattern in LOG_FACTS.items()}
            found = {fact: match[1] for fact, match in matches.items() if match}
    return found


def lines_of(log: Path | None) -> Iterable[str]:
    """The lines of a log, one at a time; nothing where it cannot be read."""
    if log is None:
        return
    try:
        with log.open(errors="replace") as file:
            yield from file
    except OSError:
        return


def compare(stock: Mapping[str, str], candidate: Mapping[str, str], accepted: Sequence[str]) -> Comparison:
    """Facts side by side. A fact that only one side tells is open, not different."""
    differences, open_facts = [], []
    for fact in IDENTITY_FIELDS:
        left, right = stock.get(fact, ""), candidate.get(fact, "")
        if not left or not right:
            if fact not in accepted:
                open_facts.append(fact)
        elif left != right:
            differences.append(Difference(fact=fact, stock=left, candidate=right, accepted=fact in accepted))
    return Comparison(differences=tuple(differences), open_facts=tuple(open_facts))


def refusals(comparison: Comparison) -> tuple[str, ...]:
    """What must be accepted in the file, in words."""
    return tuple(f"{d.words}; if that is meant: accept_differences = [{d.fact!r}] in [candidate]" for d in comparison.refused)
