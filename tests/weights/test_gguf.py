"""The GGUF header parser: right on good files, one sentence on bad ones, bounded on hostile ones."""

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Type

from equarx_serve.errors import UserError
from equarx_serve.weights import embedded
from equarx_serve.weights.gguf import GgufFile, StringArray, read_gguf


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def entry(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(
    keys: list[bytes], entries: list[bytes], data: bytes = b"", magic: bytes = b"GGUF", version: int = 3
) -> bytes:
    front = magic + struct.pack("<IQQ", version, len(entries), len(keys)) + b"".join(keys + entries)
    return front + bytes(-len(front) % 32) + data


@pytest.fixture
def parse(tmp_path: Path) -> Callable[[bytes], GgufFile]:
    def run(content: bytes) -> GgufFile:
        path = tmp_path / "made.gguf"
        path.write_bytes(content)
        return read_gguf(path)

    return run


def compare_with_library(path: Path) -> None:
    """Every metadata field and every tensor: the same as `gguf.GGUFReader` reads."""
    ours, library = read_gguf(path), gguf.GGUFReader(path)
    names = [name for name in library.fields if not name.startswith("GGUF.")]
    assert list(ours.metadata) == names
    for name in names:
        value, field = ours.metadata[name], library.fields[name]
        if isinstance(value, StringArray):
            assert list(value.raws()) == [field.parts[n].tobytes() for n in field.data], name
        elif isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, np.concatenate([field.parts[n] for n in field.data]), name)
        else:
            assert value == field.contents(), name
            assert type(value) is type(field.contents()), name
    assert list(ours.tensors) == [tensor.name for tensor in library.tensors]
    for tensor in library.tensors:
        info = ours.tensors[tensor.name]
        assert (info.kind, info.offset, info.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(info.shape)
        np.testing.assert_array_equal(ours.read(tensor.name), expected, tensor.name)


def test_reads_what_the_library_reads(tiny_gguf: Path) -> None:
    compare_with_library(tiny_gguf)


@pytest.mark.slow  # the library's reader takes 21 to 48 s
def test_reads_the_real_file_as_the_library_does(tmp_path: Path) -> None:
    path = tmp_path / "real.gguf"
    embedded.assemble(path)
    assert path.stat().st_size == embedded.SIZE
    compare_with_library(path)


def test_real_header_is_read_in_less_than_two_seconds(tmp_path: Path) -> None:
    path = tmp_path / "real.gguf"
    embedded.assemble(path)
    begin = time.perf_counter()
    file = read_gguf(path)
    assert time.perf_counter() - begin < 2
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, StringArray)
    assert len(tokens) == 262_144
    assert tokens[:4] == ["<pad>", "<eos>", "<bos>", "<unk>"]
    assert tokens[-1] == "<unused6241>"
    assert len(file.tensors) == 236


def test_every_value_type(parse: Callable[[bytes], GgufFile]) -> None:
    scalars = {
        Type.UINT8: ("<B", 200),
        Type.INT8: ("<b", -100),
        Type.UINT16: ("<H", 60_000),
        Type.INT16: ("<h", -30_000),
        Type.UINT32: ("<I", 2**32 - 1),
        Type.INT32: ("<i", -(2**31)),
        Type.UINT64: ("<Q", 2**64 - 1),
        Type.INT64: ("<q", -(2**63)),
        Type.FLOAT32: ("<f", 0.5),
        Type.FLOAT64: ("<d", 0.1),
        Type.BOOL: ("<?", True),
    }
    keys = [key(kind.name, kind, struct.pack(form, value)) for kind, (form, value) in scalars.items()]
    keys += [
        key(f"{kind.name}s", Type.ARRAY, struct.pack("<IQ", kind, 3) + struct.pack(form, value) * 3)
        for kind, (form, value) in scalars.items()
    ]
    keys.append(key("text", Type.STRING, text("gänse\0füße")))
    keys.append(key("texts", Type.ARRAY, struct.pack("<IQ", Type.STRING, 3) + text("") + text("é") + text("z")))
    file = parse(build(keys, []))
    for kind, (_, value) in scalars.items():
        found = file.metadata[kind.name]
        assert found == value
        assert type(found) is type(value)
        many = file.metadata[f"{kind.name}s"]
        assert isinstance(many, np.ndarray)
        assert many.tolist() == [value] * 3
    assert file.metadata["text"] == "gänse\0füße"
    texts = file.metadata["texts"]
    assert isinstance(texts, StringArray)
    assert list(texts) == ["", "é", "z"]
    assert texts[-1] == "z"
    assert len(texts) == 3
    with pytest.raises(IndexError):
        texts[3]


@pytest.mark.parametrize("size", [(1 << 20) - 60, (1 << 20) - 36, 1 << 20, 3 << 20])
def test_values_that_cross_the_read_ahead_window(parse: Callable[[bytes], GgufFile], size: int) -> None:
    """Strings and numbers that straddle the window's end, at every alignment to it."""
    long = "é" * (size // 2)
    for shift in range(9):
        words = ["x" * shift, long[:-8], "tail", "", "ü"]
        keys = [
            key("words", Type.ARRAY, struct.pack("<IQ", Type.STRING, len(words)) + b"".join(map(text, words))),
            key("numbers", Type.ARRAY, struct.pack("<IQ", Type.INT32, 5) + struct.pack("<5i", 1, 2, 3, 4, 5)),
            key("many", Type.ARRAY, struct.pack("<IQ", Type.UINT8, size) + bytes(size - 1) + b"\7"),
            key("last", Type.STRING, text("end")),
        ]
        file = parse(build(keys, [entry("t", (8,), Kind.F32, 0)], bytes(32)))
        found = file.metadata["words"]
        assert isinstance(found, StringArray)
        assert list(found) == words
        numbers, many = file.metadata["numbers"], file.metadata["many"]
        assert isinstance(numbers, np.ndarray)
        assert isinstance(many, np.ndarray)
        assert numbers.tolist() == [1, 2, 3, 4, 5]
        assert len(many) == size
        assert many[-1] == 7
        assert not many[:-1].any()
        assert file.text("last") == "end"
        assert file.read("t").tolist() == [0.0] * 8


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q5_0, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K, Kind.BF16, Kind.F16, Kind.F32])
def test_rows_are_the_rows_of_the_whole(parse: Callable[[bytes], GgufFile], kind: Kind) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    # Bytes below 0x40: no exponent is all ones, so that every scale and value is finite.
    data = np.random.default_rng(0).integers(0, 0x40, 6 * 512 // block * size, np.uint8).tobytes()
    file = parse(build([], [entry("t", (512, 6), kind, 0)], data))
    everything = file.read("t")
    assert everything.shape == (6, 512)
    assert everything.dtype == np.float32
    raw = np.frombuffer(data, np.uint8).reshape(6, -1)
    np.testing.assert_array_equal(everything, gguf.quants.dequantize(raw, kind))
    for start, stop in [(0, 6), (2, 5), (5, 6), (3, 3)]:
        np.testing.assert_array_equal(file.read("t", start, stop), everything[start:stop])


U64 = 2**64 - 1
GOOD = entry("t", (8,), Kind.F32, 0)
MALFORMED = {
    "empty": (b"", "the file is empty"),
    "one byte": (b"G", "begins with b'G'"),
    "magic only": (b"GGUF", "ends inside the version"),
    "other magic": (build([], [], magic=b"GGML"), "begins with b'GGML', not with b'GGUF'"),
    "version 1": (build([], [], version=1), "its version is 1; versions 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 4": (build([], [], version=4), "its version is 4"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "ends inside the number of tensors"),
    "huge tensor count": (b"GGUF" + struct.pack("<IQQ", 3, U64, 0), "claims 18,446,744,073,709,551,615 tensors"),
    "huge key count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "claims 1,099,511,627,776 metadata keys"),
    "too many keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 20_000) + bytes(400_000), "the limit is 16,384"),
    "too many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 70_000, 0) + bytes(1_800_000), "the limit is 65,536"),
    "key too long": (build([struct.pack("<Q", 2**63) + bytes(40)], []), "ends inside the name of metadata key 0"),
    "value type 13": (build([key("k", 13, bytes(8))], []), "'k' has the unknown value type 13"),
    "array type 99": (build([key("k", Type.ARRAY, struct.pack("<IQ", 99, 0))], []), "unknown value type 99"),
    "array of arrays": (
        build([key("k", Type.ARRAY, struct.pack("<IQ", Type.ARRAY, 1) + bytes(12))], []),
        "array of arrays",
    ),
    "huge array": (
        build([key("k", Type.ARRAY, struct.pack("<IQ", Type.FLOAT64, 2**61))], []),
        "claims 2,305,843,009,213,693,952 values in the metadata key 'k'",
    ),
    "huge string array": (
        build([key("k", Type.ARRAY, struct.pack("<IQ", Type.STRING, 2**61))], []),
        "claims 2,305,843,009,213,693,952 strings",
    ),
    "string in an array too long": (
        build([key("k", Type.ARRAY, struct.pack("<IQ", Type.STRING, 1) + struct.pack("<Q", U64) + bytes(40))], []),
        "ends inside string 0 of the metadata key 'k'",
    ),
    "string value too long": (build([key("k", Type.STRING, struct.pack("<Q", U64))], []), "ends inside the metadata"),
    "giant string value": (
        build([key("k", Type.STRING, text(bytes((1 << 24) + 1)))], []),
        "a string of 16,777,217 bytes; the limit",
    ),
    "key not UTF-8": (build([text(b"\xff\xfe") + struct.pack("<IB", 0, 1)], []), "key 0 is not valid UTF-8"),
    "value not UTF-8": (build([key("k", Type.STRING, text(b"\xc3"))], []), "'k' is not valid UTF-8"),
    "token not UTF-8": (  # the two halves of one character in two strings: valid only when joined
        build([key("k", Type.ARRAY, struct.pack("<IQ", Type.STRING, 2) + text(b"\xc3") + text(b"\xa9"))], []),
        "string 0 of the metadata key 'k' is not valid UTF-8",
    ),
    "truth value 2": (build([key("k", Type.BOOL, b"\2")], []), "neither 0 nor 1"),
    "same key twice": (build([key("k", 0, b"\1")] * 2, []), "'k' is there twice"),
    "alignment 0": (build([key("general.alignment", Type.UINT32, bytes(4))], [GOOD]), "alignment is 0"),
    "alignment 24": (
        build([key("general.alignment", Type.UINT32, struct.pack("<I", 24))], [GOOD]),
        "alignment is 24; a power of two",
    ),
    "alignment text": (build([key("general.alignment", Type.STRING, text("x"))], [GOOD]), "alignment is no number"),
    "negative alignment": (
        build([key("general.alignment", Type.INT32, struct.pack("<i", -32))], [GOOD]),
        "alignment is -32",
    ),
    "same tensor twice": (build([], [GOOD, GOOD], bytes(64)), "'t' is there twice"),
    "no axes": (build([], [entry("t", (), Kind.F32, 0)], bytes(64)), "has 0 axes"),
    "five axes": (build([], [entry("t", (1,) * 5, Kind.F32, 0)], bytes(64)), "has 5 axes"),
    "2**32-1 axes": (build([], [text("t") + struct.pack("<I", 2**32 - 1) + bytes(99)]), "has 4294967295 axes"),
    "empty axis": (build([], [entry("t", (8, 0), Kind.F32, 0)], bytes(64)), "an empty axis"),
    "overflowing shape": (
        build([], [entry("t", (2**63, 2**63, 2**63, 2**63), Kind.F32, 0)], bytes(64)),
        "ends at byte .* but the file has",
    ),
    "shape that overflows to 0": (build([], [entry("t", (2**32, 2**32), Kind.F32, 0)], bytes(64)), "ends at byte"),
    "rows of 33": (build([], [entry("t", (33, 2), Kind.Q8_0, 0)], bytes(99)), "rows of 33 values, but type Q8_0"),
    "unknown tensor type": (build([], [entry("t", (8,), 9999, 0)], bytes(64)), "unknown type 9999"),
    "retired tensor type": (build([], [entry("t", (8,), 4, 0)], bytes(64)), "unknown type 4"),
    "offset past the end": (build([], [entry("t", (8,), Kind.F32, 64)], bytes(64)), "cut short or its header is wrong"),
    "negative offset": (build([], [entry("t", (8,), Kind.F32, 2**64 - 32)], bytes(64)), "ends at byte"),
    "offset off the alignment": (build([], [entry("t", (8,), Kind.F32, 8)], bytes(64)), "no multiple of the alignment"),
    "data cut short": (build([], [GOOD], bytes(31)), "cut short"),
    "overlap": (
        build([], [entry("a", (16,), Kind.F32, 0), entry("b", (8,), Kind.F32, 32)], bytes(128)),
        "'a' and 'b' overlap",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_is_one_sentence(parse: Callable[[bytes], GgufFile], case: str) -> None:
    content, message = MALFORMED[case]
    with pytest.raises(UserError, match=message) as caught:
        parse(content)
    said = str(caught.value)
    assert "made.gguf: " in said
    assert "\n" not in said
    assert said.endswith(".")
    assert len(said) < 600


def test_truncated_anywhere(tiny_gguf: Path) -> None:
    content = tiny_gguf.read_bytes()
    header = read_gguf(tiny_gguf).data_offset
    for size in [*range(1, header, 41), header, len(content) - 1]:
        tiny_gguf.write_bytes(content[:size])
        with pytest.raises(UserError, match=r"tiny\.gguf: "):
            read_gguf(tiny_gguf)


def test_hostile_counts_allocate_less_than_the_file(parse: Callable[[bytes], GgufFile], tmp_path: Path) -> None:
    """Claims of 2**30 to 2**62 things in a file of 4 MB: refused before anything is allocated for them."""
    filler = bytes(4 << 20)
    hostile = [
        b"GGUF" + struct.pack("<IQQ", 3, 2**40, 2**40) + filler,
        build([struct.pack("<Q", 2**40) + filler], []),
        build([key("k", Type.STRING, struct.pack("<Q", 2**62))], [], filler),
        build([key("k", Type.ARRAY, struct.pack("<IQ", Type.STRING, 2**60))], [], filler),
        build([key("k", Type.ARRAY, struct.pack("<IQ", Type.UINT64, 2**60))], [], filler),
        build([key("k", Type.ARRAY, struct.pack("<IQ", Type.STRING, 2**17))], [], filler),  # all empty: legal so far
        build([], [entry("t", (2**40, 2**20), Kind.Q4_K, 0)], filler),
    ]
    for number, content in enumerate(hostile):
        path = tmp_path / f"hostile{number}.gguf"
        path.write_bytes(content)
        tracemalloc.start()
        try:
            read_gguf(path)
        except UserError:
            pass  # its sentence is tested above
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        # The window is freed and grown in 1 MiB steps; arrays grow by an eighth.
        assert peak < len(content) * 1.2 + (3 << 20), number


def test_data_that_vanishes_after_the_header_was_read(parse: Callable[[bytes], GgufFile], tmp_path: Path) -> None:
    file = parse(build([], [entry("t", (8, 4), Kind.F32, 0)], bytes(128)))
    path = tmp_path / "made.gguf"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="the file ends early"):
        file.read("t")


def test_values_that_are_not_finite(parse: Callable[[bytes], GgufFile]) -> None:
    data = np.array([1, np.nan, 2, 3, 4, 5, 6, 7], np.float32).tobytes()
    with pytest.raises(UserError, match="tensor t holds NaN or infinite values"):
        parse(build([], [GOOD], data)).read("t")
    q8 = struct.pack("<e", float("inf")) + bytes([0, 255] * 16)  # inf * 0
    with pytest.raises(UserError, match="NaN or infinite"):
        parse(build([], [entry("t", (32, 1), Kind.Q8_0, 0)], q8)).read("t")


def test_type_that_the_library_cannot_dequantize(parse: Callable[[bytes], GgufFile]) -> None:
    with pytest.raises(UserError, match="type I32, which the gguf library can't dequantize"):
        parse(build([], [entry("t", (8,), Kind.I32, 0)], bytes(32))).read("t")


def test_getters_name_the_key(parse: Callable[[bytes], GgufFile]) -> None:
    keys = [
        key("flag", Type.BOOL, b"\1"),
        key("half", Type.FLOAT32, struct.pack("<f", 0.5)),
        key("nan", Type.FLOAT32, struct.pack("<f", float("nan"))),
        key("three", Type.UINT8, b"\3"),
    ]
    file = parse(build(keys, []))
    assert (file.integer("three"), file.number("three"), file.number("half")) == (3, 3.0, 0.5)
    for get, name in [(file.integer, "flag"), (file.integer, "half"), (file.number, "nan"), (file.text, "three")]:
        with pytest.raises(UserError, match=f"key '{name}' should be one"):
            get(name)
    with pytest.raises(UserError, match="key 'gone' is missing"):
        file.text("gone")
