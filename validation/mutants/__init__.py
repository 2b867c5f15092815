"""Wrong candidates on purpose. Each names the fault class it stands for, the claim it attacks and the check that must kill it."""

from __future__ import annotations

from validation.mutants.paths import PATH_MUTANTS, path_factory

__all__ = ["PATH_MUTANTS", "path_factory"]
