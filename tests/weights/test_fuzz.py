"""Damaged GGUF files: whatever is changed or cut off, only a `UserError` comes out, and in bounded time."""

import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_gemma3 import gguf_tensors, metadata, official_tree, write_gguf

from equarx_serve.errors import UserError
from equarx_serve.weights.gguf import read_gguf
from equarx_serve.weights.gguf_gemma3 import GgufGemma3
from equarx_serve.weights.gguf_tokenizer import has_tokenizer, sentencepiece_model
from equarx_serve.weights.tree import whole


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp())
    write_gguf(path / "good.gguf", metadata(), gguf_tensors(official_tree()))
    yield path
    shutil.rmtree(path)


def use_all_of_it(path: Path) -> str:
    """What a user's start does with a file; the sentence that came out, or '' when all went well."""
    try:
        file = read_gguf(path)
        if has_tokenizer(file):
            sentencepiece_model(file)
        checkpoint = GgufGemma3(file)
        for name, spec in checkpoint.leaves.items():
            checkpoint.read(name, whole(spec))
    except UserError as error:
        return str(error)
    return ""


numbers = st.sampled_from([0, 1, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
# (where, what): most of the file is data, nearly all faults are in the header.
edits = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.booleans(),
        st.one_of(
            st.binary(min_size=1, max_size=9),
            numbers.map(lambda number: struct.pack("<Q", number)),
            numbers.map(lambda number: struct.pack("<I", number % 2**32)),
        ),
    ),
    min_size=1,
    max_size=3,
)


def damage(folder: Path, changes: list[tuple[float, bool, bytes]], keep: float) -> str:
    good = folder / "good.gguf"
    content = bytearray(good.read_bytes())
    header = read_gguf(good).data_offset
    for where, in_header, what in changes:
        at = int(where * (header if in_header else len(content)))
        content[at : at + len(what)] = what
    bad = folder / "bad.gguf"
    bad.write_bytes(content[: max(1, int(len(content) * keep))])
    said = use_all_of_it(bad)
    assert "\n" not in said
    assert said == "" or "bad.gguf: " in said
    return said


def test_the_good_file_is_good(folder: Path) -> None:
    assert use_all_of_it(folder / "good.gguf") == ""


@settings(max_examples=150, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=edits, keep=st.one_of(st.just(1.0), st.floats(0, 1)))
def test_a_damaged_file_gives_a_sentence(folder: Path, changes: list[tuple[float, bool, bytes]], keep: float) -> None:
    damage(folder, changes, keep)


@pytest.mark.slow
@settings(max_examples=3000, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=edits, keep=st.one_of(st.just(1.0), st.floats(0, 1)))
def test_many_damaged_files_give_a_sentence(
    folder: Path, changes: list[tuple[float, bool, bytes]], keep: float
) -> None:
    damage(folder, changes, keep)
