"""Written leaf by leaf, read slice by slice: what the library reads, and a sentence for damaged files."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from equarx_serve.errors import UserError
from equarx_serve.weights import SafetensorsCheckpoint, files
from equarx_serve.weights.safetensors_file import write
from equarx_serve.weights.tree import LeafSpec, blocks

RNG = np.random.default_rng(0)
LEAVES = {
    "embedder/input_embedding": RNG.normal(size=(40, 16)).astype(np.float32),
    "layer_0/attn/kv_einsum/w": RNG.normal(size=(2, 3, 5, 8)).astype(np.float32),
    "half": RNG.normal(size=(7, 3)).astype(np.float16),
    "brain": RNG.normal(size=(6, 4, 2)).astype(ml_dtypes.bfloat16),
    "final_norm/scale": RNG.normal(size=16).astype(np.float32),
    "nothing": np.zeros((0, 4), np.float32),
    "number": np.array(3.5, np.float32),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    specs = {name: LeafSpec(array.shape, array.dtype) for name, array in LEAVES.items()}
    parts = (LEAVES[name][index] for name, spec in specs.items() for index in blocks(spec, 100))
    seen = []
    with open(path, "wb") as out:
        write(out, specs, (np.ascontiguousarray(part) for part in parts), seen.append)
    assert sum(seen) == sum(array.nbytes for array in LEAVES.values())
    return path


def test_the_library_reads_the_same(path: Path) -> None:
    found = load_file(path)
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0  # the data begin on a multiple of 8
    assert set(found) == set(LEAVES)
    for name, array in LEAVES.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_every_slice(path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(path)
    assert {name: (spec.shape, spec.dtype) for name, spec in checkpoint.leaves.items()} == {
        name: (array.shape, array.dtype) for name, array in LEAVES.items()
    }
    rng = np.random.default_rng(1)
    for name, array in LEAVES.items():
        for _ in range(40):
            cuts = [sorted(rng.integers(0, size + 1, 2).tolist()) for size in array.shape]
            index = tuple(slice(*cut) if rng.random() < 0.5 else slice(None) for cut in cuts)
            found = checkpoint.read(name, index)
            assert found.dtype == array.dtype
            assert found.flags.c_contiguous
            np.testing.assert_array_equal(found, array[index], f"{name}{index}")


def test_only_the_slice_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read for each contiguous run, and not a byte more."""
    checkpoint = SafetensorsCheckpoint(path)
    counts: list[int] = []
    real = files.os.preadv

    def spy(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        counts.append(sum(len(buffer) for buffer in buffers))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(files.os, "preadv", spy)
    kv = "layer_0/attn/kv_einsum/w"
    for name, index, runs in [
        ("embedder/input_embedding", (slice(10, 20), slice(None)), 1),
        (kv, (slice(None), slice(1, 2), slice(None), slice(None)), 2),
        (kv, (slice(1, 2), slice(None), slice(1, 3), slice(None)), 3),
        (kv, (slice(None), slice(None), slice(None), slice(0, 4)), 30),
    ]:
        counts.clear()
        found = checkpoint.read(name, index)
        assert (len(counts), sum(counts)) == (runs, found.nbytes)


def test_too_few_parts_is_a_defect(tmp_path: Path) -> None:
    leaves = {"a": LeafSpec((4,), np.dtype(np.float32))}
    with open(tmp_path / "w", "wb") as out, pytest.raises(ValueError, match="0 bytes were given for leaves of 16"):
        write(out, leaves, [], lambda count: None)


def test_damaged_files(path: Path) -> None:
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for damaged in [
        content[:5],
        content[:100],
        content[:-1],
        content + b"x",
        (2**62).to_bytes(8, "little") + content[8:],
        content[:9] + b"\xff" + content[10:],
        content[:8] + b"[" * (header - 8) + content[header:],
    ]:
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"weights\.safetensors: not a usable safetensors file") as caught:
            SafetensorsCheckpoint(path)
        assert "\n" not in str(caught.value)


def test_a_dtype_that_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "ints.safetensors"
    front = json.dumps({"ids": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(front).to_bytes(8, "little") + front + bytes(8))
    with pytest.raises(UserError, match="'ids' has dtype I32; F32, F16, BF16 can be read"):
        SafetensorsCheckpoint(path)


def test_shortened_after_opening(path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(UserError, match="the file ends early"):
        checkpoint.read("embedder/input_embedding", (slice(None), slice(None)))
