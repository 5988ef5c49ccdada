"""Time of a prefill at one rank: equarx_serve against Google's own `gemma`, same weights, same cores, one process.

    UV_PROJECT_ENVIRONMENT=.venv-parity uv run --extra parity python scripts/compare_with_gemma.py
        [--tokens 512 --rounds 15 --dtypes bfloat16 float32]

Needs the extra `parity` (3 GB with TensorFlow), hence an environment of its own, and a few minutes.
Same work on both sides: the built-in prompt in, logits of the last token out, compiled ahead of time by `jax.jit`
(`gm.nn.Gemma3_270M(...).apply(..., return_last_only=True)`). Ours also hands back its KV cache and hidden states, and
its logits are f32 where gemma's are in the model's dtype.

Before anything is timed, the outputs are compared: in f32 logits agree to 1e-3; in bf16 each side rounds in its own
places, so ours may lie at most 1.25 times as far from f32 as gemma's (rms). Then the two run in turn, round by round,
the first round dropped. A round's ratio is ours / gemma; below 1 ours is faster. Beside the wall clock stands the
processor time of the whole process: it moves less where other programs share the machine. The last line is JSON.
Says nothing of more ranks than one, of accelerators, or of decoding.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from equarx_serve import load_model
from equarx_serve.inference import EXACT, ServingModel, make_batch
from equarx_serve.timing.interleave import interleaved
from equarx_serve.timing.record import provenance

F32_CLOSE = 1e-3
"""Largest difference of f32 logits, which go up to about 30."""
BF16_SLACK = 1.25
"""How much further from f32 than gemma's our bf16 logits may lie."""


def gemma_program(params: dict[str, Any], dtype: str, tokens: np.ndarray) -> tuple[Callable[[], jax.Array], float]:
    """Compiled official prefill of `tokens` [1, T] on our arrays (no copy), and the seconds that it took to compile."""
    try:
        from gemma import gm
    except ModuleNotFoundError as error:
        sys.exit(f"{error}; gemma comes with the extra `parity` (see the header of this file)")
    model = gm.nn.Gemma3_270M(dtype=jnp.dtype(dtype))
    tree: dict[str, Any] = {}
    for name, leaf in params.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    start = time.perf_counter()
    run = jax.jit(lambda p, t: model.apply({"params": p}, t, return_last_only=True).logits)
    compiled = run.lower(tree, tokens).compile()
    return lambda: compiled(tree, tokens), time.perf_counter() - start


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def check(dtype: str, ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """How far apart the two outputs are; ends the program when they are not the same computation."""
    found = {
        "max_abs_difference": float(np.abs(ours - theirs).max()),
        "max_abs_logit": float(np.abs(theirs).max()),
        "ours_rms_to_f32": rms(ours - exact) / rms(exact),
        "gemma_rms_to_f32": rms(theirs - exact) / rms(exact),
    }
    if dtype == "float32":
        agree = found["max_abs_difference"] <= F32_CLOSE
    else:
        agree = found["ours_rms_to_f32"] <= BF16_SLACK * found["gemma_rms_to_f32"]
    if not (agree and np.isfinite(ours).all() and np.isfinite(theirs).all()):
        sys.exit(f"{dtype}: the outputs do not agree, so their times can't be compared: {found}")
    return found


def summary(values: list[float]) -> dict[str, float]:
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
    return {"median": float(median), "quartile_low": float(low), "quartile_high": float(high)}


def compare(
    model: ServingModel, dtype: str, prompt: list[int], rounds: int, exact: np.ndarray | None
) -> dict[str, Any]:
    """Checks and times one dtype. `exact` is the official f32 output; None when this run makes it itself."""
    batch = make_batch([prompt], model.config.vocab_size, width=len(prompt))
    program = model.compiled(batch)
    gemma, gemma_seconds = gemma_program(model.parameters(EXACT), dtype, jnp.asarray(batch.tokens))
    sides: dict[str, Callable[[], Any]] = {"ours": lambda: program.run(batch), "gemma": gemma}
    ours_logits, gemma_logits = np.asarray(sides["ours"]().logits[0], np.float32), np.asarray(gemma()[0], np.float32)
    agreement = check(dtype, ours_logits, gemma_logits, gemma_logits if exact is None else exact)

    processor: dict[str, list[float]] = {side: [] for side in sides}

    def timed(side: str) -> Callable[[], None]:
        def run() -> None:
            start = time.process_time()
            jax.block_until_ready(sides[side]())
            processor[side].append(time.process_time() - start)

        return run

    wall = interleaved({side: timed(side) for side in sides}, rounds)
    taken = {
        "wall": {side: list(timing.seconds) for side, timing in wall.items()},
        "processor": {side: times[1:] for side, times in processor.items()},  # the first, dropped there too
    }
    result: dict[str, Any] = {"dtype": dtype, "agreement": agreement, "logits": gemma_logits}
    result["compile_s"] = {"ours": program.seconds, "gemma": gemma_seconds}
    for clock, times in taken.items():
        ratios = [ours / theirs for ours, theirs in zip(times["ours"], times["gemma"], strict=True)]
        result[clock] = {side: summary(seconds) for side, seconds in times.items()} | {"ratio": summary(ratios)}
    return result


def show(results: list[dict[str, Any]], tokens: int, rounds: int) -> None:
    print(f"prefill of {tokens} tokens, tp=1, {jax.devices()[0].device_kind}; median of {rounds} rounds [quartiles]")
    print(f"{'dtype':9} {'clock':10} {'ours ms':>22} {'gemma ms':>22} {'ours / gemma':>22}")
    for result in results:
        for clock in ("wall", "processor"):
            cells = []
            for column, factor, digits in (("ours", 1e3, 0), ("gemma", 1e3, 0), ("ratio", 1, 2)):
                low, median, high = (
                    f"{result[clock][column][key] * factor:.{digits}f}"
                    for key in ("quartile_low", "median", "quartile_high")
                )
                cells.append(f"{median} [{low}, {high}]")
            print(f"{result['dtype']:9} {clock:10} " + " ".join(f"{cell:>22}" for cell in cells))
        a = result["agreement"]
        print(
            f"{'':9} outputs: max difference {a['max_abs_difference']:.2g} of {a['max_abs_logit']:.3g}; "
            f"rms to gemma's f32: ours {a['ours_rms_to_f32']:.2g}, gemma {a['gemma_rms_to_f32']:.2g}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=("float32", "bfloat16"))
    args = parser.parse_args()
    if args.tokens < 1 or args.rounds < 1:
        parser.error("--tokens and --rounds must be at least 1")

    text = files("equarx_serve.cli").joinpath("builtin_prompt.txt").read_text(encoding="utf-8")
    results, exact = [], None
    # f32 first: its output is what bf16 is measured against.
    for dtype in sorted(set(args.dtypes) | {"float32"}, reverse=True):
        model = load_model("gemma3-270m", tp=1, reduce="f32", dtype=dtype)
        ids = model.tokenizer.encode(text)
        prompt = (ids + ids[1:] * (args.tokens // len(ids)))[: args.tokens]  # one BOS, however often it is repeated
        timed = dtype in args.dtypes
        result = compare(model, dtype, prompt, args.rounds if timed else 1, exact)
        logits = result.pop("logits")
        exact = logits if exact is None else exact
        results += [result] if timed else []
    show(results, args.tokens, args.rounds)
    print(json.dumps({"tokens": args.tokens, "rounds": args.rounds, "tp": 1, "results": results} | provenance()))


if __name__ == "__main__":
    main()
