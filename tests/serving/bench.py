"""vLLM's own `bench serve` against any server, and its file as a cell of the matrix."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from perf.matrix import CellResult
from perf.servers import read_cell
from tests.serving.vllm_environment import PYTHON

# The `vllm` command of the CPU wheel cannot find its own version (the wheel has another name); this is what it would call.
MAIN = (
    "from vllm.benchmarks.serve import add_cli_args, main; from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)


def command(url: str, model: str, tokenizer: Path, result: Path, *, prompts: int = 8, concurrency: int = 2) -> list[str]:
    """Random prompts of 64 tokens and replies of 16."""
    return [
        *(str(PYTHON), "-c", MAIN, "--backend", "openai", "--base-url", url, "--model", model, "--tokenizer", str(tokenizer)),
        *("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16", "--ignore-eos", "--disable-tqdm"),
        *("--num-prompts", str(prompts), "--max-concurrency", str(concurrency)),
        *("--save-result", "--result-dir", str(result.parent), "--result-filename", result.name),
    ]


def measured(cell: str, url: str, model: str, tokenizer: Path, result: Path) -> CellResult:
    """Run the client; the cell it fills. Raises AssertionError with the client's words when it fails."""
    done = subprocess.run(
        command(url, model, tokenizer, result),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert result.exists(), f"exit code {done.returncode}: {done.stdout[-500:]} {done.stderr[-1500:]}"
    return read_cell(cell, result, listed=False)
