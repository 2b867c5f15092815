"""Counters under vLLM's names, so that its clients read them, and the proof of which path decoded.

Names ending in `_total` get that ending from the client library.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

from kimi_k3_decode.plan import SPECIALIZED, STOCK

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """One server's metrics. Written by the worker, read by the /metrics route."""

    def __init__(self, model_name: str, *, candidate: str, speculation: str, drafts: int, facts: dict[str, str]) -> None:
        self.registry = CollectorRegistry()
        self._model, self._candidate = model_name, candidate
        self._per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by their place.",
            ["model_name", "engine", "position"],
            registry=self.registry,
        )
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens prefilled.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.running = self._gauge("vllm:num_requests_running", "Requests with a place in the batch.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests without a place yet.")
        self.cache_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of cache pages in use, 0 to 1.")
        self.first_token_s = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token_s = self._histogram("vllm:inter_token_latency_seconds", "Between two steps' tokens of a request.")
        self.latency_s = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self._finished = self._by("vllm:request_success", "Requests finished, by reason.", "finished_reason")
        self._failed = self._by("fasttrack:request_failure", "Requests that failed, by reason.", "reason")
        self._steps = self._by("fasttrack:decode_steps", "Decode steps by the path that ran them.", "path", "candidate")
        self._rows = self._by("fasttrack:decode_rows", "Token rows of decode steps by path.", "path", "candidate")
        self.drafts = self.draft_tokens = self.accepted_tokens = None
        if speculation != "none":
            self.drafts = self._counter("vllm:spec_decode_num_drafts", "Verify steps, one a request.")
            self.draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.")
            self.accepted_tokens = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.")
            for position in range(drafts):
                self._per_position.labels(model_name, "0", str(position))
        for path in (SPECIALIZED, STOCK):
            self._steps.labels(model_name, "0", path, candidate)
        Info("fasttrack:decode_path", "What this server was started with.", registry=self.registry).info(facts)

    def _counter(self, name: str, words: str) -> Counter:
        return Counter(name, words, ["model_name", "engine"], registry=self.registry).labels(self._model, "0")

    def _gauge(self, name: str, words: str) -> Gauge:
        return Gauge(name, words, ["model_name", "engine"], registry=self.registry).labels(self._model, "0")

    def _histogram(self, name: str, words: str) -> Histogram:
        return Histogram(name, words, ["model_name", "engine"], registry=self.registry, buckets=_SECONDS).labels(self._model, "0")

    def _by(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(name, words, ["model_name", "engine", *labels], registry=self.registry)

    # ---- events ----
    def finished(self, reason: str) -> None:
        self._finished.labels(self._model, "0", reason).inc()

    def failed(self, reason: str) -> None:
        self._failed.labels(self._model, "0", reason).inc()

    def step(self, path: str, rows: int) -> None:
        self._steps.labels(self._model, "0", path, self._candidate).inc()
        self._rows.labels(self._model, "0", path, self._candidate).inc(rows)

    def verified(self, n_drafts: int, accepted: int) -> None:
        """One request's verify step: `accepted` of `n_drafts` drafts were kept."""
        if self.drafts is None or self.draft_tokens is None or self.accepted_tokens is None:
            return
        self.drafts.inc()
        self.draft_tokens.inc(n_drafts)
        self.accepted_tokens.inc(accepted)
        for position in range(accepted):
            self._per_position.labels(self._model, "0", str(position)).inc()

    def text(self) -> bytes:
        """The Prometheus exposition."""
        return generate_latest(self.registry)
