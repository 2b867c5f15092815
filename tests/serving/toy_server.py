"""A stand-in model behind OpenAI-compatible routes, fast enough to run whole suites in a test.

    python toy_server.py --port N [--mode good|worse|noisy|nan|unforced|speculative] [--path specialized|stock] [--dies-after N]
                       [--seconds S]

It answers the items of the nano suites from their own data, most of them rightly, always the same ones; its distributions depend on the
last few tokens, plus a small noise that depends on how the request was computed, as a real server's rounding does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).resolve().parents[2] / "evals" / "nano" / "data"
VOCABULARY, MEMORY, CONTEXT = 128, 6, 8192
NOISE_NATS = {"noisy": 0.2}


def number_of(*parts: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def load_answers() -> dict[str, str]:
    rows = [json.loads(line) for path in sorted(DATA.glob("*_nano.jsonl")) for line in path.read_text().splitlines()]
    return {row["prompt"]: row["answer"] for row in rows}


class Toy:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.answers = load_answers()
        self.lock = threading.Lock()
        self.in_flight = self.requests = self.steps = 0

    def answer(self, prompt: str) -> str:
        right = self.answers.get(prompt.strip(), " nothing")
        draw = number_of("item", prompt) % 1000
        wrong = draw < 200 or (self.options.mode == "worse" and draw < 350)
        return " #### -1 \\boxed{-1} the answer is unknown" if wrong else right

    def log_probabilities(self, tokens: list[int], how: Any) -> np.ndarray:
        base = np.random.default_rng(number_of(tokens[-MEMORY:])).normal(scale=3.0, size=VOCABULARY)
        seed = number_of(tokens[-MEMORY:], how, self.options.path)
        logits = base + np.random.default_rng(seed).normal(scale=NOISE_NATS.get(self.options.mode, 0.02), size=VOCABULARY)
        return logits - np.log(np.exp(logits).sum())

    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt = request["prompt"]
        if isinstance(prompt, str):
            return self._text(request, self.answer(prompt), len(prompt))
        forced = request.get("vllm_xargs", {}).get("force_ids")
        if forced and self.options.mode in ("unforced", "speculative"):
            forced = None
        allowed = request.get("allowed_token_ids") if self.options.mode != "unforced" else None
        tokens, rows = list(prompt), []
        for step in range(request["max_tokens"]):
            values = self.log_probabilities(tokens, (len(prompt), self.in_flight > 1))
            chosen = forced[step] if forced else allowed[0] if allowed else int(values.argmax())
            if self.options.mode == "nan" and step == 3:
                values[:] = np.nan
            rows.append((chosen, values))
            tokens.append(chosen)
        top = request.get("logprobs")
        choice: dict[str, Any] = {"text": "", "finish_reason": "length", "token_ids": [chosen for chosen, _ in rows]}
        if top is not None:
            choice["logprobs"] = {
                "tokens": [f"token_id:{chosen}" for chosen, _ in rows],
                "token_logprobs": [float(values[chosen]) for chosen, values in rows],
                "top_logprobs": [{f"token_id:{i}": float(values[i]) for i in np.argsort(-values)[:top]} for _, values in rows],
            }
        return {"model": "toy", "choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(rows)}}

    def _text(self, request: dict[str, Any], text: str, prompt_tokens: int) -> dict[str, Any]:
        stops = [text.find(stop) for stop in request.get("stop", []) if stop in text]
        text = text[: min(stops)] if stops else text
        ids = [ord(letter) % VOCABULARY for letter in text[: request["max_tokens"]]]
        choice = {"text": text[: request["max_tokens"]], "finish_reason": "stop", "token_ids": ids}
        return {"model": "toy", "choices": [choice], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": len(ids)}}

    def metrics(self) -> str:
        lines = ["# TYPE toy:steps counter", f'toy:steps_total{{path="{self.options.path}"}} {self.steps}']
        if self.options.mode == "speculative":
            lines += [f"vllm:spec_decode_num_drafts_total {self.steps}", f"vllm:spec_decode_num_draft_tokens_total {3 * self.steps}"]
            lines += [f"vllm:spec_decode_num_accepted_tokens_total {2 * self.steps}"]
            lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{p}"}} {self.steps}' for p in range(2)]
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    toy: Toy

    def do_GET(self) -> None:
        bodies: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"data": [{"id": "toy", "root": "toy-weights", "max_model_len": CONTEXT}]},
            "/version": {"version": "1.0"},
            "/metrics": self.toy.metrics(),
        }
        self._send(bodies.get(self.path), 200 if self.path in bodies else 404)

    def do_POST(self) -> None:
        toy, request = self.toy, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            text = request.get("prompt") or json.dumps(request.get("messages"))
            self._send({"tokens": [ord(letter) % VOCABULARY for letter in text]}, 200)
            return
        with toy.lock:
            toy.in_flight += 1
            toy.requests += 1
            toy.steps += request["max_tokens"]
            if toy.options.dies_after and toy.requests > toy.options.dies_after:
                print("engine core died", flush=True)
                os._exit(9)
        try:
            time.sleep(toy.options.seconds)
            self._send(toy.completion(request), 200)
        finally:
            with toy.lock:
                toy.in_flight -= 1

    def _send(self, body: Any, status: int) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *parts: Any) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--mode", default="good")
    parser.add_argument("--path", default="stock")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--dies-after", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0, help="that each answer takes at least")
    Handler.toy = Toy(parser.parse_args())
    print(f"decoding on the {Handler.toy.options.path} path", flush=True)
    server = ThreadingHTTPServer(("127.0.0.1", Handler.toy.options.port), Handler)
    server.daemon_threads = True
    server.request_queue_size = 128
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
