"""One generator of cases for every sweep over the collectives, and the runner that compares backend and reference.

A case is (config, axis sizes, shape). `grid()` is the whole grid of the acceptance: every algorithm, format, block,
number of ranks and torus; codes, scales, rotation and clip search take turns so that each meets each format and block.
Both dtypes are compared in every case: the bf16 input is the same numbers, and only the last cast differs.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from equarx_serve.collectives import CollectiveConfig, all_reduce
from equarx_serve.collectives import reference as ref

ALGORITHMS = ("ring", "two_ended_ring", "two_shot")
CODED = ("int8", "int7", "int6", "int5", "int4", "fp8_e4m3")
FORMATS = (*CODED, "bfloat16", "float32")
SIZES = ((1,), (2,), (3,), (4,), (8,), (16,), (2, 2), (2, 4), (2, 2, 2))
CODES = ("symmetric", "full_range")
SCALES = ("float32", "bfloat16", "byte")
FEATURES = 256
BLOCKS = (32, 128, 0)
AXES = ("i", "j", "k")


@dataclass(frozen=True)
class Case:
    """One comparison: shape is [tokens, features] of a rank."""

    config: CollectiveConfig
    sizes: tuple[int, ...]
    tokens: int
    features: int = FEATURES

    def __str__(self) -> str:
        return f"{self.config}-{'x'.join(map(str, self.sizes))}-{self.tokens}"


def config(**fields: Any) -> CollectiveConfig:
    """A config that is never too small to run."""
    return CollectiveConfig(
        **{"min_bytes": 0, "quantize_min_bytes": 0, "on_unsupported": "raise", "chunks": 1, **fields}
    )


def grid() -> Iterator[Case]:
    """Every (algorithm, format, block, sizes); the other options are drawn, always the same ones."""
    draw = random.Random(3)
    for sizes, format, block, algorithm in itertools.product(SIZES, FORMATS, BLOCKS, ALGORITHMS):
        if format not in CODED and block != BLOCKS[0]:
            continue
        codes, scale, rotation = draw.choice(CODES), draw.choice(SCALES), draw.choice((0, 32, 128))
        yield Case(
            config(
                algorithm=algorithm,
                format=format,
                block=block,
                codes="symmetric" if format == "fp8_e4m3" else codes,
                scale=scale,
                rotation=rotation,
                clip_search=format == "int4" and block == 32,
                chunks=draw.choice((1, 1, 1, 1, 1, 2)),
            ),
            sizes,
            tokens=16 * len(sizes) - 3,
        )


SAMPLE = {
    ((2,), "int4", 32, "ring"),
    ((3,), "int7", 0, "two_shot"),
    ((4,), "int5", 128, "two_ended_ring"),
    ((8,), "int6", 128, "two_shot"),
    ((16,), "fp8_e4m3", 0, "two_ended_ring"),
    ((2, 2), "int8", 128, "ring"),
    ((2, 4), "bfloat16", 32, "two_ended_ring"),
    ((2, 2, 2), "int8", 32, "two_shot"),
    ((2, 2), "float32", 32, "ring"),
    ((3,), "int4", 128, "two_ended_ring"),
}
"""Cheap to compile, and every algorithm, format, block and size is there."""


def sample() -> tuple[Case, ...]:
    """The few cases of the grid that the quick suite runs."""
    return tuple(c for c in grid() if (c.sizes, c.config.format, c.config.block, c.config.algorithm) in SAMPLE)


def codec_options() -> Iterator[Case]:
    """Every combination of what a message may hold, on three ranks: format, block, codes, scale, clip (few bits)."""
    for format, block, codes, scale, clip in itertools.product(CODED, BLOCKS, CODES, SCALES, (False, True)):
        if format == "fp8_e4m3" and codes == "full_range":
            continue
        if clip and format not in ("int6", "int5", "int4"):
            continue
        yield Case(
            config(algorithm="two_ended_ring", format=format, block=block, codes=codes, scale=scale, clip_search=clip),
            (3,),
            tokens=5,
        )


def inputs(case: Case, seed: int = 0) -> np.ndarray:
    """Partial sums [*sizes, tokens, features] in bf16: heavy tails, a giant token, a zero block, loud channels."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, (*case.sizes, case.tokens, case.features)) * np.exp(rng.standard_normal(case.features))
    x[..., case.tokens // 2, :] *= 1e4
    x[..., 0, : case.features // 2] = 0
    return x.astype(ml_dtypes.bfloat16)


def emulated(body: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """`body` for every rank at once on one device: axis names bound by nested vmaps, outermost first."""
    for name in reversed(AXES[:axes]):
        body = jax.vmap(body, axis_name=name)
    return body


def same_bits(a: Any, b: Any) -> bool:
    """Equal shape, dtype and bits; any NaN equals any NaN."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    unsigned = {2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
    return bool(np.all((a.view(unsigned) == b.view(unsigned)) | (np.isnan(wide_a) & np.isnan(wide_b))))


def check_case(case: Case) -> None:
    """Backend and reference agree in every bit, in both dtypes, and so do all ranks. One compile for both dtypes."""
    x = inputs(case)
    names = AXES[: len(case.sizes)]

    @jax.jit
    def both(bf16: jax.Array) -> tuple[jax.Array, jax.Array]:
        run = emulated(lambda part: all_reduce(part, names, case.config), len(names))
        return run(bf16.astype(jnp.float32)), run(bf16)

    for result, given in zip(both(jnp.asarray(x)), (x.astype(np.float32), x), strict=True):
        check_ranks(result, len(names))
        expected = ref.all_reduce(given, case.sizes, case.config)
        assert same_bits(result, expected), f"{case}: {difference(result, expected)}"


def check_ranks(result: Any, axes: int) -> None:
    """Every rank holds the same bits."""
    ranks = np.asarray(result).reshape(-1, *result.shape[axes:])
    for rank in range(1, len(ranks)):
        assert same_bits(ranks[rank], ranks[0]), f"rank {rank} and rank 0: {difference(ranks[rank], ranks[0])}"


def difference(a: Any, b: Any) -> str:
    """The first coordinate that differs, with both values."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    if a.shape != b.shape:
        return f"shapes {a.shape} and {b.shape}"
    where = np.argwhere((a != b) & ~(np.isnan(a) & np.isnan(b)))
    if not len(where):
        return "equal as numbers, not in bits or dtype"
    first = tuple(int(i) for i in where[0])
    return f"{len(where)} of {a.size} differ, first at {first}: {a[first]} and {b[first]}"
