"""Measured errors against predicted ones: Gaussian partial sums, within a few per cent."""

import math

import cases
import jax
import numpy as np
import pytest

from equarx_serve.collectives import all_reduce, quantization_units

FEATURES, BLOCK = 256, 128


def mean_square_of_largest(count: int) -> float:
    """E[max |z|^2] of `count` standard normal numbers: the integral of 2 t P(max > t)."""
    t = np.linspace(0, 8, 8001)
    below = np.array([math.erf(v / math.sqrt(2)) for v in t]) ** count
    return float(np.trapezoid(2 * t * (1 - below), t))


def predicted(algorithm: str, sizes: tuple[int, ...], top: int) -> float:
    """rms error over rms of the sum: steps of largest / top, uniform errors of step^2 / 12, times the units."""
    one = mean_square_of_largest(BLOCK) / top**2 / 12
    return math.sqrt(one * quantization_units(algorithm, sizes))  # type: ignore[arg-type]


def measured(algorithm: str, sizes: tuple[int, ...], **fields: object) -> float:
    fields = {"block": BLOCK, "rotation": 0, "scale": "float32", **fields}
    config = cases.config(algorithm=algorithm, **fields)
    ranks = math.prod(sizes)
    x = np.random.default_rng(11).standard_normal((*sizes, 512, FEATURES)).astype(np.float32)
    names = cases.AXES[: len(sizes)]
    got = np.asarray(jax.jit(cases.emulated(lambda part: all_reduce(part, names, config), len(sizes)))(x))
    got = got.reshape(ranks, 512, FEATURES)[0]
    exact = x.astype(np.float64).sum(axis=tuple(range(len(sizes))))
    return float(np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)))


def check(algorithm: str, sizes: tuple[int, ...], **fields: object) -> float:
    got, want = measured(algorithm, sizes, **fields), predicted(algorithm, sizes, 127)
    assert got == pytest.approx(want, rel=0.05), f"{algorithm} {sizes}: measured {got:.5f}, predicted {want:.5f}"
    return got


@pytest.mark.parametrize("algorithm", cases.ALGORITHMS)
@pytest.mark.parametrize("n", [2, 4])
def test_few_ranks(algorithm: str, n: int) -> None:
    check(algorithm, (n,))


def test_eight_ranks_two_ended_beats_ring() -> None:
    ring, two_ended, two_shot = (check(algorithm, (8,)) for algorithm in cases.ALGORITHMS)
    assert two_shot < two_ended < ring


@pytest.mark.slow
def test_sixteen_ranks_two_ended_beats_ring() -> None:
    ring, two_ended, two_shot = (check(algorithm, (16,)) for algorithm in cases.ALGORITHMS)
    assert two_shot < two_ended < ring


def test_torus() -> None:
    check("two_ended_ring", (2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2)])
@pytest.mark.parametrize("algorithm", cases.ALGORITHMS)
def test_tori(algorithm: str, sizes: tuple[int, ...]) -> None:
    check(algorithm, sizes)


def test_rotation_keeps_the_error_of_gaussian_numbers_and_cures_loud_channels() -> None:
    check("two_shot", (4,), rotation=128)
    config_of = {"plain": 0, "rotated": 128}
    rng = np.random.default_rng(5)
    x = rng.standard_normal((4, 256, FEATURES)).astype(np.float32)
    x[..., 7] *= 30
    errors = {}
    for name, rotation in config_of.items():
        config = cases.config(algorithm="two_shot", block=BLOCK, rotation=rotation)
        got = np.asarray(jax.jit(cases.emulated(lambda part, c=config: all_reduce(part, "i", c), 1))(x))[0]
        quiet = np.arange(FEATURES // 2) != 7
        errors[name] = float(np.sqrt(np.mean((got - x.sum(axis=0))[:, : FEATURES // 2][:, quiet] ** 2)))
    assert errors["rotated"] < errors["plain"] / 3, errors


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        # Full range: largest / 128 instead of / 127, and no more; a byte scale is up to 1/8 too large, bfloat16 1/128.
        ({"codes": "full_range"}, (0.95, 1.03)),
        ({"scale": "bfloat16"}, (1.0, 1.03)),
        ({"scale": "byte"}, (1.03, 1.13)),
        ({"format": "int7"}, (127 / 63 * 0.97, 127 / 63 * 1.03)),
        ({"format": "int4", "codes": "full_range"}, (12, 18.5)),
    ],
    ids=str,
)
def test_options_move_the_error_as_they_should(fields: dict[str, object], factor: tuple[float, float]) -> None:
    ratio = measured("two_shot", (3,), **fields) / predicted("two_shot", (3,), 127)
    assert factor[0] < ratio < factor[1]


def test_clip_search_pays_at_four_bits() -> None:
    plain = measured("two_shot", (3,), format="int4", codes="full_range")
    searched = measured("two_shot", (3,), format="int4", codes="full_range", clip_search=True)
    assert searched < 0.96 * plain, (searched, plain)
