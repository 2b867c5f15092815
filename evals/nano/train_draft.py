"""Train the drafter on the frozen target's own hidden states and next-token distributions.

Anchors are drawn inside answers. Many anchors of a sequence are laid side by side: the rows of one anchor see the context before it and
one another, never the rows of another anchor. The loss is the cross entropy against the *target's* distribution, earlier drafts weighing
more, because a draft counts only when all before it were accepted. The mask token's embedding is trained with the drafter.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from evals.nano import export, network
from evals.nano.optimiser import Optimiser
from evals.nano.stream import Mixture, Stream
from kimi_k3_decode import draft_model
from kimi_k3_decode.config import ModelConfig

if TYPE_CHECKING:
    from evals.nano.train import Trainer

ANCHORS, DISCOUNT, MATRIX_RATE, REST_RATE = 16, 0.8, 0.02, 2e-3
BATCH, LENGTH = 48, 768
CONTINUED_RATE = 0.3  # of the rates, when a drafter is only adapted to a target that changed a little


def initial_draft(config: ModelConfig, seed: int) -> network.Parameters:
    generator = torch.Generator().manual_seed(seed + 1)
    params = {}
    for name, shape in draft_model.draft_shapes(config).items():
        if "norm" in name:
            params[name] = torch.ones(shape)
        elif name.endswith("w2.weight"):
            params[name] = torch.zeros(shape)  # the correction starts at nothing
        else:
            gain = 0.3 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            params[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5 * gain
    return params


def pick_anchors(shares_BT: torch.Tensor, count: int, n_drafts: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Positions [B, count] drawn among answer tokens, at least one token of context before and `n_drafts` after."""
    eligible = (shares_BT >= 1.0).float()
    eligible[:, 0] = 0
    eligible[:, -(n_drafts + 1) :] = 0
    eligible += 1e-6 * (torch.arange(shares_BT.shape[1], device=shares_BT.device) == 1)  # a row without answers still draws something
    return torch.multinomial(eligible, count, replacement=True, generator=generator).sort(-1).values


def block_mask(anchors_BN: torch.Tensor, tokens: int, rows: int) -> torch.Tensor:
    """[B, N * rows, tokens + N * rows]: context strictly before the own anchor, and the rows of the own block."""
    batch, count = anchors_BN.shape
    context = torch.arange(tokens, device=anchors_BN.device) < anchors_BN.unsqueeze(-1)
    context = context.repeat_interleave(rows, dim=1)
    block = torch.arange(count, device=anchors_BN.device).repeat_interleave(rows)
    own = (block.unsqueeze(0) == block.unsqueeze(1)).expand(batch, -1, -1)
    return torch.cat((context, own), dim=-1)


def block_logits(
    draft: draft_model.DraftWeights,
    config: ModelConfig,
    embed: torch.Tensor,
    head: torch.Tensor,
    taps_IBTD: torch.Tensor,
    ids: torch.Tensor,
    anchors_BN: torch.Tensor,
) -> torch.Tensor:
    """Base logits float32 [B, N, n_drafts, V] of the blocks that start at the anchors."""
    d = draft_model.draft_config(config)
    rows = 1 + d.n_drafts
    positions_BT = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    context = draft_model.context_latents(draft, config, taps_IBTD, positions_BT)
    x = draft_model.block_rows(config, embed, ids.gather(1, anchors_BN)).flatten(1, 2).to(draft.fc.dtype)
    positions = (anchors_BN.unsqueeze(-1) + torch.arange(rows, device=ids.device)).flatten(1)
    mask = block_mask(anchors_BN, ids.shape[1], rows)
    hidden = draft_model.draft_hidden(draft, config, x, positions, context, mask).unflatten(1, (-1, rows))
    return (hidden[:, :, 1:] @ head.to(hidden.dtype).T).float()


def prepared(params: network.Parameters, config: ModelConfig, dtype: torch.dtype) -> draft_model.DraftWeights:
    """The drafter as the checkpoint will hold it (bf16 values), differentiable."""
    return draft_model.draft_from_tensors({name: value.bfloat16().to(dtype) for name, value in params.items()}, config)


def loss_of(
    draft: draft_model.DraftWeights, base_BNRV: torch.Tensor, ids: torch.Tensor, logits_BTV: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """Discounted cross entropy of the corrected drafts against the target's distribution at the same positions."""
    steps = torch.arange(base_BNRV.shape[2], device=ids.device)
    before = anchors.unsqueeze(-1) + steps  # draft i follows the token at anchor + i, and so does the target's prediction
    batch = torch.arange(ids.shape[0], device=ids.device).view(-1, 1, 1)
    wanted = logits_BTV[batch, before].softmax(-1)
    corrected = draft_model.markov_correct(draft, base_BNRV, ids[batch, before])
    losses = -(wanted * corrected.log_softmax(-1)).sum(-1)
    discount = DISCOUNT ** steps.float()
    return (losses * discount).sum() / discount.sum() / anchors.numel()


def train(trainer: Trainer, stream: Stream, log: Path) -> tuple[network.Parameters, torch.Tensor, int]:
    """Returns the drafter's parameters, the embedding with its trained mask row, and the number of steps."""
    from evals.nano.train import LOG_EVERY, to_device

    config, recipe, rank = trainer.config, trainer.recipe, trainer.rank
    d = draft_model.draft_config(config)
    known, rate_share = (trainer.draft, CONTINUED_RATE) if trainer.draft else (initial_draft(config, recipe.seed), 1.0)
    params = {name: value.to(rank.device).requires_grad_() for name, value in known.items()}
    mask_row = trainer.params["embed_tokens.weight"].detach()[d.mask_token_id].clone().requires_grad_()
    optimiser = Optimiser({**params, "mask": mask_row}, REST_RATE * rate_share, MATRIX_RATE * rate_share)
    with torch.no_grad():
        frozen = {name: value.detach() for name, value in network.prepare(trainer.params, trainer.dtype).items()}
    embed = frozen["embed_tokens.weight"]
    is_mask = (torch.arange(len(embed), device=rank.device) == d.mask_token_id).unsqueeze(-1)
    batch = max(1, min(BATCH, recipe.rows // min(recipe.lengths)))
    batches = stream.batches(
        Mixture(batch=batch, length=min(LENGTH, *recipe.lengths), recall_share=0.15, word=0.6, science=0.2, contest=0.2)
    )
    started, step = time.monotonic(), 0
    while True:
        elapsed = time.monotonic() - started
        progress = rank.agree(max(step / recipe.draft_steps, elapsed / (60 * recipe.draft_minutes)))
        if progress >= 1.0:
            break
        ids, shares = to_device(next(batches), rank.device)
        with torch.no_grad():
            hidden, taps, _ = network.forward(frozen, trainer.biases, ids, config, taps=d.target_layer_ids)
            logits = network.logits_of(hidden, frozen).unflatten(0, ids.shape)
        anchors = pick_anchors(shares, ANCHORS, d.n_drafts)
        draft = prepared(params, config, trainer.dtype)
        table = torch.where(is_mask, mask_row.bfloat16().to(embed.dtype), embed)
        base = block_logits(draft, config, table, frozen["lm_head.weight"], torch.stack(taps), ids, anchors)
        loss = loss_of(draft, base, ids, logits, anchors)
        loss.backward()
        rank.mean_([*(p.grad for p in params.values() if p.grad is not None), mask_row.grad])  # type: ignore[list-item]
        optimiser.step(min(1.0, (step + 1) / 50) * min(1.0, (1.0 - progress) / 0.6))
        if step % LOG_EVERY == 0 and rank.index == 0:
            export.append_json(log, {"phase": "draft", "step": step, "seconds": round(elapsed, 2), "loss": round(float(loss.detach()), 4)})
        step += 1
    embedding = torch.where(is_mask, mask_row.detach(), trainer.params["embed_tokens.weight"].detach())
    return {name: value.detach() for name, value in params.items()}, embedding, step
