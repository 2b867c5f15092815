"""Decode paths with one planted fault each: the specialised path with one operation or one weight replaced.

The faults are those real paths shipped with (classes F01-F26 of the fault catalogue, see `rfc/fast-track.md`); a mutant is built by
wrapping one oracle or changing one bound weight, so everything around the fault is exactly the candidate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from validation.core.types import HarnessError

if TYPE_CHECKING:
    from kimi_k3_decode.step import SpecializedPath
    from kimi_k3_decode.weights import ModelWeights

Tensors = Mapping[str, torch.Tensor]
OracleWrapper = Callable[[Any, Any, Any, Any, Any], dict[str, torch.Tensor]]
WeightChange = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class PathMutant:
    """`wrap` maps an op to `f(real_oracle, config, contract, operands, arithmetic) -> outputs`; `change` alters one bound weight by name.

    `killed_by` is the id of the check that must kill it. `control` mutants are correct and must survive.
    """

    id: str
    fault: str
    sentence: str
    claim: str
    killed_by: str
    wrap: Mapping[str, OracleWrapper] = dataclasses.field(default_factory=dict)
    change: WeightChange | None = None
    control: bool = False

    def build(self, weights: ModelWeights, **options: Any) -> SpecializedPath:
        from kimi_k3_decode.operand_weights import transform
        from kimi_k3_decode.ops.registry import ORACLES
        from kimi_k3_decode.step import SpecializedPath

        def bound(op: str, wrapper: OracleWrapper) -> Any:
            real = ORACLES[op]
            return lambda config, contract, operands, arithmetic: wrapper(real, config, contract, operands, arithmetic)

        change = self.change
        changed = None if change is None else (lambda rank, tensors: transform(tensors, change))
        return SpecializedPath(weights, oracles={op: bound(op, w) for op, w in self.wrap.items()}, weights_change=changed, **options)


# ---- faults in one operation ----
def _state_transposed(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """The recurrent state is stored [K, V] where the caches hold [V, K]: reads and writes both see it transposed."""
    stored = operands["state_SHVK"]
    turned = stored.transpose(-1, -2).contiguous()
    out = real(config, contract, {**operands, "state_SHVK": turned}, arithmetic)
    stored.copy_(turned.transpose(-1, -2) if contract.parameters["q"] > 1 else turned)
    return out


def _state_in_bf16(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    out = real(config, contract, operands, arithmetic)
    operands["state_SHVK"].copy_(operands["state_SHVK"].to(torch.bfloat16))
    return out


def _wrong_accepted_slot(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """The state is read from slot `accepted` instead of `accepted - 1` (clamped to the last)."""
    accepted = operands["accepted_B"]
    return real(config, contract, {**operands, "accepted_B": (accepted + 1).clamp(max=contract.parameters["q"])}, arithmetic)


def _not_renormalised(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    out = real(config, contract, operands, arithmetic)
    scores = torch.sigmoid(arithmetic.wide(operands["logits_TE"])).gather(1, out["ids_TZ"].long().clamp(min=0))
    weights = arithmetic.bf16(scores * config.routed_scaling_factor)
    return {**out, "weights_TZ": torch.where(out["ids_TZ"] >= 0, weights, 0)}


def _ties_to_the_higher_id(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    from kimi_k3_decode.ops.route.oracle import expert_lists

    out = real(config, contract, operands, arithmetic)
    if contract.parameters["forced"]:
        return out
    scores = torch.sigmoid(arithmetic.wide(operands["logits_TE"]))
    turned = (scores + arithmetic.wide(operands["bias_E"])).flip(-1)
    live = int(operands["live_rows_N"])
    ids = config.n_experts - 1 - turned.sort(dim=-1, descending=True, stable=True).indices[:, : config.n_experts_per_token]
    picked = scores.gather(1, ids)
    weights = arithmetic.bf16(picked / picked.sum(-1, keepdim=True) * config.routed_scaling_factor)
    ids[live:], weights[live:] = -1, 0
    offsets, pairs = expert_lists(ids, live, config.n_experts)
    return {**out, "ids_TZ": ids.to(torch.int32), "weights_TZ": weights, "offsets_E": offsets, "pairs_N": pairs}


def _biased_weights(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """The correction bias, meant for the choice only, also enters the routing weights."""
    out = real(config, contract, operands, arithmetic)
    biased = torch.sigmoid(arithmetic.wide(operands["logits_TE"])) + arithmetic.wide(operands["bias_E"])
    picked = biased.gather(1, out["ids_TZ"].long().clamp(min=0))
    weights = arithmetic.bf16(picked / picked.sum(-1, keepdim=True) * config.routed_scaling_factor)
    return {**out, "weights_TZ": torch.where(out["ids_TZ"] >= 0, weights, 0)}


def _padding_routed(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """Padding rows are routed like real ones, and their NaN reaches the norm of every row of the step."""
    rows = contract.parameters["rows"]
    out = real(config, contract, {**operands, "live_rows_N": torch.tensor([rows])}, arithmetic)
    leak = arithmetic.wide(operands["logits_TE"]).sum() * 0
    return {**out, "weights_TZ": out["weights_TZ"] + leak}


def _table_bound(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """The kernel's page table holds 1024 entries: tokens from 65,536 on are read from the last of them."""
    table = operands["block_table_BN"]
    if table.shape[1] > 1024:
        table = table.clone()
        table[:, 1024:] = table[:, 1023:1024]
    return real(config, contract, {**operands, "block_table_BN": table}, arithmetic)


def _one_token_short(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """The split that ends at the newest token stops one short: the token attends to its past but not to itself."""
    lengths = operands["lengths_B"]
    return real(config, contract, {**operands, "lengths_B": (lengths - 1).clamp(min=0)}, arithmetic)


def _merge_unweighted(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """Context splits are averaged over those in use instead of weighted by their log-sum-exp."""
    used = (operands["lse_XTH"] > -torch.inf).to(operands["lse_XTH"].dtype)
    return real(config, contract, {**operands, "lse_XTH": torch.where(used > 0, 0.0, -torch.inf)}, arithmetic)


def _rotated_keys(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """The shared key channels are rotated although the model is NoPE; q is, the cache is not, so positions leak into the scores."""
    out = real(config, contract, operands, arithmetic)
    q_THM = out["q_THM"].clone()
    rope, q = config.qk_rope_head_dim, contract.parameters["q"]
    position = (operands["lengths_B"].unsqueeze(1) + torch.arange(q)).flatten().to(q_THM.dtype)
    angle = position[:, None] / 10000 ** (torch.arange(0, rope, 2, dtype=q_THM.dtype) / rope)
    even, odd = q_THM[..., -rope::2].clone(), q_THM[..., -rope + 1 :: 2].clone()
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    q_THM[..., -rope::2], q_THM[..., -rope + 1 :: 2] = even * cos - odd * sin, even * sin + odd * cos
    return {**out, "q_THM": q_THM}


def _double_counted_prefix(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """On a block-write layer the prefix just saved is counted as a second source of the same boundary."""
    out = real(config, contract, operands, arithmetic)
    if not contract.parameters["writes_block"] or not contract.parameters["n_blocks"]:
        return out
    from kimi_k3_decode.ops.attn_res.oracle import mix

    prefix = arithmetic.wide(out["block_out_TD"])
    sources = torch.cat((arithmetic.wide(operands["blocks_NTD"]), prefix[None], prefix[None]))
    mixed = mix(sources, arithmetic.wide(operands["res_score_D"]), config.rms_norm_eps)
    return {**out, "x_TD": arithmetic.bf16(arithmetic.rms_norm(mixed, operands["norm_D"], config.rms_norm_eps))}


def _one_rank_lost(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """Without its rounding to BF16 after the sum, and with one quarter of the latent taken from before the sum's last part."""
    out = real(config, contract, operands, arithmetic)
    latent = out["latent_normed_TL"].clone()
    latent[:, : latent.shape[1] // 4] = 0
    return {**out, "latent_normed_TL": latent}


def _unclamped_up(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """SwiGLU in place of SiTU: the soft clamps of gate and up are left out."""
    changed = dataclasses.replace(config, situ_beta=1e4, situ_linear_beta=1e4)
    return real(changed, contract, operands, arithmetic)


def _nan_swallowed(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """Non-finite logits become the smallest ones, so that sampling picks a plausible token and nobody sees the fault."""
    cleaned = torch.nan_to_num(operands["logits_box_TV"], nan=-1e30, posinf=-1e30, neginf=-1e30)
    return real(config, contract, {**operands, "logits_box_TV": cleaned}, arithmetic)


def _depends_on_rows(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """Above 8 rows the split partials are kept in FP8 (E4M3) until they are added, so a row's result depends on its company."""
    out = real(config, contract, operands, arithmetic)
    if contract.parameters["rows"] <= 8:
        return out
    half = operands["x_TD"].shape[1] // 2
    x, weight = arithmetic.wide(operands["x_TD"]), arithmetic.wide(operands["weight_PD"])
    parts = [x[:, a:b] @ weight[:, a:b].T for a, b in ((0, half), (half, x.shape[1]))]
    coarse = sum(p.to(torch.float8_e4m3fn).to(p.dtype) for p in parts)
    return {**out, "proj_TP": arithmetic.bf16(coarse)}


def _slots_assumed_dense(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """Slots are computed from the request's place in the batch, as they are in a fresh server, instead of being read from the table."""
    slots = operands["slots_BQ"]
    dense = 1 + torch.arange(slots.numel(), dtype=slots.dtype).view_as(slots)
    dense = torch.where(slots > 0, dense.clamp(max=operands["state_SHVK"].shape[0] - 1), slots)
    return real(config, contract, {**operands, "slots_BQ": dense}, arithmetic)


def _null_slot_written(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """Tokens without a slot store their state in slot 0 instead of nowhere."""
    out = real(config, contract, operands, arithmetic)
    if bool((operands["slots_BQ"] <= 0).any()):
        operands["state_SHVK"][0] += 1
    return out


def _last_tile_lost(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """The configuration chosen for 17 to 32 rows leaves out the last tile of the reduction; every other row count is right."""
    if not 16 < contract.parameters["rows"] <= 32:
        return real(config, contract, operands, arithmetic)
    short = operands["x_TD"].clone()
    short[:, -32:] = 0
    return real(config, contract, {**operands, "x_TD": short}, arithmetic)


def _last_tile_unwritten(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """The last tile of columns is computed but never stored: the buffer holds there whatever it held before."""
    out = real(config, contract, operands, arithmetic)
    stored = torch.empty_like(out["proj_TP"])
    stored[:, :-16] = out["proj_TP"][:, :-16]
    return {**out, "proj_TP": stored}


# ---- faults in one weight ----
def _scale_dropped(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Expert 3 of every layer is read with scale 1 (E8M0 code 127)."""
    if "_scale_E" not in name:
        return tensor
    changed = tensor.clone()
    changed[3] = 127
    return changed


def _taps_shifted(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(1, dims=-1) if name.endswith("conv_weight_CW") else tensor


def _other_order(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """The reduction in quarters, last to first: other bits, as good a result."""
    out = real(config, contract, operands, arithmetic)
    x, weight = arithmetic.wide(operands["x_TD"]), arithmetic.wide(operands["weight_PD"])
    parts = [a @ b.T for a, b in zip(x.chunk(4, 1), weight.chunk(4, 1), strict=True)]
    return {**out, "proj_TP": arithmetic.bf16(parts[3] + parts[2] + parts[1] + parts[0])}


def _coarse_output(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """The output keeps 6 significant bits where BF16 keeps 8: hardly more than the factor allows, so a looser factor lets it live."""
    out = real(config, contract, operands, arithmetic)
    return {name: _rounded(value, 6) if value.is_floating_point() else value for name, value in out.items()}


def _rounded(value: torch.Tensor, bits: int) -> torch.Tensor:
    mantissa, exponent = torch.frexp(value.float())
    return torch.ldexp(torch.round(mantissa * 2.0**bits) / 2.0**bits, exponent).to(value.dtype)


def _gate_bound_positive(real: Any, config: Any, contract: Any, operands: Any, arithmetic: Any) -> dict[str, torch.Tensor]:
    """The bound of the decay gate is read as -1 instead of -5: state decays too slowly."""
    return real(dataclasses.replace(config, gate_lower_bound=-1.0), contract, operands, arithmetic)


SUBLAYER, LONG, FAR = "numerics.sublayer", "numerics.long_context", "numerics.far_context"


def _m(identity: str, fault: str, sentence: str, killed_by: str, claim: str, **planted: Any) -> PathMutant:
    return PathMutant(id=identity, fault=fault, sentence=sentence, killed_by=killed_by, claim=claim, **planted)


PATH_MUTANTS: Mapping[str, PathMutant] = {
    mutant.id: mutant
    for mutant in (
        _m("kda_state_transposed", "F13", "state stored [K, V] for [V, K]", SUBLAYER, "C-NUM-1", wrap={"kda": _state_transposed}),
        _m(
            "kda_state_bf16",
            "F13",
            "recurrent state rounded to BF16 each token",
            "numerics.state_layout",
            "C-NUM-1",
            wrap={"kda": _state_in_bf16},
        ),
        _m(
            "kda_wrong_accepted_slot",
            "F14",
            "state read one slot too far",
            "numerics.verify",
            "C-NUM-1",
            wrap={"kda": _wrong_accepted_slot},
        ),
        _m("kda_gate_bound", "F13", "decay gate bound -1 for -5", SUBLAYER, "C-NUM-1", wrap={"kda": _gate_bound_positive}),
        _m("conv_taps_shifted", "F14", "convolution taps shifted by one", SUBLAYER, "C-NUM-1", change=_taps_shifted),
        _m(
            "router_not_renormalised",
            "F25",
            "routing weights not renormalised",
            "numerics.routing_scale",
            "C-NUM-1",
            wrap={"route": _not_renormalised},
        ),
        _m("router_biased_weights", "F25", "correction bias in the routing weights", SUBLAYER, "C-NUM-1", wrap={"route": _biased_weights}),
        _m("router_ties_high", "F25", "ties go to the higher id", "numerics.ties", "C-NUM-1", wrap={"route": _ties_to_the_higher_id}),
        _m("padding_routed", "F11", "padding rows routed, NaN leaks", "numerics.padding", "C-NUM-1", wrap={"route": _padding_routed}),
        _m("expert_scale_dropped", "F13", "one expert's scale dropped", SUBLAYER, "C-NUM-1", change=_scale_dropped),
        _m("o_proj_coarse", "F22", "two bits of the output lost", SUBLAYER, "C-NUM-1", wrap={"o_proj": _coarse_output}),
        _m("experts_swiglu", "F22", "SwiGLU in place of SiTU", SUBLAYER, "C-NUM-1", wrap={"experts_up": _unclamped_up}),
        _m("mla_table_bound", "F17", "page table bound at 1024 pages", FAR, "C-NUM-4", wrap={"mla_decode": _table_bound}),
        _m("mla_one_token_short", "F17", "newest token not attended", SUBLAYER, "C-NUM-1", wrap={"mla_decode": _one_token_short}),
        _m("mla_merge_unweighted", "F17", "context splits averaged", LONG, "C-NUM-3", wrap={"mla_merge": _merge_unweighted}),
        _m("mla_rotated", "F17", "NoPE keys rotated", LONG, "C-NUM-3", wrap={"mla_query": _rotated_keys}),
        _m(
            "attn_res_double_prefix",
            "F22",
            "saved prefix counted twice",
            "numerics.end_to_end",
            "C-NUM-2",
            wrap={"attn_res": _double_counted_prefix},
        ),
        _m(
            "latent_part_lost",
            "F08",
            "a quarter of the latent lost in the reduction",
            SUBLAYER,
            "C-NUM-1",
            wrap={"latent_reduce": _one_rank_lost},
        ),
        _m("nan_swallowed", "F21", "non-finite logits hidden", "numerics.nonfinite", "C-NUM-2", wrap={"sample": _nan_swallowed}),
        _m(
            "depends_on_rows", "F20", "result depends on the row count", "numerics.row_count", "C-NUM-1", wrap={"in_proj": _depends_on_rows}
        ),
        _m(
            "slots_assumed_dense",
            "F12",
            "slots computed, not read",
            "numerics.slots",
            "C-NUM-1",
            wrap={"kda": _slots_assumed_dense},
        ),
        _m(
            "last_tile_unwritten",
            "F15",
            "a tile of the projection is never stored",
            "schedule.poison",
            "C-SCHED-1",
            wrap={"in_proj": _last_tile_unwritten},
        ),
        _m("null_slot_written", "F12", "the null slot is written", "numerics.slots", "C-NUM-1", wrap={"kda": _null_slot_written}),
        _m(
            "autotune_bad_choice",
            "F23",
            "one row bucket gets a configuration that drops a tile",
            "numerics.row_count",
            "C-NUM-1",
            wrap={"in_proj": _last_tile_lost},
        ),
        _m("control_other_order", "-", "sums in another order", "", "", control=True, wrap={"in_proj": _other_order}),
        _m("control_identical", "-", "the candidate itself, unchanged", "", "", control=True),
    )
}


def path_factory(identity: str) -> Callable[[ModelWeights], SpecializedPath]:
    """The factory of a path mutant by id.

    Raises:
        HarnessError: unknown id; the message lists the known ones.
    """
    if identity not in PATH_MUTANTS:
        raise HarnessError(f"candidate: got {identity!r}, needs specialized, stock, module:factory, or a mutant: {', '.join(PATH_MUTANTS)}")
    return PATH_MUTANTS[identity].build
