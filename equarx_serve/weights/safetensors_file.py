"""Writes a safetensors file leaf by leaf, and reads slices of one.

Does: `write` streams: header first, then one block of one leaf at a time, so that memory holds a block and never the
tree. `SafetensorsCheckpoint` reads exactly the bytes of a slice with `pread`, straight into the result.
Why not the library for both: its `save_file` wants every tensor at once (1.07 GB for the 270M) and `safe_open` maps
the file. The library still judges every header (`safe_open` checks sizes, overlaps and gaps) before a byte is read.
Assumes: the names are official leaf names. Leaves to others: what is written, and when (`cache`).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np
from jaxtyping import Shaped, UInt8
from safetensors import SafetensorError, safe_open

from equarx_serve.errors import UserError
from equarx_serve.weights.files import OpenFile, open_regular
from equarx_serve.weights.tree import ArchitectureFacts, LeafSpec, bounds

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def header(leaves: Mapping[str, LeafSpec]) -> bytes:
    """The front of a file that holds `leaves` in this order: length, JSON, padded to 8 bytes."""
    table: dict[str, object] = {}
    at = 0
    for name, spec in leaves.items():
        table[name] = {"dtype": _NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(
    out: BinaryIO,
    leaves: Mapping[str, LeafSpec],
    parts: Iterable[Shaped[np.ndarray, "..."]],
    advance: Callable[[int], None],
) -> str:
    """Write `leaves` to `out`; `parts` are consecutive C-contiguous blocks, leaf after leaf, in the leaves' order.

    `advance(bytes)` is called after each block. Returns the file's sha256 in hex. `OSError` is the caller's.
    """
    front = header(leaves)
    digest = hashlib.sha256(front)
    out.write(front)
    written = 0
    for part in parts:
        raw = memoryview(part.reshape(-1).view(np.uint8))
        digest.update(raw)
        out.write(raw)
        written += len(raw)
        advance(len(raw))
    if written != (expected := sum(spec.nbytes for spec in leaves.values())):
        raise ValueError(f"{written} bytes were given for leaves of {expected} bytes")
    return digest.hexdigest()


class SafetensorsCheckpoint:
    """A safetensors file with official leaf names as a `Checkpoint`. A damaged header is a `UserError`."""

    def __init__(
        self,
        path: Path,
        *,
        source: str | None = None,
        facts: ArchitectureFacts | None = None,
        tokenizer_path: Path | None = None,
    ) -> None:
        self.path = path
        self.source = source if source is not None else str(path)
        self.facts: ArchitectureFacts | None = facts
        self.tokenizer_path: Path | None = tokenizer_path
        self._offsets: dict[str, int] = {}
        self.leaves: Mapping[str, LeafSpec] = self._read_header()

    def _read_header(self) -> dict[str, LeafSpec]:
        with open_regular(self.path, "a safetensors file") as file:
            try:
                with safe_open(self.path, framework="numpy"):
                    pass  # opening is the check
            except SafetensorError as error:
                raise UserError(f"{self.path}: not a usable safetensors file ({error}).") from error
            length = int.from_bytes(file.read(0, 8).tobytes(), "little")
            table = json.loads(file.read(8, length).tobytes())
        leaves = {}
        for name, entry in table.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _DTYPES:
                legal = ", ".join(_DTYPES)
                raise UserError(f"{self.path}: the leaf {name!r} has dtype {entry['dtype']}; {legal} can be read.")
            leaves[name] = LeafSpec(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
            self._offsets[name] = 8 + length + entry["data_offsets"][0]
        return leaves

    def read(self, name: str, index: tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        """A C-contiguous copy of the slice; memory holds the slice and nothing else."""
        spec = self.leaves[name]
        ranges = bounds(name, spec, index)
        out = np.empty([stop - start for start, stop in ranges], spec.dtype)
        if out.size:
            raw = out.reshape(-1).view(np.uint8)
            with open_regular(self.path, "a safetensors file") as file:
                _read_slice(file, self._offsets[name], spec, ranges, raw)
        return out


def _read_slice(
    file: OpenFile,
    offset: int,
    spec: LeafSpec,
    ranges: tuple[tuple[int, int], ...],
    out: UInt8[np.ndarray, "bytes"],
) -> None:
    """Fill `out` with the slice: one read for each contiguous run.

    The last axis that is cut, and all whole axes after it, form a run; every index of the axes before it begins one.
    """
    cut = max((axis for axis, pair in enumerate(ranges) if pair != (0, spec.shape[axis])), default=0)
    strides = [spec.dtype.itemsize] * len(spec.shape)
    for axis in range(len(spec.shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * spec.shape[axis + 1]
    run = (ranges[cut][1] - ranges[cut][0]) * strides[cut] if ranges else spec.dtype.itemsize
    first = offset + sum(start * stride for (start, _), stride in zip(ranges, strides, strict=True))
    for position, step in enumerate(np.ndindex(*(stop - start for start, stop in ranges[:cut]))):
        begin = first + sum(at * stride for at, stride in zip(step, strides, strict=False))
        file.read_into(begin, out[position * run : (position + 1) * run])
