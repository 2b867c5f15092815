"""Escaping for Markdown. Model output and other people's strings reach reports; none of it may become markup or break a table."""

from __future__ import annotations

import re

_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~!@])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def cell(value: object, limit_chars: int = 300) -> str:
    """One line of plain text for a Markdown table cell: markup, pipes, mentions and control characters are neutralised."""
    text = str(value)
    if len(text) > limit_chars:
        text = text[: limit_chars - 1] + "…"
    return _MARKUP.sub(r"\\\1", _CONTROL.sub(" ", text))


def code(value: object, limit_chars: int = 2000) -> str:
    """An inline code span that its content cannot leave, safe inside a table cell."""
    text = _CONTROL.sub(" ", str(value))[:limit_chars].replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"
