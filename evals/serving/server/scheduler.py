"""Continuous batching: one worker thread owns the engine, and every iteration prefills a chunk and decodes one step of all requests.

A request waits for a place and for cache pages for all its tokens, in order of arrival; then its prompt is prefilled by the stock path, at
most `chunk_tokens` rows an iteration over all prompts, while the others keep decoding. A decode step is one token a request, or, with the
drafter, an anchor and its drafts: the target's token is chosen at each row as without drafts, and drafts are kept while they equal it. So
speculation changes neither a greedy reply nor a seeded one beyond the rounding of the steps, whatever masks or forced tokens it has.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch

from evals.serving.server.errors import SERVER_FAULT, STOPPING, RequestError
from evals.serving.server.job import Job
from evals.serving.server.metrics import Metrics
from kimi_k3_decode.cache import Caches
from kimi_k3_decode.dspark import DsparkProposer
from kimi_k3_decode.engine import CANDIDATE, STOCK, Engine
from kimi_k3_decode.sampling import TokenLogprob, greedy, logprobs_of

log = logging.getLogger("fasttrack.serve")

PAGE_TOKENS = 64
_JOIN_S = 30.0


class Scheduler:
    """Runs jobs until `close`. All engine work happens on its thread; `submit`, `cancel` and `close` may be called from any other."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        *,
        side: str,
        max_jobs: int,
        max_job_tokens: int,
        max_cached_tokens: int,
        proposer: DsparkProposer | None = None,
    ) -> None:
        self.engine, self.metrics, self.side, self.proposer = engine, metrics, side, proposer
        self.max_jobs = max_jobs
        # A verify step writes its drafts behind the newest token, kept or not.
        self.spare_tokens = 0 if proposer is None else proposer.n_drafts
        pages = -(-max_cached_tokens // PAGE_TOKENS) + max_jobs
        self.caches = Caches.allocate(
            engine.config, max_jobs, max_job_tokens, 1 + self.spare_tokens, engine.stock.dtype, PAGE_TOKENS, n_pages=pages
        )
        self._n_pages = pages
        self._wake = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._decoding: list[Job] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="fasttrack-serve-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; a server that is stopping fails it."""
        with self._wake:
            if not self._closing:
                self._inbox.append(job)
                self._wake.notify()
                return
        job.fail(_stopping())

    def cancel(self, job: Job) -> None:
        """Stop working on a job; it gets no further Delta."""
        with self._wake:
            job.cancelled = True
            self._wake.notify()

    def close(self) -> None:
        """Fail what is in flight and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    # ---- the thread ----
    def _run(self) -> None:
        with torch.inference_mode():
            while self._collect():
                self._admit()
                if self._prefilling:
                    self._prefill()
                if self._decoding:
                    self._decode()
                self._measure()
        for job in [*self._inbox, *self._waiting, *self._prefilling, *self._decoding]:
            job.fail(_stopping())

    def _collect(self) -> bool:
        """Take new jobs, drop cancelled ones, sleep when there is nothing to do. False when the server closes."""
        with self._wake:
            while not (self._inbox or self._waiting or self._prefilling or self._decoding or self._closing):
                self._wake.wait()
            if self._closing:
                return False
            self._waiting.extend(self._inbox)
            self._inbox.clear()
        gone = [job for job in (*self._waiting, *self._prefilling, *self._decoding) if job.cancelled]
        for job in gone:
            self.metrics.failed("cancelled")
            self._leave(job)
        self._waiting = deque(job for job in self._waiting if not job.cancelled)
        return True

    def _admit(self) -> None:
        while self._waiting and self.caches.room_for(self._waiting[0].total + self.spare_tokens):
            job = self._waiting.popleft()
            job.place = self.caches.acquire()
            self.caches.reserve(job.place, job.total + self.spare_tokens)
            if self.proposer is not None:
                self.proposer.clear(job.place)
            self._prefilling.append(job)

    def _leave(self, job: Job) -> None:
        job.done = True
        if job.place >= 0:
            self.caches.release(job.place)
            job.place = -1
        for group in (self._prefilling, self._decoding):
            if job in group:
                group.remove(job)

    def _fail(self, jobs: Sequence[Job], message: str) -> None:
        log.error("%s", message)
        for job in list(jobs):
            self.metrics.failed("error")
            job.fail(RequestError(message, status=SERVER_FAULT))
            self._leave(job)

    # ---- prefill ----
    def _prefill(self) -> None:
        """One chunk: whole prompts and at most one part, in order."""
        room, parts = self.engine.chunk_tokens, []
        for job in self._prefilling:
            if room == 0:
                break
            part = job.prompt[job.fed : job.fed + room]
            parts.append((job, part))
            room -= len(part)
        jobs = [job for job, _ in parts]
        try:
            out = self.engine.stock.prefill(
                [part for _, part in parts],
                self.caches,
                [job.place for job in jobs],
                chunk_tokens=self.engine.chunk_tokens,
                taps=self.proposer is not None,
                all_logits=any(job.sampling.prompt_logprobs is not None for job in jobs),
            )
        except Exception as error:  # a broken model must not take the server down
            self._fail(jobs, f"prefill: got {type(error).__name__}: {error}, needs a working stock path; see the server's log")
            return
        ready = []
        for row, (job, part) in enumerate(parts):
            if job.sampling.prompt_logprobs is not None and out.all_logits is not None:
                self._score_prompt(job, out.all_logits[row])
            if self.proposer is not None and out.taps is not None:
                taps = out.taps[row].unsqueeze(1)
                self.proposer.observe([job.place], taps, torch.tensor([taps.shape[2]]))
            job.fed += len(part)
            self.metrics.prompt_tokens.inc(len(part))
            if job.fed == len(job.prompt):
                ready.append((job, row))
        self._begin(ready, out.logits_RV)

    def _score_prompt(self, job: Job, logits_NV: torch.Tensor) -> None:
        """Log-probabilities of the prompt's own tokens after each row of a part that starts at `fed`."""
        following = job.prompt[job.fed + 1 : job.fed + 1 + len(logits_NV)]
        if following:
            job.prompt_logprobs += logprobs_of(logits_NV[: len(following)], following, job.sampling.prompt_logprobs or 0)

    def _begin(self, ready: list[tuple[Job, int]], logits_RV: torch.Tensor) -> None:
        """First tokens of the prompts that are complete."""
        for job, _ in ready:
            self._prefilling.remove(job)
            self._decoding.append(job)
        scoring = [job for job, _ in ready if job.sampling.max_new_tokens == 0]
        for job in scoring:
            self._finish(job, ("length", None))
        rows = [(job, row) for job, row in ready if job.sampling.max_new_tokens > 0]
        if rows:
            self._take([job for job, _ in rows], logits_RV[[row for _, row in rows]].unsqueeze(1), None)

    # ---- decode ----
    def _decode(self) -> None:
        jobs = self._decoding[: self.max_jobs]
        places = [job.place for job in jobs]
        anchors = torch.tensor([job.pending for job in jobs])
        drafts = None
        try:
            rows = anchors.unsqueeze(1)
            if self.proposer is not None:
                drafts = self.proposer.propose(places, anchors, None).drafts_BN
                rows = torch.cat((rows, drafts), dim=1)
            before = self._specialised_steps()
            batch = self.caches.batch(rows, places)
            out = self.engine.run_step(self.side, batch, self.caches, **({"taps": True} if self.proposer is not None else {}))
        except Exception as error:
            self._fail(jobs, f"decode step: got {type(error).__name__}: {error}, needs a working path; see the server's log")
            return
        self.metrics.step("specialized" if self._specialised_steps() > before else "stock", batch.rows)
        kept = self._take(jobs, out.logits_BQV, drafts)
        alive = [(job, count, row) for row, (job, count) in enumerate(zip(jobs, kept, strict=True)) if job.place >= 0]
        if not alive:
            return
        places, counts = [job.place for job, _, _ in alive], [count for _, count, _ in alive]
        if self.proposer is not None and out.taps_IBQD is not None:
            self.proposer.observe(places, out.taps_IBQD[:, [row for _, _, row in alive]], torch.tensor(counts))
        self.caches.advance(places, counts)

    def _specialised_steps(self) -> int:
        return sum(count for (path, _), count in self.engine.step_counts[self.side].items() if path != STOCK)

    def _take(self, jobs: Sequence[Job], logits_BQV: torch.Tensor, drafts_BN: torch.Tensor | None) -> list[int]:
        """Choose tokens of every job from its rows; returns how many rows of each count (the anchor's and the accepted drafts')."""
        made = self.metrics
        chosen = _Rows(jobs, logits_BQV)
        kept = []
        for row, job in enumerate(jobs):
            proposed = [] if drafts_BN is None else drafts_BN[row].tolist()
            finished, count = None, 0
            try:
                while True:
                    token, logprob = chosen.token(row, count)
                    finished = job.take(token, logprob)
                    count += 1
                    if finished is not None or count > len(proposed) or proposed[count - 1] != token:
                        break
            except ValueError as error:
                message = f"output token {len(job.tokens)} of a request: {error}"
                self._fail([job], message)
                kept.append(count)
                continue
            if drafts_BN is not None:
                accepted = count if finished is not None and count <= len(proposed) and proposed[count - 1] == token else count - 1
                made.verified(len(proposed), accepted)
            self._time(job, count)
            if finished is not None:
                self._finish(job, finished)
            else:
                job.emit(None)
            kept.append(count)
        return kept

    def _time(self, job: Job, count: int) -> None:
        now = time.monotonic()
        if len(job.tokens) == count:
            self.metrics.first_token_s.observe(now - job.arrived_s)
        else:
            self.metrics.inter_token_s.observe(now - job.latest_s)
        job.latest_s = now
        self.metrics.generation_tokens.inc(count)

    def _finish(self, job: Job, finished: tuple[str, str | int | None]) -> None:
        self.metrics.finished(finished[0])
        self.metrics.latency_s.observe(time.monotonic() - job.arrived_s)
        job.emit(finished)
        self._leave(job)

    def _measure(self) -> None:
        self.metrics.running.set(len(self._prefilling) + len(self._decoding))
        self.metrics.waiting.set(len(self._waiting))
        self.metrics.cache_usage.set(1 - len(self.caches.free_pages) / self._n_pages)


class _Rows:
    """The logits of a step, with what can be computed for all rows at once."""

    def __init__(self, jobs: Sequence[Job], logits_BQV: torch.Tensor) -> None:
        self._jobs, self._logits = jobs, logits_BQV
        self._best = greedy(logits_BQV).tolist()
        self._broken = torch.isnan(logits_BQV).any(-1).tolist()

    def token(self, row: int, place: int) -> tuple[int, TokenLogprob | None]:
        """The token that job `row` takes at its row `place`, with its log-probabilities. Raises ValueError for NaN logits."""
        if self._broken[row][place]:
            raise ValueError("got NaN logits, needs numbers; the decode path is broken or its caches are")
        job, logits_V = self._jobs[row], self._logits[row, place]
        token = self._best[row][place] if job.chooser.plain else job.chooser.next(logits_V, len(job.tokens))
        asked = job.sampling.logprobs
        return token, None if asked is None else logprobs_of(logits_V.unsqueeze(0), [token], asked)[0]


def side_of(engine: Engine) -> str:
    """The side of the engine that serves: the candidate's when there is one."""
    return CANDIDATE if engine.candidate is not None else STOCK


def _stopping() -> RequestError:
    return RequestError("server: got a request while stopping, needs a running server; start it again", status=STOPPING)
