"""Prefill as one compiled program: tokens in; last-token logits, KV cache and hidden states out, on a mesh.

Everything runs inside one `jax.shard_map`. Leaves to others: what the AllReduce is (`reduce`), where arrays come from
(`loading`), text (`tokenizer`), timing (`equarx_serve.timing`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from equarx_serve.gemma3 import TP_AXIS, Gemma3, Gemma3Config, TensorParallel, with_parameters
from equarx_serve.gemma3.attention import positions_of


class KVCache(NamedTuple):
    """Keys (rotary embedding applied) and values of every layer, and which token each slot holds.

    The head axis is split over the ranks; with fewer KV heads than ranks it has one entry a rank, each head repeated.
    """

    keys: tuple[Float[Array, "B T K H"], ...]
    values: tuple[Float[Array, "B T K H"], ...]
    positions: Int[Array, "B T"]
    valid: Bool[Array, "B T"]


class PrefillOutput(NamedTuple):
    """What a prefill leaves on the mesh."""

    logits: Float[Array, "B V"]
    """Of the last real token of each row, f32; the vocabulary is split over the ranks."""
    cache: KVCache
    hidden: Float[Array, "B T D"]
    """After the final norm, every token, the same on every rank."""


Prefill = Callable[[Mapping[str, Array], Int[Array, "B T"], Bool[Array, "B T"]], PrefillOutput]


def last_real(valid: Bool[Array, "B T"]) -> Int[Array, " B"]:
    """Index of the last real token of each row."""
    width = valid.shape[1]
    return width - 1 - jnp.argmax(valid[:, ::-1], axis=1).astype(jnp.int32)


def prefill_function(
    config: Gemma3Config, mesh: Mesh, ranks: TensorParallel, specs: Mapping[str, PartitionSpec], dtype: np.dtype
) -> Prefill:
    """The prefill of `config` on `mesh`, ready for `jax.jit`.

    Args:
        ranks: how many ranks there are and how they sum; its size must be the mesh's `tp` axis.
        specs: how each parameter lies on the mesh (`reduce.parameter_specs`).
        dtype: of weights and activations.
    """
    if ranks.size != mesh.shape[TP_AXIS]:
        raise ValueError(f"the model is built for {ranks.size} ranks and the mesh has {mesh.shape[TP_AXIS]}")
    model = Gemma3(config, ranks, jnp.dtype(dtype))

    def one_rank(params: Mapping[str, Array], tokens: Int[Array, "B T"], valid: Bool[Array, "B T"]) -> PrefillOutput:
        loaded: Any = with_parameters(model, params)
        forward = loaded(tokens, valid)
        last = jnp.take_along_axis(forward.hidden, last_real(valid)[:, None, None], axis=1)[:, 0]
        keys, values = zip(*forward.cache, strict=True)
        cache = KVCache(tuple(keys), tuple(values), positions_of(valid), valid)
        return PrefillOutput(loaded.embedder.decode(last), cache, forward.hidden)

    everywhere, heads = PartitionSpec(), PartitionSpec(None, None, TP_AXIS)
    layers: Any = (heads,) * config.num_layers
    # The same trees with a sharding in each array's place.
    output, cache_of, by_vocabulary = cast(Any, PrefillOutput), cast(Any, KVCache), PartitionSpec(None, TP_AXIS)
    return jax.shard_map(
        one_rank,
        mesh=mesh,
        in_specs=(dict(specs), everywhere, everywhere),
        out_specs=output(by_vocabulary, cache_of(layers, layers, everywhere, everywhere), everywhere),
        # Ranks do hold equal hidden states (tested bitwise), but a ring of permutes can't prove it to the checker.
        check_vma=False,
    )
