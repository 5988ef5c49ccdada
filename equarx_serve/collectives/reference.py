"""The oracle: every collective in NumPy, message by message for every rank, with the portable backend's arithmetic.

Does: `all_reduce`, `reduce_scatter`, `all_gather` on an array that holds all ranks' inputs, following the written-out
sends of `schedule.py`; returns what every rank would hold, each computed from its own messages.
Assumes: little-endian IEEE float32. Subnormal results count as zero, as on XLA:CPU and TPU.
Leaves to others: one message's arithmetic (`reference_codes.py`), speed. Nothing but tests calls this. It shares with
the backend only the config, the policy (where to cut), the schedule (what to send) and the layout (sizes), none of the
arithmetic.
`psum` is added in rank order here, but in the platform's order there: equal bits only where every order gives the same.
"""

import math

import ml_dtypes
import numpy as np

from equarx_serve.collectives.config import CollectiveConfig
from equarx_serve.collectives.policy import Plan, explain, wire_layout
from equarx_serve.collectives.reference_codes import F32, decode, encode, flush, hadamard, sixteen_bits
from equarx_serve.collectives.schedule import AxisSchedule, axis_schedule


def all_reduce(
    x: np.ndarray,
    axis_sizes: tuple[int, ...],
    config: CollectiveConfig,
    channel_scale: np.ndarray | None = None,
    folded: bool = False,
) -> np.ndarray:
    """x [*axis_sizes, ..., tokens, D], each rank's partial sum -> the same shape, each rank's result."""
    axes = len(axis_sizes)
    shape = x.shape[axes:]
    run = _Run(explain(shape, x.dtype, axis_sizes, "tpu", config), config, axis_sizes, shape[-1], channel_scale, folded)
    if run.plan.algorithm in ("identity", "psum"):
        return run.psum(x)
    rows = _f32(x).reshape(*axis_sizes, -1, shape[-1])
    tokens = rows.shape[axes]
    shard = -(-tokens // run.ranks)
    padded = _pad_rows(rows, shard * run.ranks)
    shards = run.before(padded.reshape(*axis_sizes, *axis_sizes, shard, shape[-1]))
    mine = run.reduce_scatter(_pad_rows(shards, run.rows))
    full = run.all_gather(mine)[..., :shard, :].reshape(*axis_sizes, -1, shape[-1])[..., :tokens, :]
    return run.after(full).astype(x.dtype).reshape(x.shape)


def reduce_scatter(
    x: np.ndarray, axis_sizes: tuple[int, ...], config: CollectiveConfig, channel_scale: np.ndarray | None = None
) -> np.ndarray:
    """x [*axis_sizes, ..., tokens, D] -> [*axis_sizes, ..., ceil(tokens / ranks), D]. No psum here."""
    axes = len(axis_sizes)
    *lead, tokens, features = x.shape[axes:]
    plan = explain(x.shape[axes:], x.dtype, axis_sizes, "tpu", config, "reduce_scatter")
    run = _Run(plan, config, axis_sizes, features, channel_scale, False)
    shard = -(-tokens // run.ranks)
    split = _pad_rows(_f32(x), shard * run.ranks).reshape(*axis_sizes, math.prod(lead), run.ranks, shard * features)
    by_rank = np.moveaxis(split, axes + 1, axes).reshape(*axis_sizes, *axis_sizes, -1, features)
    mine = run.reduce_scatter(_pad_rows(run.before(by_rank), run.rows))[..., : by_rank.shape[-2], :]
    return run.after(mine).astype(x.dtype).reshape(*axis_sizes, *lead, shard, features)


def all_gather(
    x: np.ndarray, axis_sizes: tuple[int, ...], config: CollectiveConfig, channel_scale: np.ndarray | None = None
) -> np.ndarray:
    """x [*axis_sizes, ..., shard, D] -> [*axis_sizes, ..., ranks * shard, D]. No psum here."""
    axes = len(axis_sizes)
    *lead, shard, features = x.shape[axes:]
    plan = explain(x.shape[axes:], x.dtype, axis_sizes, "tpu", config, "all_gather")
    run = _Run(plan, config, axis_sizes, features, channel_scale, False)
    rows = run.before(_f32(x).reshape(*axis_sizes, -1, features))
    full = run.all_gather(_pad_rows(rows, run.rows))[..., : rows.shape[-2], :]
    split = full.reshape(*axis_sizes, run.ranks, math.prod(lead), shard * features)
    merged = np.moveaxis(split, axes, axes + 1).reshape(*axis_sizes, *lead, run.ranks * shard, features)
    return run.after(merged).astype(x.dtype)


class _Run:
    """One plan over all ranks. Arrays start with the dimensions of the axes: whose rank's copy it is."""

    def __init__(
        self,
        plan: Plan,
        config: CollectiveConfig,
        axis_sizes: tuple[int, ...],
        features: int,
        channel_scale: np.ndarray | None,
        folded: bool,
    ) -> None:
        self.plan, self.config, self.axis_sizes, self.folded = plan, config, axis_sizes, folded
        self.layout = wire_layout(config, plan.format, features)
        self.ranks = plan.ranks
        self.rows = len(plan.colours) * plan.chunks * plan.tokens_per_piece
        self.scale = None if channel_scale is None else channel_scale.astype(F32)

    def before(self, x: np.ndarray) -> np.ndarray:
        if self.folded or not self.layout.quantized:
            return x
        if self.scale is not None:
            x = sixteen_bits(flush(x * (F32(1) / self.scale)))
        return hadamard(x, self.config.rotation)

    def after(self, x: np.ndarray) -> np.ndarray:
        if not self.folded and not self.layout.quantized:
            return x
        if self.config.rotation:
            x = flush(hadamard(x, self.config.rotation) * F32(1 / self.config.rotation))
        return x if self.scale is None else flush(x * self.scale)

    def psum(self, x: np.ndarray) -> np.ndarray:
        """Identity and psum: rank order, in the stated dtype."""
        dtype = F32 if self.plan.format == "float32" else ml_dtypes.bfloat16
        axes = len(self.axis_sizes)
        flat = x.reshape(-1, *x.shape[axes:])
        if len(flat) > 1:
            parts = flat.astype(dtype)
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            flat = np.broadcast_to(total, flat.shape)
        result = self.after(flat.astype(F32)) if self.folded else flat
        return result.astype(x.dtype).reshape(x.shape)

    def reduce_scatter(self, shards: np.ndarray) -> np.ndarray:
        """[*axes, *axes, rows, D] -> [*axes, rows, D]."""
        axes, features = len(self.axis_sizes), shards.shape[-1]
        cut = shards.reshape(*shards.shape[: 2 * axes], *self._cut(), features)
        out = np.zeros((*self.axis_sizes, *self._cut(), features), F32)
        for colour, order in enumerate(self.plan.colours):
            for chunk in range(self.plan.chunks):
                parts = cut[..., colour, chunk, :, :]
                left = list(range(axes))
                for axis in order:
                    parts = self._reduce_phase(parts, axis, axes + left.index(axis), chunk)
                    left.remove(axis)
                # What is left of the shard dimensions are axes of one rank.
                out[..., colour, chunk, :, :] = parts.reshape(*self.axis_sizes, *parts.shape[-2:])
        return out.reshape(*self.axis_sizes, self.rows, features)

    def all_gather(self, shard: np.ndarray) -> np.ndarray:
        """[*axes, rows, D] -> [*axes, *axes, rows, D]."""
        axes, features = len(self.axis_sizes), shard.shape[-1]
        rows = encode(shard, self.layout).reshape(*self.axis_sizes, *self._cut(), -1)
        out = np.zeros((*self.axis_sizes, *self.axis_sizes, *rows.shape[axes:]), np.uint8)
        for colour, order in enumerate(self.plan.colours):
            for chunk in range(self.plan.chunks):
                held = rows[..., colour, chunk, :, :]
                done: list[int] = []
                for axis in reversed(order):
                    held = self._gather_phase(held, axis, chunk)
                    done.insert(0, axis)
                back = [axes + done.index(axis) for axis in sorted(done)]
                held = held.transpose(*range(axes), *back, held.ndim - 2, held.ndim - 1)
                target = out[..., colour, chunk, :, :]
                target[...] = held.reshape(target.shape)
        return decode(out, self.layout).reshape(*self.axis_sizes, *self.axis_sizes, self.rows, features)

    def _cut(self) -> tuple[int, int, int]:
        return len(self.plan.colours), self.plan.chunks, self.plan.tokens_per_piece

    def _schedule(self, axis: int) -> AxisSchedule:
        return axis_schedule(self.plan.algorithm, self.axis_sizes[axis], self.plan.chunks)  # type: ignore[arg-type]

    def _reduce_phase(self, parts: np.ndarray, axis: int, shard_axis: int, chunk: int) -> np.ndarray:
        """One phase for every line of ranks along `axis`: the shard dimension goes, its owner's sum stays."""
        schedule = self._schedule(axis)
        by_shard = np.moveaxis(parts, (axis, shard_axis), (0, 1))  # [rank, shard, other ranks and shards..., t, D]
        arrived: dict[tuple[int, int, int], np.ndarray] = {}  # (receiver, shard, chain or sender) -> message
        for send in schedule.sends():
            if send.kind != "reduce" or send.chunk != chunk:
                continue
            part = by_shard[send.sender, send.shard]
            if send.hop:
                part = flush(part + decode(arrived.pop((send.sender, send.shard, send.chain)), self.layout))
            place = send.sender if schedule.in_rank_order else send.chain
            arrived[send.receiver, send.shard, place] = encode(part, self.layout)
        sums = []
        for owner in range(schedule.ranks):
            inbox = {place: decode(m, self.layout) for (r, k, place), m in arrived.items() if r == owner and k == owner}
            own = by_shard[owner, owner]
            terms = [own, *(inbox[place] for place in sorted(inbox))]
            if schedule.in_rank_order:
                inbox[owner] = own
                terms = [inbox[rank] for rank in range(schedule.ranks)]
            total = terms[0]
            for term in terms[1:]:
                total = flush(total + term)
            sums.append(total)
        return np.moveaxis(np.stack(sums), 0, axis)

    def _gather_phase(self, rows: np.ndarray, axis: int, chunk: int) -> np.ndarray:
        """One phase for every line of ranks along `axis`: [*axes, ...] -> [*axes, shard, ...]."""
        n = self.axis_sizes[axis]
        by_rank = np.moveaxis(rows, axis, 0)
        held = {(rank, rank): by_rank[rank] for rank in range(n)}  # (rank, shard) -> message
        for send in self._schedule(axis).sends():
            if send.kind == "gather" and send.chunk == chunk:
                held[send.receiver, send.shard] = held[send.sender, send.shard]
        full = np.stack([np.stack([held[rank, shard] for shard in range(n)]) for rank in range(n)])
        return np.moveaxis(np.moveaxis(full, 0, axis + 1), 0, len(self.axis_sizes))


def _f32(x: np.ndarray) -> np.ndarray:
    return flush(x.astype(F32))


def _pad_rows(x: np.ndarray, rows: int) -> np.ndarray:
    widths = [(0, 0)] * x.ndim
    widths[-2] = (0, rows - x.shape[-2])
    return np.pad(x, widths)
