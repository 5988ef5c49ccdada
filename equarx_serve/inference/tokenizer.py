"""Text to token ids and back, with the beginning-of-sequence id exactly once.

Does: wraps a SentencePiece model (the `.model` file that belongs to a checkpoint).
BOS: Gemma without it has a perplexity of 130 instead of 20, with two of them it loses points on every benchmark. So
`encode` puts exactly one, and takes away any literal `<bos>` with which the text begins (templates and dumped prompts
bring their own).
Limits: a literal U+2581 in the text comes back as a space. Markers inside the text (`<start_of_turn>`) are encoded as
plain text.
Leaves to others: where the model file comes from (`equarx_serve.weights`), batching and padding (`prefill`).
"""

from collections.abc import Iterable
from operator import index
from pathlib import Path
from typing import SupportsIndex

import sentencepiece

from equarx_serve.errors import UserError
from equarx_serve.weights.files import open_regular


class Tokenizer:
    """A SentencePiece tokenizer with Gemma's rules about BOS. Ids are Python ints in [0, vocab_size)."""

    def __init__(self, path: str | Path) -> None:
        """Load a SentencePiece `.model` file; `UserError` when it is missing or is none."""
        self.path = Path(path)
        with open_regular(self.path, "a SentencePiece model") as file:
            model = file.read(0, file.size).tobytes()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f"{self.path}: not a usable SentencePiece model ({str(error).strip()}).") from error
        self.vocab_size: int = self._processor.GetPieceSize()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self.pad_id: int = self._processor.pad_id()
        if self.bos_id < 0:
            raise UserError(f"{self.path}: this SentencePiece model has no beginning-of-sequence piece; Gemma has one.")
        self._bos = self.piece(self.bos_id)

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """The ids of `text`, with one BOS in front (`add_bos`) and no EOS.

        With `add_bos`, every literal `<bos>` at the beginning of the text is dropped first, so that there is one BOS
        and no more. Without, the text is encoded as it stands and no BOS is among the ids. A NUL character and 1 MB
        of text are fine; a lone surrogate (half a character, which no UTF-8 has) is a `UserError`.
        """
        if add_bos:
            while text.startswith(self._bos):
                text = text[len(self._bos) :]
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"The text holds half a character (the lone surrogate U+{ord(text[error.start]):04X} at position "
                f"{error.start}): it was decoded wrongly before it came here."
            ) from error
        ids = self._processor.EncodeAsIds(text)
        return [self.bos_id, *ids] if add_bos else list(ids)

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """The text of `ids`; BOS, EOS and padding give nothing. `UserError` for an id outside the vocabulary."""
        checked = [index(one) for one in ids]
        for extreme in (min(checked, default=0), max(checked, default=0)):
            self._check(extreme)
        text: str = self._processor.DecodeIds(checked)
        return text

    def piece(self, token: SupportsIndex) -> str:
        """The piece of one id as the model spells it, with U+2581 for a space. `UserError` as for `decode`."""
        self._check(index(token))
        piece: str = self._processor.IdToPiece(index(token))
        return piece

    def _check(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise UserError(f"{token} is no token id: this vocabulary has ids 0 to {self.vocab_size - 1}.")
