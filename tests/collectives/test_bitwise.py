"""The portable backend has the reference's bits, and all ranks have the same (reports 8 and 24)."""

import random
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from equarx_serve.collectives import all_gather, all_reduce, column_scale, fold, reduce_scatter
from equarx_serve.collectives import reference as ref


@pytest.mark.parametrize("case", cases.sample(), ids=str)
def test_sample_of_the_grid(case: cases.Case) -> None:
    cases.check_case(case)


def test_sample_covers_every_axis_of_the_grid() -> None:
    sample = cases.sample()
    assert len(sample) == len(cases.SAMPLE)
    assert {c.config.algorithm for c in sample} == set(cases.ALGORITHMS)
    assert {c.config.format for c in sample} == set(cases.FORMATS)
    assert {c.config.block for c in sample} == set(cases.BLOCKS)
    assert {c.config.scale for c in sample} == set(cases.SCALES)
    assert {c.sizes for c in sample} == set(cases.SIZES) - {(1,)}


@pytest.mark.slow
@pytest.mark.parametrize("case", tuple(cases.grid()), ids=str)
def test_whole_grid(case: cases.Case) -> None:
    cases.check_case(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", tuple(cases.codec_options()), ids=str)
def test_every_codec_option(case: cases.Case) -> None:
    cases.check_case(case)


SHAPES = st.tuples(
    st.sampled_from(cases.ALGORITHMS),
    st.sampled_from(cases.FORMATS),
    st.sampled_from(((2,), (3,), (5,), (2, 3), (1, 2), (3, 1, 2))),
    st.integers(1, 40),
    st.sampled_from((8, 24, 64, 96)),
    st.integers(1, 3),
    st.sampled_from(cases.SCALES),
)


def check_random(drawn: tuple[Any, ...]) -> None:
    algorithm, format, sizes, tokens, features, chunks, scale = drawn
    config = cases.config(algorithm=algorithm, format=format, block=8, rotation=8, chunks=chunks, scale=scale)
    cases.check_case(cases.Case(config, sizes, tokens, features))


@settings(max_examples=3, deadline=None, derandomize=True)
@given(SHAPES)
def test_random_shapes(drawn: tuple[Any, ...]) -> None:
    check_random(drawn)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(SHAPES)
def test_many_random_shapes(drawn: tuple[Any, ...]) -> None:
    check_random(drawn)


def on_devices(body: Callable[..., Any], sizes: tuple[int, ...], check_vma: bool = False) -> Callable[..., Any]:
    """`body` on a mesh of CPU devices; argument and result have the mesh's dimensions in front."""
    names = cases.AXES[: len(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    spec = P(*names)

    def local(x: jax.Array) -> jax.Array:
        return body(x.reshape(x.shape[len(sizes) :])).reshape((1,) * len(sizes) + (-1, x.shape[-1]))

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma))


DEVICE_CASES = [
    cases.Case(cases.config(algorithm="ring", chunks=2), (8,), 61),
    cases.Case(cases.config(algorithm="two_ended_ring", format="int6", block=64, scale="byte", chunks=2), (5,), 40),
    cases.Case(
        cases.config(algorithm="two_shot", format="int4", block=32, codes="full_range", clip_search=True), (8,), 9
    ),
    cases.Case(cases.config(algorithm="two_ended_ring", codes="full_range", scale="byte", block=64), (16,), 33),
    cases.Case(cases.config(algorithm="two_ended_ring", chunks=2), (2, 4), 70),
    cases.Case(cases.config(algorithm="two_shot"), (2, 2, 2), 30),
    cases.Case(cases.config(algorithm="ring", format="bfloat16"), (4,), 7),
]


@pytest.mark.parametrize("case", DEVICE_CASES, ids=str)
def test_on_devices_in_shard_map(case: cases.Case) -> None:
    names = cases.AXES[: len(case.sizes)]
    x = cases.inputs(case)
    got = on_devices(lambda part: all_reduce(part, names, case.config), case.sizes)(jnp.asarray(x))
    cases.check_ranks(got, len(names))
    expected = ref.all_reduce(x, case.sizes, case.config)
    assert cases.same_bits(got, expected), cases.difference(got, expected)


@pytest.mark.parametrize("sizes", [(3,), (2, 3)])
@pytest.mark.parametrize("algorithm", cases.ALGORITHMS)
def test_reduce_scatter_and_all_gather(algorithm: str, sizes: tuple[int, ...]) -> None:
    """Both halves against the reference, with two leading dimensions and tokens that do not divide."""
    names = cases.AXES[: len(sizes)]
    config = cases.config(algorithm=algorithm, block=32, rotation=32, chunks=2)
    rng = np.random.default_rng(5)
    x = rng.standard_normal((*sizes, 2, 13, 64)).astype(np.float32)
    scale = np.exp(rng.standard_normal(64)).astype(np.float32)
    ranks = int(np.prod(sizes))

    @jax.jit
    def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(part: jax.Array) -> tuple[jax.Array, jax.Array]:
            shard = reduce_scatter(part, names, config, channel_scale=jnp.asarray(scale))
            return shard, all_gather(shard, names, config, channel_scale=jnp.asarray(scale), tokens=13)

        return cases.emulated(body, len(names))(x)

    shard, full = halves(x)
    expected = ref.reduce_scatter(x, sizes, config, scale)
    assert cases.same_bits(shard, expected), cases.difference(shard, expected)
    everything = ref.all_gather(expected, sizes, config, scale)[..., :13, :]
    cases.check_ranks(full, len(names))
    assert cases.same_bits(full, everything), cases.difference(full, everything)
    # The order of the shards: row-major over the axes, as lax.psum_scatter's.
    merged = np.moveaxis(np.asarray(shard).reshape(ranks, 2, -1, 64), 0, 1).reshape(2, -1, 64)
    total = x.sum(axis=tuple(range(len(sizes))))
    loudness = np.asarray(scale) * np.sqrt(ranks)
    np.testing.assert_allclose(merged[:, :13] / loudness, total / loudness, atol=0.1)
    np.testing.assert_array_equal(merged[:, 13:], 0)


@pytest.mark.parametrize("sizes", [(4,), (2, 3)])
def test_plain_halves_match_lax(sizes: tuple[int, ...]) -> None:
    """In float32 reduce_scatter and all_gather are lax.psum_scatter and lax.all_gather, in values and in order."""
    names = cases.AXES[: len(sizes)]
    config = cases.config(algorithm="psum", format="float32")
    ranks = int(np.prod(sizes))
    x = np.arange(ranks * ranks * 2 * 8, dtype=np.float32).reshape(*sizes, 2 * ranks, 8)
    got = on_devices(lambda part: reduce_scatter(part, names, config), sizes)(x)
    want = on_devices(lambda part: jax.lax.psum_scatter(part, names, scatter_dimension=0, tiled=True), sizes)(x)
    np.testing.assert_array_equal(got, want)
    got = on_devices(lambda part: all_gather(part, names, config), sizes)(want)
    want = on_devices(lambda part: jax.lax.all_gather(part, names, axis=0, tiled=True), sizes)(want)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
def test_psum_reference(format: str) -> None:
    """On numbers whose sum is the same in every order, psum is bitwise the reference's."""
    config = cases.config(algorithm="psum", format=format)
    x = np.random.default_rng(0).integers(-8, 8, (8, 5, 32)).astype(np.float32)
    got = on_devices(lambda part: all_reduce(part, "i", config), (8,))(x)
    assert cases.same_bits(got, ref.all_reduce(x, (8,), config))


def test_folded_weight_needs_only_the_inverse() -> None:
    """y = h W summed over ranks: with scale and rotation folded into W the result is the unfolded one, up to rounding
    of the weight, and its bits are the reference's."""
    rng = np.random.default_rng(1)
    ranks, tokens, hidden, features = 4, 9, 32, 256
    h = rng.standard_normal((ranks, tokens, hidden)).astype(np.float32)
    w = (rng.standard_normal((ranks, hidden, features)) * np.exp(rng.standard_normal(features))).astype(np.float32)
    scale = column_scale(jnp.asarray(w.reshape(-1, features)))
    config = cases.config(algorithm="two_shot")
    folded = np.stack([np.asarray(fold(jnp.asarray(part), config, scale)) for part in w])
    exact = np.einsum("rth,rhd->td", h.astype(np.float64), w.astype(np.float64))

    def run(partial: np.ndarray, is_folded: bool) -> np.ndarray:
        body = lambda part: all_reduce(part, "i", config, channel_scale=scale, folded=is_folded)  # noqa: E731
        got = jax.jit(cases.emulated(body, 1))(partial)
        assert cases.same_bits(got, ref.all_reduce(partial, (ranks,), config, np.asarray(scale), is_folded))
        return np.asarray(got)[0]

    relative = []
    for weights, is_folded in ((w, False), (folded, True)):
        got = run(np.einsum("rth,rhd->rtd", h, weights).astype(np.float32), is_folded)
        relative.append(float(np.sqrt(np.mean(((got - exact) / np.std(exact, axis=0)) ** 2))))
    assert max(relative) < 0.015, relative
    assert abs(relative[0] - relative[1]) < 0.1 * relative[0], "folding must not change the error"


@pytest.mark.parametrize("text", ["psum", "ring"])
def test_folded_is_undone_when_nothing_is_coded(text: str) -> None:
    """A folded weight with an uncoded path: the inverse still runs."""
    config = cases.config(algorithm=text, format="float32", rotation=128)
    x = np.random.default_rng(2).integers(-9, 9, (3, 4, 128)).astype(np.float32)
    scale = jnp.asarray(np.exp2(np.arange(128) % 5 - 2).astype(np.float32))
    rotated = np.stack([np.asarray(fold(jnp.asarray(part), config, scale)) for part in x])
    body = lambda part: all_reduce(part, "i", config, channel_scale=scale, folded=True)  # noqa: E731
    got = jax.jit(cases.emulated(body, 1))(rotated)
    np.testing.assert_array_equal(got[0], x.sum(axis=0))


def test_alternating_shapes_200_times() -> None:
    """Report 5: two shapes in turn, each call's values its own."""
    config = cases.config(algorithm="two_ended_ring", rotation=0, block=32, scale="float32")
    run = on_devices(lambda part: all_reduce(part, "i", config), (4,))
    order = random.Random(0)
    for call in range(200):
        tokens = 8 if order.random() < 0.5 else 13
        x = np.full((4, tokens, 32), float(call + 1), np.float32)
        # A float32 scale makes the largest number of a block exact up to 2^-17, so a constant block too.
        np.testing.assert_allclose(np.asarray(run(x)), 4 * (call + 1), rtol=1e-4)
