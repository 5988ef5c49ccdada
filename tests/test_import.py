"""Importing the package starts no backend, reads no environment and is quick."""

import ast
import subprocess
import sys

import pytest

SPY = """
import os, sys, time, types
import jax
jax_modules = set(sys.modules)
class Spy(dict):
    read = []
    def __getitem__(self, key): Spy.read.append(key); return dict.__getitem__(self, key)
    def get(self, key, default=None): Spy.read.append(key); return dict.get(self, key, default)
    def __contains__(self, key): Spy.read.append(key); return dict.__contains__(self, key)
before = dict(os.environ)
real, os.environ = os.environ, Spy(before)
real_getenv, os.getenv = os.getenv, lambda key, default=None: os.environ.get(key, default)
start = time.perf_counter()
{imports}
seconds = time.perf_counter() - start
os.environ, os.getenv = real, real_getenv
assert dict(os.environ) == before, "the environment was changed"
from jax._src import xla_bridge
assert not xla_bridge._backends, "a backend was started"
print(repr(sorted(set(Spy.read))), seconds, "flax" in sys.modules)
"""


def run(imports):
    done = subprocess.run(
        [sys.executable, "-c", SPY.replace("{imports}", imports)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read, rest = done.stdout.rsplit("]", 1)
    seconds, flax = rest.split()
    return read + "]", float(seconds), flax == "True"


def test_importing_the_package_is_free():
    read, seconds, flax = run("import equarx_serve")
    assert read == "[]"
    assert seconds < 1
    assert not flax


def test_importing_the_collectives_reads_nothing_and_needs_no_flax():
    read, seconds, flax = run("import equarx_serve.collectives")
    # jaxtyping, a library, looks for its own switches when it is imported.
    assert [name for name in ast.literal_eval(read) if not name.startswith("JAXTYPING_")] == []
    assert seconds < 1
    assert not flax


@pytest.mark.parametrize("module", ["gemma3", "inference", "weights", "evaluation.divergence", "timing.interleave"])
def test_no_room_starts_a_backend(module):
    run(f"import equarx_serve.{module}")


def test_public_names_are_there_and_an_unknown_one_is_an_error():
    import equarx_serve

    assert all(getattr(equarx_serve, name) is not None for name in equarx_serve.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'lod_model'"):
        _ = equarx_serve.lod_model
