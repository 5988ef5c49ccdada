"""The plan: right bytes, right reason, the same in every process; and the counter of fallbacks."""

import math
import subprocess
import sys

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equarx_serve.collectives import (
    CollectiveConfig,
    CollectiveError,
    all_gather,
    all_reduce,
    explain,
    fallback_counts,
    reset_fallback_counts,
)
from equarx_serve.collectives.policy import tile

DEFAULT = CollectiveConfig()


def plan(text: str, shape: tuple[int, ...], sizes: tuple[int, ...], platform: str = "tpu"):  # type: ignore[no-untyped-def]
    return explain(shape, jnp.bfloat16, sizes, platform, CollectiveConfig.parse(text))


@pytest.mark.parametrize(
    ("text", "features", "ratio"),
    [
        ("int8:block=128,codes=symmetric,scale=float32", 5376, 132 / 256),
        ("int8:block=256,codes=symmetric,scale=float32", 2560, 260 / 512),
        ("int8:block=token,codes=symmetric,scale=float32", 640, 644 / 1280),
        ("int8:block=64,codes=full_range,scale=byte", 640, 651 / 1280),
        ("int8:block=128,scale=bfloat16", 640, 650 / 1280),
        ("int7:block=64,codes=full_range,scale=byte", 640, 571 / 1280),
        ("int6:block=64,codes=full_range,scale=byte", 640, 491 / 1280),
        ("int5:block=64,codes=full_range,scale=byte", 640, 411 / 1280),
        ("int4:block=64,codes=full_range,scale=byte", 640, 331 / 1280),
        ("fp8:block=128,codes=symmetric,scale=float32", 640, 132 / 256),
        ("bf16:algorithm=ring", 640, 1.0),
        ("f32:algorithm=ring", 640, 2.0),
    ],
)
@pytest.mark.parametrize("sizes", [(4,), (8,), (2, 4), (2, 2, 2)])
def test_wire_ratio(text: str, features: int, ratio: float, sizes: tuple[int, ...]) -> None:
    got = plan(text, (768, features), sizes)
    n = math.prod(sizes)
    assert not got.fallback
    assert got.padded_tokens == 768
    assert got.bf16_bytes == 2 * (n - 1) * 768 * features * 2 // n
    assert got.wire_bytes == got.payload_bytes + got.scale_bytes
    assert got.ratio == pytest.approx(ratio, rel=1e-12)


def test_goals_of_the_wire() -> None:
    byte = "block=64,codes=full_range,scale=byte"
    for sizes in ((4,), (2, 4), (2, 2, 2)):
        assert plan("int8:block=128,codes=symmetric,scale=float32", (1536, 5376), sizes).ratio <= 0.516
        assert plan(f"int8:{byte}", (1536, 640), sizes).ratio <= 0.51
        assert plan("int8:block=token,codes=symmetric,scale=float32", (1536, 640), sizes).ratio <= 0.504
        assert plan(f"int6:{byte}", (1536, 640), sizes).ratio <= 0.385
        assert plan(f"int4:{byte}", (1536, 640), sizes).ratio <= 0.26


@pytest.mark.parametrize(
    ("text", "shape", "sizes", "algorithm", "words"),
    [
        ("int8:min_bytes=1000000", (64, 640), (4,), "psum", ["81920 bytes", "min_bytes=1000000"]),
        ("int8:block=96,rotation=none", (512, 640), (4,), "psum", ["block 96", "640"]),
        ("int8:block=10", (512, 650), (4,), "psum", ["rotation length 128", "650"]),
        ("int5:block=13,rotation=none", (512, 676), (4,), "psum", ["groups of 8", "676"]),
        ("int8:min_bytes=1", (3, 640), (8,), "psum", ["3 tokens padded to 8", "times the bytes of bf16"]),
        (
            "int8:quantize_min_bytes=1000000",
            (512, 640),
            (4,),
            DEFAULT.algorithm,
            ["bfloat16", "quantize_min_bytes=1000000"],
        ),
    ],
)
def test_fallbacks_say_why(
    text: str, shape: tuple[int, ...], sizes: tuple[int, ...], algorithm: str, words: list[str]
) -> None:
    got = plan(text, shape, sizes)
    assert got.fallback
    assert got.algorithm == algorithm
    for word in words:
        assert word in got.reason
    with pytest.raises(CollectiveError) as error:
        plan(text + ",on_unsupported=raise", shape, sizes)
    for word in words:
        assert word in str(error.value)


def test_min_bytes_zero_always_takes_the_path() -> None:
    got = plan("int8:min_bytes=0,quantize_min_bytes=0", (1, 640), (8,))
    assert (got.algorithm, got.format, got.fallback) == (DEFAULT.algorithm, "int8", False)
    assert (got.padded_tokens, got.ratio > 1) == (8, True)
    assert not plan("int8:min_bytes=0", (512, 640), (4,)).fallback


def test_one_rank_is_the_identity() -> None:
    got = plan("int8", (5, 640), (1, 1))
    assert (got.algorithm, got.wire_bytes, got.fallback, got.ratio) == ("identity", 0, False, 1.0)


def test_psum_bytes() -> None:
    assert plan("bf16", (512, 640), (4,)).ratio == 1.0
    assert plan("bf16", (512, 640), (4,), "cpu").ratio == 2.0, "XLA:CPU widens bf16 on the wire"
    assert plan("f32", (512, 640), (4,)).ratio == 2.0


@pytest.mark.parametrize(
    ("shape", "dtype", "sizes", "platform", "words"),
    [
        ((8, 64), jnp.float16, (2,), "tpu", ["float16", "65504"]),
        ((8, 64), jnp.int32, (2,), "tpu", ["int32", "bfloat16 or float32"]),
        ((64,), jnp.float32, (2,), "tpu", ["(64,)", "tokens, features"]),
        ((0, 64), jnp.float32, (2,), "tpu", ["(0, 64)", "empty"]),
        ((8, 64), jnp.float32, (), "tpu", ["axis_sizes=()"]),
        ((8, 64), jnp.float32, (0,), "tpu", ["axis_sizes=(0,)"]),
        ((8, 64), jnp.float32, (2,), "tpuv5", ["'tpuv5'", "did you mean 'tpu'?"]),
    ],
)
def test_wrong_arguments(shape, dtype, sizes, platform, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CollectiveError) as error:
        explain(shape, dtype, sizes, platform, DEFAULT)
    for word in words:
        assert word in str(error.value)


def test_fp16_is_refused_by_the_op() -> None:
    """Report 4 and 12."""
    run = cases.emulated(lambda x: all_reduce(x, "i", DEFAULT), 1)
    with pytest.raises(CollectiveError, match="float16"):
        run(jnp.ones((2, 8, 128), jnp.float16))


def test_op_argument_errors() -> None:
    x = jnp.ones((2, 8, 128), jnp.float32)
    config = cases.config()
    with pytest.raises(CollectiveError, match="channel_scale of shape"):
        cases.emulated(lambda x: all_reduce(x, "i", config, channel_scale=jnp.ones(64)), 1)(x)
    with pytest.raises(CollectiveError, match="axis_name"):
        cases.emulated(lambda x: all_reduce(x, ("i", "i"), config), 1)(x)
    with pytest.raises(CollectiveError, match="tokens=17"):
        cases.emulated(lambda x: all_gather(x, "i", config, tokens=17), 1)(x)
    with pytest.raises(CollectiveError, match="folded"):
        cases.emulated(lambda x: all_reduce(x, "i", CollectiveConfig.parse("f32:rotation=128"), folded=True), 1)(
            x[..., :64]
        )


def test_fallbacks_are_counted_by_reason() -> None:
    reset_fallback_counts()
    run = jax.jit(cases.emulated(lambda x: all_reduce(x, "i", CollectiveConfig(block=96, min_bytes=0)), 1))
    x = np.random.default_rng(0).integers(-9, 9, (2, 8, 128)).astype(np.float32)
    np.testing.assert_array_equal(run(x)[0], x.sum(axis=0))
    run(x)
    counts = fallback_counts()
    assert list(counts.values()) == [1], "counted when traced, not when called"
    assert "block 96 does not divide the feature size 128" in next(iter(counts))
    cases.emulated(lambda x: all_reduce(x, "i", cases.config()), 1)(x)
    assert fallback_counts() == counts, "a plan that runs as asked for is no fallback"
    reset_fallback_counts()
    assert fallback_counts() == {}


def test_same_plan_in_two_processes() -> None:
    """Report 3: no tuner, no clock, no environment: two fresh processes and this one agree."""
    script = (
        "import jax.numpy as jnp\n"
        "from equarx_serve.collectives import CollectiveConfig, explain\n"
        "for text in ('int8', 'int6:algorithm=ring,chunks=4', 'bf16'):\n"
        "    for shape in ((1, 640), (512, 640), (77, 5376)):\n"
        "        for sizes in ((4,), (2, 4), (2, 2, 2)):\n"
        "            print(explain(shape, jnp.bfloat16, sizes, 'tpu', CollectiveConfig.parse(text)))\n"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120).stdout
        for _ in range(2)
    ]
    assert outputs[0] == outputs[1]
    assert str(plan("int8", (512, 640), (2, 4))) in outputs[0]


@settings(max_examples=200)
@given(
    st.integers(1, 500),
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    st.sampled_from(cases.ALGORITHMS),
    st.integers(1, 8),
)
def test_tiling_invariants(rows: int, sizes: tuple[int, ...], algorithm: str, chunks: int) -> None:
    tiling = tile(rows, sizes, algorithm, chunks)  # type: ignore[arg-type]
    assert tiling.rows == len(tiling.colours) * tiling.chunks * tiling.tokens_per_piece
    assert 1 <= tiling.chunks <= chunks
    assert rows <= tiling.rows <= rows + max(rows // 4, 0), "padding is at most a quarter, and none on few rows"


def test_padding_only_as_needed() -> None:
    for tokens in (1, 5, 8, 64, 512, 513, 2048):
        got = plan("int8:min_bytes=0,quantize_min_bytes=0,chunks=4", (tokens, 640), (8,))
        least = -(-tokens // 8) * 8
        assert least <= got.padded_tokens <= least * 1.125
