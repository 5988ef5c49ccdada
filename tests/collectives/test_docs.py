"""docs/collective.md: its program runs as printed, and its tables say what the code says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from equarx_serve.collectives import CollectiveConfig, explain, quantization_units

PAGE = Path(__file__).parents[2] / "docs" / "collective.md"


def test_the_program_in_the_page_runs(tmp_path: Path) -> None:
    """Ten lines in a program that is not ours, run as a user would: a fresh process, nothing but the package."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert blocks
    program = tmp_path / "program.py"
    program.write_text(blocks[0])
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "True" in done.stdout
    body = [line for line in blocks[0].splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(body) <= 10


def test_the_table_of_bytes_is_what_explain_says() -> None:
    rows = re.findall(r"^\| `(\S+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert len(rows) >= 8
    for text, *ratios in rows:
        for ratio, features in zip(ratios, (640, 2560, 5376), strict=True):
            plan = explain((1536, features), jnp.bfloat16, (8,), "tpu", CollectiveConfig.parse(text))
            assert float(ratio) == pytest.approx(plan.ratio, abs=0.0005), text


def test_the_table_of_units_is_what_the_schedule_says() -> None:
    rows = re.findall(
        r"^\| `(ring|two_ended_ring|two_shot)` \|[^|]*\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|",
        PAGE.read_text(),
        flags=re.MULTILINE,
    )
    assert {row[0] for row in rows} == {"ring", "two_ended_ring", "two_shot"}
    for algorithm, *units in rows:
        for unit, n in zip(units, (4, 8, 16), strict=True):
            assert float(unit) == pytest.approx(quantization_units(algorithm, (n,)), abs=0.005)  # type: ignore[arg-type]


def test_the_defaults_in_the_page_are_the_defaults() -> None:
    line = re.search(r"^The defaults: `(.*?)`", PAGE.read_text(), flags=re.MULTILINE)
    assert line is not None
    assert CollectiveConfig.parse(line.group(1)) == CollectiveConfig()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("bench_quantize.py", ["--tokens=16", "--features=256", "--repeats=2", "--formats", "int8", "int6:block=64"]),
        ("collective_errors.py", ["--tokens=16", "--features=256", "--configs", "int8"]),
    ],
)
def test_scripts_end_with_one_json_line(script: str, arguments: list[str]) -> None:
    command = [sys.executable, str(PAGE.parents[1] / "scripts" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["jax"]
