"""One message: codes, scales, packing and rotation, on arbitrary float32 numbers, against the reference and bounds."""

import functools
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from equarx_serve.collectives import CollectiveError, blockwise, column_scale, fold, packing, rotation
from equarx_serve.collectives import reference_codes as ref
from equarx_serve.collectives.layout import Layout

FEATURES, BLOCK, TOKENS = 64, 16, 3
LAYOUTS = [
    Layout.of(cases.config(block=BLOCK, **fields), FEATURES)
    for fields in (
        {},
        {"codes": "full_range"},
        {"scale": "bfloat16"},
        {"codes": "full_range", "scale": "byte"},
        {"scale": "byte", "format": "int6"},
        {"format": "int4", "codes": "full_range", "scale": "byte", "clip_search": True},
        {"format": "int7", "codes": "full_range"},
        {"format": "int5", "scale": "bfloat16"},
        {"format": "fp8_e4m3"},
    )
]
NUMBERS = hnp.arrays(np.float32, (TOKENS, FEATURES), elements=st.floats(width=32), fill=st.nothing())


@functools.cache
def message(layout: Layout) -> Callable[[Any], Any]:
    """Compiled once a layout: the bytes, and what they decode to."""
    return jax.jit(lambda x: (blockwise.encode(x, layout), blockwise.decode(blockwise.encode(x, layout), layout)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@settings(max_examples=15, deadline=None)
@given(NUMBERS)
def test_any_numbers(layout: Layout, x: np.ndarray) -> None:
    sent, got = (np.asarray(part) for part in message(layout)(x))
    assert sent.shape == (TOKENS, layout.row_bytes)
    assert cases.same_bits(got, ref.decode(ref.encode(x, layout), layout))
    blocks, values = x.reshape(TOKENS, -1, BLOCK), got.reshape(TOKENS, -1, BLOCK)
    largest = np.abs(blocks).max(axis=-1).astype(np.float64)
    broken = np.isnan(values).any(axis=-1)
    assert (np.isnan(values).all(axis=-1) == broken).all(), "a block is NaN as a whole or not at all"
    assert broken[~np.isfinite(largest)].all(), "no wrong finite number"
    assert not broken[largest < 3e38 * (1 - 1 / layout.half)].any(), "and none without cause"
    assert (values[largest == 0] == 0).all()


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if not layout.clip_search], ids=str)
def test_error_is_half_a_step(layout: Layout) -> None:
    x = np.random.default_rng(0).standard_normal((TOKENS, FEATURES)).astype(np.float32)
    blocks = x.reshape(TOKENS, -1, BLOCK)
    scale, _ = ref.block_scales(blocks, layout)
    step = np.abs(scale) / layout.half
    if layout.format == "fp8_e4m3":
        step = step * 32
    error = np.abs(np.asarray(message(layout)(x)[1]).reshape(blocks.shape) - blocks)
    # Full range has no code for the opposite of its largest number: there a whole step.
    within = 1.0 if layout.codes == "full_range" else 0.5
    assert (error <= within * step[..., None] * 1.0001).all()
    if layout.codes == "full_range":
        assert (error <= 0.5 * step[..., None] * 1.0001).mean() > 0.95


@pytest.mark.parametrize("scale", cases.SCALES)
def test_sent_scales_are_rounded_up_to_few_bits(scale: str) -> None:
    """The invariant behind the bitwise claim: 17 significant bits at most, and never below the block's largest."""
    layout = Layout.of(cases.config(block=BLOCK, codes="full_range", scale=scale), FEATURES)
    x = np.random.default_rng(1).standard_normal((500, FEATURES)).astype(np.float32)
    codes, sent = blockwise.quantize(jnp.asarray(x), layout)
    ones = jnp.full_like(codes, -layout.half)  # code -half stands for minus the scale
    scales = -np.asarray(blockwise.dequantize(ones, sent, layout)).reshape(500, -1, BLOCK)[..., 0]
    largest = np.abs(x.reshape(500, -1, BLOCK)).max(axis=-1)
    grid = {"float32": 2.0**-16, "bfloat16": 2.0**-7, "byte": 2.0**-3}[scale]
    assert (np.abs(scales) >= largest).all()
    assert (np.abs(scales) <= largest * (1 + grid)).all()
    bits = np.abs(scales).astype(np.float32).view(np.uint32)
    assert not (bits & (2 ** blockwise.DROPPED_BITS[scale] - 1)).any()


@pytest.mark.parametrize("bits", [4, 5, 6, 7, 8])
def test_packing_is_exact_for_every_code(bits: int) -> None:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = np.random.default_rng(bits).integers(low, high, (5, 3, 48)).astype(np.int8)
    codes.reshape(-1)[: 2**bits] = np.arange(low, high)
    packed = packing.pack(jnp.asarray(codes), bits)
    assert packed.shape == (5, 3, 48 * bits // 8)
    np.testing.assert_array_equal(packing.unpack(packed, bits), codes)
    layout = Layout.of(cases.config(format=f"int{bits}", block=48), 48)
    np.testing.assert_array_equal(packed, ref.pack(codes, layout))


def test_packing_uses_every_bit() -> None:
    """int6 bytes of random codes have all eight bits in use: really 6/8 of the bytes."""
    codes = np.random.default_rng(0).integers(-32, 32, (4, 64)).astype(np.int8)
    packed = np.asarray(packing.pack(jnp.asarray(codes), 6))
    assert np.bitwise_or.reduce(packed, axis=None) == 255
    for flipped in range(8):
        changed = packing.unpack(jnp.asarray(packed ^ np.uint8(1 << flipped)), 6)
        assert (np.asarray(changed) != codes).any(), "no bit is idle"


@pytest.mark.parametrize("length", [8, 32, 128])
def test_hadamard_is_the_sylvester_matrix(length: int) -> None:
    matrix = np.ones((1, 1))
    while len(matrix) < length:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = np.random.default_rng(0).integers(-99, 99, (3, 256)).astype(np.float32)
    expected = (x.reshape(3, -1, length) @ matrix).reshape(3, 256)
    got = rotation.hadamard(jnp.asarray(x), length)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(rotation.inverse(got, length, None), x)
    y = np.random.default_rng(1).standard_normal((3, 256)).astype(np.float32)
    assert cases.same_bits(rotation.hadamard(jnp.asarray(y), length), ref.hadamard(y, length))


def test_channel_scale() -> None:
    """Divided before and multiplied after: the same numbers to 16 bits, and the reference's to the last bit."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.standard_normal(64) * 5).astype(np.float32)
    x = rng.standard_normal((400, 64)).astype(np.float32)
    there = rotation.forward(jnp.asarray(x), 0, jnp.asarray(scale))
    assert cases.same_bits(there, ref.sixteen_bits(x * (np.float32(1) / scale)))
    np.testing.assert_allclose(rotation.inverse(there, 0, jnp.asarray(scale)), x, rtol=2.0**-16)


def test_column_scale() -> None:
    weight = np.ones((4, 8, 16), np.float32)
    weight[..., 3] = 8
    weight[..., 5] = 0
    got = np.asarray(column_scale(jnp.asarray(weight)))
    assert got[3] == pytest.approx(8, rel=1e-6)
    np.testing.assert_allclose(np.delete(got, 3), 1, rtol=1e-6, err_msg="a column of zeros sends nothing: 1")
    assert (np.asarray(column_scale(jnp.zeros((4, 16)))) == 1).all()


def test_fold_says_what_does_not_fit() -> None:
    with pytest.raises(CollectiveError, match="rotation=128 does not divide the weight's 96"):
        fold(jnp.ones((4, 96)), cases.config())
