"""What the parity tests share: marks, real text, and the official model on our weights.

Assumes nothing at import: `gemma` (3 GB with TensorFlow) is looked for by the fixture `gm` in conftest.py, so that
collecting these files costs nothing without it. Leaves to the tests: what is compared and how closely.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

EVALDATA = Path(__file__).parents[3] / "shared" / "evaldata"
"""Real benchmark rows beside the checkout; no part of the project."""

OFFICIAL_CLASS = {
    "gemma3-270m": "Gemma3_270M",
    "gemma3-1b": "Gemma3_1B",
    "gemma3-4b": "Gemma3_4B",
    "gemma3-12b": "Gemma3_12B",
    "gemma3-27b": "Gemma3_27B",
}

PARITY = [
    pytest.mark.parity,
    # Loading TensorFlow and compiling the official model take minutes on a busy machine of 2 cores.
    pytest.mark.timeout(1200),
]

Tree = dict[str, Any]


@contextmanager
def official_rules() -> Iterator[None]:
    """`gemma` relies on jax's defaults: it mixes dtypes and ranks, which our conftest forbids to our own code."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def nested(flat: Mapping[str, Any]) -> Tree:
    """{"layer_0/attn/q_einsum/w": x} as {"layer_0": {"attn": {"q_einsum": {"w": x}}}}: what flax.linen takes."""
    tree: Tree = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def flattened(tree: Any) -> dict[str, Any]:
    """The inverse of `nested`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(step.key for step in path): leaf for path, leaf in leaves}


def official_program(gm: Any, params: Mapping[str, Any], length: int) -> Callable[[np.ndarray], jax.Array]:
    """Compiled `gm.nn.Gemma3_270M` in f32 on `params` (official name -> array): ids [length] -> logits [length, V]."""
    model = gm.nn.Gemma3_270M(dtype=jnp.float32)
    tree = nested(params)
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    with official_rules():
        compiled = jax.jit(lambda p, t: model.apply({"params": p}, t).logits[0]).lower(tree, tokens).compile()
    return lambda ids: compiled(tree, jnp.asarray(ids, jnp.int32)[None])


def real_text(characters: int) -> str:
    """BoolQ passages, one after another, at least `characters` long; skips the test where the rows are not there."""
    source = EVALDATA / "boolq.jsonl"
    if not source.is_file():
        pytest.skip("no benchmark rows beside the checkout (../shared/evaldata/boolq.jsonl)")
    text = ""
    with source.open(encoding="utf-8") as rows:
        while len(text) < characters:
            text += json.loads(next(rows))["passage"] + "\n\n"
    return text
