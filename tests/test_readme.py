"""The README's examples run, and say what they show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)


def test_the_ten_lines_run_and_print_what_a_reader_expects():
    code = next(block for block in BLOCKS if "load_model" in block)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_NUM", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=250,
        env={**clean, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shape, top, reason = done.stdout.splitlines()
    assert shape == "(1, 262144) 18"
    assert "' the'" in top
    assert "in int8 as asked for" in reason


def test_the_collective_alone_runs_in_a_foreign_program():
    import jax
    import numpy as np
    from jax.sharding import AxisType, PartitionSpec

    code = next(block for block in BLOCKS if "all_reduce" in block)
    space = {}

    def program(x):
        space["x"] = x
        exec(code, space)
        return space["y"]

    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
    x = np.random.default_rng(0).standard_normal((4, 256, 256)).astype(np.float32)
    spec = PartitionSpec("tp")
    y = np.asarray(jax.jit(jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(x))
    exact = x.sum(axis=0)
    assert np.abs(y - exact).max() / np.abs(exact).max() < 0.02
    assert not np.array_equal(y[0], exact)


@pytest.mark.parametrize("name", re.findall(r"\]\(((?:docs|scripts)/[^)#]+)", (ROOT / "README.md").read_text()))
def test_linked_files_exist(name):
    assert (ROOT / name).is_file()
