"""One-layer models whose logits are a sublayer's output, so that any candidate can be measured on a sublayer through its plain `step`.

A probe takes one layer of the checkpoint. Its vocabulary is a list of inputs captured in a real prefill: the embedding of id i is row i,
divided by the sublayer's norm weight, so that the sublayer sees what it saw then. Its LM head is the identity, so its logits are the final
normed hidden state. The other sublayer is silenced by a zero output projection, and the one under test is scaled up by a power of two
(exact in BF16), so that in the last mixture it outweighs the embedding, and the final roundings do not hide its own error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kimi_k3_decode.cache import Caches
from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.stock import StockPath
from kimi_k3_decode.weights import DenseWeights, KdaWeights, LayerWeights, MlaWeights, ModelWeights, MoeWeights
from validation.numerics.decode import Routing, decode_window

ATTENTION, MLP, KDA_BEFORE_NORM = "attention", "mlp", "kda_before_norm"
# The scale of q reaches the output of KDA only through the eps of its output norm. With v this much smaller the norm is nearly linear and
# lets the scale through.
SMALL_VALUE = 2.0**-12
OUTPUT_RMS = 2.0  # of the sublayer under test; the embedding has 1, without which the final norm would hide an error of scale


def parts_of(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """The probes of one layer."""
    return (ATTENTION, KDA_BEFORE_NORM, MLP) if config.is_kda(layer) else (ATTENTION, MLP)


@torch.inference_mode()
def capture_inputs(path: StockPath, tokens: list[int]) -> dict[tuple[str, int], torch.Tensor]:
    """(observer point, layer) -> normed sublayer inputs [n, D] of a prefill of `tokens`, in the path's dtype."""
    seen: dict[tuple[str, int], torch.Tensor] = {}

    def observer(point: str, layer: int, tensor: torch.Tensor) -> None:
        if point in ("attn_in", "mlp_in"):
            seen[point, layer] = tensor.clone()

    caches = Caches.allocate(path.config, 1, len(tokens), q_max=1)
    path.prefill([tokens], caches, [caches.acquire()], observer=observer)
    return seen


def probe_config(config: ModelConfig, layer: int) -> ModelConfig:
    """A one-layer configuration whose vocabulary is as large as its hidden size."""
    return replace(
        config,
        name=f"{config.name}-layer-{layer}",
        n_layers=1,
        vocab_size=config.hidden_size,
        kda_layers=(0,) if config.is_kda(layer) else (),
        mla_layers=() if config.is_kda(layer) else (0,),
        n_dense_layers=0 if config.is_moe(layer) else 1,
        draft=None,
    )


def build_probe(weights: ModelWeights, layer: int, part: str, inputs_VD: torch.Tensor) -> ModelWeights:
    """The probe of one sublayer over captured inputs [V, D] (V = D), with its output scaled to about OUTPUT_RMS."""
    source = weights.layers[layer]
    norm_D = source.post_norm if part == MLP else source.input_norm
    safe_D = torch.where(norm_D.double().abs() < 1e-3, 1.0, norm_D.double())
    rows_VD = inputs_VD.double() / safe_D
    rows_VD = rows_VD / rows_VD.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
    hidden = weights.config.hidden_size
    ones_D = torch.ones(hidden, dtype=torch.bfloat16)
    probe = ModelWeights(
        config=probe_config(weights.config, layer),
        embed_VD=rows_VD.bfloat16(),
        layers=(_silence_other(source, part),),
        out_res_norm=ones_D,
        out_res_proj=torch.zeros(hidden, dtype=torch.bfloat16),  # equal shares of the embedding and the output
        norm=ones_D,
        lm_head_VD=torch.eye(hidden, dtype=torch.bfloat16),
    )
    return _scaled_to(probe, part, OUTPUT_RMS / max(_output_rms(probe, part), 1e-9))


def _silence_other(source: LayerWeights, part: str) -> LayerWeights:
    if part == MLP:
        return replace(source, attn=_output_times(source.attn, 0.0))
    attn = source.attn
    if part == KDA_BEFORE_NORM and isinstance(attn, KdaWeights):
        attn = replace(attn, v_proj_CD=attn.v_proj_CD * SMALL_VALUE)
    return replace(source, attn=attn, mlp=_output_times(source.mlp, 0.0))


def _output_times(sublayer: Any, factor: float) -> Any:
    """The sublayer with the matrices that end it multiplied by a power of two, or by zero."""
    if isinstance(sublayer, KdaWeights):
        return replace(sublayer, o_proj_DC=sublayer.o_proj_DC * factor)
    if isinstance(sublayer, MlaWeights):
        return replace(sublayer, o_proj_DO=sublayer.o_proj_DO * factor)
    if isinstance(sublayer, DenseWeights):
        return replace(sublayer, down_DF=sublayer.down_DF * factor)
    if isinstance(sublayer, MoeWeights):
        return replace(sublayer, latent_up_DL=sublayer.latent_up_DL * factor, shared=_output_times(sublayer.shared, factor))
    raise TypeError(f"sublayer: got {type(sublayer).__name__}, needs attention or MLP weights")


def _output_rms(probe: ModelWeights, part: str) -> float:
    seen: list[torch.Tensor] = []

    def observer(point: str, layer: int, tensor: torch.Tensor) -> None:
        if point == ("mlp_out" if part == MLP else "attn_out"):
            seen.append(tensor)

    path = StockPath(probe.to(torch.float32), torch.float32)
    caches = Caches.allocate(probe.config, 1, 64, q_max=1, dtype=torch.float32)
    path.prefill([list(range(64))], caches, [caches.acquire()], observer=observer)
    return float(torch.cat(seen).square().mean().sqrt())


def _scaled_to(probe: ModelWeights, part: str, factor: float) -> ModelWeights:
    power = 2.0 ** round(math.log2(factor))
    layer = probe.layers[0]
    if part == MLP:
        layer = replace(layer, mlp=_output_times(layer.mlp, power))
    else:
        layer = replace(layer, attn=_output_times(layer.attn, power))
    return dataclasses.replace(probe, layers=(layer,))


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Outputs [N, D] of the paths over the same rows, and the candidate's non-finite values (outputs and caches)."""

    outputs: Mapping[str, torch.Tensor]
    non_finite: int


# Requests and step widths: decode and verify steps of one request, and one verify step of eight (64 rows, the bound).
SHAPES: Mapping[str, tuple[int, tuple[int, ...]]] = {"narrow": (1, (1,) * 8 + (8,) * 6), "wide": (8, (8,)), "eight": (8, (1, 1, 1, 1))}


def run_probe(probe: ModelWeights, targets: Mapping[str, Any], shape: str) -> ProbeResult:
    """Prefill the first rows with stock, then decode the rest with every path from forks of the same caches, experts as the oracle's."""
    n_requests, pattern = SHAPES[shape]
    n_rows, n_decoded = probe.config.vocab_size, sum(pattern)
    per_request = n_rows // n_requests
    ids = [list(range(r * per_request, (r + 1) * per_request)) for r in range(n_requests)]
    caches = Caches.allocate(probe.config, n_requests, per_request, q_max=8)
    requests = [caches.acquire() for _ in range(n_requests)]
    targets["stock"].build(probe).prefill([row[:-n_decoded] for row in ids], caches, requests)
    steps, begin = [], per_request - n_decoded
    for q in pattern:
        steps.append(torch.tensor([row[begin : begin + q] for row in ids]))
        begin += q
    outputs: dict[str, torch.Tensor] = {}
    routings: list[Routing] | None = None
    non_finite = 0
    for role in ("oracle", "stock", "candidate"):
        forked = caches.fork(targets[role].dtype)
        trace = decode_window(targets[role].build(probe), forked, requests, steps, routings)
        routings = trace.routings if routings is None else routings
        outputs[role] = trace.logits_NV
        non_finite = trace.non_finite_cache + int((~torch.isfinite(trace.logits_NV)).sum())
    return ProbeResult(outputs=outputs, non_finite=non_finite)


def relative_error(path_ND: torch.Tensor, oracle_ND: torch.Tensor) -> float:
    """RMS of the difference over the RMS of the oracle's output; NaN stays NaN."""
    difference = (path_ND.double() - oracle_ND.double()).square().mean().sqrt()
    return float(difference / oracle_ND.double().square().mean().sqrt())
