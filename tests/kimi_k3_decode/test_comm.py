"""The mailbox protocol: sentinels no data equals, readiness by words, re-arming, and refusal to overwrite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_decode.comm import SENTINEL_WORD, WORDS, Mailbox, arm, armed, canonical, is_sentinel
from kimi_k3_decode.ops.contract import ContractError
from kimi_k3_decode.ops.operands import publishes


def box(tp: int, layout: str = "slot", dtype: str = "float32") -> Mailbox:
    sizes = {"R": tp, "T": 2, "D": 4} if layout == "slot" else {"T": 2, "D": 4 * tp}
    return Mailbox("m", publishes("m", dtype, writer="w", reader="r", layout=layout, **sizes), tp)


@pytest.mark.parametrize("dtype", WORDS)
def test_armed_buffers_hold_only_sentinels_and_canonical_data_holds_none(dtype):
    buffer = armed((3, 8), dtype)
    assert bool(is_sentinel(buffer).all())
    assert not bool(is_sentinel(canonical(buffer)).any())


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4))
@settings(max_examples=200)
def test_no_bit_pattern_survives_as_a_sentinel(words):
    """Any words whatever, the sentinel among them, as FP32 and as pairs of BF16."""
    bits = torch.tensor([*words, SENTINEL_WORD], dtype=torch.int64).to(torch.uint32).view(torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        data = bits.view(dtype).unsqueeze(0)
        clean = canonical(data)
        assert not bool(is_sentinel(clean).any())
        assert torch.equal(torch.isnan(clean), torch.isnan(data))
        finite = ~torch.isnan(data)
        assert torch.equal(clean[finite].view(WORDS[dtype].element), data[finite].view(WORDS[dtype].element))  # -0.0 stays -0.0


@pytest.mark.parametrize("layout", ["slot", "columns"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_message_arrives_whole_at_every_rank(layout, dtype):
    mailbox = box(3, layout, dtype)
    parts = [torch.full((2, 4), float(r) - 1.0, dtype=getattr(torch, dtype)) for r in range(3)]
    for writer in (2, 0):
        mailbox.publish(writer, 0, parts[writer])
    assert not mailbox.ready(1, 0)
    with pytest.raises(ContractError, match=r"nothing from ranks \[1\]"):
        mailbox.consume(1, 0)
    mailbox.publish(1, 0, parts[1])
    for reader in range(3):
        got = mailbox.consume(reader, 0)
        assert torch.equal(got, torch.stack(parts) if layout == "slot" else torch.cat(parts, -1))


def test_overwriting_an_unread_word_is_refused_and_rearming_allows_it():
    mailbox = box(1)
    data = torch.ones(2, 4)
    mailbox.publish(0, 0, data)
    with pytest.raises(ContractError, match="not re-armed"):
        mailbox.publish(0, 0, data)
    mailbox.consume(0, 0)
    with pytest.raises(ContractError, match="not re-armed"):
        mailbox.publish(0, 0, data)  # read, but only the consumer of the next message re-arms this parity
    mailbox.publish(0, 1, 2 * data)
    mailbox.consume(0, 1)
    mailbox.publish(0, 0, 3 * data)
    assert torch.equal(mailbox.consume(0, 0)[0], 3 * data)


def test_data_that_looks_like_the_sentinel_is_delivered_as_nan():
    mailbox = box(1)
    evil = torch.zeros(2, 4)
    arm(evil)
    mailbox.publish(0, 0, evil)
    assert mailbox.ready(0, 0)
    assert bool(torch.isnan(mailbox.consume(0, 0)).all())


def test_wrong_shape_is_named():
    with pytest.raises(ContractError, match=r"got \[2, 3\], needs \[2, 4\]"):
        box(2).publish(0, 0, torch.zeros(2, 3))
