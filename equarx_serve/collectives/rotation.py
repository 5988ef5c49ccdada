"""Quality at no wire cost: a Hadamard rotation of neighbouring features and a scale a channel, both linear.

Does: `forward` (before the sum) and `inverse` (after it), the column-norm channel scale of a row-parallel weight, and
folding scale and forward rotation into that weight, so that only the inverse runs.
Assumes: features are the last dimension; the rotation length is a power of two that divides them.
Leaves to others: when to call it (`xla.py`: once before the sum and once after, never per hop).

Both commute with adding up partial sums, and a few loud channels are spread over their whole group (QuaRot,
arXiv 2404.00456, has the idea for weights and activations). The forward matrix has entries +1 and -1 only; the inverse
is the same matrix and one exact division by the length. What was divided by its channel scale is rounded to 16
significant bits (2^-17 of itself, nothing beside any code's step): a rounding of its own keeps a compiler from fusing
that product into the additions after it, which would change bits.
Order of the additions, the same in `reference.py`: butterflies at distance 1, 2, 4, ..., lower index minus upper index
in the upper place. Partial sums above 2^121 may overflow in a rotation of 128: then that block is NaN.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from equarx_serve.collectives.config import CollectiveConfig, CollectiveError

SCALED_MANTISSA_BITS: Final = 15


@functools.partial(jax.jit, static_argnames="length")
def hadamard(x: Float32[Array, "*lead D"], length: int) -> Float32[Array, "*lead D"]:
    """Each group of `length` features times the Hadamard matrix (Sylvester's order, entries +1 and -1)."""
    lead, features = x.shape[:-1], x.shape[-1]
    distance = 1
    while distance < length:
        pairs = x.reshape(*lead, features // (2 * distance), 2, distance)
        lower, upper = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([lower + upper, lower - upper], axis=-2).reshape(*lead, features)
        distance *= 2
    return x


def forward(
    x: Float32[Array, "*lead D"], length: int, channel_scale: Float[Array, " D"] | None
) -> Float32[Array, "*lead D"]:
    """Each channel divided by its scale, then rotated."""
    if channel_scale is not None:
        reciprocal = jnp.float32(1) / channel_scale.astype(jnp.float32)
        scaled = x * lax.broadcast_in_dim(reciprocal, x.shape, (x.ndim - 1,))
        x = lax.reduce_precision(scaled, exponent_bits=8, mantissa_bits=SCALED_MANTISSA_BITS)
    return hadamard(x, length) if length else x


def inverse(
    x: Float32[Array, "*lead D"], length: int, channel_scale: Float[Array, " D"] | None
) -> Float32[Array, "*lead D"]:
    """Undoes `forward` (up to the additions' rounding)."""
    if length:
        x = hadamard(x, length) * jnp.float32(1 / length)
    if channel_scale is not None:
        x = x * lax.broadcast_in_dim(channel_scale.astype(jnp.float32), x.shape, (x.ndim - 1,))
    return x


def column_scale(weight: Float[Array, "*contracted D"]) -> Float32[Array, " D"]:
    """The channel scale of a row-parallel weight: its column norms over their median. No data needed.

    Args:
        weight: the whole weight (all ranks' rows), output features last: o_proj `[heads, head_dim, D]`,
            down_proj `[hidden, D]`.
    """
    flat = weight.reshape(-1, weight.shape[-1]).astype(jnp.float32)
    norms = jnp.sqrt(jnp.sum(flat * flat, axis=0))
    positive = jnp.where(norms > 0, norms, jnp.median(norms))
    ratio = positive / jnp.median(norms)
    # All-zero columns, or an all-zero weight: nothing is sent there, any finite scale will do.
    return jnp.where(jnp.isfinite(ratio) & (ratio > 0), ratio, jnp.float32(1))


def fold(
    weight: Float[Array, "*contracted D"], config: CollectiveConfig, channel_scale: Float[Array, " D"] | None = None
) -> Float[Array, "*contracted D"]:
    """The weight with channel scale and forward rotation in it; use with `all_reduce(..., folded=True)`.

    The result has the weight's dtype. In bfloat16 the rotated weight is rounded once more (2^-9 of its size).

    Raises:
        CollectiveError: the rotation length does not divide the output features.
    """
    if config.rotation and weight.shape[-1] % config.rotation:
        raise CollectiveError(
            f"rotation={config.rotation} does not divide the weight's {weight.shape[-1]} output features "
            "(its last dimension)"
        )
    return forward(weight.astype(jnp.float32), config.rotation, channel_scale).astype(weight.dtype)
