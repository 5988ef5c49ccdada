"""Buckets, padding, and what is said of prompts that cannot be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equarx_serve.errors import UserError
from equarx_serve.gemma3 import MAX_CONTEXT
from equarx_serve.inference.batching import bucket, make_batch


@given(st.integers(1, MAX_CONTEXT))
def test_a_bucket_holds_its_prompt_and_wastes_less_than_half(length):
    width = bucket(length)
    assert length <= width
    assert width == 16 or width < 2 * length
    assert length <= 64 or width <= 1.5 * length + 1


def test_any_lengths_up_to_2048_need_few_programs():
    widths = {bucket(n) for n in range(1, 2049)}
    assert sorted(widths) == [16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_keep_their_tokens_in_order(side):
    prompts = [[2, 5, 6], [7], [8, 9, 10, 11]]
    batch = make_batch(prompts, 64, pad_id=1, side=side)
    assert batch.tokens.shape == (3, 16)
    assert batch.lengths == [3, 1, 4]
    for row, prompt in enumerate(prompts):
        assert batch.tokens[row][batch.valid[row]].tolist() == prompt
        assert set(batch.tokens[row][~batch.valid[row]].tolist()) == {1}
        assert batch.valid[row, 0 if side == "right" else -1]
        assert np.count_nonzero(np.diff(batch.valid[row].astype(int))) == 1


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "there is no prompt"),
        ([[]], "the prompt is empty; a prefill needs at least one token"),
        ([[2], []], "prompt 1 is empty"),
        ([[2] * (MAX_CONTEXT + 1)], "the prompt has 131,073 tokens; Gemma 3's context ends at 131,072"),
        ([[2, 64]], "the prompt holds token 64; this vocabulary has ids 0 to 63"),
        ([[2, -1]], "the prompt holds token -1"),
    ],
)
def test_impossible_prompts_are_named(prompts, message):
    with pytest.raises(UserError, match=message):
        make_batch(prompts, 64)


def test_a_width_that_is_too_small_is_refused():
    with pytest.raises(UserError, match="width 3 is too small for a prompt of 4 tokens"):
        make_batch([[2, 3, 4, 5]], 64, width=3)


def test_the_longest_prompt_is_allowed():
    assert make_batch([[2] * MAX_CONTEXT], 64).tokens.shape == (1, MAX_CONTEXT)
