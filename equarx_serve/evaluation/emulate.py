"""Any number of ranks on one device: the same collective code under `jax.vmap`, the contraction split further.

A model with four query heads can be sharded over four ranks at most. What its AllReduce would do at 8 or 16 can still
be known: the row-parallel contraction (heads x head_dim, hidden) is cut into so many parts on one device and the parts
are summed by the very code that runs inside `shard_map`. At a degree that can be sharded both give the same partial
sums (a test compares them). Bytes and quality are real in this; times mean nothing.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from equarx_serve.gemma3 import ReducePoint, TensorParallel
from equarx_serve.inference.batching import Batch
from equarx_serve.inference.prefill import PrefillOutput, prefill_function
from equarx_serve.inference.reduce import CollectiveReduce, ReduceConfig, parameter_specs
from equarx_serve.inference.serving import ServingModel

EMULATED_AXIS = "emulated"


@dataclass(frozen=True)
class EmulatedRanks(TensorParallel):
    """One real rank (`size` 1) that plays `ranks` of them in every row-parallel sum."""

    ranks: int = 1

    def row_parallel(
        self,
        equation: str,
        x: Float[Array, "..."],
        w: Float[Array, "..."],
        point: ReducePoint,
        channel_scale: Float[Array, " D"] | None = None,
    ) -> Float[Array, "B T D"]:
        contracted = x.shape[2:]
        width = int(np.prod(contracted))
        if width % self.ranks:
            raise ValueError(f"{point}: a contraction over {width} can't be cut into {self.ranks} ranks")
        parts = x.reshape(*x.shape[:2], self.ranks, width // self.ranks)
        weights = w.reshape(self.ranks, width // self.ranks, w.shape[-1])
        partial = jnp.einsum("btrk,rkd->rbtd", parts, weights)
        summed = jax.vmap(lambda one: self.all_reduce(one, point, channel_scale), axis_name=EMULATED_AXIS)(partial)
        return summed[0]


def emulated_prefill(model: ServingModel, batch: Batch, reduce: ReduceConfig, ranks: int) -> PrefillOutput:
    """A prefill of a one-rank model as `ranks` ranks would do it under `reduce`."""
    if model.tp != 1:
        raise ValueError(f"emulation needs a model on one rank; this one lies on {model.tp}")
    sums = CollectiveReduce(reduce.collective, reduce.fold, EMULATED_AXIS)
    emulated = EmulatedRanks(1, sums, reduce.channel_scale != "none", ranks)
    function = prefill_function(
        model.config, model.mesh, emulated, parameter_specs(model.config, 1, reduce), model.dtype
    )
    return jax.jit(function)(model.parameters(reduce), batch.tokens, batch.valid)
