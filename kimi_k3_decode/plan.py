"""Which steps run specialised, and why the others do not: every refusal at once, every predicate the same on all ranks."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from kimi_k3_decode.cache import StepBatch
from kimi_k3_decode.config import ModelConfig, Shard, Unsupported
from kimi_k3_decode.launches import launch_graph, plan_digest
from kimi_k3_decode.ops.schedule import MAX_ROWS

AUTO, SPECIALIZED_BACKEND = "auto", "latency_specialized"
BACKENDS = (AUTO, SPECIALIZED_BACKEND)
STOCK, SPECIALIZED = "stock", "specialized"
MAX_Q = 8  # an anchor and at most seven drafts
# Token rows for which a graph is prepared; a step is padded up to the next by whole requests.
ROW_BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
TENSOR_PARALLEL = {"kimi-k3": (8, 16)}  # other models (nano) run at any tp that divides their dimensions
CONTRACT_EXECUTION = "cpu"


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """How a server was started. Defaults are the supported shape; anything else is refused by name in `unsupported`.

    architecture: "sm_90a", "sm_100a", "sm_103a", or "cpu" for contract execution. *_parallel in ranks; dtypes as torch names.
    """

    architecture: str = CONTRACT_EXECUTION
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    decode_context_parallel: int = 1
    dual_batch_overlap: bool = False
    lora: bool = False
    sleep_mode: bool = False
    graph_mode: str = "full"  # "full" | "piecewise" | "none"
    conv_state_dtype: str = "bfloat16"
    recurrent_state_dtype: str = "float32"
    kv_cache_dtype: str = "bfloat16"
    expert_quantization: str = "mxfp4-pack-quantized"
    drafts: int = 0
    speculation: str = "none"  # "none" | "dspark" | another method's name
    adaptive_verification: bool = False
    decode_backend: str = AUTO

    def unsupported(self, config: ModelConfig) -> tuple[str, ...]:
        """Every reason why the specialised path cannot serve this deployment of `config`; empty when it can."""
        return (
            tuple(
                f"{what}: got {got!r}, needs {rule}; use decode_backend={AUTO!r} for this deployment"
                for what, got, rule, holds in self._predicates(config)
                if not holds
            )
            + config.unsupported()
        )

    def _predicates(self, config: ModelConfig) -> list[tuple[str, Any, str, bool]]:
        """(what, got, rule, holds): values every rank shares, so that all ranks decide alike."""
        tp = self.tensor_parallel
        allowed = TENSOR_PARALLEL.get(config.name)
        on_gpu = self.architecture != CONTRACT_EXECUTION
        known = (*ARCHITECTURES, CONTRACT_EXECUTION)
        tp_fits = tp in allowed if allowed else _divides(config, tp)
        draft_counts = range(1, MAX_Q) if self.speculation != "none" else range(1)
        return [
            ("architecture", self.architecture, f"one of {known}", self.architecture in known),
            ("tensor_parallel", tp, f"one of {allowed}" if allowed else "a divisor of the model's dimensions", tp_fits),
            ("pipeline_parallel", self.pipeline_parallel, "1", self.pipeline_parallel == 1),
            ("data_parallel", self.data_parallel, "at least 1", self.data_parallel >= 1),
            ("expert_parallel", self.expert_parallel, "False", not self.expert_parallel),
            ("decode_context_parallel", self.decode_context_parallel, "1", self.decode_context_parallel == 1),
            ("dual_batch_overlap", self.dual_batch_overlap, "False", not self.dual_batch_overlap),
            ("lora", self.lora, "False", not self.lora),
            ("sleep_mode", self.sleep_mode, "False", not self.sleep_mode),
            ("graph_mode", self.graph_mode, "'full'", self.graph_mode == "full" or not on_gpu),
            ("conv_state_dtype", self.conv_state_dtype, "'bfloat16'", self.conv_state_dtype == "bfloat16"),
            ("recurrent_state_dtype", self.recurrent_state_dtype, "'float32'", self.recurrent_state_dtype == "float32"),
            ("kv_cache_dtype", self.kv_cache_dtype, "'bfloat16' or 'float8_e4m3fn'", self.kv_cache_dtype in ("bfloat16", "float8_e4m3fn")),
            ("expert_quantization", self.expert_quantization, "'mxfp4-pack-quantized'", self.expert_quantization == "mxfp4-pack-quantized"),
            ("speculation", self.speculation, "'none' or 'dspark'", self.speculation in ("none", "dspark")),
            ("drafts", self.drafts, f"0 without speculation, 1..{MAX_Q - 1} with it", self.drafts in draft_counts),
            ("adaptive_verification", self.adaptive_verification, "False", not self.adaptive_verification),
        ]  # fmt: skip


def _divides(config: ModelConfig, tp: int) -> bool:
    try:
        shard = Shard(config=config, tp=tp)
        sizes = (shard.kda_heads, shard.mla_heads, shard.router_rows, shard.latent_rows, shard.up_rows, shard.vocab_rows)
        return all(sizes) and shard.expert_intermediate % config.mxfp4_group == 0 and shard.shared_intermediate > 0
    except Unsupported:
        return False


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Where one step runs and why. `requests` is the padded request count of the prepared graph (0 on the stock path)."""

    path: str
    reason: str
    requests: int = 0


def bucket_of(rows: int) -> int:
    """The prepared row count for `rows` token rows. Raises Unsupported above the bound."""
    for bucket in ROW_BUCKETS:
        if rows <= bucket:
            return bucket
    raise Unsupported("row bucket", (f"rows: got {rows}, needs <= {MAX_ROWS}; larger steps run stock",))


def padded_requests(requests: int, q: int) -> int:
    """Requests of the prepared graph that takes `requests` of q tokens: as many whole requests as the row bucket holds."""
    return bucket_of(requests * q) // q


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was decided at start-up, for the life of a server."""

    config: ModelConfig
    deployment: Deployment
    refusals: tuple[str, ...]

    @classmethod
    def make(cls, config: ModelConfig, deployment: Deployment | None = None) -> Plan:
        """Raises Unsupported with every reason when the specialised path was asked for and cannot serve; "auto" never raises for that.

        An unknown `decode_backend` is an error in either case.
        """
        deployment = deployment or Deployment()
        if deployment.decode_backend not in BACKENDS:
            raise Unsupported("plan", (f"decode_backend: got {deployment.decode_backend!r}, needs one of {BACKENDS}",))
        if deployment.decode_backend == AUTO:
            return cls(config=config, deployment=deployment, refusals=(f"decode_backend is {AUTO!r}",))
        reasons = deployment.unsupported(config)
        if reasons:
            raise Unsupported("plan", reasons)
        return cls(config=config, deployment=deployment, refusals=())

    @property
    def opted_in(self) -> bool:
        return not self.refusals

    def decide(self, batch: StepBatch) -> Decision:
        """Specialised for pure decode or uniform verify steps of at most 64 token rows; everything else stock, with every reason."""
        q, rows = batch.q, batch.rows
        allowed_q = (1,) if self.deployment.drafts == 0 else (1, 1 + self.deployment.drafts)
        reasons = list(self.refusals)
        if not batch.uniform:
            reasons.append("not uniform: the step mixes prefill with decode, or requests of different token counts")
        elif q > MAX_Q:
            reasons.append(f"q: got {q} tokens a request, needs <= {MAX_Q}")
        elif q not in allowed_q:
            reasons.append(f"partial drafts: got {q} tokens a request, needs one of {allowed_q}")
        if rows == 0:
            reasons.append("rows: got 0, needs at least 1")
        if rows > MAX_ROWS:
            reasons.append(f"rows: got {rows}, needs <= {MAX_ROWS}")
        if reasons:
            return Decision(path=STOCK, reason="; ".join(reasons))
        requests = padded_requests(batch.tokens_BQ.shape[0], q)
        return Decision(path=SPECIALIZED, reason=f"{rows} rows of q={q} on the graph for {requests * q}", requests=requests)

    def prepared(self) -> tuple[tuple[int, int], ...]:
        """(requests, q) of every graph that start-up prepares; none when the path is not opted in."""
        if not self.opted_in:
            return ()
        drafts = self.deployment.drafts
        shapes = {(bucket // q, q) for bucket in ROW_BUCKETS for q in ({1, 1 + drafts} if drafts else {1}) if bucket >= q}
        return tuple(sorted(shapes, key=lambda shape: (shape[1], shape[0])))

    def digest(self) -> str:
        """SHA-256 (hex) that ranks compare at start-up: model, deployment, refusals, every prepared launch list; no rank number."""
        shard = Shard(config=self.config, tp=self.deployment.tensor_parallel)
        graphs = [
            plan_digest(launch_graph(self.config, shard, requests * q, q, cache_dtype=self.deployment.kv_cache_dtype))
            for requests, q in self.prepared()
        ]
        content = [asdict(self.config), asdict(self.deployment), self.refusals, graphs]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def agree(digests: list[str]) -> None:
    """Raises Unsupported when the ranks' plan digests differ, naming the ranks that differ from rank 0."""
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise Unsupported("plan", (f"plan digest: got another value on ranks {others}, needs the one of rank 0; start all ranks alike",))
