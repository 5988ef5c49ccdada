"""How far two runs of the same model on the same tokens are apart: KL, top-1 agreement, perplexity, token by token.

Works from hidden states, a few tokens at a time and the vocabulary split over the ranks, so that [tokens, 262144]
logits never exist. Knows nothing of collectives: a run is whatever gave the hidden states.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int

from equarx_serve.gemma3 import TP_AXIS
from equarx_serve.inference.batching import Batch

CHUNK = 16
"""Tokens whose logits are held at once (two runs x 16 x 262,144 x 4 bytes = 34 MB over all ranks, several times)."""


@dataclass(frozen=True)
class Divergence:
    """A run against a reference over `tokens` positions, `targets` of which have a next token in the text."""

    tokens: int
    kl: float
    """Mean KL(reference || run) of the next-token distribution, nats."""
    top1: float
    """Share of positions whose likeliest next token is the same."""
    targets: int
    perplexity_reference: float
    perplexity: float

    @property
    def perplexity_change(self) -> float:
        """Relative change of perplexity; 0.01 is one per cent worse."""
        return self.perplexity / self.perplexity_reference - 1

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; a figure that no token defines is None."""
        fields = {
            "tokens": self.tokens,
            "kl": self.kl,
            "top1": self.top1,
            "targets": self.targets,
            "perplexity_reference": self.perplexity_reference,
            "perplexity": self.perplexity,
            "perplexity_change": self.perplexity_change,
        }
        return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in fields.items()}


@dataclass(frozen=True)
class TokenDivergence:
    """The same before averaging; several batches can be joined with `summarize`."""

    kl: Float[np.ndarray, " tokens"]
    agrees: Bool[np.ndarray, " tokens"]
    nll_reference: Float[np.ndarray, " targets"]
    nll: Float[np.ndarray, " targets"]


def summarize(parts: Sequence[TokenDivergence]) -> Divergence:
    """Averages over all tokens of all parts."""
    kl = np.concatenate([part.kl for part in parts])
    agrees = np.concatenate([part.agrees for part in parts])
    reference = np.concatenate([part.nll_reference for part in parts])
    run = np.concatenate([part.nll for part in parts])

    def mean(values: np.ndarray) -> float:
        return float(np.mean(values, dtype=np.float64)) if values.size else math.nan

    return Divergence(kl.size, mean(kl), mean(agrees), run.size, math.exp(mean(reference)), math.exp(mean(run)))


def compare(
    reference: Float[Array, "B T D"],
    run: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    batch: Batch,
    mesh: Mesh,
) -> TokenDivergence:
    """Compares two prefills' hidden states at every real token of `batch`; `compare_all` for one run."""
    return compare_all(reference, [run], embedding, batch, mesh)[0]


def compare_all(
    reference: Float[Array, "B T D"],
    runs: Sequence[Float[Array, "B T D"]],
    embedding: Float[Array, "V D"],
    batch: Batch,
    mesh: Mesh,
    run_embedding: Float[Array, "V D"] | None = None,
    chunk: int = CHUNK,
) -> list[TokenDivergence]:
    """Compares several runs with one reference, whose logits are made only once.

    Args:
        reference, runs: `PrefillOutput.hidden`, final norm applied.
        embedding: the tied embedding, split over the vocabulary on `mesh`.
        run_embedding: the runs' own one where it differs (a model in another dtype).
        chunk: tokens at a time; more is faster and takes more memory.
    """
    targets = np.full_like(batch.tokens, -1)
    both = batch.valid[:, :-1] & batch.valid[:, 1:]
    targets[:, :-1][both] = batch.tokens[:, 1:][both]
    rows = batch.tokens.size
    padded = -(-rows // chunk) * chunk

    def flat(hidden: Float[Array, "B T D"]) -> Float[np.ndarray, "rows D"]:
        values = np.asarray(hidden).reshape(rows, -1)
        return np.pad(values, ((0, padded - rows), (0, 0)))

    next_tokens = np.pad(targets.reshape(-1), (0, padded - rows), constant_values=-1)
    own = embedding if run_embedding is None else run_embedding
    out = _compiled(mesh, chunk)(flat(reference), np.stack([flat(run) for run in runs]), embedding, own, next_tokens)
    kl, agrees, nll_reference, nll = (np.asarray(values)[..., :rows] for values in out)
    real, scored = batch.valid.reshape(-1), next_tokens[:rows] >= 0
    return [
        TokenDivergence(kl[i][real], agrees[i][real], nll_reference[scored], nll[i][scored]) for i in range(len(runs))
    ]


@functools.lru_cache(maxsize=8)
def _compiled(mesh: Mesh, chunk: int) -> Any:
    everywhere, split = PartitionSpec(), PartitionSpec(TP_AXIS)
    return jax.jit(
        jax.shard_map(
            functools.partial(_one_rank, chunk),
            mesh=mesh,
            in_specs=(everywhere, everywhere, split, split, everywhere),
            out_specs=(everywhere, everywhere, everywhere, everywhere),
            check_vma=False,
        )
    )


def _one_rank(
    chunk: int,
    reference: Float[Array, "rows D"],
    runs: Float[Array, "R rows D"],
    table: Float[Array, "V D"],
    run_table: Float[Array, "V D"],
    targets: Int[Array, " rows"],
) -> tuple[Float32[Array, "R rows"], Bool[Array, "R rows"], Float32[Array, " rows"], Float32[Array, "R rows"]]:
    vocab = table.shape[0]
    first = jax.lax.axis_index(TP_AXIS) * vocab

    def log_probabilities(
        hidden: Float[Array, "C D"], table: Float[Array, "V D"]
    ) -> tuple[Float32[Array, "C V"], Int[Array, " C"]]:
        """Log-softmax over the whole vocabulary, this rank's part of it, and the likeliest token of all."""
        logits = jnp.einsum("cd,vd->cv", hidden, table, preferred_element_type=jnp.float32)
        local_best = jnp.max(logits, axis=-1)
        best = jax.lax.pmax(local_best, TP_AXIS)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32) + first
        # Ties between ranks go to the lowest id, as argmax does within one.
        token = jax.lax.pmin(jnp.where(local_best == best, token, np.int32(np.iinfo(np.int32).max)), TP_AXIS)
        shifted = logits - best[:, None]
        total = jax.lax.psum(jnp.sum(jnp.exp(shifted), axis=-1), TP_AXIS)
        return shifted - jnp.log(total)[:, None], token

    def target_nll(log_p: Float32[Array, "C V"], targets: Int[Array, " C"]) -> Float32[Array, " C"]:
        local = targets - first
        mine = (local >= 0) & (local < vocab)
        picked = jnp.take_along_axis(log_p, jnp.where(mine, local, 0)[:, None], axis=-1)[:, 0]
        return -jax.lax.psum(jnp.where(mine, picked, jnp.float32(0)), TP_AXIS)

    def at_once(
        part: tuple[Float[Array, "C D"], Float[Array, "R C D"], Int[Array, " C"]],
    ) -> tuple[Float32[Array, "R C"], Bool[Array, "R C"], Float32[Array, " C"], Float32[Array, "R C"]]:
        a, several, wanted = part
        log_p, best_p = log_probabilities(a, table)

        def one(b: Float[Array, "C D"]) -> tuple[Float32[Array, " C"], Bool[Array, " C"], Float32[Array, " C"]]:
            log_q, best_q = log_probabilities(b, run_table)
            kl = jax.lax.psum(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1), TP_AXIS)
            return kl, best_p == best_q, target_nll(log_q, wanted)

        kl, agrees, nll = jax.lax.map(one, several)
        return kl, agrees, target_nll(log_p, wanted), nll

    features = reference.shape[-1]
    chunks = (
        reference.reshape(-1, chunk, features),
        jnp.moveaxis(runs.reshape(runs.shape[0], -1, chunk, features), 0, 1),
        targets.reshape(-1, chunk),
    )
    kl, agrees, nll_reference, nll = jax.lax.map(at_once, chunks)

    def by_run(values: Array) -> Array:
        return jnp.moveaxis(values, 1, 0).reshape(runs.shape[0], -1)

    return by_run(kl), by_run(agrees), nll_reference.reshape(-1), by_run(nll)
