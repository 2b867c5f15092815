"""A side's scored replies as a table for pairing, and what may be said when some were never asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from evals.gate import SuiteGate, decide
from evals.generation import PATHS
from evals.pairing import PairedAnswers
from evals.records import digest
from evals.serving.asking import NOT_ASKED, tokens_of
from evals.serving.http_lm import ScoredReply
from validation.core.types import Status

SHOWN_CHARACTERS = 600  # of a reply kept in memory; the rest is in the records, and a digest tells equal from different
NEVER_ASKED = "never asked"


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Both sides' answers, one row a reply that was wanted, and the pairs of them."""

    pairs: PairedAnswers
    tables: Mapping[str, pd.DataFrame]
    reported: Mapping[str, Mapping[str, float]]

    @property
    def complete(self) -> bool:
        """Whether every request of both sides reached a server."""
        return not any(self.tables[path]["not_asked"].any() for path in PATHS)


def answer_row(one: ScoredReply, metric: str, gated: bool) -> dict[str, Any]:
    """One reply as a row for `pair_answers`. Long texts are cut to their beginning and a digest, which are equal where the texts are.

    Text of a gated suite is not kept at all: its questions must not appear in reports, and replies quote them.
    """
    reply = one.reply
    text = (reply.text or "") if reply is not None else ""
    failure = str(reply.extra.get("failure", "")) if reply is not None else NEVER_ASKED
    score = one.scores.get(metric)
    key = one.ask.key("", "")
    fold = f"[{digest(text)}]" if text else ""
    return {
        "item": one.ask.item,
        "repeat": one.repeat,
        "cluster": str(one.doc.get("cluster", one.ask.item)),
        "level": str(one.doc.get("level", "")),
        "prompt_hash": digest(key.prompt_hash + key.params_hash),
        "score": math.nan if score is None else score,
        "tokens": tokens_of(reply) if reply is not None else 0,
        "prompt_tokens": reply.prompt_tokens if reply is not None else -1,
        "truncated": reply is not None and reply.truncated,
        "text": fold if gated else text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + fold,
        "reply": fold,
        "finish_reason": f"error: {failure}" if failure else reply.finish_reason if reply is not None else "",
        "failure": failure,
        "not_asked": failure in (*NOT_ASKED, NEVER_ASKED),
    }


def with_prompt_tokens(own: pd.DataFrame, stock: pd.DataFrame, candidate: pd.DataFrame) -> list[str]:
    """Prompt digests that also tell prompts apart which one server cut or templated differently, where both report their token counts."""
    both = stock.merge(candidate, on=["item", "repeat"], suffixes=("_s", "_c"))[["item", "repeat", "prompt_tokens_s", "prompt_tokens_c"]]
    differ = both[(both["prompt_tokens_s"] >= 0) & (both["prompt_tokens_c"] >= 0) & (both["prompt_tokens_s"] != both["prompt_tokens_c"])]
    places = set(zip(differ["item"], differ["repeat"], strict=True))
    return [
        f"{prompt}/{tokens}" if (item, repeat) in places else prompt
        for item, repeat, prompt, tokens in zip(own["item"], own["repeat"], own["prompt_hash"], own["prompt_tokens"], strict=True)
    ]


def failures_of(table: pd.DataFrame) -> dict[str, int]:
    """Replies that failed, by kind; never empty where a reply is missing."""
    counts = table.loc[table["failure"] != "", "failure"].value_counts()
    return {str(kind): int(count) for kind, count in sorted(counts.items())}


def not_decided(gate: SuiteGate, scored: Scored) -> SuiteGate:
    """A gate over a part of the data: no drop is read from it and it never passes; lost, swapped or cut-off replies stay failures."""
    missing = {path: int(table["not_asked"].sum()) for path, table in scored.tables.items()}
    asked = sum(len(table) for table in scored.tables.values())
    words = ", ".join(f"{count} of {path}" for path, count in missing.items() if count)
    reason = f"{words} of {asked} replies could not be asked for (server or worker gone); the same command asks them again"
    partial = decide(replace(gate, drop_proven=False))
    status = Status.FAIL if partial.status is Status.FAIL else Status.NOT_PROVEN
    return replace(partial, status=status, reasons=(*partial.reasons, reason))
