"""The prefill command end to end on a tiny GGUF, and every refusal: one sentence, exit code not 0, no traceback."""

import json
import os
import signal
import subprocess
import sys

import pytest
from cli.command import equarx_serve
from tiny_gemma3 import gguf_tensors, metadata, official_tree, write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    path = write_gguf(folder / "tiny.gguf", metadata(), gguf_tensors(official_tree()), "gemma3")
    return ["prefill", "--weights", path, "--cache-dir", folder / "cache"]


def refused(done):
    """The one sentence of a refusal."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    sentences = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1, done.stderr
    assert done.stdout == ""
    return sentences[0].removeprefix("error: ")


def test_one_run_gives_table_plans_and_json(tiny):
    ring = "int8:algorithm=ring,block=64,scale=float32,rotation=64,min_bytes=0,quantize_min_bytes=0"
    done = equarx_serve(
        *tiny, "--tokens", 40, "--prompt", "ab a b", "--reduce", ring, "--reduce", "bf16", "--repeats", 3, "--json"
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert [row["reduce"] for row in record["results"]] == ["f32", ring, "bf16"]
    assert (record["tp"], record["prompt_tokens"], record["padded_tokens"], record["platform"]) == (4, 40, 64, "cpu")
    assert record["virtual_devices"] is True
    assert record["ranks_compared_bitwise"] == 4
    exact, quantized, bf16 = record["results"]
    assert exact["against_f32"]["kl"] == 0
    assert exact["against_f32"]["tokens"] == 40
    # The tiny weights make near-certain predictions: the figures are small, but not those of an exact sum.
    assert 0 not in (quantized["against_f32"]["kl"], bf16["against_f32"]["kl"])
    # 64 tokens x 64 features over 4 ranks: 2 (n-1)/n of a byte a feature and 4 a block of 64.
    assert quantized["plan"]["wire_bytes"] == 2 * 3 * 64 * (64 + 4) // 4
    assert quantized["sent_bytes_per_rank"] == quantized["all_reduces"] * quantized["plan"]["wire_bytes"]
    assert quantized["all_reduces"] == 4
    for row in record["results"]:
        assert row["time_to_first_token"]["runs"] == 3
        assert len(row["next_tokens"]) == 5
        assert row["compile_s"] > 0
    # The table goes to stderr, with what the times do not say.
    assert "likeliest next tokens" in done.stderr
    assert "have no link between them" in done.stderr
    assert "ring in int8 as asked for" in done.stderr


def test_bos_is_there_once_whatever_the_prompt_begins_with(tiny, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("<bos>ab a b", encoding="utf-8")
    runs = [
        equarx_serve(*tiny, *given, "--reduce", "f32", "--repeats", 1, "--tp", 1, "--json")
        for given in (["--prompt", "ab a b"], ["--prompt", "<bos>ab a b"], ["--prompt-file", file])
    ]
    assert all(run.returncode == 0 for run in runs), [run.stderr for run in runs]
    plain, marked, read = (json.loads(run.stdout) for run in runs)
    assert plain["prompt_tokens"] == marked["prompt_tokens"] == read["prompt_tokens"]
    assert (
        plain["results"][0]["next_tokens"] == marked["results"][0]["next_tokens"] == read["results"][0]["next_tokens"]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "3"], "tp=3 is not possible for gemma3-2x64: its 4 query heads"),
        (["--tp", "64"], "tp=64 is not possible"),
        (["--tp", "0"], "tp=0 is not possible"),
        (["--model", "gemma3-7b"], "unknown model 'gemma3-7b'; did you mean"),
        (["--reduce", "int8:blok=64"], "option 'blok': must be one of"),
        (["--reduce", "int3"], "format='int3': must be one of"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file are both given"),
        (["--prompt-file", "/nowhere/at/all.txt"], "/nowhere/at/all.txt: No such file"),
        (["--tokens", "131073"], "--tokens 131,073: Gemma 3's context ends at 131,072"),
        (["--tokens", "99999999999"], "--tokens 99,999,999,999: Gemma 3's context ends at 131,072"),
        (["--tokens", "0"], "--tokens 0: a prefill needs at least one token"),
        (["--dtype", "fp16"], "dtype fp16 is not possible: Gemma 3's residual stream passes 100,000"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
    ],
)
def test_bad_options_get_one_sentence(tiny, options, message):
    assert message in refused(equarx_serve(*tiny, *options))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda good: None, "o such file"),
        (lambda good: b"", "empty"),
        (lambda good: b"not a model at all", "this is no GGUF file"),
        (lambda good: good[: len(good) // 2], ""),
        (lambda good: good[:100], ""),
    ],
    ids=["missing", "empty", "no-gguf", "half", "header-only"],
)
def test_bad_weights_get_one_sentence(tiny, tmp_path, make, message):
    path = tmp_path / "w.gguf"
    content = make(tiny[2].read_bytes())
    if content is not None:
        path.write_bytes(content)
    sentence = refused(equarx_serve("prefill", "--weights", path, "--cache-dir", tmp_path / "cache"))
    assert str(path) in sentence
    assert message in sentence


def test_a_platform_that_is_not_there_is_one_sentence(tiny):
    assert "jax finds no device with JAX_PLATFORMS=cuda" in refused(equarx_serve(*tiny, env={"JAX_PLATFORMS": "cuda"}))


def test_unknown_option_and_help():
    unknown = equarx_serve("prefill", "--nonsense")
    assert unknown.returncode == 2
    assert "Traceback" not in unknown.stderr
    helped = equarx_serve("prefill", "--help", env={"COLUMNS": "80"})
    assert helped.returncode == 0
    for option in (
        "--prompt",
        "--prompt-file",
        "--tokens",
        "--model",
        "--weights",
        "--tp",
        "--reduce",
        "--dtype",
        "--json",
    ):
        assert option in helped.stdout
    for word in ("two_ended_ring", "two_shot", "psum", "channel_scale", "on_unsupported", "FORMAT"):
        assert word in helped.stdout


def test_a_row_that_fell_back_says_so(tiny):
    done = equarx_serve(*tiny, "--prompt", "ab a b", "--reduce", "int8:rotation=none", "--repeats", 1)
    assert done.returncode == 0, done.stderr
    assert "fell back to" in done.stdout
    assert "fewer than min_bytes=65536" in done.stdout


def test_ctrl_c_is_one_sentence(tiny):
    command = [sys.executable, "-m", "equarx_serve.cli", *map(str, tiny), "--tokens", "2000", "--repeats", "500"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean)
    for line in process.stderr:
        if "timing" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert "error: interrupted" in err
    assert "Traceback" not in err
    assert out == ""


def test_version():
    done = equarx_serve("--version")
    assert done.returncode == 0
    assert done.stdout.split()[0] == "equarx-serve"
