"""Fixtures of the weights tests: tiny GGUF files."""

from pathlib import Path
from typing import Any

import pytest
from tiny_gemma3 import MakeGguf, Tree, gguf_tensors, metadata, official_tree, write_gguf


@pytest.fixture
def make_gguf(tmp_path: Path) -> MakeGguf:
    """make_gguf(fields={...}, without=[...], tensors={...}, arch=...): the tiny GGUF with these changes."""

    def make(
        fields: dict[str, Any] | None = None,
        without: tuple[str, ...] = (),
        tensors: Tree | None = None,
        arch: str = "gemma3",
        name: str = "tiny.gguf",
        seed: int = 0,
    ) -> Path:
        all_fields = metadata() | (fields or {})
        all_tensors = gguf_tensors(official_tree(seed)) | (tensors or {})
        for gone in without:
            (all_fields if gone in all_fields else all_tensors).pop(gone)
        return write_gguf(tmp_path / name, all_fields, all_tensors, arch)

    return make


@pytest.fixture
def tiny_gguf(make_gguf: MakeGguf) -> Path:
    """The tiny GGUF as it is."""
    return make_gguf()


@pytest.fixture
def tiny_tree() -> Tree:
    """The official tree of `tiny_gguf`."""
    return official_tree()
