"""A SentencePiece model from GGUF arrays: the two traps undone, and a sentence for arrays that do not belong."""

from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tiny_gemma3 import MakeGguf

from equarx_serve.errors import UserError
from equarx_serve.weights.gguf import read_gguf
from equarx_serve.weights.gguf_tokenizer import has_tokenizer, sentencepiece_model


def test_pieces_types_scores_and_settings(tiny_gguf: Path) -> None:
    """Read back with the library's own protobuf classes (which are not used for writing)."""
    pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2", reason="its protobuf is another one")
    model = pb2.ModelProto()
    model.ParseFromString(sentencepiece_model(read_gguf(tiny_gguf)))
    tokens = read_gguf(tiny_gguf).metadata["tokenizer.ggml.tokens"]
    assert len(model.pieces) == len(tokens) == 300
    user_defined = [piece.piece for piece in model.pieces if piece.type == 4]
    assert user_defined == ["▁▁", "▁▁▁"]
    for number, (piece, token) in enumerate(zip(model.pieces, tokens, strict=True)):
        assert piece.piece == token.replace(" ", "▁")
        assert piece.score == -float(number)
    assert [model.pieces[n].type for n in range(5)] == [3, 3, 3, 2, 1]  # <unk>, id 3, is UNKNOWN
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    assert (trainer.model_type, trainer.vocab_size, trainer.byte_fallback) == (2, 300, True)
    assert (trainer.unk_id, trainer.bos_id, trainer.eos_id, trainer.pad_id) == (3, 2, 1, 0)
    assert (trainer.unk_piece, trainer.bos_piece, trainer.eos_piece, trainer.pad_piece) == (
        ("<unk>", "<bos>", "<eos>", "<pad>")
    )
    assert normalizer.name == "identity"
    assert (normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces, normalizer.escape_whitespaces) == (
        (False, False, True)
    )


def test_encodes_as_gemma_does(tiny_gguf: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(sentencepiece_model(read_gguf(tiny_gguf)))

    def pieces(text: str) -> list[str]:
        return [processor.IdToPiece(one) for one in processor.EncodeAsIds(text)]

    assert pieces("ab") == ["ab"]  # no dummy prefix
    assert pieces(" ab") == ["▁ab"]
    assert pieces("a   ab  ") == ["a", "▁▁▁", "ab", "▁▁"]  # runs of spaces are pieces of their own, none is dropped
    assert pieces("é\n") == ["<0xC3>", "<0xA9>", "\n"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer.ggml.model": "gpt2"}, "its tokenizer is of kind 'gpt2'"),
    ({"tokenizer.ggml.tokens": [1, 2]}, "'tokenizer.ggml.tokens' is missing or no list of strings"),
    ({"tokenizer.ggml.scores": [1.0]}, "300 tokens, but 1 values in 'tokenizer.ggml.scores'"),
    ({"tokenizer.ggml.scores": "x"}, "'tokenizer.ggml.scores' is missing or of a wrong type"),
    ({"tokenizer.ggml.token_type": [1] * 299}, "300 tokens, but 299 values"),
    ({"tokenizer.ggml.token_type": [9] * 300}, "a type that is not between 1 and 6"),
    ({"tokenizer.ggml.bos_token_id": 300}, "'tokenizer.ggml.bos_token_id' is 300, but there are 300 tokens"),
    ({"tokenizer.ggml.tokens": ["a"] * 300}, "sentencepiece refuses its tokenizer"),
    ({"tokenizer.ggml.tokens": [""] * 300}, "sentencepiece refuses its tokenizer"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_arrays_that_do_not_belong(make_gguf: MakeGguf, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        sentencepiece_model(read_gguf(make_gguf(fields)))
    assert "\n" not in str(caught.value)


def test_a_file_without_tokenizer(make_gguf: MakeGguf) -> None:
    assert not has_tokenizer(read_gguf(make_gguf(without=("tokenizer.ggml.model",))))
