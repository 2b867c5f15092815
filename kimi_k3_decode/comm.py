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
    """How a dtype's buffer is seen: as `word` integers for the sentinel, as `element` integers for the canonical NaN."""

    word: torch.dtype
    sentinel: int
    element: torch.dtype
    nan: int


WORDS = {
    torch.float32: _Words(torch.int32, SENTINEL_WORD, torch.int32, CANONICAL_NAN_WORD),
    torch.bfloat16: _Words(torch.int32, SENTINEL_WORD, torch.int16, 0x7FFF),
    # Only the oracle's mailboxes are FP64; any NaN payload that arithmetic does not produce will do.
    torch.float64: _Words(torch.int64, 0x7FF0000000000000 | SENTINEL_WORD, torch.int64, 0x7FFFFFFFFFFFFFFF),
}


def canonical(data: torch.Tensor) -> torch.Tensor:
    """`data` with every NaN replaced by the canonical one, so that no word of it equals the sentinel. Never aliases `data`."""
    words = WORDS[data.dtype]
    return data.clone(memory_format=torch.contiguous_format).view(words.element).masked_fill_(torch.isnan(data), words.nan).view(data.dtype)


def armed(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A buffer that holds nothing but sentinels. The last axis of a BF16 buffer is even, so words do not straddle rows."""
    buffer = torch.empty(shape, dtype=dtype)
    arm(buffer)
    return buffer


def arm(buffer: torch.Tensor) -> None:
    """Write the sentinel over every word of `buffer`."""
    words = WORDS[buffer.dtype]
    buffer.view(words.word).fill_(words.sentinel)


def is_sentinel(buffer: torch.Tensor) -> torch.Tensor:
    """Which words of `buffer` [..., n] hold the sentinel: boolean [..., words]."""
    words = WORDS[buffer.dtype]
    return buffer.view(words.word) == words.sentinel


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
        """The whole message; re-arms the other parity. Raises ContractError when the message is not complete.

        The tensor is the buffer itself, good until the next message of this mailbox is consumed; whoever needs it longer copies it out.
        """
        if not self.ready(reader, parity):
            missing = [w for w in range(self.tp) if bool(is_sentinel(self._part(self.buffers[reader][parity], w)).any())]
            raise ContractError(
                f"Mailbox {self.name}", [f"rank {reader}, parity {parity}: got nothing from ranks {missing}, needs all parts"]
            )
        arm(self.buffers[reader][1 - parity])
        return self.buffers[reader][parity]
