"""The cache: built once, whole or not at all, whoever is killed, whatever is damaged, however full the disk is."""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from tiny_gemma3 import MakeGguf, Tree

from equarx_serve.errors import UserError
from equarx_serve.weights import Checkpoint, SafetensorsCheckpoint, cache, gguf_gemma3, open_checkpoint
from equarx_serve.weights.gguf import read_gguf
from equarx_serve.weights.tree import whole


def assert_is(checkpoint: Checkpoint, tree: Tree) -> None:
    assert set(checkpoint.leaves) == set(tree)
    for name, spec in checkpoint.leaves.items():
        np.testing.assert_array_equal(checkpoint.read(name, whole(spec)), tree[name], name)


def entry_of(checkpoint: Checkpoint) -> Path:
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    return checkpoint.path.parent


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The entries that were built, in order."""
    seen: list[Path] = []
    build = cache._build

    def spy(entry: Path, *rest: object) -> None:
        seen.append(entry)
        build(entry, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "_build", spy)
    return seen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_built_once_then_opened(tiny_gguf: Path, tiny_tree: Tree, folder: Path, builds: list[Path]) -> None:
    said: list[tuple[int, int, str]] = []
    first = open_checkpoint(tiny_gguf, folder, lambda *report: said.append(report))
    second = open_checkpoint(tiny_gguf, folder)
    assert len(builds) == 1
    for checkpoint in (first, second):
        assert_is(checkpoint, tiny_tree)
        assert checkpoint.facts == gguf_gemma3.read_facts(read_gguf(tiny_gguf))
        assert checkpoint.source.startswith(f"{tiny_gguf} (sha256 ")
        assert checkpoint.tokenizer_path is not None
        assert checkpoint.tokenizer_path.stat().st_size > 1000
    files = {path.name for path in entry_of(first).iterdir()}
    assert files == {"weights.safetensors", "tokenizer.model", "entry.json"}
    total = sum(spec.nbytes for spec in first.leaves.values())
    assert said[-1] == (total, total, "dequantizing to float32")
    assert {what for *_, what in said} == {
        "hashing tiny.gguf",
        "reading the GGUF header and its tokenizer",
        "dequantizing to float32",
    }


def test_the_same_content_under_another_name_is_one_entry(tiny_gguf: Path, folder: Path, builds: list[Path]) -> None:
    open_checkpoint(tiny_gguf, folder)
    copy = Path(shutil.copy(tiny_gguf, tiny_gguf.with_name("copy.gguf")))
    assert open_checkpoint(copy, folder).source.startswith(str(copy))
    assert len(builds) == 1


def test_another_content_under_the_same_name_is_another_entry(
    make_gguf: MakeGguf, tiny_tree: Tree, folder: Path, builds: list[Path]
) -> None:
    path = make_gguf()
    assert_is(open_checkpoint(path, folder), tiny_tree)
    before = path.stat()
    make_gguf(seed=1)  # same path, same size
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # and the same time of change
    with pytest.raises(AssertionError):
        assert_is(open_checkpoint(path, folder), tiny_tree)
    assert len(builds) == 2


def test_the_hash_is_remembered(tiny_gguf: Path, folder: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        open_checkpoint(tiny_gguf, folder, lambda done, total, what: said.append(what))
    assert said.count("hashing tiny.gguf") == 1


def test_without_tokenizer(make_gguf: MakeGguf, tiny_tree: Tree, folder: Path) -> None:
    path = make_gguf(without=("tokenizer.ggml.model",))
    for _ in range(2):
        checkpoint = open_checkpoint(path, folder)
        assert checkpoint.tokenizer_path is None
        assert_is(checkpoint, tiny_tree)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def rewrite(path: Path, **changes: object) -> None:
    """A record whose own check sum is right, but whose content is not."""
    record = json.loads(path.read_text()) | changes
    record.pop("check")
    cache._write_record(path.parent, record)


DAMAGE = {
    "weights flipped": ("weights.safetensors", flip, "weights.safetensors is damaged (its sha256 is wrong)"),
    "weights truncated": ("weights.safetensors", truncate, "weights.safetensors has "),
    "weights gone": ("weights.safetensors", Path.unlink, "weights.safetensors is missing"),
    "tokenizer flipped": ("tokenizer.model", flip, "tokenizer.model is damaged"),
    "tokenizer gone": ("tokenizer.model", Path.unlink, "tokenizer.model is missing"),
    "record cut": ("entry.json", truncate, "entry.json can't be read"),
    "record a list": ("entry.json", lambda path: path.write_text("[]"), "entry.json can't be read"),
    "record empty": ("entry.json", lambda path: path.write_text("{}"), "entry.json is damaged (its check sum"),
    "record binary": ("entry.json", lambda path: path.write_bytes(b"\xff\0"), "entry.json can't be read"),
    "record flipped": (
        "entry.json",
        lambda path: path.write_text(path.read_text().replace('"heads": 4', '"heads": 5')),
        "entry.json is damaged (its check sum is wrong)",
    ),
    "record of nothing": ("entry.json", lambda path: rewrite(path, files={}), "entry.json is damaged (KeyError"),
    "record of other facts": ("entry.json", lambda path: rewrite(path, facts={"a": 1}), "entry.json is damaged (Type"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_said_and_mended(
    tiny_gguf: Path,
    tiny_tree: Tree,
    folder: Path,
    builds: list[Path],
    caplog: pytest.LogCaptureFixture,
    case: str,
) -> None:
    name, damage, said = DAMAGE[case]
    entry = entry_of(open_checkpoint(tiny_gguf, folder))
    damage(entry / name)
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(tiny_gguf, folder)
    assert said in caplog.text
    assert "building it anew" in caplog.text
    assert len(builds) == 2
    assert_is(checkpoint, tiny_tree)


def test_a_copied_cache_is_checked_once_and_used(
    tiny_gguf: Path, tiny_tree: Tree, folder: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_checkpoint(tiny_gguf, folder)
    copied = Path(shutil.copytree(folder, folder.with_name("copied")))
    checked: list[str] = []
    sha256 = cache._sha256
    monkeypatch.setattr(cache, "_sha256", lambda path: checked.append(path.name) or sha256(path))  # type: ignore[func-returns-value]
    for _ in range(2):
        assert_is(open_checkpoint(tiny_gguf, copied), tiny_tree)
    assert sorted(checked) == ["tokenizer.model", "weights.safetensors"]
    assert len(builds) == 1


def test_a_copied_cache_that_cannot_be_written_is_used(
    tiny_gguf: Path, tiny_tree: Tree, folder: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_checkpoint(tiny_gguf, folder)
    copied = Path(shutil.copytree(folder, folder.with_name("copied")))
    shutil.rmtree(copied / "sources")
    monkeypatch.setattr(cache.os, "access", lambda path, mode: False)
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*")}
    assert_is(open_checkpoint(tiny_gguf, copied), tiny_tree)
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*")} == before


class FullDisk:
    """A file that takes `room` bytes and no more."""

    def __init__(self, file: object, room: int, error: int) -> None:
        self.file, self.room, self.error = file, room, error

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()  # type: ignore[attr-defined]

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(self.error, os.strerror(self.error))
        return self.file.write(data)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errno.ENOSPC, "no room is left on this disk"),
        (errno.EDQUOT, r"\(or in your quota\)"),
        (errno.EACCES, "no permission to use this cache folder"),
        (errno.EIO, r"this cache folder can't be used \(Input/output error\)"),
    ],
)
def test_a_write_that_fails_leaves_nothing(
    tiny_gguf: Path, tiny_tree: Tree, folder: Path, monkeypatch: pytest.MonkeyPatch, error: int, message: str
) -> None:
    def limited(path: Path, mode: str) -> object:
        file = open(path, mode)  # noqa: SIM115 (the code under test closes it)
        return FullDisk(file, 100_000, error) if "weights" in path.name else file

    with monkeypatch.context() as patch:
        patch.setattr(cache, "open", limited, raising=False)
        with pytest.raises(UserError, match=message) as caught:
            open_checkpoint(tiny_gguf, folder)
    assert "\n" not in str(caught.value)
    assert not list(folder.rglob("*.tmp"))
    assert not list(folder.rglob("weights*"))
    assert_is(open_checkpoint(tiny_gguf, folder), tiny_tree)


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(
    tiny_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage(10**10, 10**10 - 10**6, 10**6))
    with pytest.raises(UserError, match=r"need 0\.02 GB, but this disk has 0\.00 GB free: free some, or name another"):
        open_checkpoint(tiny_gguf, folder)


def test_a_cache_folder_that_is_a_file(tiny_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(UserError, match=r"this cache folder can't be used \((File exists|Not a directory)\)"):
        open_checkpoint(tiny_gguf, file)


def test_a_source_that_changes_meanwhile_is_not_cached(
    tiny_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = gguf_gemma3.GgufGemma3.read

    def touching(self: gguf_gemma3.GgufGemma3, name: str, index: tuple[slice, ...]) -> np.ndarray:
        os.utime(tiny_gguf, ns=(1, 1))
        return read(self, name, index)

    monkeypatch.setattr(gguf_gemma3.GgufGemma3, "read", touching)
    with pytest.raises(UserError, match="the file changed while it was read"):
        open_checkpoint(tiny_gguf, folder)
    assert not list(folder.rglob("entry.json"))


SLOW_BUILD = """
import sys, time
from pathlib import Path
from equarx_serve.weights import open_checkpoint
def slowly(done, total, what):
    if what.startswith("dequantizing") or what.startswith("waiting"):
        print(what, flush=True)
        time.sleep(float(sys.argv[3]))
checkpoint = open_checkpoint(sys.argv[1], sys.argv[2], slowly)
print("opened", checkpoint.path, flush=True)
"""


def start(gguf: Path, folder: Path, pause: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILD, str(gguf), str(folder), str(pause)], stdout=subprocess.PIPE, text=True
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_killed_in_the_middle(tiny_gguf: Path, tiny_tree: Tree, folder: Path) -> None:
    process = start(tiny_gguf, folder, 0.2)
    assert first_line(process).startswith("dequantizing")
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    leftovers = [path.name for path in folder.rglob("*") if path.is_file()]
    assert any(name.endswith(".tmp") for name in leftovers)
    assert not {"weights.safetensors", "entry.json"} & set(leftovers)
    assert_is(open_checkpoint(tiny_gguf, folder), tiny_tree)
    assert not list(folder.rglob("*.tmp"))


def test_two_at_once_build_once(tiny_gguf: Path, tiny_tree: Tree, folder: Path) -> None:
    first = start(tiny_gguf, folder, 0.1)
    assert first_line(first).startswith("dequantizing")
    second = start(tiny_gguf, folder, 0)
    out, _ = second.communicate(timeout=60)
    assert out.splitlines()[0] == "waiting for another process that prepares the same weights"
    assert len(out.splitlines()) == 2
    assert out.splitlines()[1].startswith("opened")
    first.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)
    assert_is(open_checkpoint(tiny_gguf, folder), tiny_tree)


def test_the_one_that_waits_takes_over_when_the_builder_is_killed(
    tiny_gguf: Path, tiny_tree: Tree, folder: Path
) -> None:
    first = start(tiny_gguf, folder, 0.5)
    assert first_line(first).startswith("dequantizing")
    second = start(tiny_gguf, folder, 0)
    assert first_line(second).startswith("waiting")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    out, _ = second.communicate(timeout=60)
    assert second.returncode == 0
    assert out.splitlines()[-1].startswith("opened")
    assert_is(open_checkpoint(tiny_gguf, folder), tiny_tree)
