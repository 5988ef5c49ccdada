"""Block-wise quantized collectives for `jax.shard_map`: half the bytes of a bf16 psum, the same bits on every rank.

Stands alone: knows nothing of any model, needs JAX and NumPy only, starts no backend and reads no environment when
imported. docs/collective.md has the contract, the drawings and the limits.

    config.py    CollectiveConfig: what to run            policy.py     what will run and why (Plan)
    api.py       all_reduce, reduce_scatter, all_gather   counters.py   fallbacks by reason
    schedule.py  who sends what to whom, as data          layout.py     bytes of a token
    blockwise.py, packing.py, rotation.py  the arithmetic reference.py  the same in NumPy
    xla.py       the portable backend
"""

from equarx_serve.collectives.api import all_gather, all_reduce, reduce_scatter
from equarx_serve.collectives.config import CollectiveConfig, CollectiveError
from equarx_serve.collectives.counters import fallback_counts, reset_fallback_counts
from equarx_serve.collectives.policy import Plan, explain
from equarx_serve.collectives.rotation import column_scale, fold
from equarx_serve.collectives.schedule import axis_schedule, quantization_units

__all__ = [
    "CollectiveConfig",
    "CollectiveError",
    "Plan",
    "all_gather",
    "all_reduce",
    "axis_schedule",
    "column_scale",
    "explain",
    "fallback_counts",
    "fold",
    "quantization_units",
    "reduce_scatter",
    "reset_fallback_counts",
]
