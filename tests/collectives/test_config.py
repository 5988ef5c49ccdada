"""CollectiveConfig refuses nonsense in words and survives a trip through text."""

import json
import subprocess
import sys
from typing import Any

import cases
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equarx_serve.collectives import CollectiveConfig, CollectiveError


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"algorithm": "two_ended"},
            ["algorithm='two_ended'", "psum, ring, two_ended_ring, two_shot", "'two_ended_ring'"],
        ),
        ({"format": "int9"}, ["format='int9'", "int8", "did you mean 'int"]),
        ({"codes": "signed"}, ["codes='signed'", "symmetric, full_range"]),
        ({"scale": "bf16"}, ["scale='bf16'", "bfloat16"]),
        ({"block": -1}, ["block=-1", "at least 0"]),
        ({"block": True}, ["block=True", "integer"]),
        ({"rotation": 100}, ["rotation=100", "128"]),
        ({"chunks": 0}, ["chunks=0", "at least 1"]),
        ({"chunks": 1000}, ["chunks=1000", "64"]),
        ({"min_bytes": 1.5}, ["min_bytes=1.5", "integer"]),
        ({"clip_search": 1}, ["clip_search=1", "True or False"]),
        ({"algorithm": "psum"}, ["'psum'", "int8", "two_shot"]),
        ({"format": "fp8_e4m3", "codes": "full_range"}, ["full_range", "fp8"]),
        ({"format": "fp8_e4m3", "clip_search": True, "codes": "symmetric"}, ["clip_search", "fp8"]),
        ({"on_unsupported": "warn"}, ["on_unsupported='warn'", "fallback, raise"]),
        ({"fallback": "int8"}, ["fallback='int8'", "float32, bfloat16"]),
    ],
)
def test_wrong_field(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CollectiveError) as error:
        CollectiveConfig(**fields)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int", ["format='int'", "int8"]),
        ("int8:blok=64", ["option 'blok'", "did you mean 'block'?"]),
        ("int8:block", ["'block' has no value"]),
        ("int8:block=64,block=32", ["'block' is given twice"]),
        ("int8:block=big", ["block='big'", "integer or token"]),
        ("int8:rotation=off", ["rotation='off'", "integer or none"]),
        ("int8:algorithm=rign", ["algorithm='rign'", "did you mean 'ring'?"]),
        ("int8:clip_search=yes", ["clip_search='yes'", "true or false"]),
        ("bf16:block=64", ["'block' has no effect", "bfloat16"]),
        ("", ["format=''"]),
    ],
)
def test_wrong_text(text: str, words: list[str]) -> None:
    """Report 19: an unknown setting is an error that names the nearest one; so is one without effect."""
    with pytest.raises(CollectiveError) as error:
        CollectiveConfig.parse(text)
    for word in words:
        assert word in str(error.value)


def test_short_names() -> None:
    assert CollectiveConfig.parse("f32") == CollectiveConfig(format="float32", algorithm="psum")
    assert CollectiveConfig.parse("bf16") == CollectiveConfig(format="bfloat16", algorithm="psum")
    assert CollectiveConfig.parse("bf16:algorithm=ring") == CollectiveConfig(format="bfloat16", algorithm="ring")
    assert CollectiveConfig.parse("int8") == CollectiveConfig()
    got = CollectiveConfig.parse("int8: algorithm=ring, block=256, rotation=none")
    assert (got.algorithm, got.block, got.rotation) == ("ring", 256, 0)
    assert CollectiveConfig.parse("int8:block=token").block == 0
    assert str(CollectiveConfig.parse("int6:rotation=none,block=token")) == "int6:block=token,rotation=none"


@given(
    st.sampled_from(cases.FORMATS),
    st.sampled_from(("psum", *cases.ALGORITHMS)),
    st.integers(0, 512),
    st.sampled_from(cases.CODES),
    st.sampled_from(cases.SCALES),
    st.sampled_from((0, 32, 128)),
    st.booleans(),
    st.integers(1, 64),
    st.integers(0, 2**20),
)
def test_label_round_trips(
    format: Any, algorithm: Any, block: int, codes: Any, scale: Any, rotation: int, clip: bool, chunks: int, low: int
) -> None:
    fields: dict[str, Any] = {"algorithm": algorithm, "rotation": rotation, "chunks": chunks, "min_bytes": low}
    if format in cases.CODED:
        fields |= {"block": block, "codes": codes, "scale": scale, "clip_search": clip, "quantize_min_bytes": low}
    try:
        config = CollectiveConfig(format=format, **fields)
    except CollectiveError:
        return
    assert CollectiveConfig.parse(config.label()) == config
    assert CollectiveConfig(**json.loads(json.dumps(config.as_dict()))) == config


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        CollectiveConfig().block = 64  # type: ignore[misc]


def test_import_starts_no_backend_and_brings_no_model_code() -> None:
    """Report 20; and contract: the package stands alone."""
    script = (
        "import os; before = dict(os.environ)\n"
        "import sys, equarx_serve.collectives\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "assert dict(os.environ) == before\n"
        "others = [m for m in sys.modules if m.split('.')[0] == 'flax' or m.startswith(('equarx_serve.gemma3', "
        "'equarx_serve.inference', 'equarx_serve.weights'))]\n"
        "assert not others, others\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
