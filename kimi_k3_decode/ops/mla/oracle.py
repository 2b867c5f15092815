"""The four MLA launches in plain torch: absorbed, no rotation, paged cache. Source: the published K3 config and DeepSeek-V2 (MLA)."""

from __future__ import annotations

import torch

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.ops.arithmetic import Arithmetic, Operands, Outputs
from kimi_k3_decode.ops.contract import Contract

GATHER_BYTES_AT_ONCE = 64 << 20  # splits of a long context are walked one by one beyond this


def query(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """q_THM = [q_nope · W_UK | q_pe]; writes this step's latent and key channels into pages_STM (page 0 never).

    Rounding points: the normed q latent, q, the absorbed q, the cached values.
    """
    eps, wide, bf16 = config.rms_norm_eps, arithmetic.wide, arithmetic.bf16
    proj_TP = wide(operands["proj_TP"])
    rank, latent = config.q_lora_rank, config.kv_lora_rank
    q_lat_TP = bf16(arithmetic.rms_norm(proj_TP[:, :rank], operands["q_norm_P"], eps))
    heads = operands["w_uk_HKL"].shape[0]
    q_THC = bf16(q_lat_TP @ wide(operands["q_b_PC"]).T).view(-1, heads, config.qk_head_dim)
    nope_HTK = q_THC[..., : config.qk_nope_head_dim].transpose(0, 1)
    absorbed_THL = bf16(torch.bmm(nope_HTK, wide(operands["w_uk_HKL"])).transpose(0, 1))
    kv_TM = proj_TP[:, rank : rank + config.mla_cache_dim]
    new_TM = torch.cat((bf16(arithmetic.rms_norm(kv_TM[:, :latent], operands["kv_norm_L"], eps)), kv_TM[:, latent:]), dim=-1)
    _append(new_TM, contract.parameters["q"], operands)
    return {"q_THM": torch.cat((absorbed_THL, q_THC[..., config.qk_nope_head_dim :]), dim=-1)}


def _append(new_TM: torch.Tensor, q: int, operands: Operands) -> None:
    pages_STM, table_BN = operands["pages_STM"], operands["block_table_BN"].long()
    page_tokens = pages_STM.shape[1]
    position_BQ = operands["lengths_B"].long().unsqueeze(1) + torch.arange(q)
    page_T = table_BN.gather(1, position_BQ // page_tokens).flatten()
    real = page_T > 0
    row_T = (position_BQ % page_tokens).flatten()
    if not bool(real.all()):
        new_TM, page_T, row_T = new_TM[real], page_T[real], row_T[real]
    pages_STM[page_T, row_T] = (new_TM / _scale(operands)).to(pages_STM.dtype)


def _scale(operands: Operands) -> float:
    """Of the FP8 cache; 1 in BF16. A scalar argument of the launch, not memory."""
    return float(operands.get("cache_scale", 1.0))


def decode(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """partial_XTHL and lse_XTH over page-aligned context splits. Rounding point: exp(score − split maximum) before it meets the latents.

    Token t of a request sees lengths + t + 1 cached tokens. Split x covers tokens [x·c, (x+1)·c) with c the request's tokens over the
    splits, rounded up to whole pages; an empty split has lse −inf and partial 0.
    """
    q, splits = contract.parameters["q"], contract.parameters["splits"]
    page_tokens = operands["pages_STM"].shape[1]
    lengths_B = operands["lengths_B"].long()
    q_THM = arithmetic.wide(operands["q_THM"])
    heads, latent = q_THM.shape[1], config.kv_lora_rank
    requests = lengths_B.shape[0]
    chunk_B = -((lengths_B + q) // -splits)
    chunk_B = -(chunk_B // -page_tokens) * page_tokens
    used = int((-((lengths_B + q) // -chunk_B)).max())
    together = requests * used * int(chunk_B.max()) * q_THM.shape[2] * q_THM.element_size() <= GATHER_BYTES_AT_ONCE
    q_BRM = q_THM.reshape(requests, q * heads, -1) * config.qk_head_dim**-0.5
    groups = [range(used)] if together else [range(x, x + 1) for x in range(used)]
    partial_XBRL = q_THM.new_zeros(splits, requests, q * heads, latent)
    lse_XBR = q_THM.new_full((splits, requests, q * heads), -torch.inf)
    for group in groups:
        chosen = slice(group.start, group.stop)
        partial_XBRL[chosen], lse_XBR[chosen] = _attend(q_BRM, lengths_B, chunk_B, group, q, operands, latent, arithmetic)
    shape = (splits, requests * q, heads)
    return {"partial_XTHL": partial_XBRL.view(*shape, latent), "lse_XTH": lse_XBR.view(shape)}


def _attend(
    q_BRM: torch.Tensor,
    lengths_B: torch.Tensor,
    chunk_B: torch.Tensor,
    group: range,
    q: int,
    operands: Operands,
    latent: int,
    arithmetic: Arithmetic,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash partials of the splits in `group`: ([X, B, q·heads, latent], log-sum-exp [X, B, q·heads])."""
    requests, rows, _ = q_BRM.shape
    step_U = torch.arange(int(chunk_B.max()))
    position_BXU = (torch.tensor(list(group)) * chunk_B.unsqueeze(1)).unsqueeze(-1) + step_U
    inside_BXU = step_U < chunk_B.view(-1, 1, 1)
    seen_BQ = lengths_B.unsqueeze(1) + 1 + torch.arange(q)
    cached_BXUM = _gather(operands, position_BXU, inside_BXU & (position_BXU < seen_BQ[:, -1].view(-1, 1, 1)), arithmetic)
    splits, tokens = position_BXU.shape[1:]
    cached_NUM = cached_BXUM.flatten(0, 1)
    q_NRM = q_BRM.repeat_interleave(splits, dim=0) if splits > 1 else q_BRM
    scores = torch.bmm(q_NRM, cached_NUM.transpose(1, 2))  # N = requests · splits
    seen_BXQU = inside_BXU.unsqueeze(2) & (position_BXU.unsqueeze(2) < seen_BQ.view(-1, 1, q, 1))
    scores.view(requests, splits, q, rows // q, tokens).masked_fill_(~seen_BXQU.unsqueeze(3), -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    share = scores.sub_(torch.where(peak == -torch.inf, 0.0, peak)).exp_()
    total = share.sum(-1, keepdim=True)
    mixed = torch.bmm(arithmetic.bf16(share), cached_NUM[..., :latent]) / torch.where(total == 0, 1.0, total)
    lse = (peak + torch.log(total)).squeeze(-1)
    return tuple(x.unflatten(0, (requests, splits)).transpose(0, 1) for x in (mixed, lse))


def _gather(operands: Operands, position: torch.Tensor, real: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """Cached values [..., M] at token positions [B, X, U]; those not `real` repeat the request's first token, whatever pages hold."""
    pages_STM, table_BN = operands["pages_STM"], operands["block_table_BN"].long()
    page_tokens = pages_STM.shape[1]
    page = table_BN.gather(1, (position // page_tokens).clamp(max=table_BN.shape[1] - 1).flatten(1)).view_as(position)
    own_B11 = (table_BN[:, :1] * page_tokens).unsqueeze(-1)
    flat = torch.where(real, page * page_tokens + position % page_tokens, own_B11)
    values = arithmetic.wide(pages_STM.flatten(0, 1).index_select(0, flat.flatten()))
    return (values * _scale(operands) if "cache_scale" in operands else values).view(*position.shape, -1)


def merge(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """latent_THL: the splits weighted by exp(lse), in split order; rounded to BF16."""
    lse_XTH = arithmetic.wide(operands["lse_XTH"])
    share_XTH = torch.softmax(lse_XTH, dim=0)
    mixed_THL = (arithmetic.wide(operands["partial_XTHL"]) * share_XTH.unsqueeze(-1)).sum(0)
    return {"latent_THL": arithmetic.bf16(mixed_THL)}


def value(config: ModelConfig, contract: Contract, operands: Operands, arithmetic: Arithmetic) -> Outputs:
    """out_TC = (latent · W_UV) · sigmoid(gate), rounded to BF16 once."""
    latent_HTL = arithmetic.wide(operands["latent_THL"]).transpose(0, 1)
    values_TC = torch.bmm(latent_HTL, arithmetic.wide(operands["w_uv_HVL"]).transpose(1, 2)).transpose(0, 1).flatten(1)
    gate_TC = arithmetic.wide(operands["proj_TP"])[:, -values_TC.shape[1] :]
    return {"out_TC": arithmetic.bf16(values_TC * torch.sigmoid(gate_TC))}
