"""The rule documentation, read from `rule_docs/MOnnn.md`: one file a rule, the same five sections in each."""

from __future__ import annotations

import functools
from pathlib import Path

from validation.core.types import HarnessError
from validation.ordering.model import RULES

FOLDER = Path(__file__).parent / "rule_docs"
SECTIONS = ("What it does", "Why", "Example", "How to fix", "References")


@functools.cache
def rule_text(rule: str) -> str:
    """The Markdown of one rule. Raises HarnessError for an id that is no rule."""
    if rule not in RULES:
        raise HarnessError(f"rule: got {rule!r}, needs one of {', '.join(RULES)}")
    return (FOLDER / f"{rule}.md").read_text()


def rule_section(rule: str, section: str) -> str:
    """One section without its heading."""
    _, _, rest = rule_text(rule).partition(f"## {section}\n")
    return rest.partition("\n## ")[0].strip()
