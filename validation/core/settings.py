"""What a user can set, from `validate.toml` and the command line; unknown keys are errors, and the resolved form is stored in the run."""

from __future__ import annotations

import dataclasses
import importlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from validation.core import jsonio, registry
from validation.core.toml_lines import KeyLines
from validation.core.types import HarnessError

PROJECT_ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
SERVING_TABLES = ("servers", "baseline", "candidate", "evals", "numerics", "perf", "gate")
SERVING_CONFIG = "evals.serving.config"  # has `resolved(path, candidate)`; found by name, as lanes are
MAX_FILE_BYTES = 1 << 20  # of a settings file: a device or a model weight named by mistake must not fill the memory
NO_POLICY = "none"  # as `policy`: only the limits that the checks carry
# (setting, least, most): NaN and infinity are neither.
LIMITS = (("jobs", 1, 64), ("memory_gib", 0.5, 1 << 20), ("case_time_limit_s", 1, 7 * 86400), ("seed", 0, (1 << 31) - 1))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One resolved configuration. Paths are text, relative to the project root or absolute."""

    profile: str = "embedded"
    candidate: str = "specialized"  # specialized | stock | a mutant's id | module:factory
    lanes: tuple[str, ...] = registry.DEFAULT_LANES
    checkpoint: str = "kimi_k3_decode/checkpoints/nano"
    seed: int = 0
    jobs: int = 2  # lanes measured at the same time
    memory_gib: float = 6.0  # private memory a worker may reserve
    case_time_limit_s: float = 300.0
    runs_dir: str = "reports/runs"
    policy: str = "rfc/policy.toml"  # or "none"
    claims: str = "validation.claims:CLAIMS"
    lane_modules: Mapping[str, str] = field(default_factory=dict)  # replaces or adds lanes by dotted name
    serving: Mapping[str, Any] = field(default_factory=dict)  # the tables of the serving profile, resolved

    def path(self, text: str) -> Path:
        """Resolve a path setting."""
        path = Path(text)
        return path if path.is_absolute() else PROJECT_ROOT / path

    def module_of(self, lane: str) -> str:
        """The dotted name of a lane's module. Raises HarnessError for a lane nobody defined."""
        modules = {**registry.modules_of(self.profile), **self.lane_modules}
        if lane not in modules:
            raise HarnessError(f"lanes: got {lane!r}, needs some of {sorted(modules)}")
        return modules[lane]

    def unsupported(self) -> tuple[str, ...]:
        """Every reason these settings cannot be run; empty when they can."""
        known = {**registry.LANE_MODULES, **self.lane_modules}
        reasons = []
        if self.profile not in registry.PROFILES:
            reasons.append(f"profile: got {self.profile!r}, needs one of {list(registry.PROFILES)}")
        unknown = [lane for lane in self.lanes if lane not in known]
        if unknown or not self.lanes or len(set(self.lanes)) != len(self.lanes):
            reasons.append(f"lanes: got {list(self.lanes)}, needs some of {sorted(known)}, each once")
        absent = sorted(f"{lane} = {module!r}" for lane, module in self.lane_modules.items() if not registry.lane_exists(module))
        if absent:
            reasons.append(f"lane_modules: got {', '.join(absent)}, needs modules that can be imported")
        if self.policy != NO_POLICY and not self.path(self.policy).is_file():
            reasons.append(f"policy: got {self.policy!r}, needs a file, or {NO_POLICY!r} for the limits of the checks alone")
        if self.profile == "serving" and not self.serving:
            reasons.append("serving: got no [baseline] and [candidate], needs --config FILE with both; `fasttrack init` writes one")
        for name, least, most in LIMITS:
            if not least <= getattr(self, name) <= most:
                reasons.append(f"{name}: got {getattr(self, name)}, needs {least} to {most}")
        return tuple(reasons)


def _split(table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The suite's own settings, and the tables of the serving profile: `candidate` is a name in one and a table in the other."""
    tables = {key: value for key, value in table.items() if key in SERVING_TABLES and isinstance(value, Mapping)}
    return {key: value for key, value in table.items() if key not in tables}, tables


def _read_table(path: Path) -> tuple[dict[str, Any], KeyLines]:
    try:
        if path.exists() and not path.is_dir() and not path.is_file():
            raise HarnessError(f"settings: got {path}, which is a device or a pipe, needs a TOML file; `fasttrack init` writes one")
        if path.stat().st_size > MAX_FILE_BYTES:
            got = f"{path} with {path.stat().st_size} bytes"
            raise HarnessError(f"settings: got {got}, needs a TOML file of at most {MAX_FILE_BYTES}; `fasttrack init` writes one")
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), KeyLines(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise HarnessError(f"settings: got {error}, needs a readable TOML file at {path}") from error


def unknown_keys(table: Mapping[str, Any], lines: KeyLines) -> list[tuple[int, str]]:
    """(line, words) of every key at the top that is neither a setting nor a table of the serving profile."""
    known = {f.name for f in dataclasses.fields(Settings)} - {"serving"}
    own, _ = _split(table)
    return [(lines.of(key), f"got the unknown key {key!r}, needs one of {sorted(known)}") for key in own if key not in known]


def load_settings(path: Path | None, overrides: Mapping[str, Any], profile_here: Callable[[], str] | None = None) -> Settings:
    """Read a TOML file (none: the defaults), apply overrides that are not None. Raises HarnessError with every reason.

    profile_here: asked where neither names a profile.
    """
    document, lines = _read_table(path) if path is not None else ({}, KeyLines(""))
    table, tables = _split(document)
    given = {key: value for key, value in overrides.items() if value is not None}
    if profile_here is not None and "profile" not in {**table, **given}:
        table["profile"] = profile_here()
    serving = {}
    if {**table, **given}.get("profile") == "serving" and tables and path is not None:
        serving = {"serving": importlib.import_module(SERVING_CONFIG).resolved(path, given.get("candidate"))}
    unknown = unknown_keys(document, lines)
    if unknown:
        raise HarnessError("settings: " + "; ".join(f"{path}:{line}: {words}" for line, words in unknown))
    table |= given
    if table.get("profile") == "serving":
        table = {"lanes": list(registry.PROFILE_LANES["serving"]), **table, **serving}
    settings = jsonio.decode(Settings, jsonio.plain(table), "settings")
    reasons = settings.unsupported()
    if reasons:
        raise HarnessError("settings: " + "; ".join(reasons))
    return settings


def named_folder(option: str, path: Path) -> Path:
    """`path` as it is. Raises HarnessError where it is no folder: a misspelt one would read as one that proves nothing yet."""
    if not path.is_dir():
        raise HarnessError(f"{option}: got {path}, which is {'a file' if path.exists() else 'not there'}, needs an existing folder")
    return path
