"""GGUF tensors under official names: every layout, any slice, and a sentence for every file that is no Gemma 3."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gemma3 import MakeGguf, Tree

from equarx_serve.errors import UserError
from equarx_serve.weights import Checkpoint
from equarx_serve.weights.gguf import read_gguf
from equarx_serve.weights.gguf_gemma3 import GgufGemma3
from equarx_serve.weights.tree import blocks, whole


def open_gemma3(path: Path) -> GgufGemma3:
    return GgufGemma3(read_gguf(path))


def test_every_leaf_is_the_official_one(tiny_gguf: Path, tiny_tree: Tree) -> None:
    checkpoint = open_gemma3(tiny_gguf)
    assert isinstance(checkpoint, Checkpoint)
    assert {name: spec.shape for name, spec in checkpoint.leaves.items()} == {n: a.shape for n, a in tiny_tree.items()}
    for name, expected in tiny_tree.items():
        found = checkpoint.read(name, whole(checkpoint.leaves[name]))
        assert found.dtype == np.float32
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, expected, name)


def test_any_slice_is_the_slice_of_the_whole(tiny_gguf: Path, tiny_tree: Tree) -> None:
    checkpoint = open_gemma3(tiny_gguf)
    rng = np.random.default_rng(1)
    for name, expected in tiny_tree.items():
        for _ in range(8):
            cuts = [sorted(rng.integers(0, size + 1, 2).tolist()) for size in expected.shape]
            index = tuple(slice(*cut) if rng.random() < 0.7 else slice(None) for cut in cuts)
            found = checkpoint.read(name, index)
            assert found.flags.c_contiguous
            np.testing.assert_array_equal(found, expected[index], f"{name}{index}")


def test_facts(tiny_gguf: Path) -> None:
    facts = open_gemma3(tiny_gguf).facts
    assert facts is not None
    assert (facts.layers, facts.d_model, facts.d_ff, facts.heads, facts.kv_heads, facts.head_dim) == (
        (2, 64, 96, 4, 2, 32)
    )
    assert (facts.window, facts.vocab, facts.context) == (8, 300, 128)
    assert (facts.rms_eps, facts.rope_base_global, facts.rope_scale_global) == (np.float32(1e-6), 1e6, 1.0)


def test_linear_rope_scaling_is_read(make_gguf: MakeGguf) -> None:
    path = make_gguf({"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0})
    facts = open_gemma3(path).facts
    assert facts is not None
    assert facts.rope_scale_global == 8.0


def test_blocks_cut_the_first_axis(tiny_gguf: Path, tiny_tree: Tree) -> None:
    checkpoint = open_gemma3(tiny_gguf)
    for name, expected in tiny_tree.items():
        for limit in (1, 1000, 10**9):
            parts = [checkpoint.read(name, index) for index in blocks(checkpoint.leaves[name], limit)]
            np.testing.assert_array_equal(np.concatenate(parts), expected)
            assert all(part.nbytes <= limit or len(part) == 1 for part in parts)


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"gemma3.block_count": 0}, "says that layers is 0; it must be positive"),
    ({"gemma3.block_count": 3}, r"the tensor 'blk\.2\.attn_norm\.weight' is missing"),
    ({"gemma3.block_count": 2**32 - 1}, r"the tensor 'blk\.2\.attn_norm\.weight' is missing"),
    ({"gemma3.block_count": 1}, r"13 of its tensors have no place in Gemma 3 \('blk\.1\.attn_k\.weight', "),
    ({"gemma3.block_count": "two"}, "key 'gemma3.block_count' should be one whole number"),
    (
        {"gemma3.embedding_length": 128},
        r"'token_embd\.weight' has shape \(300, 64\); the metadata ask for \(300, 128\)",
    ),
    ({"gemma3.feed_forward_length": 97}, r"'blk\.0\.ffn_gate\.weight' has shape \(96, 64\)"),
    ({"gemma3.attention.head_count": 3}, "3 query heads can't share 2 KV heads evenly"),
    ({"gemma3.attention.head_count": 8}, r"'blk\.0\.attn_q\.weight' has shape \(128, 64\).* \(256, 64\)"),
    ({"gemma3.attention.value_length": 16}, "keys of 32 and values of 16"),
    ({"gemma3.rope.freq_base": float("nan")}, "'gemma3.rope.freq_base' should be one finite number"),
    ({"gemma3.rope.scaling.type": "yarn"}, "rope scaling of type 'yarn'"),
    ({"gemma3.rope.scaling.type": "linear"}, r"key 'gemma3\.rope\.scaling\.factor' is missing"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS)
def test_metadata_that_do_not_fit(make_gguf: MakeGguf, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_gemma3(make_gguf(fields))


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("gemma3.attention.sliding_window", r"the metadata key 'gemma3\.attention\.sliding_window' is missing"),
        ("blk.1.ffn_up.weight", r"the tensor 'blk\.1\.ffn_up\.weight' is missing"),
        ("token_embd.weight", r"the tensor 'token_embd\.weight' is missing"),
        ("output_norm.weight", r"the tensor 'output_norm\.weight' is missing"),
    ],
)
def test_something_is_missing(make_gguf: MakeGguf, gone: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_gemma3(make_gguf(without=(gone,)))


def test_another_architecture(make_gguf: MakeGguf) -> None:
    with pytest.raises(UserError, match="this is a 'llama' model; only 'gemma3' is supported"):
        open_gemma3(make_gguf(arch="llama"))


def test_wrong_shape_and_unknown_tensor(make_gguf: MakeGguf) -> None:
    with pytest.raises(UserError, match=r"'blk\.0\.attn_output\.weight' has shape \(128, 64\)"):
        open_gemma3(make_gguf(tensors={"blk.0.attn_output.weight": np.zeros((128, 64), np.float32)}))
    with pytest.raises(UserError, match=r"1 of its tensors have no place in Gemma 3 \('output\.weight'\)"):
        open_gemma3(make_gguf(tensors={"output.weight": np.zeros((300, 64), np.float32)}))


def test_an_index_of_another_rank_is_a_defect_of_the_caller(tiny_gguf: Path) -> None:
    checkpoint = open_gemma3(tiny_gguf)
    for index in [(slice(None),), (slice(None), slice(0, 4, 2))]:
        with pytest.raises(ValueError, match="one slice of step 1 for each axis"):
            checkpoint.read("embedder/input_embedding", index)
