"""The model's window on its ranks: where partial sums become sums.

The model knows three things of tensor parallelism: how many ranks there are, the mesh axis they lie on, and one
callable that turns a row-parallel layer's partial sums into sums. It imports no collective; whoever builds the model
hands the callable in.

    column-parallel   every rank multiplies the whole x by its columns of w: no communication
    row-parallel      every rank multiplies its part of x by its rows of w; the products are partial sums of the
                      whole result, and the AllReduce adds them up
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from equarx_serve.gemma3.sharding import TP_AXIS


@dataclass(frozen=True)
class ReducePoint:
    """Which AllReduce of the forward pass this is: the layer, and the projection that made the partial sums."""

    layer: int
    projection: str
    """"attn_vec_einsum" (attention output) or "linear" (MLP down)."""


@runtime_checkable
class AllReduce(Protocol):
    """Sums partial results over the ranks; same shape and dtype, the same bits on every rank."""

    def __call__(
        self, partial: Float[Array, "B T D"], point: ReducePoint, channel_scale: Float[Array, " D"] | None
    ) -> Float[Array, "B T D"]: ...


def exact_all_reduce(
    partial: Float[Array, "B T D"], point: ReducePoint, channel_scale: Float[Array, " D"] | None = None
) -> Float[Array, "B T D"]:
    """`lax.psum` in float32, one cast at the end: what every other AllReduce is compared with."""
    return jax.lax.psum(partial.astype(jnp.float32), TP_AXIS).astype(partial.dtype)


@dataclass(frozen=True)
class TensorParallel:
    """What the layers need to know of the ranks. With `size` 1 nothing communicates."""

    size: int = 1
    all_reduce: AllReduce = exact_all_reduce
    channel_scaled: bool = False
    """Whether each row-parallel layer holds a channel scale for its AllReduce."""

    def row_parallel(
        self,
        equation: str,
        x: Float[Array, "..."],
        w: Float[Array, "..."],
        point: ReducePoint,
        channel_scale: Float[Array, " D"] | None = None,
    ) -> Float[Array, "B T D"]:
        """`einsum(equation, x, w)` whose contraction is split over the ranks, summed by the AllReduce."""
        partial = jnp.einsum(equation, x, w)
        if self.size == 1:
            return partial
        with jax.named_scope(f"all_reduce_{point.projection}"):
            return self.all_reduce(partial, point, channel_scale)

    def vocabulary_lookup(self, table_vd: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of a table that is split over the vocabulary.

        The ranks that do not hold a token add zeros, so this sum is exact in any dtype and is never quantized.
        """
        if self.size == 1:
            return jnp.take(table_vd, tokens, axis=0)
        rows = table_vd.shape[0]
        local = tokens - jax.lax.axis_index(TP_AXIS) * rows
        mine = (local >= 0) & (local < rows)
        found = jnp.take(table_vd, jnp.where(mine, local, 0), axis=0)
        return jax.lax.psum(jnp.where(mine[..., None], found, jnp.zeros((), found.dtype)), TP_AXIS)
