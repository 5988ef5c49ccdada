"""Time of coding on this machine's CPU: quantize + dequantize of [tokens, features] float32 against a plain copy.

    python scripts/bench_quantize.py [--tokens 2048 --features 5376 --formats int8 int6:block=64 --repeats 15]

On slow links the CPU that codes is what is left, so this is the floor of what a coded collective costs there. Checked
before it is timed: the decoded array is within the format's step of the input. Medians; the first run (compile) is
dropped. A copy is XLA's own (`jnp.copy`), which allocates its result just as the coder does. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from equarx_serve.collectives import CollectiveConfig, blockwise, rotation
from equarx_serve.collectives.layout import Layout

DEFAULT_FORMATS = (
    "int8",
    "int8:block=64,scale=byte",
    "int8:codes=symmetric,scale=float32",
    "int6:block=64",
    "int4",
    "fp8",
)


def milliseconds(run: Callable[..., Any], *arguments: Any, repeats: int) -> float:
    """Median time of one call, compile dropped."""
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--features", type=int, default=5376)
    parser.add_argument("--formats", nargs="+", default=DEFAULT_FORMATS)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()

    x = jax.random.normal(jax.random.key(0), (args.tokens, args.features), jnp.float32)
    copy = milliseconds(jax.jit(jnp.copy), x, repeats=args.repeats)
    rotate = milliseconds(jax.jit(lambda x: rotation.hadamard(x, 128)), x, repeats=args.repeats)
    print(f"[{args.tokens}, {args.features}] float32 on {jax.devices()[0].device_kind}, {os.cpu_count()} cores, ms")
    print(f"copy {copy:.1f}; Hadamard rotation over 128 features {rotate:.1f}")
    print(f"{'format':40} quantize dequantize  sum/copy  encode decode (bytes, packed)")
    results = []
    for text in args.formats:
        config = CollectiveConfig.parse(text)
        layout = Layout.of(config, args.features)
        encode = jax.jit(lambda x, layout=layout: blockwise.encode(x, layout))
        decode = jax.jit(lambda rows, layout=layout: blockwise.decode(rows, layout))
        quantize = jax.jit(lambda x, layout=layout: blockwise.quantize(x, layout))
        dequantize = jax.jit(lambda codes, scales, layout=layout: blockwise.dequantize(codes, scales, layout))
        rows, (codes, scales) = encode(x), quantize(x)
        step = float(jnp.max(jnp.abs(x))) / layout.top * (32 if layout.format == "fp8_e4m3" else 1)
        np.testing.assert_allclose(decode(rows), x, atol=1.2 * step)
        np.testing.assert_array_equal(decode(rows), dequantize(codes, scales))
        times = {
            "quantize_ms": milliseconds(quantize, x, repeats=args.repeats),
            "dequantize_ms": milliseconds(dequantize, codes, scales, repeats=args.repeats),
            "encode_ms": milliseconds(encode, x, repeats=args.repeats),
            "decode_ms": milliseconds(decode, rows, repeats=args.repeats),
        }
        ratio = (times["quantize_ms"] + times["dequantize_ms"]) / copy
        print(
            f"{config.label():40} {times['quantize_ms']:8.1f} {times['dequantize_ms']:10.1f} {ratio:9.2f} "
            f"{times['encode_ms']:7.1f} {times['decode_ms']:6.1f}"
        )
        results.append({"config": config.as_dict(), "sum_over_copy": ratio, **times})
    record = {
        "benchmark": "quantize",
        "tokens": args.tokens,
        "features": args.features,
        "repeats": args.repeats,
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "copy_ms": copy,
        "hadamard_ms": rotate,
        "formats": results,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
