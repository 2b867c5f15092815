"""`python -m tests.fuzz NAME [-max_total_time=60 ...]`: coverage-guided fuzzing of one parser (extra `fuzz`; options are libFuzzer's)."""

from __future__ import annotations

import sys


def main() -> None:
    import atheris

    with atheris.instrument_imports(
        include=["validation", "kimi_k3_decode.config_io", "kimi_k3_decode.checkpoint", "perf.bench_json", "reports"]
    ):
        import validation.core.attest
        import validation.core.validate
        import validation.freshness.imports
        import validation.policy
        import validation.scope.change  # noqa: F401
        from tests.fuzz.targets import TARGETS

    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        sys.exit(f"fuzz: got {name!r}, needs one of {', '.join(TARGETS)}")
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
