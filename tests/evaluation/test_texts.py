"""Rows of text, and what is said of files that have none."""

import pytest

from equarx_serve.errors import UserError
from equarx_serve.evaluation.texts import field_of_jsonl, token_rows
from equarx_serve.inference import Tokenizer


class Letters(Tokenizer):
    """One token a letter."""

    bos_id = 2

    def __init__(self):
        pass  # no SentencePiece model behind it

    def encode(self, text, add_bos=True):
        assert not add_bos
        return [ord(letter) for letter in text]


def test_rows_are_consecutive_text_with_one_bos(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": "abcdef"}\n{"t": "ghijkl"}\n', encoding="utf-8")
    rows = token_rows(Letters(), field_of_jsonl(path, "t"), 2, 5)
    assert rows == [[2, *map(ord, "abcd")], [2, *map(ord, "ef\n\n")]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"t": "a"}\nnonsense\n', "line 2: no JSON"),
        ('{"question": "a", "b": 1}\n', "line 1: no text under 't'; the row has question, b"),
        ("[1]\n", "line 1: no text under 't'; the row has list"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        list(field_of_jsonl(path, "t"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"absent\.jsonl: No such file"):
        list(field_of_jsonl(tmp_path / "absent.jsonl", "t"))


def test_too_little_text_says_how_much_there_is(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": "abc"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="the text has 5 tokens; 2 rows of 5 need 8"):
        token_rows(Letters(), field_of_jsonl(path, "t"), 2, 5)
