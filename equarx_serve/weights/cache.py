"""Dequantizes a GGUF once, into the user's cache folder; every later start opens the result in milliseconds.

Does: for each content (sha256 of the GGUF) and layout version one folder with `weights.safetensors` (float32, official
names), `tokenizer.model` and, written last, `entry.json`: facts, sizes, sha256 and file stamps of the other two.
- Without a matching `entry.json` there is no entry: a process that is killed at any moment leaves nothing that loads.
  Every file is written under a temporary name, fsync'ed, then renamed.
- Builders of one entry take turns (an advisory lock that ends with the process); leftovers of a killed one are removed.
- A file whose stamp (size, mtime, ctime, inode) is the recorded one is taken as it is. A changed stamp (a copied
  folder, a damaged file) costs a full check of the sha256 (about 1 s); a wrong one is logged, and the entry is rebuilt.
  Not noticed: bits that rot on the disk with nobody writing to the file.
- The hash of a GGUF given by path is remembered under `sources/` with the same stamp.
Assumes: POSIX (`fcntl`). Leaves to others: formats (`gguf_gemma3`, `safetensors_file`). Imports `gguf` only to build.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs

from equarx_serve.errors import UserError
from equarx_serve.weights.files import open_regular, why_not_cached
from equarx_serve.weights.safetensors_file import SafetensorsCheckpoint, header, write
from equarx_serve.weights.tree import ArchitectureFacts, Checkpoint, blocks

LAYOUT_VERSION = 1
"""Goes up with every change of what is cached, or how; old entries are then left alone and new ones built."""

WEIGHTS, TOKENIZER, ENTRY = "weights.safetensors", "tokenizer.model", "entry.json"
_BLOCK_BYTES = 32 << 20
_SPARE_BYTES = 16 << 20

_log = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""progress(done, total, what): `what` in words; done and total in bytes (total 0: not known)."""


OpenSource = Callable[[Path], AbstractContextManager[tuple[Checkpoint, bytes | None]]]
"""open_source(scratch): the checkpoint to copy, and its serialized SentencePiece model if it has one."""


def default_folder() -> Path:
    """Where cached weights lie unless the caller says otherwise."""
    return Path(platformdirs.user_cache_dir("equarx-serve"))


def silent(done: int, total: int, what: str) -> None:
    """The progress callback of a caller who wants none."""


def open_cached(
    content_hash: str,
    source: str,
    open_source: OpenSource,
    folder: Path,
    progress: Progress,
    extra_bytes: int = 0,
) -> SafetensorsCheckpoint:
    """The cached form of the GGUF with this sha256; built when it is missing or damaged.

    `open_source(scratch)` gives the checkpoint to copy and its serialized SentencePiece model (or None); it may keep
    files of up to `extra_bytes` in the folder `scratch` while it is open. `source` is the text for result records.
    Raises `UserError` when the folder can't be written or the disk is full; whatever was begun is then removed.
    """
    entry = folder / f"gemma3-gguf-f32-v{LAYOUT_VERSION}-{content_hash[:32]}"
    try:
        found = _load(entry, source)
        if found.checkpoint is not None and (found.refreshed is None or not os.access(entry, os.W_OK)):
            return found.checkpoint
        entry.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f"{entry.name}.lock", progress):
            if found.checkpoint is not None and found.refreshed is not None:
                _write_record(entry, found.refreshed)  # sound, only copied or touched: no second full check
                return found.checkpoint
            found = _load(entry, source)  # another process may have built it while this one waited
            if found.checkpoint is not None:
                return found.checkpoint
            if found.fault is not None:
                _log.warning("%s: %s; building it anew", entry, found.fault)
            _build(entry, open_source, progress, extra_bytes)
            found = _load(entry, source)
    except OSError as error:
        raise UserError(why_not_cached(entry, error)) from error
    if found.checkpoint is None:
        raise UserError(f"{entry}: the cache was just written, but {found.fault}: is this disk healthy?")
    return found.checkpoint


def hash_file(path: Path, folder: Path, progress: Progress) -> tuple[str, list[int]]:
    """The sha256 (hex) and the stamp of a file; remembered in `folder` for as long as the stamp stays the same."""
    memory = folder / "sources" / (hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32] + ".json")
    with open_regular(path, "a GGUF file") as file:
        stamp = stamp_of(os.fstat(file.descriptor))
        try:
            known = _read_json(memory)
            if known is not None and known.get("stamp") == stamp and isinstance(known.get("sha256"), str):
                return str(known["sha256"]), stamp
            digest = hashlib.sha256()
            for at in range(0, file.size, _BLOCK_BYTES):
                digest.update(file.read(at, min(_BLOCK_BYTES, file.size - at)).data)
                progress(min(at + _BLOCK_BYTES, file.size), file.size, f"hashing {path.name}")
            if folder.exists() and not os.access(folder, os.W_OK):
                return digest.hexdigest(), stamp  # somebody else's cache: read, not added to
            memory.parent.mkdir(parents=True, exist_ok=True)
            _write_json(memory, {"path": str(path.resolve()), "stamp": stamp, "sha256": digest.hexdigest()})
        except OSError as error:
            raise UserError(why_not_cached(memory, error)) from error
    return digest.hexdigest(), stamp


@dataclass(frozen=True)
class _Found:
    """What an entry's folder holds: a sound checkpoint, or a fault in words, or (all None) nothing."""

    checkpoint: SafetensorsCheckpoint | None = None
    fault: str | None = None
    refreshed: dict[str, Any] | None = None
    """The record with the new stamps, when the files are sound but were copied or touched."""


def _load(entry: Path, source: str) -> _Found:
    if not (entry / ENTRY).exists():
        return _Found()
    record = _read_json(entry / ENTRY)
    if record is None:
        return _Found(fault=f"{ENTRY} can't be read")
    if record.pop("check", None) != _check_sum(record):
        return _Found(fault=f"{ENTRY} is damaged (its check sum is wrong)")
    refreshed = None
    try:
        facts = ArchitectureFacts(**record["facts"])
        for name in {WEIGHTS, *record["files"]}:
            path, known = entry / name, record["files"][name]
            if not path.is_file():
                return _Found(fault=f"{name} is missing")
            status = path.stat()
            if status.st_size != known["bytes"]:
                return _Found(fault=f"{name} has {status.st_size:,} bytes instead of {known['bytes']:,}")
            if (stamp := stamp_of(status)) != known["stamp"]:
                if _sha256(path) != known["sha256"]:
                    return _Found(fault=f"{name} is damaged (its sha256 is wrong)")
                known["stamp"], refreshed = stamp, record
        tokenizer = entry / TOKENIZER if TOKENIZER in record["files"] else None
        opened = SafetensorsCheckpoint(entry / WEIGHTS, source=source, facts=facts, tokenizer_path=tokenizer)
    except (KeyError, TypeError) as error:
        return _Found(fault=f"{ENTRY} is damaged ({error!r})")
    return _Found(opened, refreshed=refreshed)


def _build(
    entry: Path,
    open_source: OpenSource,
    progress: Progress,
    extra_bytes: int,
) -> None:
    """Write the entry's files; the caller holds the lock."""
    for old in (entry / ENTRY, entry / WEIGHTS, entry / TOKENIZER, *entry.glob("*.tmp")):
        old.unlink(missing_ok=True)
    _check_room(entry, extra_bytes)
    with open_source(entry) as (checkpoint, tokenizer):
        facts = checkpoint.facts
        if facts is None:
            raise ValueError("only a checkpoint that knows its architecture is cached")
        total = sum(spec.nbytes for spec in checkpoint.leaves.values())
        _check_room(entry, total + len(header(checkpoint.leaves)) + len(tokenizer or b""))
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total, "dequantizing to float32")

        parts = (
            checkpoint.read(name, index)
            for name, spec in checkpoint.leaves.items()
            for index in blocks(spec, _BLOCK_BYTES)
        )
        files = {}
        with _replacing(entry / WEIGHTS) as out:
            files[WEIGHTS] = write(out, checkpoint.leaves, parts, advance)
        if tokenizer is not None:
            with _replacing(entry / TOKENIZER) as out:
                out.write(tokenizer)
            files[TOKENIZER] = hashlib.sha256(tokenizer).hexdigest()
    known = {}
    for name, digest in files.items():
        status = (entry / name).stat()
        known[name] = {"bytes": status.st_size, "sha256": digest, "stamp": stamp_of(status)}
    _write_record(entry, {"layout": LAYOUT_VERSION, "facts": asdict(facts), "files": known})


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed + _SPARE_BYTES > free:
        raise UserError(
            f"{folder}: the dequantized weights need {(needed + _SPARE_BYTES) / 1e9:.2f} GB, but this disk has "
            f"{free / 1e9:.2f} GB free: free some, or name another cache folder."
        )


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the advisory lock `path`; the system drops it when the process ends, however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(0, 0, "waiting for another process that prepares the same weights")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that appears at `path`, whole and on the disk, when the block ends without an exception."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the renaming itself
    finally:
        os.close(folder)


def _check_sum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _write_record(entry: Path, record: dict[str, Any]) -> None:
    """`entry.json`, with a check sum over itself: what makes an entry one."""
    _write_json(entry / ENTRY, record | {"check": _check_sum(record)})


def _write_json(path: Path, record: dict[str, Any]) -> None:
    with _replacing(path) as out:
        out.write(json.dumps(record, indent=1).encode())


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a small JSON file; None when it is missing or is none."""
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def stamp_of(status: os.stat_result) -> list[int]:
    """What changes when a file is written to or replaced."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
