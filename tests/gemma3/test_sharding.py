"""The sharding rules and the per-rank model describe the same tree."""

import numpy as np
import pytest
from gemma3.tiny import tiny

from equarx_serve.gemma3 import GEMMA3_SIZES, Gemma3, TensorParallel, leaf_shardings, parameter_shapes


@pytest.mark.parametrize("name", GEMMA3_SIZES)
def test_rules_give_every_rank_exactly_the_shapes_of_its_model(name):
    config = GEMMA3_SIZES[name]
    for tp in config.legal_tp:
        local = {
            leaf: tuple(n // tp if i == rule.axis else n for i, n in enumerate(rule.global_shape))
            for leaf, rule in leaf_shardings(config, tp).items()
        }
        shapes = parameter_shapes(Gemma3(config, TensorParallel(tp)))
        assert {leaf: shape for leaf, (shape, _) in shapes.items()} == local


@pytest.mark.parametrize("name", GEMMA3_SIZES)
def test_at_one_rank_the_shapes_are_the_official_ones(name):
    config = GEMMA3_SIZES[name]
    assert all(rule.global_shape == rule.shape for rule in leaf_shardings(config, 1).values())
    c = config
    rules = leaf_shardings(c, 1)
    assert rules["layer_0/attn/kv_einsum/w"].shape == (2, c.num_kv_heads, c.embed_dim, c.head_dim)
    assert len(rules) == 11 * c.num_layers + 2


@pytest.mark.parametrize(
    ("kv_heads", "tp", "expected"), [(4, 8, [0, 0, 1, 1, 2, 2, 3, 3]), (1, 4, [0] * 4), (4, 2, [[0, 1], [2, 3]])]
)
def test_each_rank_gets_the_kv_head_that_its_query_heads_use(kv_heads, tp, expected):
    config = tiny(num_heads=8, num_kv_heads=kv_heads)
    rule = leaf_shardings(config, tp)["layer_0/attn/kv_einsum/w"]
    mine = rule.global_shape[1] // tp
    found = []
    for rank in range(tp):
        index = (slice(None), slice(rank * mine, (rank + 1) * mine), slice(None), slice(None))
        cut = rule.checkpoint_index(index)
        assert (cut[0], cut[2], cut[3]) == (slice(0, 2, 1), slice(0, 32, 1), slice(0, 16, 1))
        heads = np.arange(kv_heads)[cut[1]].tolist()
        found.append(heads[0] if len(heads) == 1 else heads)
    assert found == expected


def test_a_slice_that_would_join_two_repeated_heads_is_refused():
    rule = leaf_shardings(tiny(num_heads=8, num_kv_heads=4), 8)["layer_0/attn/kv_einsum/w"]
    with pytest.raises(ValueError, match="spans two entries repeated 2 times"):
        rule.checkpoint_index((slice(None), slice(1, 3), slice(None), slice(None)))
