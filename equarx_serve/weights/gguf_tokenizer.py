"""Rebuilds the SentencePiece model from the token arrays of a GGUF.

Does: turns tokens, scores and types back into the serialized `ModelProto` that `sentencepiece` loads: BPE, byte
fallback, no dummy prefix, extra white space kept, no normalization.
Two things that llama.cpp's converter changes are undone: USER_DEFINED pieces are stored with real spaces (they become
U+2581 again, else runs of spaces are cut differently), and `<unk>` is typed CONTROL (it becomes UNKNOWN, without which
`sentencepiece` refuses the model).
The message is written in protobuf's wire format by hand (three field kinds): the generated module that `sentencepiece`
ships only imports beside the very protobuf that it was generated for.
Leaves to others: encoding and decoding (`equarx_serve.inference.tokenizer`), the file on disk (`cache`).
"""

import struct
from enum import IntEnum

import numpy as np
import sentencepiece

from equarx_serve.errors import UserError
from equarx_serve.weights.gguf import GgufFile, StringArray, clip

_PREFIX = "tokenizer.ggml."
_SPACE = "▁".encode()


class _Piece(IntEnum):
    """Types of pieces: the same numbers in GGUF and in SentencePiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def has_tokenizer(file: GgufFile) -> bool:
    """Whether the GGUF holds a tokenizer at all."""
    return _PREFIX + "model" in file.metadata


def sentencepiece_model(file: GgufFile) -> bytes:
    """The serialized SentencePiece model in `file`, loaded once to be sure that it can be.

    Raises `UserError` when the tokenizer is of another kind, when the arrays do not belong together, or when
    `sentencepiece` refuses the result.
    """
    if (kind := file.text(_PREFIX + "model")) != "llama":
        raise UserError(f"{file.path}: its tokenizer is of kind {clip(kind)}; Gemma 3 has 'llama' (SentencePiece).")
    tokens = file.metadata.get(_PREFIX + "tokens")
    if not isinstance(tokens, StringArray):
        raise UserError(f"{file.path}: the metadata key '{_PREFIX}tokens' is missing or no list of strings.")
    scores = _numbers(file, "scores", len(tokens), "f").astype(np.float32)
    types = _numbers(file, "token_type", len(tokens), "iu").astype(np.int64)
    if not np.isin(types, [int(kind) for kind in _Piece]).all():
        raise UserError(f"{file.path}: '{_PREFIX}token_type' holds a type that is not between 1 and 6.")
    ids = {role: _special(file, key, len(tokens)) for role, key in _SPECIAL.items()}
    types[ids["unk"]] = _Piece.UNKNOWN

    body = _pieces(tokens, scores.tolist(), types.tolist())
    trainer = _number(3, 2) + _number(4, len(tokens))  # model_type BPE, vocab_size
    trainer += _number(35, int(bool((types == _Piece.BYTE).any())))  # byte_fallback
    for field, role in ((40, "unk"), (41, "bos"), (42, "eos"), (43, "pad")):
        trainer += _number(field, ids[role])  # unk_id, bos_id, ...
        trainer += _text(field + 5, tokens.raw(ids[role]))  # unk_piece, bos_piece, ...
    # name, add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces
    normalizer = _text(1, b"identity") + _number(3, 0) + _number(4, 0) + _number(5, 1)
    model = body + _message(2, trainer) + _message(3, normalizer)
    try:
        sentencepiece.SentencePieceProcessor().LoadFromSerializedProto(model)
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{file.path}: sentencepiece refuses its tokenizer ({clip(str(error))}).") from error
    return model


_SPECIAL = {"unk": "unknown_token_id", "bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id"}


def _special(file: GgufFile, key: str, vocab: int) -> int:
    number = file.integer(_PREFIX + key)
    if not 0 <= number < vocab:
        raise UserError(f"{file.path}: '{_PREFIX}{key}' is {number}, but there are {vocab} tokens.")
    return number


def _numbers(file: GgufFile, key: str, count: int, kinds: str) -> np.ndarray:
    values = file.metadata.get(_PREFIX + key)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds:
        raise UserError(f"{file.path}: the metadata key '{_PREFIX}{key}' is missing or of a wrong type.")
    if len(values) != count:
        raise UserError(f"{file.path}: {count} tokens, but {len(values)} values in '{_PREFIX}{key}'.")
    return values


def _pieces(tokens: StringArray, scores: list[float], types: list[int]) -> bytes:
    """Field 1 of the model, 262,144 times; written out, since calls would take most of the time."""
    out = bytearray()
    short = [bytes([number]) for number in range(128)]  # varints of one byte
    pack_score = struct.Struct("<f").pack
    for token, score, kind in zip(tokens.raws(), scores, types, strict=True):
        piece = token.replace(b" ", _SPACE) if kind == _Piece.USER_DEFINED else token
        size = short[len(piece)] if len(piece) < 128 else _varint(len(piece))
        # field 1 text: the piece, field 2 float: its score, field 3 number: its type (one byte)
        body = b"\x0a" + size + piece + b"\x15" + pack_score(score) + b"\x18" + short[kind]
        out += b"\x0a" + (short[len(body)] if len(body) < 128 else _varint(len(body))) + body
    return bytes(out)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


_message = _text  # a nested message has the same form as a string
