"""Tensor-parallel Gemma 3 whose row-parallel AllReduce is a block-wise quantized collective.

    from equarx_serve import load_model
    model = load_model("gemma3-270m", tp=4, reduce="int8")
    result = model.prefill("The capital of France is")

Importing this imports nothing heavy, starts no jax backend and reads no environment: names are fetched when first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equarx_serve.collectives import CollectiveConfig, CollectiveError
    from equarx_serve.errors import UserError
    from equarx_serve.inference import PrefillResult, ReduceConfig, ServingModel, load_model

_HOME = {
    "CollectiveConfig": "equarx_serve.collectives",
    "CollectiveError": "equarx_serve.collectives",
    "PrefillResult": "equarx_serve.inference",
    "ReduceConfig": "equarx_serve.inference",
    "ServingModel": "equarx_serve.inference",
    "UserError": "equarx_serve.errors",
    "load_model": "equarx_serve.inference",
}

__all__ = [
    "CollectiveConfig",
    "CollectiveError",
    "PrefillResult",
    "ReduceConfig",
    "ServingModel",
    "UserError",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
