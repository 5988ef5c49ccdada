"""The five sizes, legal tensor-parallel degrees, and what is said of illegal ones."""

import dataclasses

import pytest

from equarx_serve.errors import UserError
from equarx_serve.gemma3 import GEMMA3_SIZES, Gemma3Config, gemma3_config


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("gemma3-270m", (1, 2, 4)),
        ("gemma3-1b", (1, 2, 4)),
        ("gemma3-4b", (1, 2, 4, 8)),
        ("gemma3-12b", (1, 2, 4, 8, 16)),
        ("gemma3-27b", (1, 2, 4, 8, 16, 32)),
    ],
)
def test_legal_tp_are_the_divisors_of_the_query_heads(name, legal):
    assert gemma3_config(name).legal_tp == legal


@pytest.mark.parametrize("tp", [0, 3, 5, 8, 64, -1])
def test_illegal_tp_is_refused_with_the_legal_values(tp):
    with pytest.raises(UserError, match=rf"tp={tp} is not possible for gemma3-270m: .*; legal values: 1, 2, 4$"):
        gemma3_config("gemma3-270m").check_tp(tp)


def test_every_sixth_layer_is_global():
    config = gemma3_config("gemma3-270m")
    assert [i for i in range(config.num_layers) if config.is_global(i)] == [5, 11, 17]


def test_queries_are_scaled_by_the_head_except_in_27b():
    assert {n: round(1 / c.attention_scale**2, 6) for n, c in GEMMA3_SIZES.items()} == {
        "gemma3-270m": 256, "gemma3-1b": 256, "gemma3-4b": 256, "gemma3-12b": 256, "gemma3-27b": 5376 / 32,
    }  # fmt: skip


def test_unknown_model_names_the_nearest():
    with pytest.raises(UserError, match=r"unknown model 'gemma3-4B'; did you mean gemma3-4b\? known: gemma3-270m, "):
        gemma3_config("gemma3-4B")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_kv_heads": 3}, "4 query heads are no multiple of 3 KV heads"), ({"head_dim": 15}, "head_dim 15 is odd")],
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(Gemma3Config("x", 6, 32, 64, 4, 1, 16, window=8), **change)
