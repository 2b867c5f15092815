"""Text of a growing list of tokens: what may be shown already, and where a stop string begins."""

from __future__ import annotations

from collections.abc import Sequence

from kimi_k3_decode.tokenizer import TextTokenizer

_UNFINISHED = "�"  # what a decoder shows for the first bytes of a character


class TextStream:
    """Turns tokens into text piece by piece; the pieces joined are the whole text.

    Text that may be the beginning of a stop string, or of a character, is held back until it is decided. A stop string is searched only
    in text that is new, so a long reply costs no more a token than a short one.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._tokenizer, self._stop, self._include_stop = tokenizer, tuple(stop), include_stop
        self._longest = max((len(text) for text in stop), default=0)
        self._window: list[int] = []  # tokens whose text depends on each other; all before them is final
        self._window_text = ""
        self._held = ""
        self.length = 0  # characters made, shown or held

    def push(self, token: int) -> tuple[str, str | None]:
        """(new text to show, the stop string that was met or None) after one more token."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if text.endswith(_UNFINISHED):
            return "", None
        new = text[len(self._window_text) :]
        # One token of context is kept: some decoders treat the first token of a sequence differently.
        self._window = self._window[-1:]
        self._window_text = self._tokenizer.decode(self._window)
        self.length += len(new)
        return self._show(new)

    def _show(self, new: str) -> tuple[str, str | None]:
        text = self._held + new
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            at, stop = min(found)
            self._held = ""
            return text[: at + len(stop)] if self._include_stop else text[:at], stop
        keep = self._undecided(text)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep], None

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stop):
                return size
        return 0

    def flush(self) -> str:
        """The text still held back when the reply ends without a stop string."""
        rest = self._tokenizer.decode(self._window)[len(self._window_text) :] if self._window else ""
        held, self._held, self._window, self._window_text = self._held + rest, "", [], ""
        return held
