"""Gemma 3, text part, as one rank runs it, and how arrays get into it.

Knows the order of the layers. Leaves to others: what a row-parallel sum is made of (`TensorParallel`), where weights
come from (`equarx_serve.weights`), what is done with the outputs (`equarx_serve.inference`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from equarx_serve.gemma3.attention import positions_of, rotary_angles
from equarx_serve.gemma3.config import Gemma3Config
from equarx_serve.gemma3.layers import Block, Embedder, RMSNorm, Sequence
from equarx_serve.gemma3.parallel import TensorParallel

LayerCache = tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]


class Forward(NamedTuple):
    """What a forward pass over whole prompts leaves behind."""

    hidden: Float[Array, "B T D"]
    """After the final norm; `embedder.decode` turns it into logits."""
    cache: tuple[LayerCache, ...]
    """Keys and values of every layer, rotary embedding applied, this rank's KV heads."""


class Gemma3(nnx.Module):
    """One rank's part of Gemma 3. Attribute names spell the official parameter tree: `layer_0/attn/q_einsum/w`."""

    def __init__(self, config: Gemma3Config, tp: TensorParallel, dtype: DTypeLike = jnp.float32) -> None:
        config.check_tp(tp.size)
        self.config = config
        self.embedder = Embedder(config, tp, dtype)
        for layer in range(config.num_layers):
            setattr(self, f"layer_{layer}", Block(config, layer, tp, dtype))
        self.final_norm = RMSNorm(config.embed_dim, config.norm_eps, dtype)

    def __call__(self, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"]) -> Forward:
        """Prefill. `valid` is False at padding, which may lie left, right or both; what it holds there is no result."""
        c = self.config
        positions = positions_of(valid)
        sequence = Sequence(
            positions,
            valid,
            local_angles=rotary_angles(positions, c.head_dim, c.local_rope_base, 1.0),
            global_angles=rotary_angles(positions, c.head_dim, c.global_rope_base, c.global_rope_scale),
        )
        x = self.embedder.encode(tokens)
        cache = []
        for layer in range(c.num_layers):
            x, keys_values = getattr(self, f"layer_{layer}")(x, sequence)
            cache.append(keys_values)
        return Forward(self.final_norm(x), tuple(cache))


def parameter_shapes(model: nnx.Module) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Official name -> (this rank's shape, dtype) of every parameter."""
    _, state = nnx.split(model)
    return {"/".join(map(str, path)): (leaf.shape, leaf.dtype) for path, leaf in nnx.to_flat_state(state)}


def with_parameters(model: nnx.Module, params: Mapping[str, Array]) -> nnx.Module:
    """A copy of `model` holding `params` (official name -> this rank's array). Traceable.

    Raises `KeyError` for a missing name and `ValueError` for a shape that is not the model's.
    """
    graphdef, state = nnx.split(model)
    leaves = []
    for path, leaf in nnx.to_flat_state(state):
        name = "/".join(map(str, path))
        if params[name].shape != leaf.shape:
            raise ValueError(f"{name} has shape {params[name].shape}; the model expects {leaf.shape}")
        leaves.append((path, leaf.replace(params[name])))
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))
