"""Two sides' answers brought together item by item: only equal prompts are compared, and everything else is counted.

Trap: some tasks shuffle their choices with the process-wide random generator and the shuffled form is then frozen in a cache, so "item 17"
may be another question on the other side. A pair therefore needs the same item, the same repeat *and* the same prompt digest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from evals.stats.paired import Floats, Ints

# What each side's table must hold; other columns are kept beside.
# `score` in [0, 1] or NaN (no score); `tokens` generated; `truncated` cut by the token limit.
ANSWER_COLUMNS = ("item", "repeat", "cluster", "prompt_hash", "score", "tokens", "truncated", "text")
_MIN_TELLING_CHARACTERS = 16  # shorter replies coincide between items by right


@dataclass(frozen=True, kw_only=True)
class PairedAnswers:
    """Pairs of one suite as arrays [items, repeats], with a count of everything that is not a pair.

    A reply the candidate lost (absent, or without a score) counts as a wrong answer: dropping a request must not raise a score. A reply the
    stock side lost leaves the pair out: there is nothing to compare with.
    """

    suite: str
    items: tuple[str, ...]
    clusters: Ints  # [I]
    stock: Floats  # [I, R]
    candidate: Floats  # [I, R]
    table: pd.DataFrame  # one row a pair that was asked for: both sides' columns and `outcome`
    asked: int
    paired: int
    prompts_differ: int
    missing_stock: int
    missing_candidate: int
    swapped: int  # replies that were exchanged between two items of the candidate
    not_asked: int = 0  # pairs of which a side was never reached, through no fault of its own: left out, and counted against `paired`

    @property
    def paired_share(self) -> float:
        """Pairs over pairs asked for; NaN when nothing was asked."""
        return self.paired / self.asked if self.asked else float("nan")

    def truncated_share(self, side: str) -> float:
        """Share of this side's replies that hit the token limit, over pairs that have a reply; NaN without any."""
        flags = self.truncated_flags(side)
        return float(flags.mean()) if len(flags) else float("nan")

    def truncated_flags(self, side: str) -> Floats:
        """0 or 1 for each pair that has both replies."""
        flags = self.table.loc[self.table["outcome"] == "paired", f"truncated_{side}"]
        return flags.astype(float).to_numpy()

    @property
    def token_ratio(self) -> float:
        """Generated tokens, candidate over stock, over pairs that both sides answered; NaN without any."""
        rows = self.table[self.table["outcome"] == "paired"]
        stock = float(rows["tokens_stock"].sum())
        return float(rows["tokens_candidate"].sum()) / stock if stock > 0 else float("nan")


def _checked(what: str, answers: pd.DataFrame) -> pd.DataFrame:
    problems = [f"column {c!r} is absent" for c in ANSWER_COLUMNS if c not in answers.columns]
    if not problems and answers.duplicated(["item", "repeat"]).any():
        twice = answers[answers.duplicated(["item", "repeat"])][["item", "repeat"]].iloc[0].tolist()
        problems.append(f"item and repeat {twice} occur more than once")
    if problems:
        raise ValueError(f"{what} answers: got {'; '.join(problems)}, needs one row an item and repeat with {ANSWER_COLUMNS}")
    return answers


def pair_answers(suite: str, stock: pd.DataFrame, candidate: pd.DataFrame) -> PairedAnswers:
    """Join both sides' answers (see `ANSWER_COLUMNS`) on item and repeat; raises ValueError for absent columns or repeated rows."""
    merged = _checked("stock", stock).merge(
        _checked("candidate", candidate), on=["item", "repeat"], how="outer", suffixes=("_stock", "_candidate"), validate="one_to_one"
    )
    merged = merged.sort_values(["item", "repeat"], kind="stable", ignore_index=True)
    has_stock = merged["score_stock"].notna()
    has_candidate = merged["score_candidate"].notna()
    both_asked = merged["prompt_hash_stock"].notna() & merged["prompt_hash_candidate"].notna()
    differ = both_asked & (merged["prompt_hash_stock"] != merged["prompt_hash_candidate"])
    not_asked = _flag(merged, "not_asked_stock") | _flag(merged, "not_asked_candidate")
    merged["outcome"] = np.select(
        [differ, not_asked, ~has_stock, ~has_candidate],
        ["prompts_differ", "not_asked", "missing_stock", "missing_candidate"],
        default="paired",
    )
    comparable = merged[merged["outcome"].isin(["paired", "missing_candidate"])].copy()
    comparable["score_candidate"] = comparable["score_candidate"].fillna(0.0)
    stock_IR, candidate_IR = (_pivot(comparable, f"score_{side}") for side in ("stock", "candidate"))
    clusters = comparable.drop_duplicates("item").set_index("item")["cluster_stock"].reindex(stock_IR.index).astype(str)
    counts = merged["outcome"].value_counts()
    return PairedAnswers(
        suite=suite,
        items=tuple(str(i) for i in stock_IR.index),
        clusters=pd.factorize(clusters)[0].astype(np.int64),
        stock=stock_IR.to_numpy(dtype=np.float64),
        candidate=candidate_IR.to_numpy(dtype=np.float64),
        table=merged,
        asked=len(merged),
        paired=int(counts.get("paired", 0)),
        prompts_differ=int(counts.get("prompts_differ", 0)),
        missing_stock=int(counts.get("missing_stock", 0)),
        missing_candidate=int(counts.get("missing_candidate", 0)),
        swapped=count_swapped(merged[merged["outcome"] == "paired"]),
        not_asked=int(counts.get("not_asked", 0)),
    )


def _flag(rows: pd.DataFrame, column: str) -> pd.Series:
    """An optional column of true and false; absent values are false."""
    return rows[column].eq(True) if column in rows.columns else pd.Series(False, index=rows.index)


def _pivot(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    return rows.pivot(index="item", columns="repeat", values=column)


def count_swapped(pairs: pd.DataFrame) -> int:
    """Candidate replies exchanged between two items: i got stock's reply to j and j got stock's reply to i.

    Only replies long enough to be telling, and given by stock to one item alone, are looked at: a coincidence would need two worked
    answers to trade places letter for letter.
    """
    swapped = 0
    for _, rows in pairs.groupby("repeat"):
        stock = rows.set_index("item")["text_stock"]
        candidate = rows.set_index("item")["text_candidate"]
        telling = stock[stock.map(len) >= _MIN_TELLING_CHARACTERS]
        owner = {text: item for item, text in telling.drop_duplicates(keep=False).items()}
        for item, text in candidate.items():
            other = owner.get(text)
            if other is not None and other != item and candidate[other] == stock[item]:
                swapped += 1
    return swapped
