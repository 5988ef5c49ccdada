"""Fixtures of the parity tests: the `gemma` package, and our model on the embedded weights.

Skips, with the extra's name, where `gemma` is not installed; an installed one that does not import fails.
"""

import importlib.util
import warnings
from typing import Any

import pytest

from equarx_serve import load_model
from equarx_serve.inference import ServingModel


@pytest.fixture(scope="session")
def gm() -> Any:
    """`gemma.gm`."""
    if importlib.util.find_spec("gemma") is None:
        pytest.skip("gemma is not installed; it comes with the extra `parity`: uv run --extra parity pytest -m parity")
    with warnings.catch_warnings():
        # The suite turns warnings into errors. What TensorFlow, SWIG and their friends warn of while they are
        # imported is not ours to mend.
        warnings.simplefilter("ignore")
        from gemma import gm
    return gm


@pytest.fixture(scope="session")
def model_270m() -> ServingModel:
    """The embedded Gemma 3 270M, f32, one rank, exact AllReduce."""
    return load_model("gemma3-270m", tp=1, reduce="f32", dtype="float32")
