"""Which slice of which checkpoint leaf a rank holds.

One rule a leaf, by its name in the official tree (`layer_0/attn/q_einsum/w`): the axis that is split over the ranks, or
none (replicated). Leaves keep the official shapes, so a loader hands each device a slice of the file as it is. The one
exception is `kv_einsum` when there are fewer KV heads than ranks: a head is never split, so each head is repeated once
for every rank that needs it and the repeated axis is what is split.

    rank            0  1  2  3  4  5  6  7        8 query heads, 4 KV heads, tp = 8
    query head      0  1  2  3  4  5  6  7
    KV head         0  0  1  1  2  2  3  3        repeat = 2

Column-parallel: q, kv (heads), gating (hidden). Row-parallel: attn_vec (heads), linear (hidden); each ends in an
AllReduce. The tied embedding is split over the vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from equarx_serve.gemma3.config import Gemma3Config

TP_AXIS = "tp"
"""The mesh axis that tensor parallelism runs over."""


@dataclass(frozen=True)
class LeafSharding:
    """How one leaf lies on the ranks.

    Invariant: `global_shape[axis] == shape[axis] * repeat`, and rank r holds entries
    `[r * global_shape[axis] / tp, (r + 1) * global_shape[axis] / tp)` of the repeated axis.
    """

    shape: tuple[int, ...]
    """Shape in the official checkpoint."""
    axis: int | None
    """Axis split over the ranks; None: every rank holds all."""
    repeat: int = 1
    """How often each entry of `axis` stands side by side on the ranks (KV heads only)."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        if self.axis is None:
            return self.shape
        return (*self.shape[: self.axis], self.shape[self.axis] * self.repeat, *self.shape[self.axis + 1 :])

    @property
    def spec(self) -> PartitionSpec:
        if self.axis is None:
            return PartitionSpec()
        return PartitionSpec(*([None] * self.axis), TP_AXIS)

    def checkpoint_index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """The slice of the checkpoint's leaf behind the slice `index` of the global array.

        A rank's slice either holds whole groups of repeats or lies inside one entry.
        """
        out = [slice(*s.indices(n)) for s, n in zip(index, self.global_shape, strict=True)]
        if self.axis is not None and self.repeat > 1:
            s = out[self.axis]
            start, last = s.start // self.repeat, (s.stop - 1) // self.repeat
            if start != last:
                raise ValueError(f"slice {s} of axis {self.axis} spans two entries repeated {self.repeat} times")
            out[self.axis] = slice(start, start + 1)
        return tuple(out)


def leaf_shardings(config: Gemma3Config, tp: int) -> Mapping[str, LeafSharding]:
    """Every leaf of the official tree for `config`, in the order of the forward pass.

    Raises `UserError` when `tp` is illegal for the model.
    """
    config.check_tp(tp)
    c = config
    kv_repeat = max(1, tp // c.num_kv_heads)
    leaves = {"embedder/input_embedding": LeafSharding((c.vocab_size, c.embed_dim), 0)}
    for i in range(c.num_layers):
        block = {
            "pre_attention_norm/scale": LeafSharding((c.embed_dim,), None),
            "attn/q_einsum/w": LeafSharding((c.num_heads, c.embed_dim, c.head_dim), 0),
            "attn/kv_einsum/w": LeafSharding((2, c.num_kv_heads, c.embed_dim, c.head_dim), 1, kv_repeat),
            "attn/_query_norm/scale": LeafSharding((c.head_dim,), None),
            "attn/_key_norm/scale": LeafSharding((c.head_dim,), None),
            "attn/attn_vec_einsum/w": LeafSharding((c.num_heads, c.head_dim, c.embed_dim), 0),
            "post_attention_norm/scale": LeafSharding((c.embed_dim,), None),
            "pre_ffw_norm/scale": LeafSharding((c.embed_dim,), None),
            "mlp/gating_einsum": LeafSharding((2, c.hidden_dim, c.embed_dim), 1),
            "mlp/linear": LeafSharding((c.hidden_dim, c.embed_dim), 0),
            "post_ffw_norm/scale": LeafSharding((c.embed_dim,), None),
        }
        leaves |= {f"layer_{i}/{name}": leaf for name, leaf in block.items()}
    leaves["final_norm/scale"] = LeafSharding((c.embed_dim,), None)
    return leaves
