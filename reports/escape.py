"""Escaping for Markdown and HTML. Model output and other people's strings reach reports; none of it may become markup or break a table."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

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


_ID = re.compile(r"\b[ER]-[0-9A-Za-z][0-9A-Za-z-]*")
_NUMBER = re.compile(r"-?[\d.,]+(?:e[-+]?\d+)?(?: ?[x%])?")
SHORT_CHARS, LONG_CHARS = 18, 60
LOUD = ("SURVIVED", "DEAD CONTROL", "ONLY BY", "NOT REFUSED")  # what a table shows in red


def ids(value: object) -> Markup:
    """HTML of a text in which no id of a record or run is broken over two lines."""
    return Markup(_ID.sub(lambda found: f'<span class="id">{found.group()}</span>', str(escape(str(value)))))


def is_number(text: str) -> bool:
    """True for what a column of numbers may hold: a number, a range of two, a ratio, a share, or a mark for none."""
    return text in ("", "–") or all(_NUMBER.fullmatch(part) for part in text.split("–"))


def shape(value: object, number: bool = False) -> Markup:
    """The class of a table cell, as an attribute: columns of numbers to the right, short texts on one line, long ones with room."""
    text = str(value)
    name = "number" if number else "short" if len(text) <= SHORT_CHARS else "long" if len(text) > LONG_CHARS else ""
    name += " fail" if text.startswith(LOUD) else ""
    return Markup(f' class="{name.strip()}"') if name else Markup("")
