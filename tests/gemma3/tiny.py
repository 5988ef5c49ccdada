"""Tiny models for tests, on any number of ranks."""

import dataclasses

import jax
import numpy as np
from jax.sharding import NamedSharding

from equarx_serve.gemma3 import Gemma3Config, leaf_shardings
from equarx_serve.inference.mesh import make_mesh
from equarx_serve.inference.reduce import EXACT
from equarx_serve.inference.serving import ServingModel

TINY = Gemma3Config(
    "tiny", num_layers=6, embed_dim=32, hidden_dim=64, num_heads=4, num_kv_heads=1, head_dim=16, window=8, vocab_size=64
)
"""Six layers, so that one is global; window 8."""


def tiny(**changes):
    return dataclasses.replace(TINY, **changes)


def placed(config, params, mesh, dtype=np.float32):
    """Official leaves on the mesh, by the sharding rules."""
    rules = leaf_shardings(config, mesh.shape["tp"])
    return {
        name: jax.make_array_from_callback(
            rule.global_shape,
            NamedSharding(mesh, rule.spec),
            lambda index, name=name: params[name][rules[name].checkpoint_index(index)].astype(dtype),
        )
        for name, rule in rules.items()
    }


F32 = np.dtype(np.float32)


def serving_model(config, params, tp=1, reduce=EXACT, dtype=F32):
    mesh = make_mesh(tp)
    return ServingModel(config, mesh, placed(config, params, mesh, dtype), dtype, reduce)
