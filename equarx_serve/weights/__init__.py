"""Weights on disk, whatever their format, as one tree of official leaves that is read slice by slice.

    checkpoint = open_checkpoint(None)                      # the embedded Gemma 3 270M
    checkpoint.leaves["layer_0/mlp/linear"].shape           # (2048, 640)
    checkpoint.read("layer_0/mlp/linear", (slice(0, 512), slice(0, 640)))

One module a format, one idea each: `tree` (what a checkpoint is), `gguf` (the file format), `gguf_gemma3` (its tensors
under official names), `gguf_tokenizer`, `safetensors_file`, `embedded` (the default weights), `cache` (dequantized
once), `files` (reading with sentences for errors). Importing this starts no jax backend and imports no flax.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from equarx_serve.errors import UserError
from equarx_serve.weights import cache, embedded
from equarx_serve.weights.cache import Progress
from equarx_serve.weights.files import open_regular
from equarx_serve.weights.safetensors_file import SafetensorsCheckpoint
from equarx_serve.weights.tree import ArchitectureFacts, Checkpoint, LeafSpec

__all__ = ["ArchitectureFacts", "Checkpoint", "LeafSpec", "Progress", "SafetensorsCheckpoint", "open_checkpoint"]

_LEGAL = "a GGUF file of Gemma 3 can be read (Orbax and safetensors: not supported yet)"


def open_checkpoint(
    weights: str | Path | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Open weights: None for the embedded Gemma 3 270M, or the path of a GGUF file.

    The first time they are dequantized to float32 into `cache_dir` (default: the user's cache folder), 4 bytes a
    parameter on the disk; later they are opened from there. `progress(done, total, what)` is called while that goes
    on, with bytes. Raises `UserError` with one sentence for everything that can't be opened.
    """
    folder = Path(cache_dir) if cache_dir is not None else cache.default_folder()
    report = progress if progress is not None else cache.silent
    if weights is None:

        @contextmanager
        def open_embedded(scratch: Path) -> Iterator[tuple[Checkpoint, bytes | None]]:
            joined = scratch / "embedded.gguf.tmp"
            report(0, embedded.SIZE, "joining the embedded weights")
            try:
                embedded.assemble(joined)
                yield _open_gguf(joined, report)
            finally:
                joined.unlink(missing_ok=True)

        return cache.open_cached(
            embedded.content_hash(), embedded.NAME, open_embedded, folder, report, extra_bytes=embedded.SIZE
        )
    path = Path(weights)
    _check_format(str(weights), path)
    content, stamp = cache.hash_file(path, folder, report)

    @contextmanager
    def open_given(scratch: Path) -> Iterator[tuple[Checkpoint, bytes | None]]:
        yield _open_gguf(path, report)
        if cache.stamp_of(path.stat()) != stamp:
            raise UserError(f"{path}: the file changed while it was read; start again when it is complete.")

    return cache.open_cached(content, f"{path} (sha256 {content[:12]})", open_given, folder, report)


def _open_gguf(path: Path, report: Progress) -> tuple[Checkpoint, bytes | None]:
    # Imported here: a start from the cache does without the gguf library.
    from equarx_serve.weights.gguf import read_gguf
    from equarx_serve.weights.gguf_gemma3 import GgufGemma3
    from equarx_serve.weights.gguf_tokenizer import has_tokenizer, sentencepiece_model

    report(0, 0, "reading the GGUF header and its tokenizer")
    file = read_gguf(path)
    return GgufGemma3(file), sentencepiece_model(file) if has_tokenizer(file) else None


def _check_format(given: str, path: Path) -> None:
    """Say what `path` is when it is no GGUF file."""
    if "://" in given:
        raise UserError(f"{given}: a remote address; only local files can be read today, and of these {_LEGAL}.")
    if os.path.isdir(path):
        kind = "a directory"
        if any(os.path.exists(path / name) for name in ("_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA")):
            kind = "an Orbax checkpoint"
        elif next(path.glob("*.safetensors"), None) is not None:
            kind = "a folder of safetensors"
        raise UserError(f"{path}: this is {kind}; {_LEGAL}.")
    with open_regular(path, "a GGUF file") as file:
        front = file.read(0, min(16, file.size)).tobytes()
    if front[:4] == b"GGUF":
        return
    if path.suffix == ".safetensors" or front[8:10] == b'{"':
        raise UserError(f"{path}: this is a safetensors file; {_LEGAL}.")
    raise UserError(f"{path}: this is no GGUF file (it begins with {front[:4]!r}, not with b'GGUF'); {_LEGAL}.")
