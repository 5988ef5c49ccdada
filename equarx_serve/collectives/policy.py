"""What will run, and why: (shape, dtype, axis sizes, platform, config) -> `Plan`. A pure function.

Does: check the arguments, apply the two thresholds and the shape rules, choose how many pieces the tokens are cut into,
count the bytes, and say the reason in one sentence.
Assumes: nothing about devices; `platform` only decides how a psum's bytes are counted.
Leaves to others: running it (`api.py`, `xla.py`), remembering fallbacks (`counters.py`).
The same inputs give the same plan in every process: no clock, no environment, no device is read.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

import numpy as np

from equarx_serve.collectives.config import Algorithm, CollectiveConfig, CollectiveError, Format, nearest
from equarx_serve.collectives.layout import Layout, unsupported
from equarx_serve.collectives.schedule import axis_schedule, colours

Operation = Literal["all_reduce", "reduce_scatter", "all_gather"]
OPERATIONS: Final = get_args(Operation)
PLATFORMS: Final = ("cpu", "gpu", "tpu")


@dataclass(frozen=True)
class Plan:
    """What one call does. Bytes are what one rank sends in one call.

    Invariants: padded_tokens == ranks * len(colours) * chunks * tokens_per_piece >= tokens when it is our schedule;
    wire_bytes == payload_bytes + scale_bytes; ratio == wire_bytes / bf16_bytes.

    Attributes:
        algorithm: what runs: one of the configured ones, or `identity` on one rank.
        format: what is sent.
        ranks: product of the axis sizes.
        colours: for each colour (an equal part of the tokens) the order in which it goes over the axes.
        chunks: pieces of a colour's shard, so that coding one overlaps with sending another.
        tokens: token rows of the whole (unscattered) array, all leading dimensions together.
        padded_tokens: the same with padding.
        tokens_per_piece: rows in one message.
        steps: message times one after the other, over all phases; the chunks of one hop count as one step.
        bf16_bytes: what an honest bf16 collective sends for the unpadded array: 2 (n-1)/n * tokens * features * 2
            for an all_reduce, half of it for a reduce_scatter or an all_gather.
        fallback: True when something else runs than the config asked for.
        reason: one sentence.
    """

    operation: Operation
    algorithm: Algorithm | Literal["identity"]
    format: Format
    ranks: int
    colours: tuple[tuple[int, ...], ...]
    chunks: int
    tokens: int
    padded_tokens: int
    tokens_per_piece: int
    steps: int
    payload_bytes: int
    scale_bytes: int
    wire_bytes: int
    bf16_bytes: int
    ratio: float
    fallback: bool
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True)
class Tiling:
    """How the rows of one rank's shard are cut: [colours, chunks, tokens_per_piece].

    Invariant: rows == colours * chunks * tokens_per_piece.
    """

    colours: tuple[tuple[int, ...], ...]
    chunks: int
    tokens_per_piece: int
    rows: int


def tile(rows: int, axis_sizes: tuple[int, ...], algorithm: Algorithm, chunks: int) -> Tiling:
    """The pieces of a shard of `rows` rows: as many colours as there are real axes and as many chunks as asked for,
    but fewer where the padding would be felt (more than one row in eight)."""
    many = colours(axis_sizes)
    orders = colours(axis_sizes, enough_tokens=rows % len(many) == 0 or rows >= 8 * len(many))
    a_colour = -(-rows // len(orders))
    # two_shot has no hops to overlap with.
    chunks = 1 if algorithm == "two_shot" else min(chunks, a_colour)
    while a_colour % chunks and a_colour < 8 * chunks:
        chunks -= 1
    piece = -(-a_colour // chunks)
    return Tiling(orders, chunks, piece, piece * chunks * len(orders))


def check_array(shape: tuple[int, ...], dtype: Any) -> None:
    """Raises CollectiveError unless the array is [..., tokens, features] in bfloat16 or float32."""
    name = np.dtype(dtype).name
    if name == "float16":
        raise CollectiveError(
            "dtype float16: Gemma-sized activations pass 65504, its largest number; use bfloat16 or float32"
        )
    if name not in ("bfloat16", "float32"):
        raise CollectiveError(f"dtype {name}: must be bfloat16 or float32")
    if len(shape) < 2 or 0 in shape:
        raise CollectiveError(f"shape {shape}: must be [..., tokens, features] with nothing empty")


def explain(
    shape: tuple[int, ...],
    dtype: Any,
    axis_sizes: tuple[int, ...],
    platform: str = "tpu",
    config: CollectiveConfig | None = None,
    operation: Operation = "all_reduce",
) -> Plan:
    """What a collective does with an array of this shape and dtype on each rank.

    Args:
        shape: [..., tokens, features] of the array that each rank passes in.
        dtype: bfloat16 or float32.
        axis_sizes: ranks along each named axis, in the order of `axis_name`.
        platform: cpu, gpu or tpu. XLA:CPU widens a bfloat16 psum to float32, which the bytes show; nothing else
            depends on it.
        config: the default config if None.
        operation: all_reduce, reduce_scatter or all_gather.

    Raises:
        CollectiveError: a wrong dtype, shape, size or platform; with `on_unsupported="raise"` every fallback.
    """
    config = CollectiveConfig() if config is None else config
    check_array(tuple(shape), dtype)
    for word, given, choices in (("platform", platform, PLATFORMS), ("operation", operation, OPERATIONS)):
        if given not in choices:
            raise CollectiveError(f"{word}={given!r}: must be one of {', '.join(choices)}{nearest(given, choices)}")
    if not axis_sizes or any(type(size) is not int or size < 1 for size in axis_sizes):
        raise CollectiveError(f"axis_sizes={axis_sizes!r}: must be positive integers, one for each axis")
    call = _Call(operation, tuple(shape), np.dtype(dtype).itemsize, tuple(axis_sizes), platform, config)
    if call.ranks == 1:
        return call.plan("identity", "float32", "one rank: nothing to send")
    if config.algorithm == "psum":
        return call.plan("psum", config.format, f"psum in {config.format} as asked for")
    why = call.not_worth_it() or unsupported(config, call.features)
    if why is not None:
        return call.fall_back("psum", config.fallback, f"psum in {config.fallback}: {why}")
    if config.quantized and call.bf16_payload < config.quantize_min_bytes:
        limit = f"quantize_min_bytes={config.quantize_min_bytes}"
        return call.fall_back(
            config.algorithm,
            "bfloat16",
            f"{config.algorithm} in bfloat16: {call.bf16_payload} bytes (as bf16) are fewer than {limit}",
        )
    return call.plan(config.algorithm, config.format, f"{config.algorithm} in {config.format} as asked for")


@dataclass(frozen=True)
class _Call:
    """The arguments of `explain`, checked, and what follows from them."""

    operation: Operation
    shape: tuple[int, ...]
    itemsize: int
    axis_sizes: tuple[int, ...]
    platform: str
    config: CollectiveConfig

    @property
    def ranks(self) -> int:
        return math.prod(self.axis_sizes)

    @property
    def features(self) -> int:
        return self.shape[-1]

    @property
    def tokens(self) -> int:
        """Rows of the unscattered array."""
        rows = math.prod(self.shape[:-1])
        return rows * self.ranks if self.operation == "all_gather" else rows

    @property
    def shard_rows(self) -> int:
        """Rows that one rank owns, before padding to pieces. A reduce_scatter scatters only the token dimension."""
        if self.operation == "all_gather":
            return math.prod(self.shape[:-1])
        if self.operation == "reduce_scatter":
            return math.prod(self.shape[:-2]) * -(-self.shape[-2] // self.ranks)
        return -(-self.tokens // self.ranks)

    @property
    def bf16_payload(self) -> int:
        """Bytes of the whole array in bfloat16: what the thresholds look at."""
        return self.tokens * self.features * 2

    def not_worth_it(self) -> str | None:
        """Why a psum is the better choice, by the first threshold or by the padding; min_bytes=0 switches both off."""
        if self.config.min_bytes == 0:
            return None
        if self.bf16_payload < self.config.min_bytes:
            return f"{self.bf16_payload} bytes (as bf16) are fewer than min_bytes={self.config.min_bytes}"
        if unsupported(self.config, self.features):
            return None
        padded = self._tiling(self.config.algorithm).rows * self.ranks
        ratio = padded * Layout.of(self.config, self.features).row_bytes / self.bf16_payload
        if padded > self.tokens and ratio > 1:
            return f"{self.tokens} tokens padded to {padded} would send {ratio:.2f} times the bytes of bf16"
        return None

    def fall_back(self, algorithm: Algorithm, format: Format, reason: str) -> Plan:
        """The plan of a fallback, or the error if the config is strict."""
        if self.config.on_unsupported == "raise":
            raise CollectiveError(
                f"{self.operation} of {self.shape} over {self.axis_sizes} with {self.config.label()} cannot run as "
                f"asked for; on_unsupported='fallback' would run {reason}"
            )
        return self.plan(algorithm, format, reason, fallback=True)

    def _tiling(self, algorithm: Algorithm) -> Tiling:
        return tile(self.shard_rows, self.axis_sizes, algorithm, self.config.chunks)

    def _sent(self, whole: int) -> int:
        """What a rank sends of an array of `whole` bytes, rounded up: (n-1)/n, and twice that for an all_reduce."""
        ways = 2 if self.operation == "all_reduce" else 1
        return -(-ways * (self.ranks - 1) * whole // self.ranks)

    def plan(
        self, algorithm: Algorithm | Literal["identity"], format: Format, reason: str, fallback: bool = False
    ) -> Plan:
        bf16 = self._sent(self.bf16_payload)
        if algorithm == "psum" or algorithm == "identity":
            orders: tuple[tuple[int, ...], ...] = ()
            chunks, piece, padded, steps, scales = 1, self.shard_rows, self.tokens, 0, 0
            size = 4 if format == "float32" or self.platform == "cpu" else 2
            if self.operation == "all_gather" and algorithm == "psum":
                size = self.itemsize if self.platform != "cpu" else 4
            payload = self._sent(self.tokens * self.features * size)
        else:
            tiling = self._tiling(algorithm)
            orders, chunks, piece = tiling.colours, tiling.chunks, tiling.tokens_per_piece
            padded = tiling.rows * self.ranks
            layout = wire_layout(self.config, format, self.features)
            steps = self._steps(algorithm, orders[0])
            payload, scales = self._sent(padded * layout.payload_bytes), self._sent(padded * layout.scale_bytes)
        return Plan(
            operation=self.operation,
            algorithm=algorithm,
            format=format,
            ranks=self.ranks,
            colours=orders,
            chunks=chunks,
            tokens=self.tokens,
            padded_tokens=padded,
            tokens_per_piece=piece,
            steps=steps,
            payload_bytes=payload,
            scale_bytes=scales,
            wire_bytes=payload + scales,
            bf16_bytes=bf16,
            ratio=(payload + scales) / bf16 if bf16 else 1.0,
            fallback=fallback,
            reason=reason,
        )

    def _steps(self, algorithm: Algorithm, order: tuple[int, ...]) -> int:
        phases = [axis_schedule(algorithm, self.axis_sizes[axis]) for axis in order]
        reduce_steps = sum(phase.steps("reduce") for phase in phases)
        gather_steps = sum(phase.steps("gather") for phase in phases)
        return {
            "all_reduce": reduce_steps + gather_steps,
            "reduce_scatter": reduce_steps,
            "all_gather": gather_steps,
        }[self.operation]


def wire_layout(config: CollectiveConfig, format: Format, features: int) -> Layout:
    """The rows that are sent when `config` runs with `format` (its own, or a raw one it fell back to)."""
    if format != config.format:
        config = CollectiveConfig(algorithm=config.algorithm, format=format)
    return Layout.of(config, features)
