"""The schedule as data: every part reaches its owner once, every code reaches everybody, both directions are used."""

import cases
import pytest

from equarx_serve.collectives import CollectiveError, axis_schedule, quantization_units
from equarx_serve.collectives.schedule import colours, links_used

RANKS = (1, 2, 3, 4, 5, 8, 16)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("algorithm", cases.ALGORITHMS)
def test_every_part_is_summed_once_and_every_code_arrives(algorithm: str, n: int, chunks: int) -> None:
    schedule = axis_schedule(algorithm, n, chunks)  # type: ignore[arg-type]
    for chunk in range(chunks):
        # Partial sums as sets of ranks: what a message holds of a shard.
        chains: dict[tuple[int, int, int], set[int]] = {}
        at_owner = {rank: [{rank}] for rank in range(n)}
        for send in (s for s in schedule.sends() if s.kind == "reduce" and s.chunk == chunk):
            held = {send.sender}
            if send.hop:
                held |= chains.pop((send.sender, send.shard, send.chain))
            if send.receiver == send.shard:
                at_owner[send.receiver].append(held)
            else:
                chains[send.receiver, send.shard, send.chain] = held
        assert not chains, "no message is left on the way"
        for parts in at_owner.values():
            assert sum(len(part) for part in parts) == n
            assert set().union(*parts) == set(range(n))
        known = {rank: {rank} for rank in range(n)}
        for send in (s for s in schedule.sends() if s.kind == "gather" and s.chunk == chunk):
            assert send.shard in known[send.sender], "only what a rank has can be handed on"
            known[send.receiver].add(send.shard)
        assert all(shards == set(range(n)) for shards in known.values())


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("algorithm", cases.ALGORITHMS)
def test_messages_a_rank(algorithm: str, n: int) -> None:
    schedule = axis_schedule(algorithm, n, 2)  # type: ignore[arg-type]
    for kind in ("reduce", "gather"):
        assert len(schedule.of(kind, 0)) == len(schedule.of(kind, 1)) == n - 1


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_steps(n: int) -> None:
    for kind in ("reduce", "gather"):
        assert axis_schedule("ring", n).steps(kind) == n - 1
        assert axis_schedule("two_ended_ring", n).steps(kind) == n // 2, "half the ring from each side"
        assert axis_schedule("two_shot", n).steps(kind) == 1


@pytest.mark.parametrize("n", [3, 4, 8])
@pytest.mark.parametrize("algorithm", ["ring", "two_ended_ring"])
def test_two_chunks_load_both_directions_equally(algorithm: str, n: int) -> None:
    used = links_used(axis_schedule(algorithm, n, 2))  # type: ignore[arg-type]
    assert set(used) == {(r, (r + d) % n) for r in range(n) for d in (1, -1)}
    assert set(used.values()) == {2 * (n - 1)}


def test_a_step_uses_each_link_direction_once() -> None:
    for algorithm in ("ring", "two_ended_ring"):
        for kind in ("reduce", "gather"):
            seen = [
                (s.step, s.sender, s.receiver)
                for s in axis_schedule(algorithm, 8, 3).sends()  # type: ignore[arg-type]
                if s.kind == kind
            ]
            assert len(seen) == len(set(seen))


def test_chunks_interleave() -> None:
    """Pipelining as data: while a hop of chunk 0 is on the wire, chunk 1 is coded for the step after."""
    steps = [(r.step, r.hop, r.chunk) for r in axis_schedule("ring", 4, 2).of("reduce")]
    assert steps == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 2, 0), (5, 2, 1)]


@pytest.mark.parametrize("n", RANKS[1:])
def test_units_are_the_formulas(n: int) -> None:
    assert quantization_units("ring", (n,)) == pytest.approx((n - 1) / 2 + 1)
    assert quantization_units("two_shot", (n,)) == pytest.approx((n - 1) / n + 1)
    if n % 2 == 0:
        assert quantization_units("two_ended_ring", (n,)) == pytest.approx(n / 4 + 1)


def test_colours() -> None:
    assert colours((4,)) == ((0,),)
    assert colours((2, 4)) == ((0, 1), (1, 0))
    assert colours((2, 1, 3)) == ((0, 2), (2, 0))
    assert colours((2, 2, 2)) == ((0, 1, 2), (1, 2, 0), (2, 0, 1))
    for phase in range(3):
        assert {order[phase] for order in colours((2, 2, 2))} == {0, 1, 2}, "every axis is busy in every phase"
    assert colours((2, 4), enough_tokens=False) == ((0, 1),)


def test_errors() -> None:
    with pytest.raises(CollectiveError, match="ranks=0"):
        axis_schedule("ring", 0)
    with pytest.raises(CollectiveError, match="psum"):
        axis_schedule("psum", 4)
