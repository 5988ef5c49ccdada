"""What really leaves a rank, counted from the compiled program; and one cast to the output dtype on the way."""

import math
import re
from collections.abc import Iterator
from typing import Any

import cases
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from equarx_serve.collectives import CollectiveConfig, all_gather, all_reduce, explain, reduce_scatter

SIZE = {"u8": 1, "s8": 1, "u16": 2, "bf16": 2, "u32": 4, "f32": 4}
COLLECTIVES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
INSTRUCTION = re.compile(rf"= (\(?[^=]*?\)?) ({COLLECTIVES})(?:-start)?\(")
SHAPE = re.compile(r"([a-z]+\d+)\[([\d,]*)\]")


def sent_bytes(hlo: str, sizes: tuple[int, ...]) -> tuple[int, set[str]]:
    """Bytes that one rank sends to others, and the kinds of collectives, from the HLO text of one device.

    A permute sends its operand. An all_to_all of m bytes keeps its own part; an all_gather's operand goes to all
    others; the group's size stands in replica_groups.
    """
    total, kinds = 0, set()
    for line in re.sub(r"/\*.*?\*/", "", hlo).splitlines():
        found = INSTRUCTION.search(line)
        if not found:
            continue
        result, kind = found.groups()
        kinds.add(kind)
        size = sum(
            SIZE[dtype] * math.prod(int(d) for d in dims.split(",") if d) for dtype, dims in SHAPE.findall(result)
        )
        group = group_size(line, math.prod(sizes))
        if kind == "collective-permute":
            total += size
        elif kind in ("all-to-all", "all-gather"):
            assert size * (group - 1) % group == 0
            total += size * (group - 1) // group
        else:
            raise AssertionError(f"a collective that no algorithm names: {line.strip()[:200]}")
    return total, kinds


def group_size(line: str, everyone: int) -> int:
    """Ranks that take part in one instance: {{0,1},{2,3}}, [2,2]<=[4] or mesh['i'=2,'j'=4] {'i'}."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed.group(1).split(","))
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if counted:
        return int(counted.group(2))
    meshed = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if meshed:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", meshed.group(1)))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", meshed.group(2)))
    assert "replica_groups" not in line or "{}" in line, line
    return everyone


def compiled(op: Any, sizes: tuple[int, ...], shape: tuple[int, ...], config: CollectiveConfig) -> str:
    names = cases.AXES[: len(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    run = jax.shard_map(
        lambda x: op(x[0], names, config)[None], mesh=mesh, in_specs=P(names), out_specs=P(names), check_vma=False
    )
    x = jax.ShapeDtypeStruct((math.prod(sizes), *shape), jnp.bfloat16)
    return jax.jit(run).lower(x).compile().as_text()


BYTE = {"block": 64, "codes": "full_range", "scale": "byte"}
CASES: list[tuple[dict[str, Any], tuple[int, ...], float]] = [
    ({"algorithm": "ring", "block": 128, "chunks": 2}, (4,), 0.516),
    ({"algorithm": "two_ended_ring", "block": 128, "chunks": 2}, (8,), 0.516),
    ({"algorithm": "two_shot", "block": 128}, (8,), 0.516),
    ({"algorithm": "two_ended_ring", "block": 128, "chunks": 2}, (2, 4), 0.53),
    ({"algorithm": "two_shot", "block": 128}, (2, 2, 2), 0.53),
    ({"algorithm": "two_shot", "format": "int6", **BYTE}, (4,), 0.41),
    ({"algorithm": "two_ended_ring", "format": "int4", **BYTE}, (4,), 0.29),
    ({"algorithm": "two_shot", "format": "int5", **BYTE}, (3,), 0.35),
    ({"algorithm": "ring", "format": "bfloat16"}, (4,), 1.0),
]


@pytest.mark.parametrize(("fields", "sizes", "at_most"), CASES, ids=str)
def test_bytes_of_the_compiled_program(fields: dict[str, Any], sizes: tuple[int, ...], at_most: float) -> None:
    """Report 22: exactly the formula's bytes, and no collective but the algorithm's."""
    config, shape = cases.config(**fields), (96, 640)
    plan = explain(shape, jnp.bfloat16, sizes, "cpu", config)
    sent, kinds = sent_bytes(compiled(all_reduce, sizes, shape, config), sizes)
    assert sent == plan.wire_bytes
    assert sent / plan.bf16_bytes <= at_most
    assert kinds == ({"all-to-all", "all-gather"} if fields["algorithm"] == "two_shot" else {"collective-permute"})


def test_bytes_with_padding() -> None:
    config, shape = cases.config(algorithm="ring", chunks=2), (3, 7, 640)
    plan = explain(shape, jnp.bfloat16, (4,), "cpu", config)
    assert plan.padded_tokens > plan.tokens == 21
    assert sent_bytes(compiled(all_reduce, (4,), shape, config), (4,))[0] == plan.wire_bytes


@pytest.mark.parametrize("op", [reduce_scatter, all_gather])
def test_bytes_of_the_halves(op: Any) -> None:
    config, shape = cases.config(algorithm="two_shot"), (24, 640)
    plan = explain(shape, jnp.bfloat16, (4,), "cpu", config, op.__name__)
    assert sent_bytes(compiled(op, (4,), shape, config), (4,))[0] == plan.wire_bytes
    assert plan.ratio <= 0.516


def casts(jaxpr: Any) -> Iterator[Any]:
    """Every convert_element_type to bfloat16, in all nested jaxprs."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == jnp.bfloat16:
            yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from casts(inner)


@pytest.mark.parametrize("algorithm", cases.ALGORITHMS)
@pytest.mark.parametrize("format", cases.CODED)
def test_exactly_one_cast_to_the_output_dtype(algorithm: str, format: str) -> None:
    """Report 2. (The path of a bfloat16 or float32 psum has none or one, too: see below.)"""
    config = cases.config(algorithm=algorithm, format=format)
    run = jax.vmap(lambda x: all_reduce(x, "i", config), axis_name="i")
    jaxpr = jax.make_jaxpr(run)(jnp.ones((4, 16, 256), jnp.bfloat16)).jaxpr
    assert len(list(casts(jaxpr))) == 1


@pytest.mark.parametrize(("text", "count"), [("f32", 1), ("bf16", 0), ("f32:algorithm=ring", 1)])
def test_casts_of_uncoded_paths(text: str, count: int) -> None:
    config = CollectiveConfig.parse(text + (",min_bytes=0" if ":" in text else ""))
    run = jax.vmap(lambda x: all_reduce(x, "i", config), axis_name="i")
    jaxpr = jax.make_jaxpr(run)(jnp.ones((4, 16, 256), jnp.bfloat16)).jaxpr
    assert len(list(casts(jaxpr))) == count
