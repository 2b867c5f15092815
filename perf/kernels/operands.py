"""Random operands for any contract, on any device: fresh values of the right roles, poisoned outputs, armed or filled mailboxes."""

from __future__ import annotations

import math

import torch

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.ops.contract import Access, Contract, Operand, Role
from kimi_k3_decode.ops.operands import SENTINEL_WORD
from kimi_k3_decode.ops.route.oracle import expert_lists

Tensors = dict[str, torch.Tensor]
PAGE_TOKENS = 64
POISON_INT = -7


class Maker:
    """Makes the operands of one contract. `lengths` are the cached tokens of the requests (MLA); `slack` extra slots and pages stay
    unused."""

    def __init__(self, config: ModelConfig, contract: Contract, seed: int, device: str = "cuda", lengths: list[int] | None = None) -> None:
        self.config, self.contract, self.device = config, contract, device
        self.random = torch.Generator(device=device).manual_seed(seed)
        self.rows = contract.parameters["rows"]
        self.q = contract.parameters.get("q", 1)
        self.requests = self.rows // self.q
        self.lengths = lengths or [37 + 101 * b for b in range(self.requests)]
        self._lists: Tensors = {}

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.random, device=self.device) * std).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.random, device=self.device, dtype=dtype)

    def all(self) -> Tensors:
        """Every operand; outputs and published mailboxes poisoned, consumed mailboxes filled with data."""
        return {o.name: self.operand(o) for o in self.contract.operands if o.role is not Role.SCRATCH}

    def operand(self, o: Operand) -> torch.Tensor:
        special = getattr(self, f"_{o.name}", None)
        if special is not None:
            return special(o)
        shape = tuple(s for s in o.shape if s is not None)
        dtype = getattr(torch, o.dtype)
        if o.role is Role.OUTPUT or (o.role is Role.MAILBOX and o.access is Access.WRITE):
            return poisoned(shape, dtype, self.device)
        if o.role is Role.WEIGHT:
            return self._weight(o, shape, dtype)
        return self.normal(*shape, dtype=dtype)

    def _weight(self, o: Operand, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.uint8:
            return self.integers(118, 124, *shape, dtype=dtype) if "_scale_" in o.name else self.integers(0, 256, *shape, dtype=dtype)
        if len(shape) == 1:
            return self.normal(*shape, std=0.1).add_(1.0).to(dtype)
        if math.prod(shape) > 1 << 28:  # an embedding or a vocabulary: no FP32 copy of it
            return torch.empty(shape, dtype=dtype, device=self.device).normal_(0, shape[-1] ** -0.5, generator=self.random)
        return self.normal(*shape, std=shape[-1] ** -0.5, dtype=dtype)

    # ---- operands whose values have a meaning ----
    def _res_score_D(self, o: Operand) -> torch.Tensor:
        return self.normal(*_sizes(o), std=self.config.hidden_size**-0.5)

    def _conv_weight_CW(self, o: Operand) -> torch.Tensor:
        return self.normal(*_sizes(o), std=0.5)

    def _a_log_H(self, o: Operand) -> torch.Tensor:
        return torch.rand(*_sizes(o), generator=self.random, device=self.device).mul_(15).add_(1).log_()

    def _dt_bias_C(self, o: Operand) -> torch.Tensor:
        return self.normal(*_sizes(o))

    def _bias_E(self, o: Operand) -> torch.Tensor:
        return self.normal(*_sizes(o), std=0.05)

    def _tokens_T(self, o: Operand) -> torch.Tensor:
        return self.integers(0, self.config.vocab_size, self.rows)

    def _live_rows_N(self, o: Operand) -> torch.Tensor:
        return torch.tensor([self.rows], dtype=torch.int32, device=self.device)

    def _slots_BQ(self, o: Operand) -> torch.Tensor:
        order = torch.randperm(self.rows, generator=self.random, device=self.device).to(torch.int32)
        return (order * 2 + 1).view(self.requests, self.q)  # gaps between the slots in use

    def _accepted_B(self, o: Operand) -> torch.Tensor:
        return self.integers(1, self.q + 1, self.requests)

    def _conv_SW3C(self, o: Operand) -> torch.Tensor:
        return self.normal(2 * self.rows + 1, self.q + 2, 3, o.shape[-1] or 1, dtype=torch.bfloat16)

    def _state_SHVK(self, o: Operand) -> torch.Tensor:
        return self.normal(2 * self.rows + 1, *(s for s in o.shape[1:] if s is not None), std=0.3)

    def _lengths_B(self, o: Operand) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.device)

    def _pages_each(self) -> list[int]:
        return [-(-(n + self.q) // PAGE_TOKENS) for n in self.lengths]

    def _block_table_BN(self, o: Operand) -> torch.Tensor:
        each = self._pages_each()
        order = (torch.randperm(sum(each), generator=self.random, device=self.device) + 1).to(torch.int32)
        table = torch.zeros(self.requests, max(each), dtype=torch.int32, device=self.device)
        for b, pages in enumerate(order.split(each)):
            table[b, : len(pages)] = pages
        return table

    def _pages_STM(self, o: Operand) -> torch.Tensor:
        shape = (sum(self._pages_each()) + 1, PAGE_TOKENS, self.config.mla_cache_dim)
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(generator=self.random).to(getattr(torch, o.dtype))

    def _lists_of_experts(self) -> Tensors:
        if not self._lists:
            scores = torch.rand(self.rows, self.config.n_experts, generator=self.random, device=self.device)
            ids = scores.topk(self.config.n_experts_per_token).indices
            offsets, pairs = expert_lists(ids.cpu(), self.rows, self.config.n_experts)
            self._lists = {"ids_TZ": ids.to(torch.int32), "offsets_E": offsets.to(self.device), "pairs_N": pairs.to(self.device)}
        return self._lists

    def _ids_TZ(self, o: Operand) -> torch.Tensor:
        return poisoned(o.shape, torch.int32, self.device) if o.role is Role.OUTPUT else self._lists_of_experts()["ids_TZ"]

    def _offsets_E(self, o: Operand) -> torch.Tensor:
        return poisoned(o.shape, torch.int32, self.device) if o.role is Role.OUTPUT else self._lists_of_experts()["offsets_E"]

    def _pairs_N(self, o: Operand) -> torch.Tensor:
        return poisoned(o.shape, torch.int32, self.device) if o.role is Role.OUTPUT else self._lists_of_experts()["pairs_N"]

    def _weights_TZ(self, o: Operand) -> torch.Tensor:
        if o.role is Role.OUTPUT:
            return poisoned(o.shape, torch.bfloat16, self.device)
        weights = torch.rand(self.rows, self.config.n_experts_per_token, generator=self.random, device=self.device)
        return (weights / weights.sum(-1, keepdim=True)).to(torch.bfloat16)

    def _lse_XTH(self, o: Operand) -> torch.Tensor:
        shape = tuple(s for s in o.shape if s is not None)
        if o.role is Role.OUTPUT:
            return poisoned(shape, torch.float32, self.device)
        lse = self.normal(*shape)
        if shape[0] > 1:
            lse[-1] = -torch.inf  # an empty split
        return lse


def _sizes(o: Operand) -> tuple[int, ...]:
    """The operand's shape, all of whose axes are known."""
    return tuple(size for size in o.shape if size is not None)


def poisoned(shape: tuple[int | None, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """NaN, or an impossible integer."""
    value = float("nan") if dtype.is_floating_point else POISON_INT
    return torch.full(tuple(s for s in shape if s is not None), value, dtype=dtype, device=device)


def armed(shape: tuple[int | None, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A mailbox buffer of nothing but sentinels."""
    box = torch.empty(tuple(s for s in shape if s is not None), dtype=dtype, device=device)
    box.view(torch.int32).fill_(SENTINEL_WORD)
    return box
