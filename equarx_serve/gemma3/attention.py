"""What a token may see, where it stands, and the attention kernel itself.

Masks come from positions and validity alone, so padding may lie on either side or both: a query sees a key when the
key is a real token, does not come later, and (in local layers) is fewer than `window` positions back.

`attend` is the one place that names an attention implementation; a TPU kernel takes its place here.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

QUERY_BLOCK = 1024
"""Longer prompts attend this many queries at a time, so that scores take [N, 1024, T] and not [N, T, T]."""


def positions_of(valid: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Position of each real token in its own row, from 0. Padding gets its neighbour's position; nobody reads it."""
    return jnp.maximum(jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1, 0)


def rotary_angles(
    positions: Int[Array, "B T"], head_dim: int, base: float, scale: float
) -> tuple[Float[Array, "B T 1 H2"], Float[Array, "B T 1 H2"]]:
    """Cosine and sine of the rotary embedding (half-split form), f32."""
    exponent = 2.0 * jnp.arange(head_dim // 2, dtype=jnp.float32) / head_dim
    angle = positions[..., None].astype(jnp.float32) / (base**exponent)[None, None, :] / scale
    return jnp.cos(angle)[:, :, None, :], jnp.sin(angle)[:, :, None, :]


def rotate(
    x: Float[Array, "B T N H"], angles: tuple[Float[Array, "B T 1 H2"], Float[Array, "B T 1 H2"]]
) -> Float[Array, "B T N H"]:
    """Rotary position embedding: (first half, second half) turned by the angle, in f32, back in x's dtype."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def visible(
    q_positions: Int[Array, "B Q"], k_positions: Int[Array, "B S"], k_valid: Bool[Array, "B S"], window: int | None
) -> Bool[Array, "B 1 Q S"]:
    """True where query may see key; `window` None: a global layer."""
    back = q_positions[:, :, None] - k_positions[:, None, :]
    seen = (back >= 0) & k_valid[:, None, :]
    if window is not None:
        seen &= back < window
    return seen[:, None]


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    k_valid: Bool[Array, "B S"],
    window: int | None,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Masked softmax attention with grouped KV heads (N a multiple of K), by `jax.nn.dot_product_attention`."""

    def block(q_block: Float[Array, "B Q N H"], positions: Int[Array, "B Q"]) -> Float[Array, "B Q N H"]:
        mask = visible(positions, k_positions, k_valid, window)
        # The library promotes bf16 logits to f32 by itself; a program in strict promotion mode would refuse that.
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(q_block, k, v, mask=mask, scale=scale)

    length = q.shape[1]
    if length <= QUERY_BLOCK:
        return block(q, q_positions)
    # A remainder attends on its own: padding q would cost more code than a second call.
    whole = length // QUERY_BLOCK * QUERY_BLOCK
    blocks = (
        jnp.moveaxis(q[:, :whole].reshape(q.shape[0], -1, QUERY_BLOCK, *q.shape[2:]), 1, 0),
        jnp.moveaxis(q_positions[:, :whole].reshape(q.shape[0], -1, QUERY_BLOCK), 1, 0),
    )
    out = jnp.moveaxis(jax.lax.map(lambda b: block(*b), blocks), 0, 1).reshape(q[:, :whole].shape)
    if whole == length:
        return out
    return jnp.concatenate([out, block(q[:, whole:], q_positions[:, whole:])], axis=1)
