"""What a wire format costs in accuracy and bytes, without a model: the table in docs/collective.md.

    python scripts/collective_errors.py [--ranks 4 --tokens 512 --features 640 --algorithm two_shot]

Partial sums are Gaussian (`gauss`), or Gaussian with a log-normal size a channel, as a row-parallel layer's output has
it (`loud`); `col` is `loud` with the channel sizes given as channel scale. Printed: wire bytes as a fraction of bf16,
and the sum's rms error over its rms in per cent, each channel over its own rms, so that loud channels don't hide what
the quiet ones lose. Ranks are emulated by vmap. The last line is JSON.
"""

import argparse
import json
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from equarx_serve.collectives import CollectiveConfig, all_reduce, explain

BYTE = "block=64,codes=full_range,scale=byte"
ROWS = (
    "int8",
    "int8:codes=full_range",
    "int8:scale=float32",
    "int8:block=64",
    f"int8:{BYTE}",
    "int8:block=token,scale=float32",
    "fp8",
    f"int7:{BYTE}",
    "int6:block=64,scale=byte",
    f"int6:{BYTE}",
    f"int5:{BYTE}",
    "int4:block=64,scale=byte",
    f"int4:{BYTE}",
    f"int4:{BYTE},clip_search=true",
)


def errors_of(text: str, algorithm: str, x: np.ndarray, rotation: int, scale: np.ndarray | None) -> list[float]:
    """rms errors in per cent for each of the stacked inputs x [inputs, ranks, tokens, features]."""
    more = f"rotation={rotation},algorithm={algorithm},min_bytes=0,quantize_min_bytes=0,chunks=1"
    config = CollectiveConfig.parse(f"{text}{',' if ':' in text else ':'}{more}")
    channels = None if scale is None else jnp.asarray(scale)
    run = jax.vmap(lambda part: all_reduce(part, "i", config, channel_scale=channels), axis_name="i")
    got = np.asarray(jax.jit(run)(np.moveaxis(x, 0, 1)))[0]
    exact = x.astype(np.float64).sum(axis=1)
    error = (got - exact) / np.sqrt(np.mean(exact**2, axis=1, keepdims=True))
    return [float(np.sqrt(np.mean(one**2)) * 100) for one in error]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--features", type=int, default=640)
    parser.add_argument("--algorithm", default="two_shot")
    parser.add_argument("--configs", nargs="+", default=ROWS)
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    gauss = rng.standard_normal((args.ranks, args.tokens, args.features)).astype(np.float32)
    loudness = np.exp(rng.standard_normal(args.features)).astype(np.float32)
    loud = gauss * loudness
    print(f"{args.algorithm}, {args.ranks} ranks, [{args.tokens}, {args.features}], rms error in per cent")
    print("| config | wire | rotated: gauss | loud | col | not rotated: loud |\n|---|---|---|---|---|---|")
    results = []
    for text in args.configs:
        both = errors_of(text, args.algorithm, np.stack([gauss, loud]), 128, None)
        col = errors_of(text, args.algorithm, loud[None], 128, loudness)
        plain = errors_of(text, args.algorithm, loud[None], 0, None)
        plan = explain(gauss.shape[1:], jnp.bfloat16, (args.ranks,), "tpu", CollectiveConfig.parse(text))
        errors = [*both, *col, *plain]
        print(f"| `{text}` | {plan.ratio:.3f} | " + " | ".join(f"{e:.2f}" for e in errors) + " |", flush=True)
        named = dict(zip(("gauss", "loud", "col", "loud_not_rotated"), errors, strict=True))
        results.append({"config": text, "wire_over_bf16": plan.ratio, "rms_error_percent": named})
    settings = {"algorithm": args.algorithm, "ranks": args.ranks, "tokens": args.tokens, "features": args.features}
    print(json.dumps({"table": "collective_errors", **settings, "jax": jax.__version__, "rows": results}))


if __name__ == "__main__":
    main()
