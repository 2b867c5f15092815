"""What was asked and answered, one JSON object a line: an append-only file that a killed run resumes from.

Two kinds of line. A `reply` holds what a path generated for one item and repeat; a `score` holds what the task made of it later. A line is
written with one system call and carries a digest of itself, so that after a crash only the last line can be torn: it is cut off on opening
and that reply is simply generated again. A digest that does not fit anywhere else means that the file was altered: HarnessError, no guess.

The key of a reply holds the target's fingerprint and the prompt's digest, so that one target is never given another's answers and a changed
prompt or generation setting is asked again (lm-eval's own cache keys hold no model).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from validation.core.types import HarnessError

SCHEMA = 1


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


def open_alone(path: Path, what: str) -> int:
    """A descriptor that appends to `path` under an advisory lock, for one writer over all processes. Raises HarnessError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise HarnessError(f"{what}: got {error}, needs a writable {path}; free space or choose another folder") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise HarnessError(f"{what}: got {path} in use, needs one run at a time; wait for the other run to end") from error
    return fd


class RecordFile:
    """Replies and scores of a run. One writer at a time (an advisory lock); use as a context manager or call `close`.

    Raises HarnessError when the file cannot be written, is locked by another run, or was altered before its last line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._replies: dict[ReplyKey, Reply] = {}
        self._scores: dict[ReplyKey, dict[str, float | None]] = {}
        self.repaired_bytes = 0
        self._fd = open_alone(path, "eval records")
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

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
        self._append([{"kind": "reply", **reply_to_json(reply)} for reply in replies])
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
        self._append([{"kind": "score", "key": asdict(key), "metrics": metrics} for key, metrics in fresh.items()])
        self._scores.update(fresh)

    def _append(self, objects: Sequence[Mapping[str, Any]]) -> None:
        if not objects:
            return
        block = b"".join(encode_line(obj) for obj in objects)
        before = os.fstat(self._fd).st_size
        try:
            written = 0
            while written < len(block):
                written += os.write(self._fd, block[written:])
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, before)  # a full disk leaves no half line behind
            raise HarnessError(f"eval records: got {error} while writing {self.path}, needs space; free some and run again") from error

    # ---- loading ----
    def _load(self) -> None:
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            good_end = 0
            for number, line in enumerate(file, start=1):
                obj = decode_line(line)
                if obj is None:
                    rest = file.read(1)
                    if rest:
                        raise HarnessError(
                            f"eval records: got an altered line {number} in {self.path}, needs the file as written; restore it"
                        )
                    self.repaired_bytes = len(line)
                    os.ftruncate(self._fd, good_end)
                    break
                self._take(obj, number)
                good_end += len(line)

    def _take(self, obj: Mapping[str, Any], number: int) -> None:
        try:
            if obj["kind"] == "reply":
                reply = reply_from_json(obj)
                if reply.key in self._replies:
                    raise HarnessError(
                        f"eval records: got {reply.key} again in line {number} of {self.path}, needs each key once; restore it"
                    )
                self._replies[reply.key] = reply
            else:
                self._scores[ReplyKey(**obj["key"])] = dict(obj["metrics"])
        except (KeyError, TypeError) as error:
            raise HarnessError(
                f"eval records: got line {number} of {self.path} in another form ({error}), needs schema {SCHEMA}; move the file away"
            ) from error


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
