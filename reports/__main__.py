"""`python -m reports RUN_DIR`: render the report of a finished or interrupted run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from reports.render import render
from validation.core.types import EXIT_HARNESS_ERROR, HarnessError


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(f"reports: got {len(arguments)} argument(s), needs one run folder; try `python -m reports reports/runs/R-…`", file=sys.stderr)
        return EXIT_HARNESS_ERROR
    try:
        paths = render(Path(arguments[0]))
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_HARNESS_ERROR
    print(json.dumps({kind: str(path) for kind, path in paths.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
