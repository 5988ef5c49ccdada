"""Real text as rows of tokens for teacher-forced scoring."""

import json
from collections.abc import Iterator
from pathlib import Path

from equarx_serve.errors import UserError
from equarx_serve.inference.tokenizer import Tokenizer


def field_of_jsonl(path: Path, field: str) -> Iterator[str]:
    """The text of one field of every row of a JSON Lines file; `UserError` names the line and what is there instead."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: no JSON ({error.msg})") from error
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            has = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
            raise UserError(f"{path}, line {number}: no text under {field!r}; the row has {has}")
        yield row[field]


def token_rows(tokenizer: Tokenizer, texts: Iterator[str], rows: int, width: int) -> list[list[int]]:
    """`rows` rows of exactly `width` ids: one BOS, then consecutive text. `UserError` when the texts end too early."""
    ids: list[int] = []
    needed = rows * (width - 1)
    for text in texts:
        ids += tokenizer.encode(text + "\n\n", add_bos=False)
        if len(ids) >= needed:
            break
    if len(ids) < needed:
        raise UserError(f"the text has {len(ids)} tokens; {rows} rows of {width} need {needed}")
    step = width - 1
    return [[tokenizer.bos_id, *ids[i * step : (i + 1) * step]] for i in range(rows)]
