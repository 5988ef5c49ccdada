"""From a GGUF on disk to logits on a mesh, and what is said when it cannot be."""

import logging
import os
import subprocess
import sys

import gemma3.naive as naive
import jax
import numpy as np
import pytest
from tiny_gemma3 import gguf_tensors, metadata, official_tree, write_gguf

from equarx_serve.collectives import CollectiveConfig
from equarx_serve.errors import UserError
from equarx_serve.inference import ReduceConfig, load_model
from equarx_serve.inference.loading import parse_dtype
from equarx_serve.inference.mesh import make_mesh
from equarx_serve.inference.serving import as_reduce


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    return write_gguf(folder / "tiny.gguf", metadata(), gguf_tensors(official_tree()), "gemma3"), folder / "cache"


@pytest.fixture(scope="module")
def tiny_model(tiny_file):
    return load(tiny_file, tp=2, reduce="f32")


def load(tiny_file, **options):
    path, cache = tiny_file
    return load_model(weights=path, cache_dir=cache, **options)


def test_a_gguf_of_no_published_size_gives_the_naive_models_logits(tiny_file):
    tokens = [2, *range(5, 25)]
    for tp in (1, 4):  # 2 KV heads: replicated at 4 ranks
        model = load(tiny_file, tp=tp, reduce="f32")
        expected, _ = naive.forward(model.config, official_tree(), tokens)
        found = np.asarray(model.prefill(tokens).logits)[0]
        np.testing.assert_allclose(found, expected[-1], rtol=0, atol=2e-5 * np.abs(expected[-1]).max())


def test_text_and_its_ids_are_the_same_prompt(tiny_file):
    model = load(tiny_file, tp=2, reduce="f32")
    ids = model.tokenizer.encode("ab a")
    assert ids.count(2) == 1
    by_text, by_ids, marked = (model.prefill(prompt) for prompt in ("ab a", ids, "<bos>ab a"))
    assert by_text.batch.lengths == [len(ids)]
    np.testing.assert_array_equal(np.asarray(by_text.logits), np.asarray(by_ids.logits))
    np.testing.assert_array_equal(np.asarray(by_text.logits), np.asarray(marked.logits))
    several = model.prefill(["ab a", ids[:2]])
    assert several.batch.lengths == [len(ids), 2]
    top = by_text.top(3)
    assert [p for _, p in top] == sorted((p for _, p in top), reverse=True)


def test_many_lengths_compile_at_most_one_program_a_bucket(tiny_file):
    model = load(tiny_file, reduce="f32")
    compiled = []
    original = model._compile
    model._compile = lambda batch, reduce: compiled.append(batch.tokens.shape) or original(batch, reduce)
    for length in np.random.default_rng(0).integers(1, 64, 20):
        model.prefill([2] * int(length))
    assert sorted(compiled) == sorted(set(compiled))
    assert set(compiled) <= {(1, 16), (1, 32), (1, 64)}


def test_each_device_holds_its_own_slice_only(tiny_file, monkeypatch):
    """A spy on placement: what is read for each device, and what lies on it afterwards."""
    placed = []
    original = jax.make_array_from_callback

    def spy(shape, sharding, callback):
        def counted(index):
            values = callback(index)
            placed.append(values.nbytes)
            return values

        return original(shape, sharding, counted)

    monkeypatch.setattr(jax, "make_array_from_callback", spy)
    model = load(tiny_file, tp=4, reduce="f32")
    params = model.parameters(model.reduce)
    total = sum(a.nbytes for a in params.values())
    held = dict.fromkeys(range(4), 0)
    for array in params.values():
        for shard in array.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    replicated = sum(a.nbytes for a in params.values() if a.sharding.is_fully_replicated)
    assert max(placed) == max(shard.data.nbytes for a in params.values() for shard in a.addressable_shards)
    assert all(size == (total - replicated) // 4 + replicated for size in held.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "tp=3 is not possible for gemma3-2x64: .* legal values: 1, 2, 4"),
        ({"model": "gemma3-270m", "tp": 1}, "is not gemma3-270m: its layers is 2, not 18; its d_model is 64, not 640"),
        ({"model": "gemma3-270"}, "unknown model 'gemma3-270'; did you mean gemma3-270m"),
        ({"dtype": "float16"}, "residual stream passes 100,000 and float16 ends at 65,504"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; choose float32 or bfloat16"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(tiny_file, options, message):
    with pytest.raises(UserError, match=message):
        load(tiny_file, **options)


def test_weights_of_the_other_sizes_must_be_given():
    with pytest.raises(UserError, match="only gemma3-270m comes with weights; for gemma3-4b name a GGUF file"):
        load_model("gemma3-4b", tp=2)


def test_too_few_devices_says_how_to_get_more():
    with pytest.raises(UserError, match=r'needs 32 devices, and there are 16 \(cpu\); .*"jax_num_cpu_devices", 32'):
        make_mesh(32)
    with pytest.raises(UserError, match="tp=0: at least one rank"):
        make_mesh(0)


def test_dtype_names():
    assert parse_dtype("f32") == np.float32
    assert parse_dtype("bf16") == parse_dtype("bfloat16")


def test_a_checkpoint_without_tokenizer_takes_ids_only(tiny_file, tmp_path):
    fields = {name: value for name, value in metadata().items() if not name.startswith("tokenizer")}
    path = write_gguf(tmp_path / "bare.gguf", fields, gguf_tensors(official_tree()), "gemma3")
    model = load_model(weights=path, cache_dir=tmp_path / "cache")
    assert np.isfinite(np.asarray(model.prefill([2, 5]).logits)).all()
    with pytest.raises(UserError, match="came without a tokenizer; pass token ids"):
        model.prefill("ab")


def test_nan_in_the_weights_is_refused(tiny_file, tmp_path, caplog):
    tensors = gguf_tensors(official_tree())
    tensors["blk.1.ffn_down.weight"] = tensors["blk.1.ffn_down.weight"].copy()
    tensors["blk.1.ffn_down.weight"][3, 4] = np.nan
    path = write_gguf(tmp_path / "nan.gguf", metadata(), tensors, "gemma3")
    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match="NaN"):
        load_model(weights=path, cache_dir=tmp_path / "cache")


def test_arrays_of_ids_are_prompts(tiny_model):
    for ids in (np.array([2, 5, 6]), jax.numpy.array([2, 5, 6]), (2, 5, 6)):
        assert tiny_model.batch(ids).lengths == [3]
    assert tiny_model.batch([np.array([2, 5]), "ab"]).lengths[0] == 2
    assert tiny_model.batch(np.array([[2, 5], [2, 6]])).lengths == [2, 2]


def test_a_reduce_is_text_or_a_config_and_nothing_else(tiny_model):
    text = "bf16:algorithm=ring,min_bytes=0"
    for reduce in (text, CollectiveConfig.parse(text), ReduceConfig.parse(text)):
        assert as_reduce(reduce) == ReduceConfig.parse(text)
    assert tiny_model.prefill([2, 5], reduce=text).plan.format == "bfloat16"


NOT_CHECKED_BY_TYPES = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
from equarx_serve import UserError, load_model
from equarx_serve.inference.serving import as_reduce
path, cache = sys.argv[1:]
model = load_model(weights=path, cache_dir=cache, tp=2, reduce="f32")
tries = [
    lambda: model.batch(None), lambda: model.batch(5), lambda: model.batch(b"abc"), lambda: model.batch([None]),
    lambda: model.batch([2, 3.5]), lambda: model.batch([True, False]), lambda: model.batch([]),
    lambda: model.batch([[2], 5]), lambda: model.batch([2], side="middle"), lambda: as_reduce(8),
    lambda: load_model(tp="4"), lambda: load_model(tp=2.0), lambda: load_model(tp=True), lambda: load_model(5),
]
for number, one in enumerate(tries):
    try:
        print(number, "accepted", one())
    except UserError as error:
        print(error)
"""


def test_arguments_of_other_kinds_are_named_where_no_type_checker_stands_guard(tiny_file):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_NUM", "XLA_"))}
    command = [sys.executable, "-c", NOT_CHECKED_BY_TYPES, *map(str, tiny_file)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**clean, "JAX_PLATFORMS": "cpu"}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "None (NoneType) is no prompt; give text or a list of token ids",
        "5 (int) is no prompt; give text or a list of token ids",
        "b'abc' (bytes) is no prompt; give text or a list of token ids",
        "the prompt holds None (NoneType); token ids are integers",
        "the prompt holds 3.5 (float); token ids are integers",
        "the prompt holds True (bool); token ids are integers",
        "there is no prompt; give at least one",
        "5 (int) is no prompt; give text or a list of token ids",
        "side='middle': prompts are padded on the left or the right",
        'reduce=8 (int): give text like "int8", a CollectiveConfig or a ReduceConfig',
        "tp='4' (str): the number of ranks is an integer",
        "tp=2.0 (float): the number of ranks is an integer",
        "tp=True (bool): the number of ranks is an integer",
        "unknown model 5; known: gemma3-270m, gemma3-1b, gemma3-4b, gemma3-12b, gemma3-27b",
    ]
