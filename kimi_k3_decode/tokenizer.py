"""The tokenizer as the engine needs it, and tokenizer.json behind it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as _Tokenizer


class TextTokenizer(Protocol):
    """`encode` puts the beginning-of-sequence token first; `encode_continuation` does not; `decode` drops special tokens."""

    def encode(self, text: str) -> list[int]: ...

    def encode_continuation(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class FileTokenizer:
    """tokenizer.json of a checkpoint folder."""

    def __init__(self, path: str | Path) -> None:
        """`path` is the file or its folder. Raises ValueError when it cannot be read."""
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = _Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a missing or broken file
            raise ValueError(f"tokenizer {path}: cannot be read ({error}), needs a tokenizer.json of the tokenizers library") from error

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def encode_continuation(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)
