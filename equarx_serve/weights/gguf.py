"""Reads a GGUF file: a bounded parser of the header, and rows of a tensor as float32.

Does: parses versions 2 and 3, little-endian, without trusting a single number in the file. Every count and length is
checked against the bytes that are left before anything is allocated for it, so that what is kept of a header takes
no more room than the header does in the file, and whatever is malformed is one `UserError` that names the file and
the fault.
Why its own parser: `gguf.GGUFReader` makes several NumPy views for each string and takes 21 to 48 s on Gemma's
262,144 token strings; this one takes about 0.3 s. The library's enums, block sizes and `dequantize` are used as they
are, and a slow test compares every field and every tensor with the library's reader.
Leaves to others: what the tensors mean (`gguf_gemma3`), what the token arrays mean (`gguf_tokenizer`).
"""

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, overload

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from jaxtyping import Float32

from equarx_serve.errors import UserError
from equarx_serve.weights.files import OpenFile, open_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# Far above any real file (33 keys and 236 tensors in the 270M; a few thousand tensors in the largest models): they
# bound the Python objects that a hostile header can ask for.
MAX_KEYS = 16_384
MAX_TENSORS = 65_536
MAX_AXES = 4
MAX_STRING = 1 << 24
_READ_AHEAD = 1 << 20

_SCALARS: dict[GGUFValueType, np.dtype] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


class StringArray(Sequence[str]):
    """Many strings in one block of UTF-8: a list of 262,144 `str` would take several times the file's bytes."""

    def __init__(self, text: bytearray, ends: "array[int]") -> None:
        self._text = text
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def raw(self, position: int) -> bytes:
        """The UTF-8 bytes of string `position` (0 <= position < len)."""
        start = self._ends[position - 1] if position else 0
        return bytes(memoryview(self._text)[start : self._ends[position]])

    def raws(self) -> Iterator[bytes]:
        """The UTF-8 bytes of every string, in order."""
        start = 0
        for end in self._ends:
            yield bytes(memoryview(self._text)[start:end])
            start = end

    @overload
    def __getitem__(self, position: int) -> str: ...
    @overload
    def __getitem__(self, position: slice) -> list[str]: ...
    def __getitem__(self, position: int | slice) -> str | list[str]:
        if isinstance(position, slice):
            return [self.raw(at).decode() for at in range(*position.indices(len(self)))]
        return self.raw(range(len(self))[position]).decode()


Value = bool | int | float | str | np.ndarray | StringArray


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `shape` in NumPy's order (last axis contiguous), `offset` from the file's start."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """A parsed header. The file is opened again for each `read`: nothing is mapped, no descriptor is kept."""

    path: Path
    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    data_offset: int

    def integer(self, key: str) -> int:
        """The whole number under `key`; `UserError` when it is missing or something else."""
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"{self.path}: the metadata key {key!r} should be one whole number.")
        return value

    def number(self, key: str) -> float:
        """The finite number under `key`; `UserError` when it is missing or something else."""
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise UserError(f"{self.path}: the metadata key {key!r} should be one finite number.")
        return float(value)

    def text(self, key: str) -> str:
        """The string under `key`; `UserError` when it is missing or something else."""
        value = self._required(key)
        if not isinstance(value, str):
            raise UserError(f"{self.path}: the metadata key {key!r} should be one string.")
        return value

    def _required(self, key: str) -> Value:
        if key not in self.metadata:
            raise UserError(f"{self.path}: the metadata key {key!r} is missing.")
        return self.metadata[key]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Float32[np.ndarray, "..."]:
        """Rows `start` to `stop` (of the first axis) of a tensor, dequantized to float32.

        Only these rows' bytes are read. A tensor with one axis is read whole. Raises `UserError` for a tensor type
        that the `gguf` library can't dequantize, a file that has become shorter, and values that are NaN or infinite.
        """
        info = self.tensors[name]
        if len(info.shape) == 1:
            if start != 0 or stop not in (None, info.shape[0]):
                raise ValueError(f"{name} has one axis: it is read whole")
            start, stop, rows = 0, 1, 1
        else:
            rows = info.shape[0]
        start, stop, _ = slice(start, stop).indices(rows)
        stop = max(start, stop)
        row_bytes = info.nbytes // rows
        with open_regular(self.path, "a GGUF file") as file:
            raw = file.read(info.offset + start * row_bytes, (stop - start) * row_bytes)
        shape = info.shape if len(info.shape) == 1 else (stop - start, *info.shape[1:])
        if raw.size == 0:
            return np.empty(shape, np.float32)
        row_size = GGML_QUANT_SIZES[info.kind][1] * (info.shape[-1] // GGML_QUANT_SIZES[info.kind][0])
        try:
            with np.errstate(all="ignore"):  # what overflows is found, and named, right below
                values = dequantize(raw.reshape(-1, row_size), info.kind)
        except NotImplementedError as error:
            raise UserError(
                f"{self.path}: tensor {name} has type {info.kind.name}, which the gguf library can't dequantize."
            ) from error
        if not np.isfinite(values).all():
            raise UserError(f"{self.path}: tensor {name} holds NaN or infinite values: the file is damaged.")
        return values.reshape(shape)


def read_gguf(path: Path) -> GgufFile:
    """Parse the header of a GGUF file; everything malformed is a `UserError` with one sentence."""
    with open_regular(path, "a GGUF file") as file:
        return _Parser(file).parse()


def clip(name: str) -> str:
    """A text out of the file, fit for a sentence: quoted, and never longer than a line."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


class _Parser:
    """A cursor over the file's front. `buffer` is a window that begins at byte `base` of the file; what was parsed is
    dropped from it, and it never reaches past the end."""

    def __init__(self, file: OpenFile) -> None:
        self.file = file
        self.buffer = bytearray()
        self.base = 0
        self.at = 0

    @property
    def position(self) -> int:
        """The cursor, counted from the file's start."""
        return self.base + self.at

    def fail(self, fault: str) -> NoReturn:
        raise UserError(f"{self.file.path}: not a usable GGUF file: {fault}.")

    def check_room(self, count: int, what: str) -> None:
        """Say that the file ends inside `what` unless it has `count` more bytes."""
        if (end := self.position + count) > self.file.size:
            self.fail(f"it ends inside {what} (byte {end:,} is asked for, the file has {self.file.size:,})")

    def need(self, count: int, what: str) -> None:
        """Have `count` more bytes in the window. What lies before the cursor is dropped, so the cursor may move."""
        self.check_room(count, what)
        if self.at + count > len(self.buffer):
            del self.buffer[: self.at]
            self.base, self.at = self.position, 0
            have = self.base + len(self.buffer)
            ahead = min(self.file.size, max(self.base + count, have + _READ_AHEAD))
            self.buffer += self.file.read(have, ahead - have).data

    def unpack(self, form: struct.Struct, what: str) -> int:
        self.need(form.size, what)
        (value,) = form.unpack_from(self.buffer, self.at)
        self.at += form.size
        return value

    def u32(self, what: str) -> int:
        return self.unpack(_U32, what)

    def u64(self, what: str) -> int:
        return self.unpack(_U64, what)

    def string(self, what: str) -> str:
        length = self.u64(what)
        self.check_room(length, what)
        if length > MAX_STRING:
            self.fail(f"{what} is a string of {length:,} bytes; the limit is {MAX_STRING:,}")
        self.need(length, what)
        raw = self.buffer[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")

    def count(self, what: str, least: int, limit: int | None = None) -> int:
        """A count of things that take at least `least` bytes each, checked against the bytes that are left."""
        number = self.u64(f"the number of {what}")
        room = (self.file.size - self.position) // least
        if number > room:
            self.fail(f"it claims {number:,} {what}, but there is room for {room:,} at most")
        if limit is not None and number > limit:
            self.fail(f"it claims {number:,} {what}; the limit is {limit:,}")
        return number

    def parse(self) -> GgufFile:
        self.need(min(4, self.file.size), "the magic bytes")
        if self.buffer[:4] != MAGIC:
            self.fail(f"it begins with {bytes(self.buffer[:4])!r}, not with {MAGIC!r}")
        self.at = 4
        version = self.u32("the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            note = " (it is big-endian)" if swapped in VERSIONS else ""
            self.fail(f"its version is {version}{note}; versions 2 and 3, little-endian, can be read")
        tensor_count = self.count("tensors", least=24, limit=MAX_TENSORS)
        key_count = self.count("metadata keys", least=13, limit=MAX_KEYS)
        metadata: dict[str, Value] = {}
        for position in range(key_count):
            key = self.string(f"the name of metadata key {position}")
            if key in metadata:
                self.fail(f"the metadata key {clip(key)} is there twice")
            metadata[key] = self.value(f"the metadata key {clip(key)}")
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment < 2**32 or alignment & (alignment - 1):
            given = f"is {alignment}" if isinstance(alignment, int | float) else "is no number"
            self.fail(f"general.alignment {given}; a power of two below 2**32 is needed")
        tensors: dict[str, TensorInfo] = {}
        for position in range(tensor_count):
            name = self.string(f"the name of tensor {position}")
            if name in tensors:
                self.fail(f"the tensor {clip(name)} is there twice")
            tensors[name] = self.tensor(clip(name), alignment)
        start = -(-self.position // alignment) * alignment
        placed = {name: self.place(name, info, start) for name, info in tensors.items()}
        self.check_overlap(placed)
        return GgufFile(self.file.path, version, metadata, placed, start)

    def value(self, what: str) -> Value:
        kind = self.value_type(what)
        if kind == GGUFValueType.STRING:
            return self.string(what)
        if kind == GGUFValueType.ARRAY:
            inner = self.value_type(what)
            if inner == GGUFValueType.ARRAY:
                self.fail(f"{what} is an array of arrays, which no known file has")
            if inner == GGUFValueType.STRING:
                return self.strings(self.count(f"strings in {what}", least=8), what)
            return self.numbers(self.count(f"values in {what}", least=_SCALARS[inner].itemsize), inner, what)
        item: bool | int | float = self.numbers(1, kind, what)[0].item()
        return item

    def value_type(self, what: str) -> GGUFValueType:
        number = self.u32(f"the type of {what}")
        try:
            return GGUFValueType(number)
        except ValueError:
            self.fail(f"{what} has the unknown value type {number}")

    def numbers(self, count: int, kind: GGUFValueType, what: str) -> np.ndarray:
        dtype = _SCALARS[kind]
        size = count * dtype.itemsize
        self.check_room(size, what)
        raw = np.empty(size, np.uint8)
        buffered = min(size, len(self.buffer) - self.at)
        raw[:buffered] = np.frombuffer(self.buffer, np.uint8, buffered, self.at)
        self.file.read_into(self.position + buffered, raw[buffered:])
        self.at += size
        if self.at > len(self.buffer):
            self.base, self.at, self.buffer = self.position, 0, bytearray()
        if kind == GGUFValueType.BOOL and (raw > 1).any():
            self.fail(f"{what} is a truth value that is neither 0 nor 1")
        return raw.view(dtype)

    def strings(self, count: int, what: str) -> StringArray:
        text = bytearray()
        ends = array("q")
        buffer, unpack = self.buffer, _U64.unpack_from
        at, have = self.at, len(buffer)
        for position in range(count):
            # `need` only where the window ends: a call for every string would double the time.
            if at + 8 > have:
                self.at = at
                self.need(8, f"string {position} of {what}")
                at, have = self.at, len(buffer)
            length: int = unpack(buffer, at)[0]
            at += 8
            if at + length > have:
                self.at = at
                self.need(length, f"string {position} of {what}")
                at, have = self.at, len(buffer)
            piece = buffer[at : at + length]
            try:
                piece.decode()
            except UnicodeDecodeError:
                self.fail(f"string {position} of {what} is not valid UTF-8")
            text += piece
            ends.append(len(text))
            at += length
        self.at = at
        return StringArray(text, ends)

    def tensor(self, name: str, alignment: int) -> TensorInfo:
        """One tensor's entry, its offset still relative to the start of the data."""
        axes = self.u32(f"the entry of tensor {name}")
        if not 1 <= axes <= MAX_AXES:
            self.fail(f"tensor {name} has {axes} axes; 1 to {MAX_AXES} are possible")
        shape = tuple(self.u64(f"the shape of tensor {name}") for _ in range(axes))[::-1]
        number = self.u32(f"the type of tensor {name}")
        offset = self.u64(f"the offset of tensor {name}")
        try:
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            self.fail(f"tensor {name} has the unknown type {number}")
        if 0 in shape:
            self.fail(f"tensor {name} has an empty axis (shape {shape})")
        if shape[-1] % block:
            self.fail(f"tensor {name} has rows of {shape[-1]} values, but type {kind.name} comes in blocks of {block}")
        elements = 1
        for size in shape:
            elements *= size
        nbytes = elements // block * block_bytes
        if offset % alignment:
            self.fail(f"tensor {name} begins at {offset}, which is no multiple of the alignment {alignment}")
        return TensorInfo(shape, kind, offset, nbytes)

    def place(self, name: str, info: TensorInfo, start: int) -> TensorInfo:
        """The entry with its offset counted from the file's start, once it is known to lie inside the file."""
        end = start + info.offset + info.nbytes
        if end > self.file.size:
            self.fail(
                f"tensor {clip(name)} (shape {info.shape}, {info.kind.name}) ends at byte {end:,}, "
                f"but the file has {self.file.size:,}: it was cut short or its header is wrong"
            )
        return TensorInfo(info.shape, info.kind, start + info.offset, info.nbytes)

    def check_overlap(self, tensors: Mapping[str, TensorInfo]) -> None:
        order = sorted(tensors, key=lambda name: tensors[name].offset)
        for before, after in pairwise(order):
            if tensors[before].offset + tensors[before].nbytes > tensors[after].offset:
                self.fail(f"the tensors {clip(before)} and {clip(after)} overlap")


_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
