"""Short constructors for axes and operands, so that a contract reads as a table. Sizes always come from `Shard` or `ModelConfig`."""

from __future__ import annotations

from kimi_k3_decode.config import Shard
from kimi_k3_decode.ops.contract import Access, Axis, MailboxRule, Operand, Role

BF16, FP32, INT32, UINT8 = "bfloat16", "float32", "int32", "uint8"

# The 32-bit word that means "not written yet": a NaN payload. Publishers turn every NaN into the canonical one (all mantissa bits set), so
# data never carries it, neither as one FP32 nor as a pair of BF16.
SENTINEL_WORD = 0x7FA55A5A
MXFP4_CODES_PER_BYTE = 2

MEANINGS = {
    "B": "requests",
    "C": "input channels",
    "D": "hidden",
    "E": "experts",
    "H": "heads of this rank",
    "I": "intermediate of this rank",
    "J": "packed input bytes",
    "G": "scale groups",
    "K": "key channels of a head",
    "L": "latent",
    "M": "cached values of a token",
    "N": "saved blocks or table entries",
    "P": "projection rows",
    "Q": "tokens a request",
    "R": "ranks",
    "S": "slots",
    "T": "token rows",
    "V": "value channels or vocabulary",
    "W": "window",
    "X": "splits",
    "Z": "chosen experts",
}


def axes(**sizes: int | None) -> tuple[Axis, ...]:
    """`axes(T=8, D=256)`; a trailing digit tells two axes of one letter apart (`P`, `P2`)."""
    return tuple(
        Axis(letter=name.rstrip("0123456789"), meaning=MEANINGS[name.rstrip("0123456789")], size=size) for name, size in sizes.items()
    )


def weight(name: str, dtype: str = BF16, *, note: str = "", **sizes: int | None) -> Operand:
    return Operand(name=name, role=Role.WEIGHT, dtype=dtype, axes=axes(**sizes), note=note)


def given(name: str, dtype: str = BF16, *, note: str = "", **sizes: int | None) -> Operand:
    """An `input`: written by an earlier launch of the same step."""
    return Operand(name=name, role=Role.INPUT, dtype=dtype, axes=axes(**sizes), note=note)


def output(name: str, dtype: str = BF16, *, note: str = "", **sizes: int | None) -> Operand:
    return Operand(name=name, role=Role.OUTPUT, dtype=dtype, axes=axes(**sizes), note=note)


def table(name: str, dtype: str = INT32, *, note: str = "", **sizes: int | None) -> Operand:
    return Operand(name=name, role=Role.TABLE, dtype=dtype, axes=axes(**sizes), align_bytes=4, note=note)


def state(name: str, dtype: str, *, access: Access = Access.READ_WRITE, note: str = "", **sizes: int | None) -> Operand:
    return Operand(name=name, role=Role.STATE, dtype=dtype, axes=axes(**sizes), access=access, strided=True, note=note)


def scratch(name: str, dtype: str = FP32, *, note: str = "", **sizes: int | None) -> Operand:
    return Operand(name=name, role=Role.SCRATCH, dtype=dtype, axes=axes(**sizes), note=note)


def split_k_workspace(splits: int, rows: int, columns: int) -> tuple[Operand, ...]:
    """Partials of a split-K product kept in global memory; none when `splits` is 1 or the reduction stays inside a cluster."""
    if splits <= 1:
        return ()
    return (
        scratch("partial_XTP", X=splits, T=rows, P=columns, note="summed in split order"),
        scratch("tickets_N", INT32, N=None, note="arrival counters; the last arriver sums and resets them"),
    )


def publishes(name: str, dtype: str, *, writer: str, reader: str, layout: str, **sizes: int | None) -> Operand:
    """The publisher's side of a mailbox: written in every rank's copy, this rank's slot or column block."""
    return _mailbox(name, dtype, Access.WRITE, writer, reader, layout, sizes)


def consumes(name: str, dtype: str, *, writer: str, reader: str, layout: str, **sizes: int | None) -> Operand:
    """The consumer's side: polled until no word is the sentinel; this launch re-arms the other parity, read one message ago."""
    return _mailbox(name, dtype, Access.READ_WRITE, writer, reader, layout, sizes)


def _mailbox(name: str, dtype: str, access: Access, writer: str, reader: str, layout: str, sizes: dict[str, int | None]) -> Operand:
    rule = MailboxRule(
        writer=f"{writer} of every rank",
        reader=reader,
        sentinel=f"0x{SENTINEL_WORD:08X}",
        rearmed_by=f"{reader} of the owning rank, while it reads the other parity",
        layout=layout,
    )
    return Operand(name=name, role=Role.MAILBOX, dtype=dtype, axes=axes(**sizes), access=access, mailbox=rule)


def attention_columns(shard: Shard, attention: str) -> int:
    """Columns of o_proj on this rank: all value channels of its heads. `attention` is "kda" or "mla"."""
    return shard.kda_dim if attention == "kda" else shard.mla_heads * shard.config.v_head_dim


def projection_rows(shard: Shard, attention: str) -> int:
    """Rows of the fused input projection of this rank."""
    return shard.in_proj_rows if attention == "kda" else shard.mla_in_rows
