"""Puts answers on disk while others are still in flight: one thread, batches, a bounded queue."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType

from evals.records import Reply
from evals.serving.asking import Answer, Ask, Reading, reply_of
from evals.serving.items import ItemStore
from evals.serving.progress import Display

QUEUE = 512
BATCH = 128
SCORING_SHARE = 0.05  # of the time that may go into scores that are only shown: some tasks take a second for one


class Writer:
    """A context manager; `take` may be called from one thread. What was taken is on disk when the context ends, also after an interrupt."""

    def __init__(
        self,
        store: ItemStore,
        fingerprint: str,
        path: str,
        reading: Reading,
        score: Callable[[int, str], float],
        shown: Display,
        title: str,
    ) -> None:
        self._store, self._fingerprint, self._path, self._reading = store, fingerprint, path, reading
        self._score, self._shown, self._title = score, shown, title
        # Not a bounded Queue: its lock hands the interpreter to the other thread at each put, while a slot stands empty.
        self._queue: queue.SimpleQueue[tuple[Ask, Answer] | None] = queue.SimpleQueue()
        self._score_again_at = 0.0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"records-{path}", daemon=True)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._queue.put(None)
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def take(self, ask: Ask, answer: Answer) -> None:
        """Hand over one answer. Raises what writing raised."""
        if self._error is not None:
            raise self._error
        self._queue.put((ask, answer))
        while self._queue.qsize() > QUEUE and self._error is None:  # a disk that cannot keep up holds the requests back, not the memory
            time.sleep(0.01)

    def _work(self) -> None:
        more = True
        while more:
            batch = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < BATCH:
                    batch.append(self._queue.get_nowait())
            more = None not in batch
            if self._error is None:
                try:
                    self._write([one for one in batch if one is not None])
                except BaseException as error:  # handed to the thread that takes
                    self._error = error

    def _write(self, batch: list[tuple[Ask, Answer]]) -> None:
        replies = [reply_of(ask, answer, self._path, self._fingerprint, self._reading) for ask, answer in batch]
        self._store.add(replies)
        for reply in replies:
            self._shown.answered(self._title, self._shown_score(reply), reply.text is None)

    def _shown_score(self, reply: Reply) -> float | None:
        started = time.monotonic()
        if reply.text is None or started < self._score_again_at:
            return None
        score = self._score(int(reply.key.item), reply.text)
        ended = time.monotonic()
        self._score_again_at = ended + (ended - started) / SCORING_SHARE
        return score
