"""`equarx-serve`: commands, options, and errors as one sentence.

Imports neither jax nor the model before a command runs, so `--help` is quick and the platform can be settled first.
Exit codes: 0 done, 1 a `UserError` (one sentence on stderr), 2 an option typer refuses, 130 interrupted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    name="equarx-serve",
    help="Tensor-parallel Gemma 3 whose row-parallel AllReduce is a block-wise quantized collective.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

REDUCE_HELP = (
    "An AllReduce to run: FORMAT or FORMAT:OPTION=VALUE,...; give it again for more rows. The exact f32 one is always "
    "run, as reference. FORMAT: f32, bf16 (psum), int8, int7, int6, int5, int4, fp8. OPTIONS: "
    "algorithm (ring, two_ended_ring, two_shot, psum), block (features a scale, or token), rotation (128 or none), "
    "codes (symmetric, full_range), scale (float32, bfloat16, byte), channel_scale (none, column), fold (true, false), "
    "clip_search (true, false), chunks, min_bytes, quantize_min_bytes, fallback (float32, bfloat16), "
    "on_unsupported (fallback, raise). Example: --reduce int8:algorithm=ring,block=64 --reduce int4:block=64"
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"equarx-serve {version('equarx-serve')}")
        raise typer.Exit


@app.callback()
def equarx_serve(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Commands for a person at a terminal; the Python API is `equarx_serve.load_model`."""


@app.command()
def prefill(
    prompt: Annotated[
        str | None, typer.Option(help="Text to run; default: a built-in text of about 500 tokens.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the text from this UTF-8 file.")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Cut the text to so many tokens (BOS included), or repeat it until it has them."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="gemma3-270m, -1b, -4b, -12b or -27b; default: what the weights say they are.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="A GGUF file; default: the embedded Gemma 3 270M (4-bit, base model).")
    ] = None,
    tp: Annotated[
        int, typer.Option(help="Tensor-parallel ranks: a divisor of the model's query heads. Virtual devices on CPU.")
    ] = 4,
    reduce: Annotated[list[str] | None, typer.Option(help=REDUCE_HELP, metavar="SPEC")] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and activations: float32 or bfloat16.")] = "float32",
    repeats: Annotated[int, typer.Option(help="Timed runs of each row, after one that is dropped.", min=1)] = 5,
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="For dequantized weights and compiled programs; default: the user's cache folder."),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout; the table goes to stderr.")
    ] = False,
) -> None:
    """Run a prefill with several AllReduces and compare time, bytes and quality.

    With no options: the real Gemma 3 270M weights over 4 devices, exact f32, bf16 and quantized AllReduce side by side.
    """
    from equarx_serve.cli.prefill import Request, run

    request = Request(prompt, prompt_file, tokens, model, weights, tp, tuple(reduce or ()), dtype, repeats, cache_dir)
    with one_sentence():
        run(request, json_output)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turns bad input and Ctrl-C into one sentence on stderr; anything unforeseen keeps its traceback."""
    from equarx_serve.collectives.config import CollectiveError
    from equarx_serve.errors import UserError

    try:
        yield
    except (UserError, CollectiveError) as error:
        _say(str(error))
        raise typer.Exit(1) from error
    except KeyboardInterrupt as interrupt:
        # Here and not round the whole program: typer would end it in silence.
        _say("interrupted; what was cached is kept")
        raise typer.Exit(130) from interrupt


def main() -> None:
    """Entry point."""
    app()


def _say(sentence: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_escape(sentence)}", highlight=False)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
