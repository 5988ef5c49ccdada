"""What users import: `all_reduce`, `reduce_scatter`, `all_gather`, in place of lax.psum, psum_scatter and all_gather.

Does: ask the policy for a plan, count a fallback, pad, rotate, run the backend, rotate back, cast once; gradients.
Assumes: it is called where the axis names are bound: inside `jax.shard_map`, or `jax.vmap(axis_name=...)`, which
emulates any number of ranks on one device.
Leaves to others: every decision (`policy.py`), the steps (`schedule.py`, `xla.py`), the bytes (`blockwise.py`).

Gradients are straight-through: rounding counts as the identity, so derivatives (forward and reverse) are exactly those
of lax.psum, lax.psum_scatter or lax.all_gather, in float32 and not quantized. A channel scale counts as a constant.
With shard_map's check_vma=True the results are typed as varying over the axis (JAX can't see that they are equal):
name the axis in out_specs, or use check_vma=False.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from equarx_serve.collectives import xla
from equarx_serve.collectives.config import CollectiveConfig, CollectiveError
from equarx_serve.collectives.counters import count_fallback
from equarx_serve.collectives.policy import Operation, Plan, explain, wire_layout
from equarx_serve.collectives.rotation import forward, inverse

AxisName = str | tuple[str, ...]
Linear = Callable[[Array], Array]


def all_reduce(
    x: Float[Array, "*lead tokens D"],
    axis_name: AxisName,
    config: CollectiveConfig | None = None,
    *,
    channel_scale: Float[Array, " channels"] | None = None,
    folded: bool = False,
) -> Float[Array, "*lead tokens D"]:
    """The sum of `x` over all ranks of the named axes, the same bits on every rank.

    Args:
        x: this rank's partial sum, bfloat16 or float32. Any number of tokens; leading dimensions count as tokens.
        axis_name: one mesh axis or several; over several the array is reduced axis by axis (a torus).
        config: what travels and how; the default config if None.
        channel_scale: positive normal numbers, one a feature: features are divided by them before coding and
            multiplied after (`rotation.column_scale`). Without use to uncoded formats, unless `folded`.
        folded: `x` comes from a weight that `rotation.fold` has already scaled and rotated; only the inverse runs,
            for every format and on every fallback.

    Returns:
        The sum in x's shape and dtype: added in float32, cast once. A block with NaN or inf is NaN as a whole (with
        rotation: all features of the blocks and rotation groups that touch it), and nothing else is.

    Raises:
        CollectiveError: float16 or another dtype, a shape without tokens or features, a wrong channel scale; with
            `on_unsupported="raise"` whatever would fall back to psum, with the reason.

    Source: block-wise quantized ring AllReduce, EQuARX (arXiv 2506.17615).
    """
    config = CollectiveConfig() if config is None else config
    call = _Call.of("all_reduce", x.shape, x.dtype, axis_name, config, channel_scale, folded)

    def run(x: Array) -> Array:
        rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
        tokens, shard = rows.shape[0], -(-rows.shape[0] // call.plan.ranks)
        shards = _pad(rows, shard * call.plan.ranks).reshape(*call.real_sizes, shard, -1)
        torus = call.torus()
        mine = xla.reduce_scatter(_pad(call.before(shards), torus.rows, axis=-2), torus)
        full = xla.all_gather(mine, torus)[..., :shard, :]
        return call.after(full.reshape(-1, x.shape[-1])[:tokens]).reshape(x.shape)

    def psum(x: Array) -> Array:
        total = lax.psum(x.astype(call.psum_dtype), call.axes)
        return call.undo_fold(total)

    return call.finish(x, run, psum)


def reduce_scatter(
    x: Float[Array, "*lead tokens D"],
    axis_name: AxisName,
    config: CollectiveConfig | None = None,
    *,
    channel_scale: Float[Array, " channels"] | None = None,
    folded: bool = False,
) -> Float[Array, "*lead shard D"]:
    """The reduce half: rank r (row-major over the axes) gets tokens r * shard .. (r+1) * shard of the sum.

    As `lax.psum_scatter(x, axis_name, scatter_dimension=x.ndim - 2, tiled=True)`, but for any number of tokens:
    shard = ceil(tokens / ranks), and where that is not even the last ranks' surplus tokens are zeros. The sum is not
    coded again at its owner, so it has the hops' errors only. Arguments and errors as in `all_reduce`.
    """
    config = CollectiveConfig() if config is None else config
    call = _Call.of("reduce_scatter", x.shape, x.dtype, axis_name, config, channel_scale, folded)
    shard = -(-x.shape[-2] // call.plan.ranks)
    out_shape = (*x.shape[:-2], shard, x.shape[-1])

    def run(x: Array) -> Array:
        padded = _pad(x.astype(jnp.float32), shard * call.plan.ranks, axis=-2)
        lead, features = math.prod(x.shape[:-2]), x.shape[-1]
        by_rank = jnp.moveaxis(padded.reshape(lead, call.plan.ranks, shard, features), 1, 0)
        shards = by_rank.reshape(*call.real_sizes, lead * shard, features)
        torus = call.torus()
        mine = xla.reduce_scatter(_pad(call.before(shards), torus.rows, axis=-2), torus)
        return call.after(mine[: lead * shard]).reshape(out_shape)

    def psum(x: Array) -> Array:
        padded = _pad(x.astype(call.psum_dtype), shard * call.plan.ranks, axis=-2)
        mine = lax.psum_scatter(padded, call.axes, scatter_dimension=x.ndim - 2, tiled=True)
        return call.undo_fold(mine)

    return call.finish(x, run, psum)


def all_gather(
    x: Float[Array, "*lead shard D"],
    axis_name: AxisName,
    config: CollectiveConfig | None = None,
    *,
    channel_scale: Float[Array, " channels"] | None = None,
    tokens: int | None = None,
) -> Float[Array, "*lead tokens D"]:
    """The gather half: all ranks' tokens (row-major over the axes) one after the other, the same bits on every rank.

    As `lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True)`; a rank's own tokens too are what its codes say.

    Args:
        tokens: keep the first so many (undoes the padding of `reduce_scatter`); all if None. Others as in `all_reduce`.
    """
    config = CollectiveConfig() if config is None else config
    call = _Call.of("all_gather", x.shape, x.dtype, axis_name, config, channel_scale, False)
    everything = x.shape[-2] * call.plan.ranks
    kept = everything if tokens is None else tokens
    if not 1 <= kept <= everything:
        raise CollectiveError(
            f"tokens={tokens}: {call.plan.ranks} ranks of {x.shape[-2]} tokens hold 1 to {everything}"
        )

    def run(x: Array) -> Array:
        shard, features = x.shape[-2:]
        rows = call.before(x.astype(jnp.float32).reshape(-1, features))
        torus = call.torus()
        full = xla.all_gather(_pad(rows, torus.rows), torus)[..., : rows.shape[0], :]
        by_rank = jnp.moveaxis(full.reshape(call.plan.ranks, -1, shard, features), 0, 1)
        return call.after(by_rank.reshape(*x.shape[:-2], everything, features)[..., :kept, :])

    def psum(x: Array) -> Array:
        return lax.all_gather(x, call.axes, axis=x.ndim - 2, tiled=True)[..., :kept, :]

    return call.finish(x, run, psum)


class _Call:
    """One traced call: its plan, axes, and what comes before and after the wire."""

    def __init__(
        self,
        plan: Plan,
        axes: tuple[str, ...],
        sizes: tuple[int, ...],
        features: int,
        config: CollectiveConfig,
        channel_scale: Array | None,
        folded: bool,
    ) -> None:
        self.plan = plan
        self.axes = axes
        self.real = tuple(i for i, size in enumerate(sizes) if size > 1)
        self.real_sizes = tuple(sizes[i] for i in self.real)
        self.layout = wire_layout(config, plan.format, features)
        self.rotation = config.rotation
        self.channel_scale = None if channel_scale is None else lax.stop_gradient(channel_scale)
        self.folded = folded

    @classmethod
    def of(
        cls,
        operation: Operation,
        shape: tuple[int, ...],
        dtype: jnp.dtype,
        axis_name: AxisName,
        config: CollectiveConfig,
        channel_scale: Array | None,
        folded: bool,
    ) -> "_Call":
        axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        if not axes or len(set(axes)) < len(axes):
            raise CollectiveError(f"axis_name={axis_name!r}: must be one axis name or several different ones")
        sizes = tuple(lax.axis_size(axis) for axis in axes)
        # The platform decides how bytes are counted, not what runs; naming one here starts no backend.
        plan = explain(shape, dtype, sizes, "tpu", config, operation)
        if channel_scale is not None and channel_scale.shape != shape[-1:]:
            raise CollectiveError(f"channel_scale of shape {channel_scale.shape}: must be {shape[-1:]}, one a feature")
        if folded and config.rotation and shape[-1] % config.rotation:
            raise CollectiveError(
                f"folded=True: rotation length {config.rotation} does not divide {shape[-1]} features"
            )
        if plan.fallback:
            count_fallback(plan.reason)
        return cls(plan, axes, sizes, shape[-1], config, channel_scale, folded)

    @property
    def psum_dtype(self) -> DTypeLike:
        """What a psum adds in: bfloat16 only where that was asked for. The gradient of a coded path is float32."""
        plain_bf16 = self.plan.algorithm == "psum" and self.plan.format == "bfloat16"
        return jnp.bfloat16 if plain_bf16 else jnp.float32

    def torus(self) -> xla.Torus:
        """The plan in the backend's terms, axes of one rank left out."""
        orders = tuple(tuple(self.real.index(axis) for axis in order) for order in self.plan.colours)
        names = tuple(self.axes[i] for i in self.real)
        return xla.Torus(
            self.plan.algorithm,  # type: ignore[arg-type]
            names,
            self.real_sizes,
            orders,
            self.plan.chunks,
            self.plan.tokens_per_piece,
            self.layout,
        )

    def before(self, x: Float32[Array, "*lead D"]) -> Float32[Array, "*lead D"]:
        """Channel scale and rotation, unless the weight has them or nothing is coded."""
        if self.folded or not self.layout.quantized:
            return x
        return forward(x, self.rotation, self.channel_scale)

    def after(self, x: Float32[Array, "*lead D"]) -> Float32[Array, "*lead D"]:
        """Undoes `before`."""
        if not self.folded and not self.layout.quantized:
            return x
        return inverse(x, self.rotation, self.channel_scale)

    def undo_fold(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        """The inverse for what was never coded, only folded."""
        return inverse(x.astype(jnp.float32), self.rotation, self.channel_scale) if self.folded else x

    def finish(self, x: Array, run: Linear, psum: Linear) -> Array:
        """What the plan says, cast to x's dtype, with the gradient of `psum`."""
        if self.plan.algorithm == "identity":
            return self.undo_fold(x).astype(x.dtype)
        if self.plan.algorithm == "psum":
            return psum(x).astype(x.dtype)
        operation = self.plan.operation

        @jax.custom_jvp
        def straight_through(x: Array) -> Array:
            with jax.named_scope(f"{operation}_{self.plan.algorithm}_{self.plan.format}"):
                return run(x).astype(x.dtype)

        @straight_through.defjvp
        def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
            (x,), (t,) = primals, tangents
            result, tangent = straight_through(x), psum(t.astype(jnp.float32)).astype(x.dtype)
            # With check_vma=True a psum is typed as equal on all ranks and our result as varying, though it is equal.
            missing = tuple(sorted(_varying(result) - _varying(tangent)))
            return result, lax.pcast(tangent, missing, to="varying") if missing else tangent

        return straight_through(x)


def _varying(x: Array) -> frozenset[str]:
    """The mesh axes over which shard_map's type of x varies; none without check_vma."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _pad(x: Array, size: int, axis: int = 0) -> Array:
    """Zeros after the end of one axis."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)
