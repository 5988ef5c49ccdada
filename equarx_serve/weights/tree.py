"""The one thing that every loader gives: a named tree of arrays of which any slice can be read.

Does: says what a `Checkpoint` is, what a leaf is, and which facts of the architecture a file may tell.
Assumes: leaves have the names and shapes of the official Gemma checkpoint, joined by "/", for example
`layer_0/attn/q_einsum/w` [heads, d_model, head_dim]. A sharded load is then one `read` for each shard, with no
reshape.
Leaves to others: the formats (one module each), devices and shardings (`equarx_serve.gemma3.sharding`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped


@dataclass(frozen=True)
class LeafSpec:
    """One array of the tree: its shape and the dtype in which it is stored."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class ArchitectureFacts:
    """What a checkpoint says of its own architecture; enough to know which Gemma 3 it is, or that it is none.

    The 5:1 pattern of local and global layers and the local rope base are in no GGUF: the model's config has them.
    """

    layers: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    """Tokens that a local layer sees."""
    vocab: int
    context: int
    """Longest prompt that the model was trained for, in tokens."""
    rms_eps: float
    rope_base_global: float
    rope_scale_global: float
    """Positions of global layers are divided by this: 1 up to the 1B, 8 from the 4B up."""


@runtime_checkable
class Checkpoint(Protocol):
    """Weights on disk: nothing is in memory until `read`, and then only the slice asked for."""

    @property
    def facts(self) -> ArchitectureFacts | None:
        """What the file says of its architecture; None when the format says nothing."""
        ...

    @property
    def source(self) -> str:
        """Where the weights come from, in one line fit for a result record."""
        ...

    @property
    def leaves(self) -> Mapping[str, LeafSpec]:
        """Every leaf by its official name."""
        ...

    @property
    def tokenizer_path(self) -> Path | None:
        """The SentencePiece `.model` file that belongs to these weights; None when they came without one."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        """A C-contiguous copy of `leaves[name][index]`, one slice (step 1) for each axis, in the leaf's dtype."""
        ...


def whole(spec: LeafSpec) -> tuple[slice, ...]:
    """The index of the whole leaf."""
    return tuple(slice(0, size) for size in spec.shape)


def bounds(name: str, spec: LeafSpec, index: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
    """`index` as one (start, stop) pair for each axis, with start <= stop.

    An index that is not one slice of step 1 for each axis is a defect of the caller: a plain `ValueError`.
    """
    if len(index) != len(spec.shape) or any(part.step not in (None, 1) for part in index):
        raise ValueError(f"{name} has shape {spec.shape}: one slice of step 1 for each axis is needed, not {index}")
    ranges = (part.indices(size) for part, size in zip(index, spec.shape, strict=True))
    return tuple((start, max(start, stop)) for start, stop, _ in ranges)


def blocks(spec: LeafSpec, max_bytes: int) -> list[tuple[slice, ...]]:
    """The leaf cut along its first axis into consecutive indices of at most `max_bytes` (but at least one row)."""
    if not spec.shape:
        return [()]
    rest = whole(spec)[1:]
    rows = max(1, max_bytes * spec.shape[0] // max(spec.nbytes, 1))
    return [(slice(at, min(at + rows, spec.shape[0])), *rest) for at in range(0, spec.shape[0], rows)]
