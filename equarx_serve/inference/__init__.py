"""Sharded prefill on real weights.

serving     ServingModel and load_model: the Python API
prefill     the compiled program, its outputs and the KV cache
reduce      the model's AllReduce: `equarx_serve.collectives` bound to the mesh axis
loading     checkpoint -> arrays on the mesh
batching    prompts of unequal length as one batch
mesh        the mesh
tokenizer   text <-> ids, exactly one BOS
"""

from equarx_serve.inference.batching import Batch, make_batch
from equarx_serve.inference.prefill import KVCache, PrefillOutput
from equarx_serve.inference.reduce import EXACT, ReduceConfig
from equarx_serve.inference.serving import PrefillResult, ServingModel, load_model
from equarx_serve.inference.tokenizer import Tokenizer

__all__ = [
    "EXACT",
    "Batch",
    "KVCache",
    "PrefillOutput",
    "PrefillResult",
    "ReduceConfig",
    "ServingModel",
    "Tokenizer",
    "load_model",
    "make_batch",
]
