"""What was asked and answered, one JSON object a line: an append-only file that a killed run resumes from.

Two kinds of line. A `reply` holds what a path generated for one item and repeat; a `score` holds what the task made of it later. A line is
written with one system call and carries a digest of itself, so that after a crash only the last line can be torn: it is cut off on opening
and that reply is simply generated again. A digest that does not fit anywhere else means that the file was altered: HarnessError, no guess.

The key of a reply holds the target's fingerprint and the prompt's digest, so that one target is never given another's answers and a changed
prompt or generation setting is asked again (lm-eval's own cache keys hold no model).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from validation.core.store import lock_alone
from validation.core.types import HarnessError

SCHEMA = 1
REPLY, SCORE = "reply", "score"  # kinds of line


def digest(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of a JSON value (keys sorted) or a string."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, order=True)
class ReplyKey:
    """Identifies one answer. `path` is the side's role ("stock", "candidate"); `fingerprint` the target's kernels, weights and config."""

    suite: str
    item: str
    repeat: int
    path: str
    fingerprint: str
    prompt_hash: str
    params_hash: str  # stop strings, limit, temperature, seed


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One generated answer. `finish_reason`: "stop", "length" (hit the limit) or "error: …" (then `text` is None and no score exists)."""

    key: ReplyKey
    seed: int | None
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    prompt_tokens: int
    seconds: float  # share of its batch's wall time
    extra: Mapping[str, Any] = field(default_factory=dict)  # e.g. accepted draft lengths

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


def _open_alone(path: Path, what: str) -> int:
    """A descriptor that appends to `path` under an advisory lock, for one writer over all processes. Raises HarnessError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise HarnessError(f"{what}: got {error}, needs a writable {path}; free space or choose another folder") from error
    lock_alone(fd, f"{what}: got {path} in use, needs one run at a time; wait for the other run to end")
    return fd


class LineFile:
    """An append-only file of checked lines (`encode_line`), for one writer over all processes; a context manager, or call `close`.

    Whoever derives from it says what a line holds in `_take`, which is called for every whole line on opening. A torn last line is cut off
    (`repaired_bytes`). Raises HarnessError when the file cannot be written, is in use, or was altered before its last line.
    """

    what = "eval records"  # in messages

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repaired_bytes = 0
        self._fd = _open_alone(path, self.what)
        try:
            self._size = self._load()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take(self, obj: Mapping[str, Any], offset: int, size: int) -> None:
        """One line of `size` bytes at byte `offset`. KeyError and TypeError say that it has another form."""
        raise NotImplementedError

    def _load(self) -> int:
        """Take every whole line; returns the size of the file without a torn last one."""
        offset = 0
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            for line in file:
                obj = decode_line(line)
                if obj is None:
                    if file.read(1):
                        raise self._altered(offset)
                    self.repaired_bytes = len(line)
                    os.ftruncate(self._fd, offset)
                    break
                try:
                    self._take(obj, offset, len(line))
                except (KeyError, TypeError) as error:
                    form = f"byte {offset} of {self.path} in another form ({error})"
                    raise HarnessError(f"{self.what}: got {form}, needs schema {SCHEMA}; move the file away") from error
                offset += len(line)
        return offset

    def _line_at(self, offset: int, size: int) -> dict[str, Any]:
        obj = decode_line(os.pread(self._fd, size, offset))
        if obj is None:
            raise self._altered(offset)
        return obj

    def _altered(self, offset: int) -> HarnessError:
        return HarnessError(f"{self.what}: got an altered line at byte {offset} of {self.path}, needs it as written; restore the file")

    def _append(self, lines: Sequence[bytes]) -> int:
        """Write in one go and sync; returns the byte at which the first line begins."""
        start = self._size
        block = b"".join(lines)
        if not block:
            return start
        try:
            written = 0
            while written < len(block):
                written += os.write(self._fd, memoryview(block)[written:])
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, start)  # a full disk leaves no half line behind
            raise HarnessError(f"{self.what}: got {error} while writing {self.path}, needs space; free some and run again") from error
        self._size = start + len(block)
        return start


class RecordFile(LineFile):
    """Replies and scores of a run, all of them in memory."""

    def __init__(self, path: Path) -> None:
        self._replies: dict[ReplyKey, Reply] = {}
        self._scores: dict[ReplyKey, dict[str, float | None]] = {}
        super().__init__(path)

    # ---- reading ----
    @property
    def replies(self) -> Mapping[ReplyKey, Reply]:
        return self._replies

    def scores(self, key: ReplyKey) -> Mapping[str, float | None]:
        """Metrics of a reply (None: the task gave NaN); empty when it was not scored yet."""
        return self._scores.get(key, {})

    def select(self, suite: str, path: str, fingerprint: str) -> Iterator[Reply]:
        """One side's replies to a suite, in key order."""
        for key in sorted(self._replies):
            if (key.suite, key.path, key.fingerprint) == (suite, path, fingerprint):
                yield self._replies[key]

    # ---- writing ----
    def add_replies(self, replies: Sequence[Reply]) -> None:
        """Append replies in one write. A key that is there already is an error: nothing may be counted twice."""
        doubled = [r.key for r in replies if r.key in self._replies]
        if doubled or len({r.key for r in replies}) != len(replies):
            raise HarnessError(f"eval records: got a second reply for {doubled or 'one key'}, needs each key once; this is a bug")
        self._append([encode_line({"kind": REPLY, **reply_to_json(reply)}) for reply in replies])
        self._replies.update({reply.key: reply for reply in replies})

    def add_scores(self, scores: Mapping[ReplyKey, Mapping[str, float | None]]) -> None:
        """Append metrics of replies. Equal scores written before are skipped; different ones are an error."""
        fresh = {}
        for key, metrics in scores.items():
            if key not in self._replies:
                raise HarnessError(f"eval records: got a score for {key}, needs its reply first; this is a bug")
            known = self._scores.get(key)
            if known is not None and known != dict(metrics):
                raise HarnessError(f"eval records: got scores {dict(metrics)} after {known} for {key}, needs one; the task changed")
            if known is None:
                fresh[key] = dict(metrics)
        self._append([encode_line({"kind": SCORE, "key": asdict(key), "metrics": metrics}) for key, metrics in fresh.items()])
        self._scores.update(fresh)

    # ---- loading ----
    def _take(self, obj: Mapping[str, Any], offset: int, size: int) -> None:
        if obj["kind"] != REPLY:
            self._scores[ReplyKey(**obj["key"])] = dict(obj["metrics"])
            return
        reply = reply_from_json(obj)
        if reply.key in self._replies:
            raise HarnessError(f"{self.what}: got {reply.key} again at byte {offset} of {self.path}, needs each key once; restore it")
        self._replies[reply.key] = reply


def encode_line(obj: Mapping[str, Any]) -> bytes:
    body = json.dumps({"schema": SCHEMA, **obj}, separators=(",", ":"), allow_nan=False)
    return f'{{"sha":"{digest(body)}","body":{body}}}\n'.encode("ascii")


def decode_line(line: bytes) -> dict[str, Any] | None:
    """The object of a whole, unaltered line; None for anything else."""
    try:
        text = line.decode("ascii")
        wrapper = json.loads(text)
        body = text[text.index('"body":') + len('"body":') : -2]
        whole = text.endswith("}\n") and digest(body) == wrapper["sha"]
        return wrapper["body"] if whole else None
    except (ValueError, KeyError, TypeError):
        return None


def reply_to_json(reply: Reply) -> dict[str, Any]:
    return {**asdict(reply), "token_ids": list(reply.token_ids), "extra": dict(reply.extra)}


def reply_from_json(obj: Mapping[str, Any]) -> Reply:
    names = ("seed", "text", "finish_reason", "prompt_tokens", "seconds", "extra")
    return Reply(key=ReplyKey(**obj["key"]), token_ids=tuple(obj["token_ids"]), **{name: obj[name] for name in names})
