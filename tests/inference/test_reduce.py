"""The model's AllReduce: text form, refusals, folding, and every algorithm's result in a real forward pass."""

import gemma3.naive as naive
import numpy as np
import pytest
from gemma3.tiny import serving_model, tiny

from equarx_serve.collectives import CollectiveConfig, CollectiveError
from equarx_serve.inference.reduce import EXACT, ReduceConfig

WIDE = tiny(embed_dim=128)
PARAMS = naive.tiny_parameters(WIDE)
TOKENS = list(range(3, 28))
ALWAYS = "min_bytes=0,quantize_min_bytes=0"


@pytest.mark.parametrize(
    "text",
    ["f32", "bf16", "bf16:algorithm=ring", "int8", "int8:block=64,channel_scale=column", "int4:fold=true",
     "int8:channel_scale=column,fold=true", "int6:algorithm=two_shot,rotation=none,channel_scale=column,fold=true"],
)  # fmt: skip
def test_text_and_config_are_two_forms_of_the_same(text):
    config = ReduceConfig.parse(text)
    assert ReduceConfig.parse(config.label()) == config
    assert config.as_dict()["format"] == config.collective.format


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int9", "format='int9': must be one of"),
        ("int8:blok=64", "option 'blok': must be one of .*; did you mean 'block'"),
        ("int8:channel_scale=rows", "channel_scale='rows': must be one of none, column"),
        ("int8:channel_scale=none,channel_scale=column", "option 'channel_scale' is given twice"),
        ("int8:fold=yes", "fold='yes': must be true or false"),
        ("bf16:fold=true", "have no effect with format='bfloat16'"),
        ("f32:channel_scale=column", "have no effect with format='float32'"),
        ("int8:rotation=none,fold=true", "there is nothing to fold"),
        ("int8:algorithm=psum", "psum adds float32 or bfloat16"),
        ("", "format='': must be one of"),
    ],
)
def test_nonsense_is_named(text, message):
    with pytest.raises(CollectiveError, match=message):
        ReduceConfig.parse(text)


@pytest.fixture(scope="module")
def exact():
    return np.asarray(serving_model(WIDE, PARAMS, 1).prefill(TOKENS).output.hidden)


@pytest.mark.parametrize("algorithm", ["ring", "two_ended_ring", "two_shot"])
def test_quantized_forward_passes_are_near_the_exact_one_and_equal_on_all_ranks(algorithm, exact):
    reduce = ReduceConfig.parse(f"int8:algorithm={algorithm},{ALWAYS}")
    result = serving_model(WIDE, PARAMS, 4, reduce).prefill(TOKENS)
    assert (result.plan.algorithm, result.plan.format) == (algorithm, "int8")
    copies = [np.asarray(shard.data) for shard in result.output.hidden.addressable_shards]
    assert len(copies) == 4
    assert all(copy.tobytes() == copies[0].tobytes() for copy in copies)
    error = np.sqrt(np.mean((copies[0] - exact)[0, :25] ** 2) / np.mean(exact[0, :25] ** 2))
    # 12 AllReduces of a model whose norms pass relative error on; int8 rounding is about 0.6% each.
    assert 0.001 < error < 0.1


def test_folding_gives_what_transforming_at_run_time_gives(exact):
    def hidden(extra):
        reduce = ReduceConfig.parse(f"int8:algorithm=two_shot,channel_scale=column,{extra}{ALWAYS}")
        model = serving_model(WIDE, PARAMS, 4, reduce)
        return np.asarray(model.prefill(TOKENS).output.hidden)[0, :25], model

    at_run_time, model = hidden("")
    folded, folded_model = hidden("fold=true,")
    reduce = folded_model.reduce
    weight, prepared = (m.parameters(r)["layer_0/mlp/linear"] for m, r in ((model, EXACT), (folded_model, reduce)))
    assert not np.allclose(np.asarray(weight), np.asarray(prepared))
    assert prepared.sharding == weight.sharding
    norm = np.sqrt(np.mean(exact**2))
    # Both round the same transformed values; a value that sits on a code's border may fall either way.
    assert np.sqrt(np.mean((at_run_time - folded) ** 2)) / norm < 0.05
    unscaled = np.asarray(serving_model(WIDE, PARAMS, 4).prefill(TOKENS).output.hidden)[0, :25]
    assert np.sqrt(np.mean((folded - unscaled) ** 2)) / norm < 0.1


def test_a_small_message_falls_back_with_its_reason():
    model = serving_model(WIDE, PARAMS, 4, ReduceConfig())
    plan = model.prefill(TOKENS).plan
    assert plan.fallback
    assert "fewer than min_bytes" in plan.reason


def test_strict_mode_refuses_instead():
    model = serving_model(WIDE, PARAMS, 4, ReduceConfig(CollectiveConfig(on_unsupported="raise")))
    with pytest.raises(CollectiveError, match="fewer than min_bytes"):
        model.prefill(TOKENS)
