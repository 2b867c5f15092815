"""StockPath: the whole model as a baseline decode path, and, in FP64, the oracle.

Logits are FP32 (FP64 in the oracle) from the rounded final hidden state, not rounded themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kimi_k3_decode.cache import Caches, StepBatch, StepOutput
from kimi_k3_decode.stock import kda, kda_chunk, mla, moe
from kimi_k3_decode.stock.attn_res import Residual
from kimi_k3_decode.stock.basic import linear_wide, rms_norm, wide
from kimi_k3_decode.weights import KdaWeights, ModelWeights, MoeWeights

# Called as observer(point, layer, tensor); a tensor it returns replaces the one it was shown. Points, in order, rows first (T):
# "attn_in" [T, D] normed, "kda_o" [T, H, V] before its norm, "attn_out" [T, D], "mlp_in" [T, D] normed, "mlp_out" [T, D], and
# "final_in" [T, D] normed (layer = n_layers).
Observer = Callable[[str, int, torch.Tensor], torch.Tensor | None]
Attend = Callable[[int, torch.Tensor], torch.Tensor]
Routing = dict[int, torch.Tensor]

DEFAULT_CHUNK_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class PrefillOutput:
    """`logits_RV` of each request's last token; when asked for, `all_logits` [n, V] and `taps` [I, n, D] of its new tokens."""

    logits_RV: torch.Tensor
    all_logits: list[torch.Tensor] | None = None
    taps: list[torch.Tensor] | None = None
    routing: list[Routing] | None = None  # per request: layer -> expert ids [n, top_k]


@dataclass(frozen=True, kw_only=True)
class _Segment:
    """Tokens begin..end of one request's prompt, processed in one pass."""

    index: int
    request: int
    tokens: Sequence[int]
    last: bool


@dataclass(frozen=True, kw_only=True)
class _LayerOperands:
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    attn_res_D: torch.Tensor  # norm * projection, wide
    mlp_res_D: torch.Tensor
    attn: kda.KdaOperands | mla.MlaOperands
    mlp: moe.DenseOperands | moe.MoeOperands


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """What one pass over T rows gives: final normed hidden [T, D], taps [I, T, D] or None, expert ids per layer."""

    hidden_TD: torch.Tensor
    taps_ITD: torch.Tensor | None
    routing: Routing


class StockPath:
    """Baseline prefill and decode in one activation dtype: bfloat16 with the documented rounding points, float32, or float64 (oracle)."""

    name = "stock"

    def __init__(self, weights: ModelWeights, dtype: torch.dtype = torch.bfloat16) -> None:
        """`weights` in any dtype that represents them (see ModelWeights.to); raises ValueError for a shard or an unknown dtype."""
        if weights.tp != 1:
            raise ValueError(f"weights: got rank {weights.rank} of tp={weights.tp}, needs whole weights; use the unsharded model")
        if dtype not in (torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"dtype: got {dtype}, needs bfloat16, float32 or float64")
        self.weights, self.config, self.dtype = weights, weights.config, dtype
        self._embed_VD = weights.embed_VD.to(dtype)
        high = wide(dtype)
        self._lm_head_VD = weights.lm_head_VD.to(high)
        self._norm_D = weights.norm.to(high)
        self._out_res_D = weights.out_res_norm.to(high) * weights.out_res_proj.to(high)
        self._layers = [self._prepare(layer) for layer in range(self.config.n_layers)]
        self._tap_layers = self.config.draft.target_layer_ids if self.config.draft else ()

    def _prepare(self, layer: int) -> _LayerOperands:
        w, config = self.weights.layers[layer], self.config
        attn: kda.KdaOperands | mla.MlaOperands
        if isinstance(w.attn, KdaWeights):
            attn = kda.KdaOperands.prepare(w.attn, config, self.dtype)
        else:
            attn = mla.MlaOperands.prepare(w.attn, config, self.dtype)
        mlp: moe.DenseOperands | moe.MoeOperands
        if isinstance(w.mlp, MoeWeights):
            mlp = moe.MoeOperands.prepare(w.mlp, config, self.dtype)
        else:
            mlp = moe.DenseOperands.prepare(w.mlp, self.dtype)
        high = wide(self.dtype)
        return _LayerOperands(
            input_norm=w.input_norm.to(high),
            post_norm=w.post_norm.to(high),
            attn_res_D=w.attn_res_norm.to(high) * w.attn_res_proj.to(high),
            mlp_res_D=w.mlp_res_norm.to(high) * w.mlp_res_proj.to(high),
            attn=attn,
            mlp=mlp,
        )

    @property
    def device(self) -> torch.device:
        return self._embed_VD.device

    # ---- decode and verify ----
    @torch.inference_mode()
    def step(
        self,
        batch: StepBatch,
        caches: Caches,
        *,
        routing: Routing | None = None,
        taps: bool = False,
        observer: Observer | None = None,
    ) -> StepOutput:
        """One decode or verify step over `batch`; writes pages and slots, leaves the bookkeeping to `caches.advance`.

        `routing` maps a layer to forced expert ids [T, top_k] (T = B x Q, row-major); absent layers choose freely.
        """
        shape = batch.tokens_BQ.shape

        def attend(layer: int, x_TD: torch.Tensor) -> torch.Tensor:
            return self.attention(layer, x_TD.unflatten(0, shape), batch, caches, observer=observer).flatten(0, 1)

        done = self._run(batch.tokens_BQ.flatten(), attend, routing or {}, observer, taps)
        logits = linear_wide(done.hidden_TD, self._lm_head_VD).unflatten(0, shape)
        tapped = None if done.taps_ITD is None else done.taps_ITD.unflatten(1, shape)
        return StepOutput(logits, tapped, done.routing)

    def attention(
        self, layer: int, x_BQD: torch.Tensor, batch: StepBatch, caches: Caches, *, observer: Observer | None = None
    ) -> torch.Tensor:
        """One attention sublayer of a step on a given normed input [B, Q, D] -> [B, Q, D]. Writes the layer's cache."""
        ops = self._layers[layer].attn
        if isinstance(ops, kda.KdaOperands):
            o, gate = kda.decode(ops, x_BQD, batch, caches.kda(layer))
            o = _seen(observer, "kda_o", layer, o.flatten(0, 1)).unflatten(0, x_BQD.shape[:2])
            return kda.gated_output(ops, o, gate)
        heads_out, gate = mla.decode(ops, x_BQD, batch, caches.mla(layer))
        return mla.gated_output(ops, heads_out, gate)

    def mlp(self, layer: int, x_TD: torch.Tensor, routing: Routing | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One MLP sublayer on a given normed input [T, D] -> ([T, D], expert ids [T, top_k] or None for the dense layer)."""
        ops = self._layers[layer].mlp
        if isinstance(ops, moe.DenseOperands):
            return moe.dense_mlp(ops, self.config, x_TD), None
        return moe.latent_moe(ops, self.config, x_TD, (routing or {}).get(layer))

    # ---- prefill ----
    @torch.inference_mode()
    def prefill(
        self,
        tokens: Sequence[Sequence[int]],
        caches: Caches,
        request_ids: Sequence[int],
        *,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        taps: bool = False,
        all_logits: bool = False,
        routing: bool = False,
        observer: Observer | None = None,
    ) -> PrefillOutput:
        """Append each prompt to its request's caches, `chunk_tokens` rows at a time over all requests, and advance their lengths.

        Raises ValueError naming every empty prompt and every repeated request; CacheError when pages run out.
        """
        wrong = [f"prompt {i}: got no tokens, needs at least one" for i, prompt in enumerate(tokens) if not len(prompt)]
        if len(set(request_ids)) != len(tokens) or len(request_ids) != len(tokens):
            wrong.append(f"request_ids: got {list(request_ids)} for {len(tokens)} prompts, needs one distinct request each")
        if chunk_tokens < 1:
            wrong.append(f"chunk_tokens: got {chunk_tokens}, needs >= 1")
        if wrong:
            raise ValueError("; ".join(wrong))
        collected = _Collector(len(tokens), taps=taps, all_logits=all_logits, routing=routing)
        for group in _rounds(tokens, request_ids, chunk_tokens):
            self._prefill_round(group, caches, collected, observer)
        return collected.output()

    def _prefill_round(self, group: list[_Segment], caches: Caches, collected: _Collector, observer: Observer | None) -> None:
        lengths = [len(segment.tokens) for segment in group]
        for segment in group:
            caches.reserve(segment.request, caches.lengths_R[segment.request] + len(segment.tokens))
            caches.settle(segment.request)
        device = self.device
        index = kda_chunk.ChunkIndex.build(lengths, device)

        def attend(layer: int, x_TD: torch.Tensor) -> torch.Tensor:
            ops = self._layers[layer].attn
            if isinstance(ops, kda.KdaOperands):
                o, gate = _kda_prefill(ops, x_TD, group, caches, layer, index)
                return kda.gated_output(ops, _seen(observer, "kda_o", layer, o), gate)
            return _mla_prefill(ops, x_TD, group, caches, layer)

        flat = torch.tensor([token for segment in group for token in segment.tokens], dtype=torch.int64, device=device)
        done = self._run(flat, attend, {}, observer, collected.wants_taps)
        begin = 0
        for segment, length in zip(group, lengths, strict=True):
            caches.lengths_R[segment.request] += length
            rows = slice(begin, begin + length)
            wanted = done.hidden_TD[rows] if collected.wants_all_logits else done.hidden_TD[rows][-1:]
            if collected.wants_all_logits or segment.last:
                collected.add_logits(segment.index, linear_wide(wanted, self._lm_head_VD))
            collected.add(segment.index, done, rows)
            begin += length

    # ---- the layer loop both share ----
    def _run(self, tokens_T: torch.Tensor, attend: Attend, routing: Routing, observer: Observer | None, taps: bool) -> _Pass:
        config, eps = self.config, self.config.rms_norm_eps
        residual = Residual(self._embed_VD[tokens_T], eps)
        tapped: list[torch.Tensor] = []
        chosen: Routing = {}
        for layer, w in enumerate(self._layers):
            x_TD = rms_norm(residual.mixture(w.attn_res_D), w.input_norm, eps, self.dtype)
            delta_TD = _seen(observer, "attn_out", layer, attend(layer, _seen(observer, "attn_in", layer, x_TD)))
            if config.writes_block(layer):
                residual.write_block(restart_TD=delta_TD)
            else:
                residual.add(delta_TD)
            x_TD = rms_norm(residual.mixture(w.mlp_res_D), w.post_norm, eps, self.dtype)
            mlp_TD, ids_TK = self.mlp(layer, _seen(observer, "mlp_in", layer, x_TD), routing)
            residual.add(_seen(observer, "mlp_out", layer, mlp_TD))
            if ids_TK is not None:
                chosen[layer] = ids_TK
            if taps and layer in self._tap_layers:
                tapped.append(residual.prefix_TD)
        final_TD = residual.mixture(self._out_res_D).to(self.dtype)
        hidden_TD = rms_norm(final_TD, self._norm_D, eps, self.dtype)
        return _Pass(
            hidden_TD=_seen(observer, "final_in", config.n_layers, hidden_TD),
            taps_ITD=torch.stack(tapped) if taps else None,
            routing=chosen,
        )


def _seen(observer: Observer | None, point: str, layer: int, tensor: torch.Tensor) -> torch.Tensor:
    if observer is None:
        return tensor
    replaced = observer(point, layer, tensor)
    return tensor if replaced is None else replaced


def _rounds(tokens: Sequence[Sequence[int]], request_ids: Sequence[int], chunk_tokens: int) -> list[list[_Segment]]:
    """Cut prompts into passes of at most `chunk_tokens` rows; the parts of one prompt land in successive passes, in order."""
    rounds: list[list[_Segment]] = []
    current: list[_Segment] = []
    room = chunk_tokens
    for index, (prompt, request) in enumerate(zip(tokens, request_ids, strict=True)):
        begin = 0
        while begin < len(prompt):
            if room == 0:
                rounds.append(current)
                current, room = [], chunk_tokens
            end = min(begin + room, len(prompt))
            current.append(_Segment(index=index, request=request, tokens=prompt[begin:end], last=end == len(prompt)))
            room -= end - begin
            begin = end
    rounds.append(current)
    return rounds


class _Collector:
    """Gathers per-request results over the passes of a prefill."""

    def __init__(self, n_prompts: int, *, taps: bool, all_logits: bool, routing: bool) -> None:
        self.wants_taps, self.wants_all_logits, self.wants_routing = taps, all_logits, routing
        self._logits: list[list[torch.Tensor]] = [[] for _ in range(n_prompts)]
        self._taps: list[list[torch.Tensor]] = [[] for _ in range(n_prompts)]
        self._routing: list[list[Routing]] = [[] for _ in range(n_prompts)]

    def add_logits(self, index: int, logits_NV: torch.Tensor) -> None:
        self._logits[index].append(logits_NV)

    def add(self, index: int, done: _Pass, rows: slice) -> None:
        if done.taps_ITD is not None:
            self._taps[index].append(done.taps_ITD[:, rows])
        if self.wants_routing:
            self._routing[index].append({layer: ids[rows] for layer, ids in done.routing.items()})

    def output(self) -> PrefillOutput:
        logits = [torch.cat(parts) for parts in self._logits]
        return PrefillOutput(
            logits_RV=torch.stack([part[-1] for part in logits]),
            all_logits=logits if self.wants_all_logits else None,
            taps=[torch.cat(parts, dim=1) for parts in self._taps] if self.wants_taps else None,
            routing=[_joined(parts) for parts in self._routing] if self.wants_routing else None,
        )


def _joined(parts: list[Routing]) -> Routing:
    return {layer: torch.cat([part[layer] for part in parts]) for layer in parts[0]}


def _kda_prefill(
    ops: kda.KdaOperands, x_TD: torch.Tensor, group: list[_Segment], caches: Caches, layer: int, index: kda_chunk.ChunkIndex
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunked KDA over packed segments: (o [T, H, V] rounded, gate [T, C]); leaves taps and state in each request's first slot."""
    cache = caches.kda(layer)
    raw, gate, f_a, b = kda.project(ops, x_TD)
    slots = torch.tensor([caches.slots_RQ[segment.request][0] for segment in group], device=x_TD.device)
    started = torch.tensor([caches.lengths_R[segment.request] > 0 for segment in group], device=x_TD.device)
    history = torch.where(started[:, None, None], cache.conv_SWC[slots, :3], 0.0).to(x_TD.dtype)
    pieces, kept, begin = [], [], 0
    for row, segment in enumerate(group):
        sequence = torch.cat((history[row], raw[begin : begin + len(segment.tokens)]))
        pieces.append(kda.short_conv(ops, sequence))
        kept.append(sequence[-3:])
        begin += len(segment.tokens)
    inputs = kda.recurrence_inputs(ops, torch.cat(pieces), f_a, b)
    before = torch.where(started[:, None, None, None], cache.state_SHVK[slots], 0.0).to(inputs.q.dtype)
    o, after = kda_chunk.chunked(inputs, index, before.transpose(-1, -2), ops.lower_bound)
    cache.conv_SWC[slots, :3] = torch.stack(kept).to(cache.conv_SWC.dtype)
    cache.state_SHVK[slots] = after.transpose(-1, -2).to(cache.state_SHVK.dtype)
    return o.to(x_TD.dtype), gate


def _mla_prefill(ops: mla.MlaOperands, x_TD: torch.Tensor, group: list[_Segment], caches: Caches, layer: int) -> torch.Tensor:
    cache = caches.mla(layer)
    queries, entries, gate = mla.project(ops, x_TD)
    outputs, begin = [], 0
    for segment in group:
        rows = slice(begin, begin + len(segment.tokens))
        start, pages = caches.lengths_R[segment.request], caches.pages_R[segment.request]
        mla.write_pages(cache, pages, start, entries[rows])
        seen = mla.read_pages(cache, pages, start).to(x_TD.dtype)
        outputs.append(mla.prefill_attention(ops, queries[rows], torch.cat((seen, entries[rows]))))
        begin = rows.stop
    return mla.gated_output(ops, torch.cat(outputs), gate)
