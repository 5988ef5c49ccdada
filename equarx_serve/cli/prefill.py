"""The prefill command: load, compile, check, time, compare, print.

Knows the order of things and the record they end in. Leaves to others: the model (`inference`), clocks (`timing`),
quality figures (`evaluation`), how a table looks (`show`).
"""

import functools
import json
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from equarx_serve.cli import environment, show
from equarx_serve.errors import UserError

if TYPE_CHECKING:
    from equarx_serve.inference import PrefillOutput, ServingModel

DEFAULT_TP = 4
MAX_CONTEXT = 131_072
"""As `gemma3.MAX_CONTEXT` (a test compares them): known here before anything heavy is imported."""


@dataclass(frozen=True)
class Request:
    """The command's options as they were given."""

    prompt: str | None = None
    prompt_file: Path | None = None
    tokens: int | None = None
    model: str | None = None
    weights: Path | None = None
    tp: int = DEFAULT_TP
    reduce: tuple[str, ...] = ()
    dtype: str = "float32"
    repeats: int = 5
    cache_dir: Path | None = None


def run(request: Request, json_output: bool) -> None:
    """Runs the command and prints its table (and JSON). Raises `UserError` or `CollectiveError` for bad input."""
    text = prompt_text(request)
    if request.tokens is not None and request.tokens < 1:
        raise UserError(f"--tokens {request.tokens}: a prefill needs at least one token")
    if request.tokens is not None and request.tokens > MAX_CONTEXT:
        raise UserError(f"--tokens {request.tokens:,}: Gemma 3's context ends at {MAX_CONTEXT:,}")
    from equarx_serve.weights.cache import default_folder

    cache_dir = request.cache_dir or default_folder()
    environment.start_jax(request.tp, cache_dir)
    with show.progress_on_stderr() as progress:
        record = measure(request, text, cache_dir, progress)
    show_record(record, show.console(stderr=json_output))
    if json_output:
        json.dump(record, sys.stdout, indent=1)
        sys.stdout.write("\n")


def prompt_text(request: Request) -> str:
    """The text to run: `--prompt`, `--prompt-file`, or the built-in one."""
    if request.prompt is not None and request.prompt_file is not None:
        raise UserError("--prompt and --prompt-file are both given; choose one")
    if request.prompt is not None:
        text = request.prompt
    elif request.prompt_file is not None:
        try:
            text = request.prompt_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{request.prompt_file}: not UTF-8 text (byte {error.start} is wrong)") from error
        except OSError as error:
            raise UserError(f"{request.prompt_file}: {error.strerror or error}") from error
    else:
        text = files("equarx_serve.cli").joinpath("builtin_prompt.txt").read_text(encoding="utf-8").rstrip("\n")
    if not text:
        raise UserError("the prompt is empty; a prefill needs at least one token")
    return text


def fit(ids: list[int], tokens: int | None) -> list[int]:
    """`ids` cut to `tokens`, or repeated (but for the BOS) until there are so many."""
    if tokens is None or tokens == len(ids):
        return ids
    if tokens < len(ids):
        return ids[:tokens]
    bos, rest = ids[:1], ids[1:]
    if not rest:
        raise UserError(f"--tokens {tokens}: the prompt has nothing to repeat")
    return bos + (rest * (tokens // len(rest) + 1))[: tokens - 1]


def default_reduces(platform: str) -> list[str]:
    """bf16 and the quantized default. XLA:CPU sends a bf16 psum as f32, so there bf16 is a ring that sends its bits."""
    return ["bf16:algorithm=ring" if platform == "cpu" else "bf16", "int8"]


def measure(request: Request, text: str, cache_dir: Path, progress: Any) -> dict[str, Any]:
    """Runs everything; returns the JSON-ready record."""
    import jax

    from equarx_serve.evaluation.divergence import compare_all, summarize
    from equarx_serve.inference import EXACT, ReduceConfig, load_model
    from equarx_serve.inference.loading import describe
    from equarx_serve.timing.interleave import interleaved
    from equarx_serve.timing.record import peak_memory_bytes, provenance

    specs = request.reduce or default_reduces(jax.default_backend())
    reduces = [EXACT, *(ReduceConfig.parse(spec) for spec in specs)]
    reduces = list(dict.fromkeys(reduces))
    model = load_model(
        request.model, request.weights, request.tp, EXACT, request.dtype, cache_dir=cache_dir, progress=progress
    )
    ids = fit(model.tokenizer.encode(text), request.tokens)
    batch = model.batch(ids)
    programs = {}
    for i, reduce in enumerate(reduces):
        progress(i, len(reduces), "compiling")
        programs[reduce.label()] = model.compiled(batch, reduce)
    progress(len(reduces), len(reduces), "compiling")

    last: dict[str, PrefillOutput] = {}

    def first_token(label: str) -> int:
        """Token ids on the host -> greedy next token on the host: time to first token without tokenizing."""
        last[label] = programs[label].run(batch)
        return int(np.argmax(np.asarray(last[label].logits[0])))

    timings = interleaved(
        {label: functools.partial(first_token, label) for label in programs}, request.repeats, progress
    )
    progress(0, 1, "comparing")
    reference = last[EXACT.label()]
    embedding = model.parameters(EXACT)["embedder/input_embedding"]
    rows, copies = [], []
    hidden = [last[reduce.label()].hidden for reduce in reduces]
    parts = compare_all(reference.hidden, hidden, embedding, batch, model.mesh)
    for reduce, part in zip(reduces, parts, strict=True):
        label = reduce.label()
        copies.append(equal_copies(last[label], label))
        divergence = summarize([part])
        rows.append(
            {
                "reduce": label,
                "settings": reduce.as_dict(),
                "plan": programs[label].plan.as_dict(),
                "all_reduces": 2 * model.config.num_layers,
                "sent_bytes_per_rank": 2 * model.config.num_layers * programs[label].plan.wire_bytes,
                "compile_s": programs[label].seconds,
                "time_to_first_token": timings[label].as_dict(),
                "against_f32": divergence.as_dict(),
                "next_tokens": likeliest(model, last[label]),
            }
        )
    progress(1, 1, "comparing")
    return {
        "command": "prefill",
        "model": describe(model.config),
        "weights": model.source,
        "tp": model.tp,
        "dtype": model.dtype.name,
        "prompt_tokens": len(ids),
        "padded_tokens": int(batch.tokens.size),
        "cache_dir": str(cache_dir),
        "results": rows,
        "ranks_compared_bitwise": min(copies),
        "virtual_devices": model.platform == "cpu",
        "peak_memory_bytes": peak_memory_bytes(),
        **provenance(),
    }


def equal_copies(output: "PrefillOutput", label: str) -> int:
    """How many ranks hold the hidden states, all with the same bits; a difference is a defect of the collective."""
    copies = [np.asarray(shard.data) for shard in output.hidden.addressable_shards]
    if any(copy.tobytes() != copies[0].tobytes() for copy in copies):
        raise RuntimeError(f"the ranks' hidden states differ after {label}: the AllReduce is not deterministic")
    return len(copies)


def likeliest(model: "ServingModel", output: "PrefillOutput", count: int = 5) -> list[dict[str, Any]]:
    """The likeliest next tokens of the first row."""
    from equarx_serve.inference.serving import likeliest_tokens

    return [
        {"id": token, "text": model.tokenizer.decode([token]), "probability": probability}
        for token, probability in likeliest_tokens(output.logits[0], count)
    ]


def show_record(record: dict[str, Any], console: Console) -> None:
    """The table, the next tokens, the plans, and what the times do not say."""
    model = record["model"]
    on = f"{record['tp']} {'virtual CPU devices' if record['platform'] == 'cpu' else record['device_kind']}"
    console.print(
        f"[bold]{model['name']}[/] prefill of {record['prompt_tokens']} tokens (padded to {record['padded_tokens']}), "
        f"{record['dtype']}, tensor-parallel over {on}\nweights: {escape(record['weights'])}",
    )
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("AllReduce", overflow="fold")
    for heading in ("time to first token", "quartiles", "compile", "sent/rank", "of bf16", "KL to f32", "top-1"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in record["results"]:
        timing, plan, quality = row["time_to_first_token"], row["plan"], row["against_f32"]
        # A row that fell back must not pass for the quality of what was asked for.
        ran = f" [bold red](fell back to {plan['algorithm']} in {plan['format']})[/]" if plan["fallback"] else ""
        table.add_row(
            escape(row["reduce"]) + ran,
            f"{timing['median_s'] * 1e3:.0f} ms",
            f"{timing['quartile_low_s'] * 1e3:.0f}-{timing['quartile_high_s'] * 1e3:.0f}",
            f"{row['compile_s']:.1f} s",
            f"{row['sent_bytes_per_rank'] / 1e6:.2f} MB",
            f"{plan['ratio']:.3f}",
            f"{quality['kl']:.6f}",
            f"{quality['top1']:.1%}",
        )
    console.print(table)
    first, ranks = record["results"][0], record["ranks_compared_bitwise"]
    console.print(
        f"median of {first['time_to_first_token']['runs']} runs in turn, the first dropped; {first['all_reduces']} "
        f"AllReduces a prefill; quality over {first['against_f32']['tokens']} positions; the hidden states of the "
        f"{ranks} rank(s) are equal bit by bit; compile: tracing, and XLA or its cache of earlier starts"
    )
    console.print("\n[bold]likeliest next tokens[/]")
    for row in record["results"]:
        tokens = "  ".join(f"{t['text']!r} {t['probability']:.1%}" for t in row["next_tokens"])
        console.print(f"  {escape(row['reduce'])}: {escape(tokens)}")
    console.print("\n[bold]plans[/]")
    for row in record["results"]:
        plan = row["plan"]
        shape = f", {plan['steps']} steps of {plan['chunks']} chunk(s)" if plan["steps"] else ""
        console.print(f"  {escape(row['reduce'])}: {escape(plan['reason'])}{shape}")
    if record["platform"] == "cpu":
        console.print(
            "\nVirtual CPU devices share one memory and have no link between them: these times say nothing of the "
            "collective's worth.\nThat takes links: a TPU, or rate-limited links between processes, which this version "
            "does not set up (README, Limits)."
        )
