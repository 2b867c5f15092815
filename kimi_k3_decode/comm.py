"""The mailbox protocol between ranks, executed on the host for virtual ranks with the kernels' own words.

A mailbox is one buffer a rank and parity. Every word holds the sentinel until a peer's data arrives; a consumer is ready when no word of
its buffer is the sentinel. The consumer of one message re-arms the buffer of the *other* parity, which it finished reading one message
ago. That is safe because a peer can only publish message n + 1 after another exchange in which this rank took part after consuming n;
`Mailbox.publish` checks exactly that and refuses to overwrite a word that nobody re-armed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kimi_k3_decode.ops.contract import ContractError, MailboxRule, Operand
from kimi_k3_decode.ops.operands import SENTINEL_WORD

PARITIES = 2
CANONICAL_NAN_WORD = 0x7FFFFFFF  # as one FP32, and as the pair (0x7FFF, 0xFFFF) of BF16


@dataclass(frozen=True)
class _Words:
    """A dtype's sentinel and canonical NaN as the integer pattern of one element."""

    integer: torch.dtype
    sentinels: tuple[int, ...]  # by position inside a 32-bit word, low half first
    nan: int


# FP64 is only for the oracle, whose mailboxes are twice as wide; any NaN payload that arithmetic does not produce will do.
WORDS = {
    torch.float32: _Words(torch.int32, (SENTINEL_WORD,), CANONICAL_NAN_WORD),
    torch.float64: _Words(torch.int64, (0x7FF0000000000000 | SENTINEL_WORD,), 0x7FFFFFFFFFFFFFFF),
    torch.bfloat16: _Words(torch.int16, (SENTINEL_WORD & 0xFFFF, SENTINEL_WORD >> 16), 0x7FFF),
}


def canonical(data: torch.Tensor) -> torch.Tensor:
    """`data` with every NaN replaced by the canonical one, so that no 32-bit word of it equals the sentinel. Never aliases `data`."""
    words = WORDS[data.dtype]
    return (
        torch.where(torch.isnan(data).view(data.shape), words.nan, data.contiguous().view(words.integer)).to(words.integer).view(data.dtype)
    )


def armed(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A buffer that holds nothing but sentinels. The last axis of a BF16 buffer is even, so words do not straddle rows."""
    buffer = torch.empty(shape, dtype=dtype)
    arm(buffer)
    return buffer


def arm(buffer: torch.Tensor) -> None:
    """Write the sentinel over every word of `buffer`."""
    words = WORDS[buffer.dtype]
    bits = buffer.view(words.integer)
    for position, sentinel in enumerate(words.sentinels):
        bits[..., position :: len(words.sentinels)] = sentinel


def is_sentinel(buffer: torch.Tensor) -> torch.Tensor:
    """Which words of `buffer` [..., n] hold the sentinel: boolean [..., n / elements a word]."""
    words = WORDS[buffer.dtype]
    bits = buffer.view(words.integer)
    found = bits[..., 0 :: len(words.sentinels)] == words.sentinels[0]
    for position, sentinel in enumerate(words.sentinels[1:], start=1):
        found = found & (bits[..., position :: len(words.sentinels)] == sentinel)
    return found


class Mailbox:
    """One named mailbox of `tp` virtual ranks: `tp` x 2 parities of armed buffers.

    layout "slot": buffer [R, ...], the writer fills slot r. layout "columns": buffer [..., C], the writer fills its column block.
    """

    def __init__(self, name: str, operand: Operand, tp: int, dtype: torch.dtype | None = None) -> None:
        if operand.mailbox is None:
            raise ContractError(f"Mailbox {name}", [f"operand: got role {operand.role}, needs mailbox"])
        self.name = name
        self.tp = tp
        self.rule: MailboxRule = operand.mailbox
        shape = tuple(size for size in operand.shape if size is not None)
        own = dtype or getattr(torch, operand.dtype)
        self.buffers = [[armed(shape, own) for _ in range(PARITIES)] for _ in range(tp)]

    def _part(self, buffer: torch.Tensor, writer: int) -> torch.Tensor:
        if self.rule.layout == "slot":
            return buffer[writer]
        width = buffer.shape[-1] // self.tp
        return buffer[..., writer * width : (writer + 1) * width]

    def publish(self, writer: int, parity: int, data: torch.Tensor) -> None:
        """Rank `writer` stores its part in every rank's buffer. Raises ContractError when a word there was not re-armed."""
        reasons = []
        for reader in range(self.tp):
            target = self._part(self.buffers[reader][parity], writer)
            if target.shape != data.shape:
                raise ContractError(f"Mailbox {self.name}", [f"data: got {list(data.shape)}, needs {list(target.shape)}"])
            if not bool(is_sentinel(target).all()):
                reasons.append(
                    f"rank {reader}, parity {parity}, part of rank {writer}: got data in place, needs the sentinel; not re-armed"
                )
                continue
            target.copy_(canonical(data.to(target.dtype)))
        if reasons:
            raise ContractError(f"Mailbox {self.name}", reasons)

    def ready(self, reader: int, parity: int) -> bool:
        """True when every word of the reader's buffer has arrived."""
        return not bool(is_sentinel(self.buffers[reader][parity]).any())

    def consume(self, reader: int, parity: int) -> torch.Tensor:
        """A copy of the whole message; re-arms the other parity. Raises ContractError when the message is not complete."""
        if not self.ready(reader, parity):
            missing = [w for w in range(self.tp) if bool(is_sentinel(self._part(self.buffers[reader][parity], w)).any())]
            raise ContractError(
                f"Mailbox {self.name}", [f"rank {reader}, parity {parity}: got nothing from ranks {missing}, needs all parts"]
            )
        arm(self.buffers[reader][1 - parity])
        return self.buffers[reader][parity].clone()
