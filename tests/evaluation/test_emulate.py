"""Emulated ranks do what real ranks do."""

import gemma3.naive as naive
import numpy as np
import pytest
from gemma3.tiny import serving_model, tiny

from equarx_serve.evaluation.emulate import emulated_prefill
from equarx_serve.inference.reduce import EXACT, ReduceConfig

WIDE = tiny(embed_dim=128, num_layers=2)
PARAMS = naive.tiny_parameters(WIDE)


@pytest.mark.parametrize(
    "spec", ["f32", "int8:algorithm=ring", "int8:algorithm=two_ended_ring", "int4:algorithm=two_shot"]
)
def test_four_emulated_ranks_equal_four_real_ones(spec):
    reduce = ReduceConfig.parse(spec if spec == "f32" else spec + ",min_bytes=0,quantize_min_bytes=0")
    one, four = serving_model(WIDE, PARAMS, 1), serving_model(WIDE, PARAMS, 4)
    batch = one.batch(list(range(3, 35)))
    real = np.asarray(four.compiled(batch, reduce).run(batch).hidden)
    emulated = np.asarray(emulated_prefill(one, batch, reduce, 4).hidden)
    exact = np.asarray(one.compiled(batch, EXACT).run(batch).hidden)
    quantization = np.sqrt(np.mean((real - exact) ** 2))
    difference = np.sqrt(np.mean((real - emulated) ** 2))
    if spec == "f32":
        assert difference < 1e-5
        return
    # Partial sums differ in their last bits, so a few codes fall the other way; most must not.
    assert quantization > 1e-3
    assert difference < 0.5 * quantization


def test_more_ranks_than_heads_can_be_emulated_and_an_uneven_cut_is_refused():
    one = serving_model(WIDE, PARAMS, 1)
    batch = one.batch(list(range(3, 35)))
    exact = np.asarray(one.compiled(batch, EXACT).run(batch).hidden)
    sixteen = np.asarray(emulated_prefill(one, batch, EXACT, 16).hidden)
    np.testing.assert_allclose(sixteen, exact, atol=1e-5)
    with pytest.raises(ValueError, match="a contraction over 64 can't be cut into 7 ranks"):
        emulated_prefill(one, batch, EXACT, 7)


def test_emulation_needs_a_one_rank_model():
    four = serving_model(WIDE, PARAMS, 4)
    with pytest.raises(ValueError, match="needs a model on one rank; this one lies on 4"):
        emulated_prefill(four, four.batch([3, 4]), EXACT, 4)
