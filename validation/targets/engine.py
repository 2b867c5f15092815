"""In-process targets: the stock path, a candidate path and the FP64 oracle over one checkpoint.

A path is anything with `step(batch, caches, *, routing=None, taps=False) -> StepOutput`. A candidate is named on the command line:

    specialized       the path of this project (`kimi_k3_decode.step.SpecializedPath`)
    kernels           the compiled kernels on this machine's GPU (`validation.targets.kernels.KernelPath`)
    stock             the stock path again: the identical control, which must pass everything
    <mutant id>       a wrong candidate of `validation.mutants`; `path_factory(id)` there gives its factory
    module:factory    anything importable; `factory(weights)` returns the path

Checks reach `.path`, `.weights` and `.prefiller` directly; `run(case)` is the plain form: a teacher-forced decode of seeded tokens.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from kimi_k3_decode.cache import Caches, StepBatch, StepOutput
from kimi_k3_decode.config import Unsupported
from kimi_k3_decode.stock import StockPath
from kimi_k3_decode.weights import ModelWeights, load_checkpoint
from validation.core.settings import PROJECT_ROOT, Settings
from validation.core.types import Case, HarnessError
from validation.core.worker import Refused

ROLES = ("candidate", "oracle", "stock")


class DecodePath(Protocol):
    """The one method the suite needs of a candidate."""

    def step(self, batch: StepBatch, caches: Caches, **options: Any) -> StepOutput: ...


PathFactory = Callable[[ModelWeights], Any]  # a DecodePath


@dataclass(frozen=True, kw_only=True)
class EngineTarget:
    """One decode path in this process. `checkpoint` and `settings` are there for checks that build more from the same source."""

    name: str
    role: str
    weights: ModelWeights
    dtype: torch.dtype  # of activations and caches
    path: Any
    build: PathFactory  # the same path over other weights, for probes
    prefiller: StockPath  # BF16 stock: every path decodes from its caches
    settings: Settings
    origin: str  # digest of the code behind the path

    @cached_property
    def _fingerprint(self) -> str:
        parts = (self.name, str(self.dtype), self.origin, self.weights.digest())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def fingerprint(self) -> str:
        """Hex SHA-256 over name, dtype, code and weights."""
        return self._fingerprint

    def unsupported(self, case: Case) -> tuple[str, ...]:
        """What the path itself says about the case's parameters; a path that says nothing supports all."""
        ask = getattr(self.path, "unsupported", None)
        if ask is None:
            return ()
        try:
            return tuple(ask(dict(case.params)))
        except TypeError:  # the method is about something else than a case
            return ()

    def run(self, case: Case) -> torch.Tensor:
        """Decode `window_tokens` seeded tokens after a prefill of `context_tokens`; returns logits [window, V]. Raises Unsupported."""
        n_context, n_window = int(case.params["context_tokens"]), int(case.params["window_tokens"])
        generator = torch.Generator().manual_seed(case.seed)
        tokens = torch.randint(4, self.weights.config.vocab_size, (n_context + n_window,), generator=generator).tolist()
        return decode_tokens(self.path, self.prefiller, self.dtype, tokens[:n_context], tokens[n_context:])


def decode_tokens(path: Any, prefiller: StockPath, dtype: torch.dtype, context: list[int], window: list[int]) -> torch.Tensor:
    """Teacher-forced decode: BF16 prefill of `context`, then one step per token of `window`; logits [len(window), V]."""
    caches = Caches.allocate(prefiller.config, 1, len(context) + len(window), q_max=1, dtype=torch.bfloat16)
    request = caches.acquire()
    prefiller.prefill([context], caches, [request])
    caches = caches.fork(dtype)
    rows = []
    for token in window:
        rows.append(path.step(caches.batch([[token]], [request]), caches).logits_BQV[0, 0])
        caches.advance([request], [1])
    return torch.stack(rows)


def open_targets(settings: Settings) -> EngineTargets:
    """Called by the worker. Nothing is loaded until a role is asked for."""
    return EngineTargets(settings)


class EngineTargets:
    """Loads one checkpoint once and builds each role on first use."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._built: dict[str, EngineTarget] = {}

    @cached_property
    def weights(self) -> ModelWeights:
        return read_checkpoint(self._settings.path(self._settings.checkpoint))

    @cached_property
    def prefiller(self) -> StockPath:
        return StockPath(self.weights, torch.bfloat16)

    def get(self, role: str) -> EngineTarget:
        """Raises HarnessError for a broken checkpoint or an unknown role or candidate, Refused where the candidate refuses the model."""
        if role not in ROLES:
            raise HarnessError(f"role: got {role!r}, needs one of {list(ROLES)}; this is a bug in a lane")
        if role not in self._built:
            self._built[role] = self._build(role)
        return self._built[role]

    def _build(self, role: str) -> EngineTarget:
        name, dtype = role, torch.bfloat16
        build: PathFactory = build_stock
        if role == "oracle":
            dtype, build = torch.float64, build_oracle
        elif role == "candidate":
            name = self._settings.candidate
            build = find_candidate(name)
        try:
            path = self.prefiller if role == "stock" else build(self.weights)
        except Unsupported as refusal:
            raise Refused(refusal.reasons) from refusal
        return EngineTarget(
            name=name,
            role=role,
            weights=self.weights,
            dtype=dtype,
            path=path,
            build=build,
            prefiller=self.prefiller,
            settings=self._settings,
            origin=_origin(build),
        )


def build_stock(weights: ModelWeights) -> StockPath:
    return StockPath(weights, torch.bfloat16)


def build_oracle(weights: ModelWeights) -> StockPath:
    """The same code and values, nothing rounded."""
    return StockPath(weights.to(torch.float64), torch.float64)


def read_checkpoint(folder: Path) -> ModelWeights:
    """Load a checkpoint; whatever is wrong with it is one HarnessError."""
    try:
        return load_checkpoint(folder)
    except Exception as error:
        raise HarnessError(f"checkpoint: got {type(error).__name__}: {error} from {folder}, needs a readable, complete folder") from error


def find_candidate(name: str) -> PathFactory:
    """The factory behind a candidate's name. Raises HarnessError when nothing has it."""
    if name == "stock":
        return build_stock
    if name == "specialized":
        return _attribute("kimi_k3_decode.step", "SpecializedPath", name)
    if name == "kernels":
        return _attribute("validation.targets.kernels", "KernelPath", name)
    if ":" in name:
        module, _, attribute = name.partition(":")
        return _attribute(module, attribute, name)
    return _attribute("validation.mutants", "path_factory", name)(name)


def _attribute(module: str, attribute: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        remedy = "use specialized, stock, a mutant's id (`mutants --list`) or module:factory"
        raise HarnessError(f"candidate: got {name!r}, needs an importable path ({error}); {remedy}") from error


def _origin(factory: Any) -> str:
    """Digest of the sources a path is made of: all of `kimi_k3_decode`, and the file of a factory from elsewhere."""
    digest = hashlib.sha256()
    for path in sorted((PROJECT_ROOT / "kimi_k3_decode").rglob("*.py")):
        digest.update(path.relative_to(PROJECT_ROOT).as_posix().encode() + path.read_bytes())
    try:
        source = inspect.getsourcefile(factory)
    except TypeError:
        source = None
    if source is not None:
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()
