"""The portable backend: the schedule's rounds as lax.ppermute, two_shot's as lax.all_to_all and lax.all_gather.

Does: reduce-scatter and all-gather of float32 pieces along one axis, and over several axes in colours.
Assumes: it is called inside shard_map or vmap with the axis names bound; pieces are rotated, float32 and padded.
Leaves to others: padding, rotation and the final cast (`api.py`), the rounds (`schedule.py`), bytes (`blockwise.py`).

Shards: [ranks of axis 0, ranks of axis 1, ..., rows, features] in float32, rows cut into colours, chunks and pieces.
A phase along axis k removes its dimension (reduce) or brings it back (gather). What is added, and in which order, is
the same in `reference.py`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, UInt

from equarx_serve.collectives.blockwise import decode, encode
from equarx_serve.collectives.config import Algorithm
from equarx_serve.collectives.layout import Layout
from equarx_serve.collectives.schedule import AxisSchedule, Round, axis_schedule


@dataclass(frozen=True)
class Torus:
    """Where the pieces travel: real axes (more than one rank) in the order of the shards' dimensions.

    Attributes:
        orders: for each colour the order in which it goes over the axes, as positions in `names`.
        piece: rows in one message.
    """

    algorithm: Algorithm
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    chunks: int
    piece: int
    layout: Layout

    @property
    def rows(self) -> int:
        """Rows of one rank's shard, padding included."""
        return len(self.orders) * self.chunks * self.piece

    def schedule(self, axis: int) -> AxisSchedule:
        """The rounds along one axis."""
        return axis_schedule(self.algorithm, self.sizes[axis], self.chunks)


def reduce_scatter(shards: Float32[Array, "*ranks rows D"], torus: Torus) -> Float32[Array, "rows D"]:
    """This rank's shard of the sum, in float32, not yet coded. rows == torus.rows."""
    lead, features = shards.shape[:-2], shards.shape[-1]
    cut = shards.reshape(*lead, len(torus.orders), torus.chunks, torus.piece, features)
    sums = []
    for colour, order in enumerate(torus.orders):
        for chunk in range(torus.chunks):
            parts = cut[..., colour, chunk, :, :]
            left = list(range(len(torus.sizes)))
            for axis in order:
                parts = jnp.moveaxis(parts, left.index(axis), 0)
                parts = reduce_scatter_axis(parts, torus.names[axis], torus.schedule(axis), chunk, torus.layout)
                left.remove(axis)
            sums.append(parts)
    return jnp.concatenate(sums)


def all_gather(shard: Float32[Array, "rows D"], torus: Torus) -> Float32[Array, "*ranks rows D"]:
    """Every rank's shard, coded once by its owner; the owner too uses what the codes stand for."""
    rows = encode(shard, torus.layout).reshape(len(torus.orders), torus.chunks, torus.piece, -1)
    gathered = []
    for colour, order in enumerate(torus.orders):
        for chunk in range(torus.chunks):
            got = rows[colour, chunk]
            for axis in reversed(order):
                got = all_gather_axis(got, torus.names[axis], torus.schedule(axis), chunk)
            back = [order.index(axis) for axis in range(len(order))]
            gathered.append(got.transpose(*back, len(order), len(order) + 1))
    return decode(jnp.concatenate(gathered, axis=-2), torus.layout)


def reduce_scatter_axis(
    parts: Float32[Array, "n *rest t D"], axis_name: str, schedule: AxisSchedule, chunk: int, layout: Layout
) -> Float32[Array, "*rest t D"]:
    """The sum of the ranks' parts[k] at rank k, in float32 and not yet coded."""
    if schedule.in_rank_order:
        return _direct_reduce(parts, axis_name, schedule.ranks, layout)
    n = schedule.ranks
    rank = lax.axis_index(axis_name)

    def own(offset: int) -> Float32[Array, "*rest t D"]:
        return lax.dynamic_index_in_dim(parts, (rank + offset) % n, 0, keepdims=False)

    arrived: dict[int, Array] = {}
    for r in schedule.of("reduce", chunk):
        with jax.named_scope(f"reduce_{axis_name}_chunk{r.chunk}_chain{r.chain}_hop{r.hop}"):
            part = own(r.offset)
            if r.hop:
                part = part + decode(arrived[r.chain], layout)
            arrived[r.chain] = _send(encode(part, layout), axis_name, r, n)
    total = own(0)
    for chain in sorted(arrived):
        total = total + decode(arrived[chain], layout)
    return total


def all_gather_axis(
    rows: UInt[Array, "*rest t row"], axis_name: str, schedule: AxisSchedule, chunk: int
) -> UInt[Array, "n *rest t row"]:
    """Every rank's message rows on every rank, in rank order. Bytes are handed on unchanged."""
    n = schedule.ranks
    if schedule.in_rank_order:
        with jax.named_scope(f"gather_{axis_name}"):
            return lax.all_gather(rows, axis_name)
    held: dict[int, Array] = {0: rows}
    for r in schedule.of("gather", chunk):
        with jax.named_scope(f"gather_{axis_name}_chunk{r.chunk}_chain{r.chain}_hop{r.hop}"):
            # The receiver holds what its neighbour held: shard (its rank - shift) + offset.
            held[(r.offset - r.shift) % n] = _send(held[r.offset % n], axis_name, r, n)
    # held[j] is shard (rank + j) mod n; turn the ring so that shard 0 comes first.
    stacked = jnp.stack([held[j] for j in range(n)])
    twice = jnp.concatenate([stacked, stacked])
    return lax.dynamic_slice_in_dim(twice, (n - lax.axis_index(axis_name)) % n, n, 0)


def _send(message: UInt[Array, "*rest t row"], axis_name: str, r: Round, n: int) -> UInt[Array, "*rest t row"]:
    ring = [(rank, (rank + r.shift) % n) for rank in range(n)]
    return lax.ppermute(message, axis_name, ring)


def _direct_reduce(
    parts: Float32[Array, "n *rest t D"], axis_name: str, n: int, layout: Layout
) -> Float32[Array, "*rest t D"]:
    """Each part sent straight to its owner; added in rank order, the owner's own part uncoded."""
    with jax.named_scope(f"reduce_{axis_name}_direct"):
        rank = lax.axis_index(axis_name)
        arrived = lax.all_to_all(encode(parts, layout), axis_name, 0, 0)
        own = lax.dynamic_index_in_dim(parts, rank, 0, keepdims=False)
        total = None
        for source in range(n):
            part = jnp.where(rank == source, own, decode(arrived[source], layout))
            total = part if total is None else total + part
        assert total is not None
        return total
