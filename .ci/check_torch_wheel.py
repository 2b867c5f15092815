"""Stops an installation that would bring torch's CUDA build, which is gigabytes, to a machine that has asked for the CPU build.

Usage: python .ci/check_torch_wheel.py REQUIREMENT [PIP OPTION ...]. Standard library only: it runs before anything is installed.
Asks pip what it would install (nothing is installed) and exits 1 when CUDA libraries or a GPU compiler are among it.
"""

from __future__ import annotations

import json
import subprocess
import sys

CUDA_PACKAGES = ("nvidia-cublas", "nvidia-cudnn", "nvidia-cufft", "nvidia-cusparse", "nvidia-nccl", "nvidia-cuda-runtime", "triton")
REMEDY = (
    "point pip at an index of CPU wheels (TORCH_INDEX=URL for torch alone, or PIP_EXTRA_INDEX_URL=URL for all), "
    "or set ALLOW_CUDA=1 to install it all the same"
)


def planned_packages(requirement: str, options: list[str]) -> list[str]:
    """Names of what pip would install, lower case with dashes. Raises SystemExit with pip's own words when it cannot resolve."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", requirement, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"torch: got no installable {requirement}, needs an index that has it; {done.stderr.strip()[-600:]}")
    report = json.loads(done.stdout)
    return [item["metadata"]["name"].lower().replace("_", "-") for item in report["install"]]


def cuda_among(packages: list[str]) -> list[str]:
    return sorted(name for name in packages if name.startswith(CUDA_PACKAGES))


def main() -> None:
    found = cuda_among(planned_packages(sys.argv[1], sys.argv[2:]))
    if found:
        raise SystemExit(f"torch: got a build that brings {', '.join(found)}, needs the CPU build; {REMEDY}")


if __name__ == "__main__":
    main()
