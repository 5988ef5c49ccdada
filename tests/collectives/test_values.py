"""Ugly inputs: NaN and inf, zeros, tiny and huge blocks, giant tokens, outliers. Each is one token of one call."""

import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from equarx_serve.collectives import all_reduce
from equarx_serve.collectives import reference as ref
from equarx_serve.collectives.layout import Layout

RANKS, FEATURES, BLOCK = 3, 256, 64
CODINGS: list[dict[str, Any]] = [
    {"format": "int8"},
    {"format": "int8", "codes": "full_range", "scale": "byte"},
    {"format": "int6", "scale": "bfloat16"},
    {"format": "int4", "codes": "full_range", "clip_search": True},
    {"format": "fp8_e4m3", "scale": "byte"},
]
ROWS = (
    "plain",
    "nan",
    "inf",
    "minus_inf",
    "zero_block",
    "small",
    "tiny",
    "huge",
    "near_max",
    "giant_element",
    "after_giant",
)


def rows() -> np.ndarray:
    """[RANKS, len(ROWS), FEATURES] float32, built on ordinary numbers."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((RANKS, len(ROWS), FEATURES)).astype(np.float32)
    at = {name: i for i, name in enumerate(ROWS)}
    x[1, at["nan"], 70] = np.nan
    x[1, at["inf"], 70] = np.inf
    x[2, at["minus_inf"], 70] = -np.inf
    x[:, at["zero_block"], :BLOCK] = 0
    x[:, at["small"]] *= np.float32(1e-34)
    x[:, at["tiny"]] *= np.float32(1e-37)
    x[:, at["huge"]] *= np.float32(1e30)
    x[:, at["near_max"]] *= np.float32(2e37)
    x[:, at["giant_element"]] = 1
    x[0, at["giant_element"], 3] = 1e30
    x[0, at["giant_element"], 130] = 7e4
    return x


@functools.cache
def compiled(config: Any) -> Any:
    return jax.jit(cases.emulated(lambda part: all_reduce(part, "i", config), 1))


def run(x: np.ndarray, config: Any) -> np.ndarray:
    got = np.asarray(compiled(config)(x))
    cases.check_ranks(got, 1)
    return got[0]


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_rows(coding: dict[str, Any]) -> None:
    """Report 4 and 24: the damage stays in the block, and every block has the error its largest numbers allow."""
    config = cases.config(algorithm="two_ended_ring", block=BLOCK, rotation=0, **coding)
    x = rows()
    got = run(x, config)
    at = {name: i for i, name in enumerate(ROWS)}
    for name in ("nan", "inf", "minus_inf"):
        bad = np.isnan(got[at[name]])
        assert bad[BLOCK : 2 * BLOCK].all(), "the whole block is NaN: never a wrong finite number"
        assert np.isfinite(got[at[name]][:BLOCK]).all()
        assert np.isfinite(got[at[name]][2 * BLOCK :]).all(), "and nothing else is"
        # The other blocks are as good as if nothing had happened.
        sound = np.r_[:BLOCK, 2 * BLOCK : FEATURES]
        clean = x[:, at[name], sound].sum(axis=0)
        assert np.sqrt(np.mean((got[at[name], sound] - clean) ** 2)) < (0.5 if config.format == "int4" else 0.12)
    finite = [i for name, i in at.items() if name not in ("nan", "inf", "minus_inf")]
    assert np.isfinite(got[finite]).all()
    np.testing.assert_array_equal(got[at["zero_block"], :BLOCK], 0)
    # Every quantization is off by at most half a code step; two hops carry one rank's part each, the gather the sum.
    layout = Layout.of(config, FEATURES)
    blocks = x[:, finite].astype(np.float64).reshape(RANKS, len(finite), -1, BLOCK)
    total = blocks.sum(axis=0)
    largest = np.abs(blocks).max(axis=-1).sum(axis=0) + np.abs(total).max(axis=-1) * 1.2
    error = np.abs(got[finite].reshape(total.shape) - total).max(axis=-1)
    half_step = {"symmetric": 0.5 / layout.top, "full_range": 1.0 / layout.half}[layout.codes]
    if layout.format == "fp8_e4m3":
        half_step = 1 / 28  # half of 32, the step of the largest codes, of 448
    coarser = {"float32": 1.001, "bfloat16": 1.01, "byte": 1.125}[layout.scale]
    clipped = 1.5 if layout.clip_search else 1.0
    bound = largest * half_step * coarser * clipped
    if layout.scale == "byte":
        # A byte scale reaches so many binades below the token's largest block, and no further.
        span = {"symmetric": 31, "full_range": 15}[layout.codes]
        bound = np.maximum(bound, np.abs(x[:, finite]).max(axis=(0, 2))[:, None] * 2.0 ** (1 - span) * half_step * 8)
    # The platform's additions flush what is below 2^-126; with a step below that, so much more may be lost a term.
    bound = np.maximum(bound, 2.0**-126 * 4 * (largest < 2.0**-118))
    assert (error <= bound).all(), [(ROWS[finite[i]], j) for i, j in np.argwhere(error > bound)]


@pytest.mark.parametrize("scale", cases.SCALES)
def test_giant_token_does_not_touch_its_neighbours(scale: str) -> None:
    """Contract 4: a scale never spans two tokens, and padding is a token of its own."""
    config = cases.config(algorithm="two_ended_ring", block=0, rotation=128, scale=scale)
    x = np.random.default_rng(3).standard_normal((RANKS, 8, FEATURES)).astype(np.float32)
    calm = run(x, config)
    x[:, 4] *= 1e12  # beyond the span of a byte scale
    got = run(x, config)
    others = [0, 1, 2, 3, 5, 6, 7]
    assert cases.same_bits(got[others], calm[others])
    assert not cases.same_bits(got[4], calm[4])


def test_nan_under_rotation_fills_its_block_of_128() -> None:
    config = cases.config(algorithm="two_shot", block=64, rotation=128)
    x = np.random.default_rng(3).standard_normal((RANKS, 4, FEATURES)).astype(np.float32)
    x[1, 2, 5] = np.inf
    got = run(x, config)
    bad = np.zeros((4, FEATURES), bool)
    bad[2, :128] = True
    np.testing.assert_array_equal(np.isnan(got), bad)


def test_subnormal_numbers_count_as_zero_as_in_psum() -> None:
    config = cases.config(algorithm="two_shot", block=64, rotation=0, codes="full_range")
    x = np.full((2, 2, 64), 1e-40, np.float32)
    np.testing.assert_array_equal(run(x, config), 0)
    plain = cases.config(algorithm="psum", format="float32")
    np.testing.assert_array_equal(run(x, plain), 0)


@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e30, 2e38])
@pytest.mark.parametrize("scale", cases.SCALES)
def test_bitwise_at_the_ends_of_the_range(size: float, scale: str) -> None:
    """One message: backend and reference agree to the last bit from 1e-37 to overflow."""
    from equarx_serve.collectives import blockwise
    from equarx_serve.collectives import reference_codes as codes

    with np.errstate(over="ignore"):
        x = (np.random.default_rng(1).standard_normal((40, 64)) * size).astype(np.float32)
    for kind in cases.CODES:
        layout = Layout.of(cases.config(block=32, scale=scale, codes=kind), 64)
        got = blockwise.encode(jnp.asarray(x), layout)
        np.testing.assert_array_equal(blockwise.decode(got, layout), codes.decode(codes.encode(x, layout), layout))


def test_rows_at_75000() -> None:
    """Report 1: residual-sized rows with small summands over 8 ranks lose one output rounding and no more than the
    predicted quantization: the sum is not kept in bf16 on the way."""
    rng = np.random.default_rng(2)
    ranks, tokens = 8, 64
    x = rng.integers(1, 201, (ranks, tokens, FEATURES)).astype(np.float32)
    x[0] = 75_000
    config = cases.config(algorithm="two_shot", block=128, rotation=0, scale="float32")
    exact = x.astype(np.float64).sum(axis=0)
    got = run(x, config)
    # Rank 0's blocks are constant and exact up to 2^-17; the others' and the sum's have steps of largest / 127.
    blocks = x.astype(np.float64).reshape(ranks, tokens, 2, 128)
    steps = (np.abs(blocks[1:]).max(axis=-1) ** 2).sum(axis=0) + np.abs(blocks.sum(axis=0)).max(axis=-1) ** 2
    predicted = np.sqrt(steps.mean() / 127**2 / 12)
    # The sums of one block lie within one step of each other, so the last error is no uniform noise: bound, not equal.
    assert np.abs(got - exact).max() <= 76_700 / 254 + 8 * 200 / 254
    assert np.sqrt(np.mean((got - exact) ** 2)) <= 2 * predicted
    rounded = run(x.astype(ml_dtypes.bfloat16), config)
    wide = run(x.astype(ml_dtypes.bfloat16).astype(np.float32), config)
    assert cases.same_bits(rounded, wide.astype(ml_dtypes.bfloat16)), "one rounding of the float32 sum"


@pytest.mark.parametrize("algorithm", cases.ALGORITHMS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 9])
def test_any_token_count(algorithm: str, tokens: int) -> None:
    """Contract 5: fewer tokens than ranks, one token, and leading dimensions."""
    config = cases.config(algorithm=algorithm, block=32, rotation=32, chunks=2)
    x = np.random.default_rng(tokens).standard_normal((4, 1, tokens, 64)).astype(np.float32)
    got = run(x, config)
    assert got.shape == x.shape[1:]
    assert cases.same_bits(got, ref.all_reduce(x, (4,), config)[0])
    np.testing.assert_allclose(got, x.sum(axis=0), atol=0.12)


def test_one_rank_is_the_identity() -> None:
    x = np.random.default_rng(0).standard_normal((1, 5, 64)).astype(ml_dtypes.bfloat16)
    assert cases.same_bits(run(x, cases.config(block=32, rotation=32)), x[0])
