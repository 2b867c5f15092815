"""OpenAI MRCR at full size: rows of up to five million characters, read one at a time, chosen by needles and by length in tokens.

`prepare` walks the published rows (parquet, JSON lines, or the hub's stream) once, counts tokens with the served model's tokenizer, and
copies the rows that were asked for into a file of this run with an index; `MrcrRows` then gives lm-eval one row at a time from that file.
A second call with the same choice finds the file and reads nothing else.

Bins are the published ones by default: from 4,096 tokens on, each twice as long as the one before; prompt and answer count together, in the
tokens of the served model (the published bins count those of one fixed tokenizer, so borders move a little).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet

from evals.records import digest
from evals.tasks.docs import chat_messages
from evals.tasks.loading import data_roots
from validation.core.types import HarnessError

SUITE = "mrcr"
HUB = "openai/mrcr"
NEEDLES = (2, 4, 8)
LOWEST = 4096
PUBLISHED_BINS = tuple(LOWEST << i for i in range(1, 9))  # upper ends: 8,192 … 1,048,576
PUBLISHED_ROWS = 100 * len(PUBLISHED_BINS)  # of each needle count: a hundred a bin
INDEX_FORM = 2
COLUMNS = ("prompt", "answer", "random_string_to_prepend", "n_needles")
LONGEST_TOKEN_CHARACTERS = 12  # no text averages more characters a token: a longer row cannot fit, and need not be counted
TEMPLATE_TOKENS = 8  # a chat template adds to each message, at most; counted for the room in the context, not for the bin
CountTokens = Callable[[str], int]


@dataclass(frozen=True, kw_only=True)
class MrcrChoice:
    """Which rows. `bins` are upper ends in tokens, each from the end of the one before (the first from 4,096)."""

    needles: tuple[int, ...] = NEEDLES
    bins: tuple[int, ...] = ()  # default: the published ones up to the context
    context_tokens: int = 0  # what the server holds; 0: no bound
    max_new_tokens: int = 8192
    per_bin: int = 0  # rows of each needle count and bin, in the order of the files; 0: all

    def __post_init__(self) -> None:
        if not self.needles or list(self.bins) != sorted(set(self.bins)) or any(end <= 0 for end in self.bins):
            raise HarnessError(f"mrcr: got needles {list(self.needles)} and bins {list(self.bins)}, needs some needles and rising bins")

    @property
    def ends(self) -> tuple[int, ...]:
        """Upper ends of the bins that fit, with room for the answer, into the context."""
        chosen = self.bins or PUBLISHED_BINS
        room = self.context_tokens - self.max_new_tokens if self.context_tokens else chosen[-1]
        return tuple(min(end, room) for i, end in enumerate(chosen) if (chosen[i - 1] if i else self.lowest) < room)

    @property
    def lowest(self) -> int:
        return LOWEST if not self.bins or self.bins[0] > LOWEST else 0

    def is_whole(self, context_tokens: int) -> bool:
        """Whether every published row that a context of this size (0: unknown) holds is chosen."""
        longest = min(context_tokens or PUBLISHED_BINS[-1], PUBLISHED_BINS[-1])
        return set(NEEDLES) <= set(self.needles) and not self.per_bin and (not self.bins or self.bins[-1] >= longest)

    def bin_of(self, tokens: int) -> str | None:
        """The name of the bin with this many tokens, or None outside all of them."""
        low = self.lowest
        for end in self.ends:
            if low < tokens <= end:
                return f"{low}-{end} tokens"
            low = end
        return None


class MrcrRows:
    """Rows in a prepared file, read when they are needed: the sequence of documents that lm-eval sees. Safe from several threads."""

    features: Mapping[str, str] = dict.fromkeys((*COLUMNS, "tokens", "level", "cluster"), "")

    def __init__(self, path: Path, places: Sequence[tuple[int, int, int]], seen: Mapping[int, int]) -> None:
        self._path = path
        self._places = list(places)  # offset, bytes, tokens
        self.seen = dict(seen)  # needles -> different rows in the data, chosen or not
        self._fd = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)

    @property
    def column_names(self) -> list[str]:
        return list(self.features)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, row: int) -> dict[str, Any]:
        offset, size, _ = self._places[row]
        made: dict[str, Any] = json.loads(os.pread(self._fd, size, offset))
        return made

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def select(self, rows: Sequence[int]) -> MrcrRows:
        return MrcrRows(self._path, [self._places[row] for row in rows], self.seen)

    @property
    def data_share(self) -> float:
        """Published rows in the data over all published ones, of the needle count with the fewest; below 1 some are missing."""
        return min(min(self.seen.get(needles, 0), PUBLISHED_ROWS) for needles in NEEDLES) / PUBLISHED_ROWS

    def size_of(self, row: int) -> int:
        """Bytes of a row, for whoever bounds what is held at once."""
        return self._places[row][1]

    def tokens_of(self, row: int) -> int:
        """Tokens of its prompt and answer."""
        return self._places[row][2]


def prepare(choice: MrcrChoice, count: CountTokens, tokenizer: str, folder: Path, data: Path | None = None) -> MrcrRows:
    """The chosen rows, copied below `folder` once. `tokenizer` names what counts. Raises HarnessError for absent or damaged data."""
    files = _files(data)
    source: list[Any] = [[str(f), f.stat().st_size] for f in files] or [HUB]
    name = digest({"choice": asdict(choice), "tokenizer": tokenizer, "files": source, "form": INDEX_FORM})
    path, index = folder / f"mrcr-{name}.jsonl", folder / f"mrcr-{name}.index.json"
    if not index.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.draft")
        try:
            seen: dict[int, set[str]] = {}
            places = _copy(_chosen(_counted(_rows(files), seen), choice, count), draft)
            if not places:
                asked = f"{list(choice.needles)} needles in bins up to {list(choice.ends)} tokens"
                raise HarnessError(f"mrcr: got no row with {asked}, needs some; choose other bins")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        draft.write_text(json.dumps({"places": places, "seen": {needles: len(rows) for needles, rows in seen.items()}}))
        draft.replace(index)
    told = json.loads(index.read_text())
    return MrcrRows(path, [tuple(place) for place in told["places"]], {int(n): count for n, count in told["seen"].items()})


def _counted(rows: Iterable[Mapping[str, Any]], seen: dict[int, set[str]]) -> Iterator[Mapping[str, Any]]:
    """The rows as they are; `seen` gets a digest of each by its needles, so that a row given twice counts once."""
    for row in rows:
        seen.setdefault(int(row["n_needles"]), set()).add(digest([row["prompt"], row["answer"]]))
        yield row


def _copy(rows: Iterable[Mapping[str, Any]], path: Path) -> list[tuple[int, int, int]]:
    places, offset = [], 0
    with path.open("wb") as file:
        for row in rows:
            line = json.dumps(row, ensure_ascii=False).encode("utf-8", errors="surrogatepass") + b"\n"
            file.write(line)
            places.append((offset, len(line), int(row["tokens"])))
            offset += len(line)
    return places


def _chosen(rows: Iterable[Mapping[str, Any]], choice: MrcrChoice, count: CountTokens) -> Iterator[dict[str, Any]]:
    """Rows inside the choice, with their tokens, level and cluster. Rows that cannot fit by their characters are not tokenized."""
    if not choice.ends:
        return
    taken: dict[tuple[int, str], int] = {}
    for number, row in enumerate(rows, start=1):
        needles = int(row["n_needles"])
        if needles not in choice.needles:
            continue
        messages, answer = _checked(row, number)
        characters = len(answer) + sum(len(m["content"]) for m in messages)
        if characters > choice.ends[-1] * LONGEST_TOKEN_CHARACTERS:
            continue
        tokens = count(answer) + sum(count(m["content"]) for m in _long_pieces(messages))
        level = choice.bin_of(tokens)
        room = choice.context_tokens - choice.max_new_tokens - TEMPLATE_TOKENS * len(messages)
        if choice.context_tokens and tokens > room:
            continue
        if level is None or (choice.per_bin and taken.get((needles, level), 0) >= choice.per_bin):
            continue
        taken[needles, level] = taken.get((needles, level), 0) + 1
        haystack = digest([m["content"] for m in messages[:-1]])
        yield {
            **{name: row[name] for name in COLUMNS},
            "tokens": tokens,
            "level": f"{needles} needles, {level}",
            "cluster": haystack,  # rows that ask for different needles of one conversation are no independent questions
        }


def _long_pieces(messages: Sequence[Mapping[str, str]]) -> Iterator[dict[str, str]]:
    """Messages joined to pieces of a megabyte: few calls of a tokenizer that may be a server, and none too large for it."""
    piece: list[str] = []
    size = 0
    for message in messages:
        piece.append(message["content"])
        size += len(message["content"])
        if size > 1 << 20:
            yield {"content": "\n".join(piece)}
            piece, size = [], 0
    if piece:
        yield {"content": "\n".join(piece)}


def _checked(row: Mapping[str, Any], number: int) -> tuple[list[dict[str, str]], str]:
    """Messages and answer of a row. Raises HarnessError for one that could not be scored."""
    messages = chat_messages(row["prompt"])
    prefix, answer = row["random_string_to_prepend"], row["answer"]
    if messages is None or not prefix or not answer.startswith(prefix):
        problem = "no JSON list of messages" if messages is None else f"an answer that does not start with {prefix!r}"
        raise HarnessError(f"mrcr: got {problem} in row {number}, needs the published form; the data file is damaged")
    return messages, answer


# ---- where rows come from ----
def _files(data: Path | None) -> list[Path]:
    """Local files in the order of their names; none means the hub."""
    if data is not None and data.is_file():
        return [data]
    roots = [data] if data is not None else [root / SUITE for root in data_roots()]
    for root in roots:
        found = sorted(p for pattern in ("*.parquet", "*/*.parquet", "*.jsonl") for p in root.glob(pattern))
        if found:
            return found
    if data is not None:
        raise HarnessError(f"mrcr: got no parquet or JSON lines at {data}, needs the files of {HUB}")
    return []


def _rows(files: Sequence[Path]) -> Iterator[Mapping[str, Any]]:
    """Every row of every file, one at a time."""
    if not files:
        yield from _hub_rows()
    for path in files:
        try:
            yield from _parquet_rows(path) if path.suffix == ".parquet" else _line_rows(path)
        except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
            raise HarnessError(f"mrcr: got {type(error).__name__}: {error} in {path}, needs the columns {', '.join(COLUMNS)}") from error


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Row by row: a group may hold hundreds of megabytes, so pages are read as they are needed."""
    with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20, memory_map=False) as file:
        absent = sorted(set(COLUMNS) - set(file.schema_arrow.names))
        if absent:
            raise KeyError(f"no column {', '.join(absent)}")
        for batch in file.iter_batches(batch_size=1, columns=list(COLUMNS), use_threads=False):
            yield from batch.to_pylist()


def _line_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                row = json.loads(line)
                yield {name: row[name] for name in COLUMNS}


def _hub_rows() -> Iterator[Mapping[str, Any]]:
    try:
        yield from datasets.load_dataset(HUB, split="train", streaming=True)
    except HarnessError:
        raise
    except Exception as error:
        raise HarnessError(
            f"mrcr: got {type(error).__name__}: {str(error)[:200]} while reading {HUB} from the hub, needs access to it or local files: "
            f'[evals.data] {SUITE} = "folder of its parquet files"'
        ) from error
