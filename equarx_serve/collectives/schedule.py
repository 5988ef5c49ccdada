"""Who sends which piece to whom at which step: plain data that every backend, the reference and the byte count read.

Does: the rounds of one phase along one mesh axis (`axis_schedule`), the phases and colours of a torus (`colours`),
and both written out rank by rank (`sends`).
Assumes: ranks 0..n-1 of an axis form a ring, rank r beside r+1. Everything is the same for all ranks up to a turn of
the ring, so a round holds differences: receiver = sender + shift, shard = sender + offset (all modulo n).
Leaves to others: what is in a message and how it is added up.

Rank k owns shard k. `reduce` rounds bring partial sums to the owner, `gather` rounds bring the owner's codes to all.
With several chunks, odd chunks run mirrored, so that both directions of every link are used:

    ring, n=4, shard 0, even chunk        two_ended_ring, n=4, shard 0, even chunk      two_shot, n=4, shard 0
    1 -> 2 -> 3 -> 0                      2 -> 3 -> 0 <- 1                              1,2,3 -> 0 in one step
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from equarx_serve.collectives.config import Algorithm, CollectiveError

Kind = Literal["reduce", "gather"]


@dataclass(frozen=True)
class Round:
    """Every rank of an axis sends one message: sender r sends shard r + offset to rank r + shift (modulo n).

    Attributes:
        step: place in time within its kind; rounds of one step use different links or different directions.
        hop: how many messages of this chain came before it; 0 means that the sender sends its own part alone.
        chain: which chain of the chunk (a chain is one message handed on and on); chains of a shard end at its owner.
    """

    step: int
    kind: Kind
    chunk: int
    chain: int
    hop: int
    shift: int
    offset: int


@dataclass(frozen=True)
class Send:
    """One message of one rank, written out: `Round` for one sender."""

    step: int
    kind: Kind
    chunk: int
    chain: int
    hop: int
    sender: int
    receiver: int
    shard: int


@dataclass(frozen=True)
class AxisSchedule:
    """One phase along one axis of n ranks. `in_rank_order` says in which order an owner adds what arrives: by the
    sender's rank, its own part in its own place (two_shot), or own part first and then chain 0, chain 1 (the rings)."""

    algorithm: Algorithm
    ranks: int
    chunks: int
    rounds: tuple[Round, ...]

    @property
    def in_rank_order(self) -> bool:
        """Whether an owner adds by rank rather than own part first."""
        return self.algorithm == "two_shot"

    def of(self, kind: Kind, chunk: int | None = None) -> tuple[Round, ...]:
        """The rounds of one kind (and chunk) in order of time."""
        return tuple(r for r in self.rounds if r.kind == kind and chunk in (None, r.chunk))

    def steps(self, kind: Kind) -> int:
        """Steps in time that a kind takes."""
        return max((r.step + 1 for r in self.of(kind)), default=0)

    def sends(self) -> tuple[Send, ...]:
        """Every message of every rank."""
        n = self.ranks
        return tuple(
            Send(r.step, r.kind, r.chunk, r.chain, r.hop, rank, (rank + r.shift) % n, (rank + r.offset) % n)
            for r in self.rounds
            for rank in range(n)
        )


def axis_schedule(algorithm: Algorithm, ranks: int, chunks: int = 1) -> AxisSchedule:
    """The rounds of `algorithm` along one axis. A rank sends (ranks - 1) messages a chunk in each kind, always.

    Raises:
        CollectiveError: `psum` has no schedule of ours, and ranks and chunks must be positive.
    """
    if ranks < 1 or chunks < 1:
        raise CollectiveError(f"ranks={ranks}, chunks={chunks}: both must be at least 1")
    if algorithm == "psum":
        raise CollectiveError("algorithm='psum': the platform schedules it; choose ring, two_ended_ring or two_shot")
    rounds: list[Round] = []
    for chunk in range(chunks):
        mirror = -1 if chunk % 2 else 1
        for kind, chain, hop, shift, offset in _chunk_rounds(algorithm, ranks):
            time = 0 if algorithm == "two_shot" else hop
            rounds.append(Round(time * chunks + chunk, kind, chunk, chain, hop, mirror * shift, mirror * offset))
    rounds.sort(key=lambda r: (r.kind == "gather", r.step, r.chain))
    return AxisSchedule(algorithm, ranks, chunks, tuple(rounds))


def _chunk_rounds(algorithm: Algorithm, n: int) -> Iterator[tuple[Kind, int, int, int, int]]:
    """(kind, chain, hop, shift, offset) of an even chunk."""
    if algorithm == "two_shot":
        for shift in range(1, n):
            yield "reduce", shift - 1, 0, shift, shift
            yield "gather", shift - 1, 0, shift, 0
        return
    # A chain of `length` hops starts `length` ranks before the owner; the gather walks the same way outwards.
    lengths = (n - 1, 0) if algorithm == "ring" else (n // 2, (n - 1) // 2)
    for chain, (length, shift) in enumerate(zip(lengths, (1, -1), strict=True)):
        for hop in range(length):
            yield "reduce", chain, hop, shift, shift * (length - hop)
            yield "gather", chain, hop, shift, -shift * hop


def colours(axis_sizes: tuple[int, ...], enough_tokens: bool = True) -> tuple[tuple[int, ...], ...]:
    """For each colour (an equal part of the tokens) the order in which it goes over the axes.

    Colour c starts with axis c, so that at any time every axis carries one colour. Axes of one rank are left out.
    With too few tokens for that there is one colour.

    >>> colours((4, 2))
    ((0, 1), (1, 0))
    """
    axes = tuple(i for i, size in enumerate(axis_sizes) if size > 1)
    if not axes:
        return ((),)
    orders = tuple(axes[c:] + axes[:c] for c in range(len(axes)))
    return orders if enough_tokens else orders[:1]


def quantization_units(
    algorithm: Algorithm, axis_sizes: tuple[int, ...], order: tuple[int, ...] | None = None
) -> float:
    """Predicted error variance of an all_reduce, in units of one quantization of the final sum.

    A hop that carries the sum of m ranks' parts adds m units of one part's quantization; the gather adds N, the number
    of all ranks; so the sum over the hops of the schedule, divided by N. One axis: ring (n-1)/2 + 1,
    two_ended_ring n/4 + 1 (n even), two_shot (n-1)/n + 1.
    """
    order = colours(axis_sizes)[0] if order is None else order
    total, done = 0, 1
    everything = 1
    for axis in order:
        everything *= axis_sizes[axis]
    if everything == 1:
        return 0.0
    for axis in order:
        n = axis_sizes[axis]
        hops = sum(r.hop + 1 for r in axis_schedule(algorithm, n).of("reduce"))
        # After this phase each of the later shards gets its share from everything / (done * n) such groups.
        total += hops * done * (everything // (done * n))
        done *= n
    return total / everything + 1.0


def links_used(schedule: AxisSchedule) -> dict[tuple[int, int], int]:
    """(sender, receiver) -> messages, over all steps: what the two directions of each link carry."""
    count: dict[tuple[int, int], int] = {}
    for send in schedule.sends():
        count[send.sender, send.receiver] = count.get((send.sender, send.receiver), 0) + 1
    return count


def all_ranks(axis_sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The coordinates of every rank, row-major: the order of shards."""
    return tuple(itertools.product(*(range(size) for size in axis_sizes)))
