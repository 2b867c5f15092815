"""Finds and runs NVIDIA's command-line tools: from the wheels of this environment first, then from PATH or CUDA_HOME."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

TOOL_SECONDS = 600


class ToolError(RuntimeError):
    """A tool is missing, failed or ran out of time."""


@functools.cache
def find_tool(name: str) -> str:
    """Absolute path of nvdisasm, cuobjdump, nvcc or ptxas. Raises ToolError with the remedy when there is none."""
    roots = {sysconfig.get_paths()["purelib"], *(entry for entry in sys.path if entry.endswith("site-packages"))}
    places = [Path(root) / "nvidia" / vendor / "bin" / name for root in sorted(roots) for vendor in ("cu13", "cuda_nvcc", "cuda_nvdisasm")]
    if os.environ.get("CUDA_HOME"):
        places.append(Path(os.environ["CUDA_HOME"]) / "bin" / name)
    for place in places:
        if os.access(place, os.X_OK):
            return str(place)
    found = shutil.which(name)
    if found is None:
        raise ToolError(f"tool: got no {name}, needs one; install the project's dependencies (extra `corpus` for nvcc and ptxas)")
    return found


def run_tool(name: str, *arguments: str, cwd: str | Path | None = None, seconds: float = TOOL_SECONDS) -> str:
    """Standard output of one run. Raises ToolError with the tool's own words on failure."""
    try:
        done = subprocess.run(
            [find_tool(name), *arguments], capture_output=True, cwd=cwd, timeout=seconds, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"{name}: got no answer within {seconds:g} s, needs less; the input is too large or damaged") from error
    except OSError as error:
        raise ToolError(f"{name}: {error}") from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-2000:]
        raise ToolError(f"{name}: exit status {done.returncode}; {words or 'no message'}")
    return done.stdout.decode("utf-8", "replace")
