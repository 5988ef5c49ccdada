"""From a checkpoint on disk to arrays on a mesh, each shard straight to its device.

Knows: which model a checkpoint is (by its own facts or by the name that the user gave) and how each leaf lies on the
mesh. Leaves to others: file formats (`equarx_serve.weights`), the sharding rules (`gemma3.sharding`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from equarx_serve.errors import UserError
from equarx_serve.gemma3 import GEMMA3_SIZES, TP_AXIS, Gemma3Config, gemma3_config, leaf_shardings
from equarx_serve.weights import ArchitectureFacts, Checkpoint

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_SHORT = {"f32": "float32", "bf16": "bfloat16"}

_FACT_OF_FIELD = {
    "num_layers": "layers",
    "embed_dim": "d_model",
    "hidden_dim": "d_ff",
    "num_heads": "heads",
    "num_kv_heads": "kv_heads",
    "head_dim": "head_dim",
    "window": "window",
    "vocab_size": "vocab",
    "norm_eps": "rms_eps",
    "global_rope_base": "rope_base_global",
    "global_rope_scale": "rope_scale_global",
}


def parse_dtype(name: str) -> np.dtype:
    """ "float32" or "bfloat16" (f32, bf16). `UserError` for float16, with the reason, and for anything else."""
    long = _SHORT.get(name, name)
    if long in DTYPES:
        return DTYPES[long]
    if name in ("float16", "fp16", "f16", "half"):
        raise UserError(
            f"dtype {name} is not possible: Gemma 3's residual stream passes 100,000 and float16 ends at 65,504; "
            "choose float32 or bfloat16"
        )
    raise UserError(f"unknown dtype {name!r}; choose float32 or bfloat16")


def config_of(checkpoint: Checkpoint, model: str | None) -> Gemma3Config:
    """Which Gemma 3 the checkpoint holds.

    Its own facts decide; `model` must agree with them. A checkpoint whose facts are of no published size gets a config
    made of its facts (local rope base and the 5:1 pattern are Gemma 3's, for no file tells them).
    """
    named = gemma3_config(model) if model is not None else None
    facts = checkpoint.facts
    if facts is None:
        if named is None:
            raise UserError(f"{checkpoint.source} does not say which model it is; name it with model=...")
        return named
    if named is not None:
        wrong = _differences(named, facts)
        if wrong:
            raise UserError(f"{checkpoint.source} is not {named.name}: {'; '.join(wrong)}")
        return named
    for config in GEMMA3_SIZES.values():
        if not _differences(config, facts):
            return config
    fields = {field: getattr(facts, fact) for field, fact in _FACT_OF_FIELD.items()}
    return Gemma3Config(name=f"gemma3-{facts.layers}x{facts.d_model}", **fields)


def _differences(config: Gemma3Config, facts: ArchitectureFacts) -> list[str]:
    return [
        f"its {fact} is {getattr(facts, fact)}, not {getattr(config, field)}"
        for field, fact in _FACT_OF_FIELD.items()
        # Files hold their reals in f32: 1e-6 comes back as 9.9999999e-7.
        if not np.isclose(getattr(config, field), getattr(facts, fact), rtol=1e-5, atol=0)
    ]


def load_parameters(
    checkpoint: Checkpoint,
    config: Gemma3Config,
    mesh: Mesh,
    dtype: np.dtype,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Array]:
    """Every parameter on the mesh: official name -> global array of `LeafSharding.global_shape`.

    Each device's slice is read on its own; no more than one leaf's slices are in host memory at a time.
    Raises `UserError` for a missing leaf or a wrong shape. `progress` counts parameters.
    """
    rules = leaf_shardings(config, mesh.shape[TP_AXIS])
    missing = [name for name in rules if name not in checkpoint.leaves]
    if missing:
        raise UserError(f"{checkpoint.source} lacks {len(missing)} parameters of {config.name}, {missing[0]} first")
    for name, rule in rules.items():
        if checkpoint.leaves[name].shape != rule.shape:
            raise UserError(
                f"{checkpoint.source}: {name} has shape {checkpoint.leaves[name].shape}; "
                f"{config.name} needs {rule.shape}"
            )
    total = sum(int(np.prod(rule.shape)) for rule in rules.values())
    done = 0
    params: dict[str, Array] = {}
    for name, rule in rules.items():

        def read(index: Any, name: str = name) -> np.ndarray:
            values = checkpoint.read(name, rules[name].checkpoint_index(index))
            _refuse_non_finite(values, name, checkpoint.source)
            return values.astype(dtype, copy=False)

        sharding = NamedSharding(mesh, rule.spec)
        params[name] = jax.make_array_from_callback(rule.global_shape, sharding, read)
        done += int(np.prod(rule.shape))
        progress(done, total, "placing the weights on the mesh")
    return params


def _refuse_non_finite(values: np.ndarray, name: str, source: str) -> None:
    # A sum is finite only if every value is (or if it overflows, which the second look settles).
    if not np.isfinite(np.sum(values, dtype=np.float64)) and not np.all(np.isfinite(values)):
        raise UserError(f"{source}: {name} holds NaN or infinity; the file is damaged")


def describe(config: Gemma3Config) -> dict[str, object]:
    """The config as JSON-ready values, for result records."""
    return dataclasses.asdict(config)
