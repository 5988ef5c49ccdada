"""Gemma 3 in Flax NNX, tensor-parallel, with its AllReduce given from outside.

config      the five sizes and the legal tensor-parallel degrees
sharding    which slice of which checkpoint leaf a rank holds
parallel    the model's window on its ranks: row-parallel sums through a callable
attention   positions, rotary embedding, masks, the attention call
layers      norms, attention, feed-forward, embedding
model       the whole, and how arrays get into it
"""

from equarx_serve.gemma3.config import GEMMA3_SIZES, MAX_CONTEXT, Gemma3Config, gemma3_config
from equarx_serve.gemma3.model import Forward, Gemma3, parameter_shapes, with_parameters
from equarx_serve.gemma3.parallel import AllReduce, ReducePoint, TensorParallel, exact_all_reduce
from equarx_serve.gemma3.sharding import TP_AXIS, LeafSharding, leaf_shardings

__all__ = [
    "GEMMA3_SIZES",
    "MAX_CONTEXT",
    "TP_AXIS",
    "AllReduce",
    "Forward",
    "Gemma3",
    "Gemma3Config",
    "LeafSharding",
    "ReducePoint",
    "TensorParallel",
    "exact_all_reduce",
    "gemma3_config",
    "leaf_shardings",
    "parameter_shapes",
    "with_parameters",
]
