"""How many collectives a layer's compiled program holds, and that the plan names them all."""

import re

import gemma3.naive as naive
import pytest
from gemma3.tiny import TINY, serving_model, tiny

from equarx_serve.inference.reduce import ReduceConfig

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def counted(config, reduce, tp=4):
    """Collectives in the optimized HLO of the whole prefill, by kind; 25 tokens padded to 32."""
    model = serving_model(config, naive.tiny_parameters(config), tp, ReduceConfig.parse(reduce))
    program = model.compiled(model.batch(list(range(3, 28))))
    # An asynchronous collective is a start and a done: count the starts.
    found = re.findall(rf"= (?:\S+|\(.*?\)) ({'|'.join(COLLECTIVES)})(?:-start)?\(", program.hlo())
    return {kind: found.count(kind) for kind in COLLECTIVES if kind in found}, program.plan


def one_layer(reduce):
    """What one more layer adds."""
    two, plan = counted(tiny(num_layers=2), reduce)
    one, _ = counted(tiny(num_layers=1), reduce)
    return {k: two.get(k, 0) - one.get(k, 0) for k in COLLECTIVES if two.get(k, 0) != one.get(k, 0)}, plan


def test_a_layer_has_exactly_two_all_reduces_and_nothing_else():
    assert one_layer("f32")[0] == {"all-reduce": 2}


def test_the_embedding_adds_one():
    assert counted(TINY, "f32")[0] == {"all-reduce": 2 * TINY.num_layers + 1}


@pytest.mark.parametrize("algorithm", ["ring", "two_ended_ring", "two_shot"])
def test_a_quantized_layer_has_only_what_its_algorithm_names(algorithm):
    found, plan = one_layer(
        f"int8:algorithm={algorithm},block=32,rotation=none,min_bytes=0,quantize_min_bytes=0,chunks=1"
    )
    assert plan.algorithm == algorithm
    assert not plan.fallback
    allowed = {
        "ring": {"collective-permute", "all-gather"},
        "two_ended_ring": {"collective-permute", "all-gather"},
        "two_shot": {"all-to-all", "all-gather"},
    }[algorithm]
    assert set(found) <= allowed
    # Two points a layer, each reduce and gather: an even number of every kind, and none of psum's.
    assert all(count % 2 == 0 and count > 0 for count in found.values())
    assert "all-reduce" not in found
    if algorithm == "ring":
        assert found == {"collective-permute": 2 * plan.steps}
    if algorithm == "two_shot":
        assert found == {"all-to-all": 2, "all-gather": 2}
