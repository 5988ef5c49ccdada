"""Straight-through gradients: exactly psum's, in forward and reverse mode, with and without vma checking."""

from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from equarx_serve.collectives import all_gather, all_reduce, reduce_scatter


def sharded(body: Callable[..., Any], check_vma: bool, out_specs: P) -> Callable[..., Any]:
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    return jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=out_specs, check_vma=check_vma)


@pytest.mark.parametrize(("check_vma", "out_specs"), [(False, P()), (False, P("i")), (True, P("i"))])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_all_reduce_has_psums_gradient(check_vma: bool, out_specs: P, dtype: Any) -> None:
    config = cases.config(algorithm="two_shot", block=32, rotation=32)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((4, 16, 64)), dtype)
    weights = jnp.asarray(rng.standard_normal((4 if out_specs == P("i") else 1, 16, 64)), dtype)

    def psum(part: jax.Array) -> jax.Array:
        total = lax.psum(part.astype(jnp.float32), "i").astype(part.dtype)
        return lax.pcast(total, "i", to="varying") if check_vma else total

    ours = sharded(lambda part: all_reduce(part, "i", config), check_vma, out_specs)
    plain = sharded(psum, check_vma, out_specs)
    got = jax.jit(jax.grad(lambda x: (ours(x) * weights).astype(jnp.float32).sum()))(x)
    want = jax.jit(jax.grad(lambda x: (plain(x) * weights).astype(jnp.float32).sum()))(x)
    assert float(jnp.abs(want).max()) > 0
    np.testing.assert_array_equal(got, want)


def test_forward_mode() -> None:
    config = cases.config(algorithm="two_shot", block=32, rotation=32)
    x, t = (jnp.asarray(np.random.default_rng(i).standard_normal((4, 8, 64)), jnp.float32) for i in (0, 1))
    run = sharded(lambda part: all_reduce(part, "i", config), False, P())
    _, tangent = jax.jit(lambda x, t: jax.jvp(run, (x,), (t,)))(x, t)
    plain = jax.jit(sharded(lambda part: lax.psum(part, "i"), False, P()))
    np.testing.assert_array_equal(tangent, plain(t))


def test_halves_have_laxs_gradients() -> None:
    config = cases.config(algorithm="two_shot", block=32, rotation=32)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((4, 8, 64)), jnp.float32)

    def grad(op: Callable[..., Any], tokens: int) -> Any:
        weights = jnp.arange(4 * tokens * 64, dtype=jnp.float32).reshape(4, tokens, 64)
        run = sharded(lambda part: op(part[0])[None], False, P("i"))
        return jax.jit(jax.grad(lambda x: (run(x) * weights).sum()))(x)

    got = grad(lambda part: reduce_scatter(part, "i", config), tokens=2)
    want = grad(lambda part: lax.psum_scatter(part, "i", scatter_dimension=0, tiled=True), tokens=2)
    np.testing.assert_array_equal(got, want)

    got = grad(lambda part: all_gather(part, "i", config), tokens=32)
    want = grad(lambda part: lax.all_gather(part, "i", axis=0, tiled=True), tokens=32)
    np.testing.assert_array_equal(got, want)


def test_vma_checking_types_the_result_as_varying() -> None:
    """What docs/collective.md says: with check_vma=True an out_spec without the axis is refused by JAX."""
    config = cases.config(algorithm="two_shot", block=32, rotation=32)
    run = jax.jit(sharded(lambda part: all_reduce(part, "i", config), True, P()))
    with pytest.raises(ValueError, match="out_specs"):
        run(jnp.ones((4, 8, 64), jnp.float32))
