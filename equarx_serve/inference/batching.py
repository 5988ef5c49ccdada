"""Prompts of unequal length as one rectangular batch of few different widths.

Widths are rounded up to buckets, so that any number of prompt lengths compiles at most one program a bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from equarx_serve.errors import UserError
from equarx_serve.gemma3 import MAX_CONTEXT


def bucket(length: int) -> int:
    """The width for prompts of up to `length` tokens: 16, 32, 64, then powers of two and one and a half times them.

    At most half of a row above 64 tokens is padding, a third at most for most lengths.
    """
    width = 16
    while width < length:
        if width >= 64 and width * 3 // 2 >= length:
            return width * 3 // 2
        width *= 2
    return width


@dataclass(frozen=True)
class Batch:
    """Token ids and where they are real."""

    tokens: Int[np.ndarray, "B T"]
    valid: Bool[np.ndarray, "B T"]

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each row."""
        return [int(n) for n in self.valid.sum(axis=1)]


def make_batch(
    prompts: Sequence[Sequence[int]], vocab_size: int, pad_id: int = 0, side: str = "right", width: int | None = None
) -> Batch:
    """Token id lists as a batch, padded on `side` to `width` (default: the longest one's bucket).

    Raises `UserError` for no prompt, an empty one, one beyond the context, ids outside the vocabulary.
    """
    if side not in ("left", "right"):
        raise UserError(f"side={side!r}: prompts are padded on the left or the right")
    if not len(prompts):
        raise UserError("there is no prompt; give at least one")
    for row, prompt in enumerate(prompts):
        which = "the prompt" if len(prompts) == 1 else f"prompt {row}"
        if not len(prompt):
            raise UserError(f"{which} is empty; a prefill needs at least one token")
        if len(prompt) > MAX_CONTEXT:
            raise UserError(f"{which} has {len(prompt):,} tokens; Gemma 3's context ends at {MAX_CONTEXT:,}")
        for strange in (t for t in prompt if isinstance(t, bool) or not isinstance(t, (int, np.integer))):
            raise UserError(f"{which} holds {strange!r} ({type(strange).__name__}); token ids are integers")
        for wrong in (token for token in prompt if not 0 <= token < vocab_size):
            raise UserError(f"{which} holds token {wrong}; this vocabulary has ids 0 to {vocab_size - 1}")
    longest = max(map(len, prompts))
    width = min(bucket(longest), MAX_CONTEXT) if width is None else width
    if width < longest:
        raise UserError(f"width {width} is too small for a prompt of {longest} tokens")
    tokens = np.full((len(prompts), width), pad_id, np.int32)
    valid = np.zeros((len(prompts), width), bool)
    for row, prompt in enumerate(prompts):
        where = slice(0, len(prompt)) if side == "right" else slice(width - len(prompt), width)
        tokens[row, where] = prompt
        valid[row, where] = True
    return Batch(tokens, valid)
