"""Every field of the five published configs, and every leaf of the five parameter trees, against `gemma`.

Compares without computing: no weights, no forward pass. What the config does not hold (the norm's epsilon) is compared
by a number. The text part only: the vision encoder of 4B and above is left out (`text_only`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity.oracle import OFFICIAL_CLASS, PARITY, flattened, official_rules

from equarx_serve.gemma3 import GEMMA3_SIZES, Gemma3Config, leaf_shardings, with_parameters
from equarx_serve.gemma3.layers import RMSNorm

pytestmark = PARITY

DECIDED_ELSEWHERE = {
    "vision_encoder",  # the text part only
    "query_pre_attn_norm",  # an enum; the factor that it stands for is compared instead
    "transpose_gating_einsum",  # decides the shape of mlp/gating_einsum: see the trees
}


def as_official(config: Gemma3Config) -> dict[str, Any]:
    """Our config under the official field names; what ours has no field for is written as our layers do it."""
    return {
        "num_embed": config.vocab_size,
        "embed_dim": config.embed_dim,
        "hidden_dim": config.hidden_dim,
        "num_heads": config.num_heads,
        "head_dim": config.head_dim,
        "num_kv_heads": config.num_kv_heads,
        "sliding_window_size": config.window,
        "attention_types": ["GLOBAL" if config.is_global(i) else "LOCAL_SLIDING" for i in range(config.num_layers)],
        "local_base_frequency": config.local_rope_base,
        "global_base_frequency": config.global_rope_base,
        "local_scale_factor": 1.0,
        "global_scale_factor": config.global_rope_scale,
        "use_qk_norm": True,
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "final_logit_softcap": None,
        "attn_logits_soft_cap": None,
    }


@pytest.mark.parametrize("name", GEMMA3_SIZES)
def test_every_field_of_the_config_is_the_official_one(gm: Any, name: str) -> None:
    official = getattr(gm.nn, OFFICIAL_CLASS[name]).config
    theirs = {field.name: getattr(official, field.name) for field in dataclasses.fields(official)}
    theirs["attention_types"] = [kind.name for kind in theirs["attention_types"]]
    ours = as_official(GEMMA3_SIZES[name])
    # A field that gemma gains must be decided on here, not be overlooked.
    assert set(theirs) == set(ours) | DECIDED_ELSEWHERE
    assert {field: theirs[field] for field in ours} == ours
    assert GEMMA3_SIZES[name].num_layers == official.num_layers
    assert GEMMA3_SIZES[name].attention_scale == pytest.approx(official.query_pre_attn_scalar(), rel=1e-12)


@pytest.mark.parametrize("name", GEMMA3_SIZES)
def test_the_parameter_tree_is_the_official_one(gm: Any, name: str) -> None:
    extra = {"text_only": True} if hasattr(getattr(gm.nn, OFFICIAL_CLASS[name]), "text_only") else {}
    official = getattr(gm.nn, OFFICIAL_CLASS[name])(dtype=jnp.bfloat16, **extra)
    with official_rules():
        tree = jax.eval_shape(official.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))["params"]
    theirs = {leaf: value.shape for leaf, value in flattened(tree).items()}
    assert theirs == {leaf: rule.shape for leaf, rule in leaf_shardings(GEMMA3_SIZES[name], tp=1).items()}


def test_the_norm_is_the_official_one_where_epsilon_counts(gm: Any) -> None:
    from gemma.gm.nn import _layers

    rng = np.random.default_rng(0)
    size = 64
    scale = rng.standard_normal(size).astype(np.float32)
    # rms of 1e-3: epsilon is half of what stands under the root. And of 1e4, where it is nothing.
    x = rng.standard_normal((2, size)).astype(np.float32) * np.float32([[1e-3], [1e4]])
    with official_rules():
        theirs = np.asarray(_layers.RMSNorm().apply({"params": {"scale": scale}}, x))
    norm: Any = with_parameters(
        RMSNorm(size, GEMMA3_SIZES["gemma3-270m"].norm_eps, jnp.float32), {"scale": jnp.asarray(scale)}
    )
    np.testing.assert_allclose(np.asarray(norm(jnp.asarray(x))), theirs, rtol=2e-6, atol=0)
    assert {config.norm_eps for config in GEMMA3_SIZES.values()} == {1e-6}
