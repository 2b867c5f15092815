"""Where a suite's rows come from when it runs on servers: the user's own files, the public-data folder, or the hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from evals.serving import gpqa_local, mrcr_hub
from evals.serving.asking import Opens, Replica
from evals.serving.client import Endpoint
from evals.serving.errors import ServingError
from evals.serving.http_lm import WindowedTask
from evals.serving.mrcr_hub import CountTokens, MrcrChoice
from evals.tasks.loading import bring_up
from validation.core.settings import PROJECT_ROOT
from validation.core.types import HarnessError


@dataclass(frozen=True, kw_only=True)
class SuiteData:
    """`path`: the user's own file or folder of this suite; `tokenizer`: a tokenizer.json or its folder, else the server's /tokenize."""

    path: Path | None = None
    mrcr: MrcrChoice = field(default_factory=MrcrChoice)
    tokenizer: str = ""

    def for_files(self, suite: str) -> Path | None:
        """The path, for suites whose files lm-eval reads by itself."""
        return None if suite in (gpqa_local.SUITE, mrcr_hub.SUITE) else self.path

    def needs_server(self, suite: str) -> bool:
        """Whether choosing the rows asks the server to count tokens."""
        return suite == mrcr_hub.SUITE and not self.tokenizer


def open_data(
    suite: str, data: SuiteData, context_tokens: int, config: dict[str, Any], folder: Path, replicas: Sequence[Opens]
) -> Mapping[str, Any]:
    """Split -> rows. Raises HarnessError when they cannot be had, with the way to get them."""
    if data.path is not None and not data.path.exists():
        raise HarnessError(f"{suite} data: got no file or folder at {data.path}, needs one; correct [evals.data]")
    if suite == gpqa_local.SUITE:
        return {"train": gpqa_local.gpqa_rows(data.path)}
    if suite == mrcr_hub.SUITE:
        room = {"context_tokens": data.mrcr.context_tokens or context_tokens, "max_new_tokens": config["generation_kwargs"]["max_gen_toks"]}
        with _counter(data.tokenizer, replicas) as (count, name):
            return {"train": mrcr_hub.prepare(replace(data.mrcr, **room), count, name, folder / "data", data.path)}
    task = bring_up(suite, config, lambda one: WindowedTask(one))
    rows: Mapping[str, Any] = dict(task.dataset)
    return rows


@contextlib.contextmanager
def _counter(tokenizer: str, replicas: Sequence[Opens]) -> Iterator[tuple[CountTokens, str]]:
    """What counts tokens, and its name in the cache of chosen rows."""
    if tokenizer:
        path = PROJECT_ROOT / tokenizer
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            local = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise HarnessError(f"tokenizer: got {error} for {path}, needs a tokenizer.json or its folder; correct `tokenizer`") from error
        yield lambda text: len(local.encode(text, add_special_tokens=False).ids), str(path)
        return
    served = next((one for one in replicas if isinstance(one, Replica)), None)
    if served is None:
        raise HarnessError("mrcr: got no tokenizer and no server to ask, needs one of them to choose rows by length; set `tokenizer`")
    with Endpoint(served.base_url, model=served.model, api_key_env=served.api_key_env) as endpoint:
        try:
            endpoint.tokenize("a", add_special_tokens=False)
            yield lambda text: len(endpoint.tokenize(text, add_special_tokens=False)), f"/tokenize of {served.model}"
        except ServingError as error:
            raise HarnessError(f"mrcr: got {error} from /tokenize, needs token counts; set `tokenizer` to a local tokenizer") from error
