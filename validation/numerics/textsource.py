"""Seeded long text for teacher forcing: a chat in which the same things are asked again and again, then asked for.

Each wanted context ends with a question about an earlier reply and its true answer, so the tokens that are compared depend on the whole
context. The characters are the tokens (the embedded checkpoint's tokenizer gives a printable ASCII character its code).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

_FORMS = ("poem", "song", "tale", "note", "joke", "riddle", "letter", "essay")
_TOPICS = ("owls", "rain", "tea", "ships", "moss", "clocks", "bees", "snow", "trains", "salt", "kites", "foxes", "lamps", "rivers")
_ORDINALS = ("1st", "2nd", "3rd")
_ONSETS, _RHYMES, _SIGNS = "bdfgklmnprstvz", "aeiou", "ABCDEFGHKLMNPRSTabcdefghkmnprst23456789"


def _reply(rng: random.Random) -> str:
    words = ("".join(rng.choice(_ONSETS) + rng.choice(_RHYMES) for _ in range(rng.randint(2, 3))) for _ in range(4))
    return " ".join(words)


class _Chat:
    """The transcript so far and what was said about each subject."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.parts: list[str] = []
        self.length = 0
        self._said: dict[tuple[str, str], list[str]] = {}
        self._latest: tuple[str, str] | None = None

    def _write(self, text: str) -> None:
        self.parts.append(text)
        self.length += len(text)

    def turn(self) -> None:
        subject = self._rng.choice(_FORMS), self._rng.choice(_TOPICS)
        reply = _reply(self._rng)
        self._said.setdefault(subject, []).append(reply)
        self._latest = subject
        self._write(f"User: Write a {subject[0]} about {subject[1]}.\nBot: {reply}\n")

    def question(self) -> str:
        """A question about something said at least once, with its answer; about as long as a window."""
        subject = self._rng.choice(sorted(self._said))
        which = self._rng.randrange(min(len(self._said[subject]), len(_ORDINALS)))
        sign = "".join(self._rng.choice(_SIGNS) for _ in range(6))
        asked = f"User: Prepend {sign} to the {_ORDINALS[which]} {subject[0]} about {subject[1]}.\nBot:"
        return f"{asked} {sign} {self._said[subject][which]}\n"

    def grow_to(self, n_characters: int) -> None:
        """Turns until a question fits exactly at the end; a last turn is cut short where needed, and then nobody asks for it."""
        question = self.question()
        while self.length + len(question) < n_characters:
            self.turn()
        text = "".join(self.parts)[: n_characters - len(question)]
        if len(text) < self.length and self._latest is not None:
            self._said[self._latest].pop()
            self._said = {subject: replies for subject, replies in self._said.items() if replies}
        self.parts, self.length = [text, question], n_characters


def tokens_ending_at(contexts: Sequence[int], seed: int, *, bos: int, vocab_size: int) -> list[int]:
    """Token ids of one growing chat, as many as the longest of `contexts` (rising, tokens); a question is answered at each end.

    Raises ValueError when the vocabulary cannot hold characters or the contexts do not rise.
    """
    if vocab_size < 128 or list(contexts) != sorted(set(contexts)) or not contexts or contexts[0] < 256:
        raise ValueError(f"contexts: got {list(contexts)} and a vocabulary of {vocab_size}, needs rising lengths >= 256 and >= 128 ids")
    chat = _Chat(seed)
    for _ in range(3):
        chat.turn()
    for context in contexts:
        chat.grow_to(context - 1)  # the first id is <bos>
    return [bos, *map(ord, "".join(chat.parts))]
