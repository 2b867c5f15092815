"""Every item of one side on disk, whatever the size of the suite: only an index lies in memory.

An append-only file in the form of `evals.records`. A reply's line is written once; a failed one may be followed by a later line of the same
key, because a failure is asked again when the run is continued. The index holds a digest and a place for each key, so that twenty thousand
answers of thirty thousand tokens each cost megabytes, not gigabytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from evals.records import REPLY, SCORE, LineFile, Reply, ReplyKey, digest, encode_line, reply_from_json, reply_to_json
from validation.core.types import HarnessError


class _Place(NamedTuple):
    offset: int
    size: int
    failures: int  # failed lines of this key so far
    answered: bool


class ItemStore(LineFile):
    """Replies and scores of one suite on one side. Safe from several threads."""

    what = "eval items"

    def __init__(self, path: Path) -> None:
        self._places: dict[str, _Place] = {}
        self._scores: dict[str, dict[str, float | None]] = {}
        self._lock = threading.Lock()
        super().__init__(path)

    # ---- reading ----
    def __len__(self) -> int:
        return len(self._places)

    def answered(self, key: ReplyKey) -> bool:
        """True when a reply that is no failure is there."""
        place = self._places.get(_name(key))
        return place is not None and place.answered

    def failures(self, key: ReplyKey) -> int:
        """How often asking this key has failed."""
        place = self._places.get(_name(key))
        return place.failures if place is not None else 0

    def get(self, key: ReplyKey) -> Reply | None:
        """The latest line of a key, from disk; None when it was never asked."""
        place = self._places.get(_name(key))
        if place is None:
            return None
        return reply_from_json(self._line_at(place.offset, place.size))

    def scores(self, key: ReplyKey) -> Mapping[str, float | None]:
        """Metrics of a reply (None: no score); empty when it was not scored yet."""
        return self._scores.get(_name(key), {})

    def replies(self) -> Iterator[Reply]:
        """The latest line of every key, in the order of the file, one at a time."""
        for place in sorted(self._places.values()):
            yield reply_from_json(self._line_at(place.offset, place.size))

    # ---- writing ----
    def add(self, replies: Sequence[Reply]) -> None:
        """Append replies in one write. A second answer to a key is an error: nothing may be counted twice."""
        with self._lock:
            doubled = [r.key for r in replies if self.answered(r.key)]
            if doubled or len({r.key for r in replies}) != len(replies):
                raise HarnessError(f"eval items: got a second reply for {doubled or 'one key'}, needs each key once; this is a bug")
            lines = [encode_line({"kind": REPLY, **reply_to_json(reply)}) for reply in replies]
            offset = self._append(lines)
            for reply, line in zip(replies, lines, strict=True):
                self._note(reply.key, offset, len(line), reply.text is not None)
                offset += len(line)

    def add_scores(self, scores: Iterable[tuple[ReplyKey, Mapping[str, float | None]]]) -> None:
        """Append metrics. Equal ones written before are skipped; a later score of a reply that replaced a failure is kept."""
        with self._lock:
            fresh = []
            for key, metrics in scores:
                if _name(key) not in self._places:
                    raise HarnessError(f"eval items: got a score for {key}, needs its reply first; this is a bug")
                if self._scores.get(_name(key)) != dict(metrics):
                    fresh.append((key, dict(metrics)))
            self._append([encode_line({"kind": SCORE, "key": asdict(key), "metrics": metrics}) for key, metrics in fresh])
            self._scores.update({_name(key): metrics for key, metrics in fresh})

    def _note(self, key: ReplyKey, offset: int, size: int, answered: bool) -> None:
        before = self._places.get(_name(key))
        failures = (before.failures if before is not None else 0) + (not answered)
        self._places[_name(key)] = _Place(offset, size, failures, answered)

    # ---- loading ----
    def _take(self, obj: Mapping[str, Any], offset: int, size: int) -> None:
        key = ReplyKey(**obj["key"])
        if obj["kind"] == SCORE:
            self._scores[_name(key)] = dict(obj["metrics"])
            return
        if self.answered(key):
            raise HarnessError(f"{self.what}: got {key} again in {self.path}, needs each answer once; restore the file")
        self._note(key, offset, size, obj["text"] is not None)


def _name(key: ReplyKey) -> str:
    return digest(f"{key.suite}|{key.item}|{key.repeat}|{key.path}|{key.fingerprint}|{key.prompt_hash}|{key.params_hash}")
