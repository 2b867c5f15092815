"""MXFP4 against the OCP definition: all 16 codes x 256 scales, packing, rounding, exact inverses."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_decode import mxfp4


def ocp_value(code: int) -> Fraction:
    """E2M1 from its bit fields: sign, two exponent bits with bias 1, one mantissa bit; exponent 0 is subnormal."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = Fraction(mantissa, 2) if exponent == 0 else (1 + Fraction(mantissa, 2)) * Fraction(2) ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


def test_every_code_at_every_scale_is_the_ocp_value():
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 2)
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    values = mxfp4.unpack(mxfp4.pack_codes(codes), scales, torch.float64)
    for scale in range(255):
        for code in range(16):
            wanted = ocp_value(code) * Fraction(2) ** (scale - 127)
            for column in (code, code + 16):
                assert Fraction(values[scale, column].item()) == wanted
    assert values[255].isnan().all()
    assert torch.signbit(values[:255, 8]).all()  # the negative zero stays negative
    finite = values[:255].abs() <= torch.finfo(torch.float32).max
    assert torch.equal(mxfp4.unpack(mxfp4.pack_codes(codes), scales, torch.float32)[:255][finite], values[:255][finite].float())
    assert torch.equal(mxfp4.unpack(mxfp4.pack_codes(codes), scales, torch.bfloat16)[:255][finite].double(), values[:255][finite])


def test_low_nibble_comes_first():
    assert mxfp4.pack_codes(torch.tensor([[1, 2, 15, 0]])).tolist() == [[0x21, 0x0F]]


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda codes: len(codes) % 2 == 0))
def test_nibbles_survive_packing(codes):
    assert mxfp4.unpack_codes(mxfp4.pack_codes(torch.tensor(codes))).tolist() == codes


@settings(max_examples=200)
@given(codes=st.lists(st.integers(0, 15), min_size=32, max_size=32), scale=st.integers(0, 254))
def test_packing_inverts_unpacking_in_value_and_is_stable(codes, scale):
    packed, scales = mxfp4.pack_codes(torch.tensor([codes])), torch.tensor([[scale]], dtype=torch.uint8)
    values = mxfp4.unpack(packed, scales, torch.float64)
    again = mxfp4.pack(values)
    restored = mxfp4.unpack(*again, torch.float64)
    assert torch.equal(restored, values)
    assert torch.equal(torch.signbit(restored), torch.signbit(values))
    third = mxfp4.pack(restored)
    assert torch.equal(third[0], again[0])
    assert torch.equal(third[1], again[1])


@settings(max_examples=100)
@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=32, max_size=32),
    exponent=st.integers(-60, 60),
)
def test_values_are_rounded_to_the_nearest_representable_one(values, exponent):
    x = torch.tensor([values], dtype=torch.float64) * 2.0**exponent
    codes, scales = mxfp4.pack(x)
    found = mxfp4.unpack(codes, scales, torch.float64)
    step = 2.0 ** (scales.double() - 127)
    choices = torch.tensor(mxfp4.E2M1_VALUES, dtype=torch.float64) * step
    best = (x.unsqueeze(-1) - choices).abs().amin(-1)
    assert torch.equal((found - x).abs(), best)
    largest = x.abs().max()
    if largest > 0:
        assert 4 * step.item() <= largest.item() < 8 * step.item() or scales.item() == 0


def test_ties_go_to_the_even_mantissa():
    x = torch.zeros(1, 32, dtype=torch.float64)
    x[0, :9] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5])
    found = mxfp4.unpack(*mxfp4.pack(x), torch.float64)[0, :9].tolist()
    assert found == [6, 0, 1, 1, 2, 2, 4, 4, -2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_group_with_a_non_finite_value_becomes_nan_and_its_neighbours_do_not(bad):
    x = torch.ones(1, 64)
    x[0, 3] = bad
    values = mxfp4.unpack(*mxfp4.pack(x), torch.float32)
    assert values[0, :32].isnan().all()
    assert torch.equal(values[0, 32:], x[0, 32:])


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="needs a multiple of 32"):
        mxfp4.pack(torch.ones(1, 48))
    stack = mxfp4.Mxfp4.quantize(torch.ones(2, 4, 64))
    with pytest.raises(ValueError, match="multiples of 32"):
        stack.columns(0, 16)
    assert stack.columns(32, 64).shape == (2, 4, 32)
