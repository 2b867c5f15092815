"""The options of `fasttrack serve`; starts the server, says where it listens and which decode path runs, stops on SIGTERM or Ctrl-C."""

from __future__ import annotations

import json
import logging
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from evals.serving.server.listening import address_of, listen, run_app
from evals.serving.server.model import ServedModel, ServeOptions
from evals.serving.server.routes import Routes
from validation.core.settings import PROJECT_ROOT, Settings
from validation.core.types import HarnessError

app = typer.Typer(add_completion=False)
log = logging.getLogger("fasttrack.serve")

LEVELS = ("debug", "info", "warning", "error")


@app.command()
def serve(
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint folder; default: the shipped nano-K3.")] = None,
    decode_backend: Annotated[str, typer.Option(help="auto | latency_specialized | a candidate's name, which opts in.")] = "auto",
    spec: Annotated[str, typer.Option(help="none | dspark")] = "none",
    drafts: Annotated[int | None, typer.Option(help="Drafts a verify step; default: all the drafter has.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one, which is printed.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="Default: the checkpoint's name.")] = None,
    max_model_len: Annotated[int, typer.Option(help="Prompt and reply together, in tokens.")] = 32_768,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests decoded together; default: what fills 64 token rows.")] = None,
    max_logprobs: Annotated[int, typer.Option(help="Largest count of log-probabilities a token.")] = 128,
    log_level: Annotated[str, typer.Option(help=" | ".join(LEVELS))] = "info",
) -> None:
    """Serve a checkpoint behind OpenAI-compatible routes (starts in seconds, no GPU)."""
    if log_level not in LEVELS:
        raise HarnessError(f"log-level: got {log_level!r}, needs one of {list(LEVELS)}")
    logging.basicConfig(stream=sys.stderr, level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    default = PROJECT_ROOT / Settings().checkpoint
    options = ServeOptions(
        checkpoint=checkpoint or default,
        decode_backend=decode_backend,
        speculation=spec,
        drafts=drafts,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_logprobs=max_logprobs,
        served_model_name=served_model_name,
    )
    bound = listen(host, port)  # before the model is loaded, so that a taken port is known at once
    run(ServedModel(options), bound, log_level)


def run(model: ServedModel, bound: socket.socket, log_level: str) -> None:
    """Serve until told to stop. Prints one JSON line when ready and one at the end."""
    address = address_of(bound)
    run_app(Routes(model).app(), bound, lambda: _say_ready(model, address), access_log=log_level == "debug")
    log.info("decode path: %s", _path_line(model))
    print(json.dumps({"verdict": "stopped", "address": address, "decode_steps": model.steps()}), flush=True)


def _say_ready(model: ServedModel, address: str) -> None:
    facts = model.facts()
    log.info("decode path: decode_backend=%s candidate=%s", facts["decode_backend"], facts["candidate"])
    log.info("serving %s on %s", model.name, address)
    print(json.dumps({"serving": address, "model": model.name, "max_model_len": model.max_model_len} | facts), flush=True)


def _path_line(model: ServedModel) -> str:
    steps, facts = model.steps(), model.facts()
    reasons = "; ".join(f"{reason}: {count}" for reason, count in model.refusals().items())
    line = f"{steps['specialized']} specialized steps (candidate {facts['candidate']}), {steps['stock']} stock steps"
    return line + (f" ({reasons})" if reasons else "")
