"""The model against the naive one: windows, padding, ranks, caches."""

import functools

import gemma3.naive as naive
import jax
import numpy as np
import pytest
from gemma3.tiny import TINY, serving_model, tiny

from equarx_serve.gemma3 import attention
from equarx_serve.inference.batching import make_batch

PARAMS = naive.tiny_parameters(TINY)
TOLERANCE = 2e-5
"""Largest difference of f32 to f64 logits of size about 5, six layers (seen: 3e-6)."""


@functools.cache
def tiny_model(tp):
    return serving_model(TINY, PARAMS, tp)


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(3, TINY.vocab_size, length).tolist()


def logits_everywhere(model, batch):
    """[B, T, V] from the hidden states, by the tied embedding."""
    hidden = np.asarray(model.compiled(batch).run(batch).hidden)
    return hidden @ PARAMS["embedder/input_embedding"].T


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 25])
@pytest.mark.parametrize("tp", [1, 4])
def test_prompts_around_the_window_equal_the_naive_mask(length, tp):
    tokens = prompt(length)
    expected, cache = naive.forward(TINY, PARAMS, tokens)
    result = tiny_model(tp).prefill(tokens)
    assert result.batch.tokens.shape[1] > length or length == 16  # padding was there to be ignored
    np.testing.assert_allclose(np.asarray(result.logits)[0], expected[-1], atol=TOLERANCE, rtol=0)
    for (keys, values), ours_k, ours_v in zip(cache, result.output.cache.keys, result.output.cache.values, strict=True):
        for rank in range(tp):  # one KV head, repeated on every rank
            np.testing.assert_allclose(np.asarray(ours_k)[0, :length, rank], keys[:, 0], atol=TOLERANCE, rtol=0)
            np.testing.assert_allclose(np.asarray(ours_v)[0, :length, rank], values[:, 0], atol=TOLERANCE, rtol=0)


def test_a_window_that_is_off_by_one_would_be_seen():
    tokens = prompt(25)
    expected, _ = naive.forward(TINY, PARAMS, tokens)
    wrong = serving_model(tiny(window=9), PARAMS).prefill(tokens)
    assert np.abs(np.asarray(wrong.logits)[0] - expected[-1]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_equals_its_rows_alone(side):
    prompts = [prompt(n, seed=n) for n in (7, 16, 25, 1)]
    model = tiny_model(2)
    batch = make_batch(prompts, TINY.vocab_size, side=side, width=32)
    found = logits_everywhere(model, batch)
    last = np.asarray(model.compiled(batch).run(batch).logits)
    for row, tokens in enumerate(prompts):
        expected, _ = naive.forward(TINY, PARAMS, tokens)
        np.testing.assert_allclose(found[row][batch.valid[row]], expected, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(last[row], expected[-1], atol=TOLERANCE, rtol=0)


def test_what_stands_in_the_padding_changes_no_bit():
    model = tiny_model(2)
    batch = make_batch([prompt(9), prompt(13)], TINY.vocab_size, side="left", width=16)
    other = np.where(batch.valid, batch.tokens, 63)
    before = model.compiled(batch).run(batch)
    after = model.compiled(batch).run(type(batch)(other.astype(np.int32), batch.valid))
    assert not np.array_equal(batch.tokens, other)
    np.testing.assert_array_equal(np.asarray(before.logits), np.asarray(after.logits))


def test_queries_in_blocks_equal_queries_at_once(monkeypatch):
    tokens = prompt(25)
    expected, _ = naive.forward(TINY, PARAMS, tokens)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 10)  # 32 = 3 blocks and a remainder
    result = serving_model(TINY, PARAMS, tp=2).prefill(tokens)
    np.testing.assert_allclose(np.asarray(result.logits)[0], expected[-1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "changes"),
    [(4, 2, {"global_rope_scale": 8.0}), (8, 4, {"query_scale": 0.3})],
    ids=["rope-scale", "query-scale"],
)
def test_grouped_heads_and_the_big_models_settings(heads, kv_heads, changes):
    config = tiny(num_heads=heads, num_kv_heads=kv_heads, **changes)
    params = naive.tiny_parameters(config)
    tokens = prompt(13)
    expected, _ = naive.forward(config, params, tokens)
    for tp in (1, heads):  # tp = heads replicates every KV head
        result = serving_model(config, params, tp).prefill(tokens)
        np.testing.assert_allclose(np.asarray(result.logits)[0], expected[-1], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (8, 4), (16, 8), (32, 16)])
def test_real_head_counts_at_every_legal_degree(heads, kv_heads):
    config = tiny(num_heads=heads, num_kv_heads=kv_heads)
    params = naive.tiny_parameters(config)
    tokens = prompt(13)
    one = np.asarray(serving_model(config, params, 1).prefill(tokens).logits)
    for tp in (n for n in config.legal_tp if 1 < n <= len(jax.devices())):
        model = serving_model(config, params, tp)
        np.testing.assert_allclose(np.asarray(model.prefill(tokens).logits), one, atol=TOLERANCE, rtol=0)
        assert "all-to-all" not in model.compiled(model.batch(tokens)).hlo()


def test_bf16_stays_finite_with_residuals_beyond_100000():
    import ml_dtypes

    params = dict(PARAMS)
    params["embedder/input_embedding"] = PARAMS["embedder/input_embedding"] * np.float32(6e4)
    model = serving_model(TINY, params, tp=2, dtype=np.dtype(ml_dtypes.bfloat16))
    output = model.prefill(prompt(9)).output
    assert np.abs(params["embedder/input_embedding"]).max() * np.sqrt(32) > 1e5
    assert np.isfinite(np.asarray(output.logits)).all()
    assert np.isfinite(np.asarray(output.hidden, np.float32)).all()


def test_with_parameters_names_a_wrong_shape():
    from equarx_serve.gemma3 import Gemma3, TensorParallel, with_parameters

    wrong = {**PARAMS, "layer_0/mlp/linear": np.zeros((3, 32), np.float32)}
    with pytest.raises(ValueError, match=r"layer_0/mlp/linear has shape \(3, 32\); the model expects \(64, 32\)"):
        with_parameters(Gemma3(TINY, TensorParallel(1)), {k: jax.numpy.asarray(v) for k, v in wrong.items()})
