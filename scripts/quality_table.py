"""What a quantized AllReduce costs in quality: the table of docs/quality.md, printed again.

    uv run python scripts/quality_table.py --data FOLDER            (more than an hour on 2 cores)
    uv run python scripts/quality_table.py --data FOLDER --ranks 4 --reduce int8 --reduce int6:block=64

Real Gemma 3 270M weights, teacher-forced on real text (four kinds of it, one row of 512 tokens each, from JSON Lines
files in FOLDER with Hugging Face's field names; `--text` takes others), 2,048 positions; KL and top-1 agreement of the
next-token distribution against the exact f32 AllReduce, and the change of perplexity. All ranks are emulated on one
device by splitting the contraction (`equarx_serve.evaluation.emulate`), so that 8 and 16 are possible with four query
heads. Prints a Markdown table, then one JSON line with everything; `--results` keeps rows and goes on where it stopped.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import jax

TEXTS = ("boolq.jsonl:passage", "hellaswag_validation.jsonl:ctx", "medqa.jsonl:question", "mmlu_test.jsonl:question")
GROUP = 4
"""AllReduces that share one pass over the reference's logits."""
WHOLE_MODEL_BF16 = "whole model in bf16"
EVERY = ("f32", "bf16", "bf16:algorithm=ring")
INT8 = [
    f"int8:algorithm={algorithm},block={block},scale=float32,{extra}"
    for algorithm in ("ring", "two_ended_ring", "two_shot")
    for block in (128, 320, "token")  # 256 does not divide 640 features
    for extra in (
        "rotation=128",
        "rotation=none",
        "rotation=128,channel_scale=column",
        "rotation=none,channel_scale=column",
    )
]
FINE = "codes=full_range,scale=byte,block=64,channel_scale=column"
DEFAULTS = [f"int8:algorithm={algorithm}" for algorithm in ("ring", "two_ended_ring", "two_shot")]
CANDIDATES = [
    "int8:algorithm=two_ended_ring,codes=full_range",
    "int8:algorithm=two_ended_ring,block=64,codes=full_range,scale=byte",
    f"int8:algorithm=two_ended_ring,{FINE}",
    "int8:algorithm=two_ended_ring,channel_scale=column",
    "int8:algorithm=two_shot,block=token,scale=float32,codes=full_range,channel_scale=column",
]
FEW_BITS = [
    f"int8:algorithm=two_shot,{FINE}",
    f"int7:algorithm=two_shot,{FINE}",
    "int6:algorithm=two_shot,block=128",
    f"int6:algorithm=two_shot,{FINE}",
    f"int5:algorithm=two_shot,{FINE}",
    "int4:algorithm=two_shot,block=32,rotation=none",
    "int4:algorithm=two_shot,block=32",
    f"int4:algorithm=two_shot,{FINE}",
    f"int4:algorithm=two_shot,{FINE},clip_search=true",
    "fp8:algorithm=two_shot",
]
MANY_RANKS = [
    "int8:algorithm=two_shot,block=128,scale=float32",
    f"int8:algorithm=two_shot,{FINE}",
    f"int6:algorithm=two_shot,{FINE}",
    f"int4:algorithm=two_shot,{FINE},clip_search=true",
    # One chunk: two would double a program that is long at 16 ranks, and change no statistics.
    "int8:algorithm=two_ended_ring,block=128,scale=float32,chunks=1",
    f"int8:algorithm=two_ended_ring,{FINE},chunks=1",
    "int8:algorithm=ring,block=128,scale=float32,chunks=1",
    f"int8:algorithm=ring,{FINE},chunks=1",
]


def table_rows(ranks: int) -> list[str]:
    """The recorded table's rows for one rank count."""
    if ranks == 4:
        return [*EVERY, WHOLE_MODEL_BF16, *INT8, *FEW_BITS, *DEFAULTS, *CANDIDATES]
    return MANY_RANKS


def main() -> None:
    """Parses options, runs every row, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts' files")
    parser.add_argument(
        "--text",
        action="append",
        metavar="FILE:FIELD",
        help=f"texts; default {' '.join(TEXTS)}, rows shared out evenly",
    )
    parser.add_argument("--ranks", type=int, action="append", help="rank counts; default 4, 8 and 16")
    parser.add_argument("--reduce", action="append", help="AllReduces instead of the recorded table's")
    parser.add_argument("--rows", type=int, default=4, help="rows of text, a multiple of the number of texts")
    parser.add_argument("--width", type=int, default=512, help="tokens a row, BOS included")
    parser.add_argument(
        "--results",
        type=Path,
        help="JSON Lines file: rows found there are not run again, new ones are added as they end",
    )
    options = parser.parse_args()
    options.text = options.text or list(TEXTS)

    from equarx_serve.collectives import CollectiveError
    from equarx_serve.errors import UserError

    try:
        records = [row for ranks in options.ranks or (4, 8, 16) for row in study(ranks, options)]
    except (UserError, CollectiveError) as error:
        sys.exit(f"error: {error}")
    print_table(records)
    print(json.dumps({**setting(options), "results": records}))


def setting(options: argparse.Namespace) -> dict:
    """What rows must have in common to stand in one table."""
    return {"text": options.text, "rows": options.rows, "width": options.width, "jax": jax.__version__}


def study(ranks: int, options: argparse.Namespace) -> list[dict]:
    """Every row at one rank count, in groups that share the reference's logits."""
    from equarx_serve.errors import UserError
    from equarx_serve.evaluation.divergence import compare_all, summarize
    from equarx_serve.evaluation.emulate import emulated_prefill
    from equarx_serve.evaluation.texts import field_of_jsonl, token_rows
    from equarx_serve.inference import EXACT, ReduceConfig, load_model

    done = {}
    if options.results is not None and options.results.exists():
        kept = [json.loads(line) for line in options.results.read_text().splitlines()]
        done = {r["reduce"]: r for r in kept if r["ranks"] == ranks and r["setting"] == setting(options)}
    specs = options.reduce or table_rows(ranks)
    wanted = [spec for spec in specs if spec not in done]
    if not wanted:
        return [done[spec] for spec in specs]

    model = load_model(reduce="f32")
    for spec in wanted:
        if spec != WHOLE_MODEL_BF16:
            plan = ReduceConfig.parse(spec).plan(model.config, ranks, options.rows * options.width, model.dtype, "tpu")
            if plan.fallback:
                raise UserError(f"{spec} does not run as asked for, so its figures would be another's: {plan.reason}")
    rows = []
    for text in options.text:
        file, _, field = text.partition(":")
        content = field_of_jsonl(options.data / file, field)
        rows += token_rows(model.tokenizer, content, options.rows // len(options.text), options.width)
    batch = model.batch(rows)
    reference = emulated_prefill(model, batch, EXACT, ranks).hidden
    # The whole model in bf16 has its own embedding, so it is a group of its own.
    coded = [spec for spec in wanted if spec != WHOLE_MODEL_BF16]
    groups = [coded[i : i + GROUP] for i in range(0, len(coded), GROUP)]
    if WHOLE_MODEL_BF16 in wanted:
        groups.append([WHOLE_MODEL_BF16])
    for group in groups:
        start = time.perf_counter()
        whole = group == [WHOLE_MODEL_BF16]
        runner = load_model(reduce="f32", dtype="bfloat16") if whole else model
        reduces = [ReduceConfig.parse("bf16" if whole else spec) for spec in group]
        hidden = [emulated_prefill(runner, batch, reduce, ranks).hidden for reduce in reduces]
        tables = [m.parameters(EXACT)["embedder/input_embedding"] for m in (model, runner)]
        parts = compare_all(reference, hidden, tables[0], batch, model.mesh, tables[1], chunk=256)
        for spec, reduce, part in zip(group, reduces, parts, strict=True):
            # "tpu": bytes of a bf16 psum as an accelerator sends them; XLA:CPU would send f32.
            plan = reduce.plan(model.config, ranks, batch.tokens.size, runner.dtype, "tpu")
            done[spec] = {
                "ranks": ranks,
                "reduce": spec,
                "wire": plan.ratio,
                **summarize([part]).as_dict(),
                "plan": plan.as_dict(),
                "setting": setting(options),
            }
            print(f"{ranks:3d} ranks  {spec}: KL {done[spec]['kl']:.5f}", file=sys.stderr, flush=True)
        if options.results is not None:
            with options.results.open("a") as file:
                file.writelines(json.dumps(done[spec]) + "\n" for spec in group)
        seconds = time.perf_counter() - start
        print(f"{len(done)} of {len(specs)} rows at {ranks} ranks; {seconds:.0f} s", file=sys.stderr, flush=True)
    return [done[spec] for spec in specs]


def print_table(records: list[dict]) -> None:
    """Markdown, one row a measurement."""
    print("| ranks | AllReduce | wire / bf16 | KL to f32 | top-1 agrees | perplexity | n |")
    print("|---|---|---|---|---|---|---|")
    for r in records:
        print(
            f"| {r['ranks']} | {r['reduce']} | {r['wire']:.3f} | {r['kl']:.5f} | {r['top1']:.1%} | "
            f"{r['perplexity_change']:+.2%} | {r['tokens']} |"
        )


if __name__ == "__main__":
    main()
