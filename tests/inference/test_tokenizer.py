"""The real Gemma 3 tokenizer, out of the embedded GGUF: known ids, BOS exactly once, round trips, odd texts."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from equarx_serve.errors import UserError
from equarx_serve.inference.tokenizer import Tokenizer
from equarx_serve.weights import open_checkpoint

EVALDATA = Path(__file__).parents[3] / "shared" / "evaldata"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    path = open_checkpoint().tokenizer_path
    assert path is not None
    return Tokenizer(path)


def test_known_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    assert tokenizer.encode("The capital of France is", add_bos=False) == [818, 5279, 529, 7001, 563]
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (262_144, 0, 1, 2)
    assert [tokenizer.piece(n) for n in (0, 1, 2, 3, 818)] == ["<pad>", "<eos>", "<bos>", "<unk>", "The"]


def test_loads_in_less_than_a_second(tokenizer: Tokenizer) -> None:
    begin = time.perf_counter()
    Tokenizer(tokenizer.path)
    assert time.perf_counter() - begin < 1


@pytest.mark.parametrize("text", ["", "x", " x", "<bos>", "<bos>x", "<bos><bos>x", "<bos><bos><bos> x", "x<bos>y"])
def test_bos_is_there_exactly_once(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1
    bare = text
    while bare.startswith("<bos>"):
        bare = bare.removeprefix("<bos>")
    assert ids[1:] == tokenizer.encode(bare, add_bos=False)
    assert tokenizer.decode(ids) == bare


def test_without_bos_nothing_is_taken_from_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<bos>x", add_bos=False)
    assert tokenizer.bos_id not in ids
    assert tokenizer.decode(ids) == "<bos>x"


ODD = {
    "nothing": "",
    "NUL": "a\0b\0",
    "spaces": "  a   b    c     ",
    "line ends": "\r\n\n\n\t\t x\n",
    "emoji": "🙂👨‍👩‍👧🏳️‍🌈",
    "combining": "e\u0301 é ﬁ Å",  # no normalization: both forms come back
    "scripts": "日本語 العربية हिन्दी ไทย",
    "last character": "\U0010ffff\ufffe\ufffd",
    "byte piece as text": "<0x41>",
    "markers as text": "<start_of_turn>user\n<end_of_turn><eos><pad><unk>",
    "code": "def f(x):\n        return x  # ok\n",
}


@pytest.mark.parametrize("case", ODD)
def test_odd_texts_come_back(tokenizer: Tokenizer, case: str) -> None:
    ids = tokenizer.encode(ODD[case])
    assert tokenizer.decode(ids) == ODD[case]
    assert not {0, 1, 3} & set(ids)  # no pad, eos or unk out of plain text


def test_runs_of_spaces_are_single_pieces(tokenizer: Tokenizer) -> None:
    """Without turning the spaces of user-defined pieces back into U+2581 a run would be cut in ones."""
    assert [tokenizer.piece(one) for one in tokenizer.encode("a    b", add_bos=False)] == ["a", "▁▁▁▁", "b"]


@pytest.mark.parametrize("text", ["lorem ipsum dolor " * 60_000, "a" * 1_000_000, " " * 1_000_000, "日本語" * 120_000])
def test_a_megabyte(tokenizer: Tokenizer, text: str) -> None:
    begin = time.perf_counter()
    ids = tokenizer.encode(text)
    assert time.perf_counter() - begin < 10  # 0.5 s on an idle core
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["ab\ud800", "\udcff", "\ud83d then \ude42"])
def test_half_a_character_is_one_sentence(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(
        UserError, match=r"half a character \(the lone surrogate U\+D[0-9A-F]{3} at position \d"
    ) as caught:
        tokenizer.encode(text)
    str(caught.value).encode()  # and the sentence itself can be printed


def test_numpy_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(np.array([2, 818, 5279], np.int32)) == "The capital"
    assert tokenizer.piece(np.int64(5279)) == "▁capital"
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("bad", [-1, 262_144, 10**12])
def test_ids_outside_the_vocabulary(tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(UserError, match=f"{bad} is no token id: this vocabulary has ids 0 to 262143"):
        tokenizer.decode([818, bad])
    with pytest.raises(UserError, match="is no token id"):
        tokenizer.piece(bad)


def test_files_that_are_no_model(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    with pytest.raises(UserError, match="there is no such file; a SentencePiece model was expected"):
        Tokenizer(path)
    for content in (b"hello", bytes(100), b"\x0a\xff\xff\xff\xff\x0f"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer\.model: not a usable SentencePiece model"):
            Tokenizer(path)
    with pytest.raises(UserError, match="this is a directory"):
        Tokenizer(tmp_path)


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


ROWS = 200


@pytest.mark.skipif(not EVALDATA.is_dir(), reason="no benchmark rows beside the checkout (../shared/evaldata)")
def test_real_rows_come_back(tokenizer: Tokenizer) -> None:
    """Every text field of the first rows of every file; a literal U+2581 is the one thing that can't come back."""
    count = 0
    for path in sorted(EVALDATA.glob("*.jsonl")):
        with open(path, encoding="utf-8") as lines:
            for _, line in zip(range(ROWS), lines, strict=False):
                for text in strings(json.loads(line)):
                    ids = tokenizer.encode(text)
                    assert ids.count(tokenizer.bos_id) == 1
                    assert tokenizer.decode(ids) == text.replace("▁", " "), (path.name, text)
                    count += 1
    assert count > 10_000
