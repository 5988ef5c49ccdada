"""The tensors of a Gemma 3 GGUF under the names and shapes of the official checkpoint.

Does: reads the architecture's facts from the metadata, checks that exactly the expected tensors are there with the
expected shapes, and gives any slice of an official leaf, dequantized to float32. It is a `Checkpoint` by itself;
`cache` copies it once into a file that is faster to read.
Assumes (true of llama.cpp's converter): matrices are [out, in]; q, k and v have their rows in half-split rope order,
as the official ones do, so nothing is permuted; RMSNorm weights hold the +1 (official scale = GGUF value - 1); the
output matrix is tied to the embedding.
Leaves to others: parsing (`gguf`), the tokenizer (`gguf_tokenizer`), 5:1 layer pattern and local rope base, which no
GGUF holds (`equarx_serve.gemma3.config`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from equarx_serve.errors import UserError
from equarx_serve.weights.gguf import GgufFile, clip
from equarx_serve.weights.tree import ArchitectureFacts, LeafSpec, bounds


class _Layout(Enum):
    """How an official leaf (or one entry of a stacked one) lies in its GGUF tensor."""

    AS_IS = "[R, C] is [R, C]"
    SCALE = "[D] is [D], one more than the official scale"
    TRANSPOSED = "[F, D] is [D, F]"
    HEADS_OUT = "[N, D, H] (q, k, v: makes heads) is [N*H, D]"
    HEADS_IN = "[N, H, D] (attention output: takes heads) is [D, N*H]"

    def gguf_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self is _Layout.TRANSPOSED:
            return shape[::-1]
        if self is _Layout.HEADS_OUT:
            return (shape[0] * shape[2], shape[1])
        if self is _Layout.HEADS_IN:
            return (shape[2], shape[0] * shape[1])
        return shape


@dataclass(frozen=True)
class _Leaf:
    """An official leaf: `shape` as official; two `tensors` are stacked along a new first axis."""

    shape: tuple[int, ...]
    layout: _Layout
    tensors: tuple[str, ...]

    @property
    def stacked(self) -> bool:
        return len(self.tensors) > 1

    @property
    def entry(self) -> tuple[int, ...]:
        """Official shape of what one tensor holds."""
        return self.shape[1:] if self.stacked else self.shape


def read_facts(file: GgufFile) -> ArchitectureFacts:
    """The architecture as the metadata tells it; another architecture or an impossible value is a `UserError`."""
    architecture = file.text("general.architecture")
    if architecture != "gemma3":
        raise UserError(f"{file.path}: this is a {clip(architecture)} model; only 'gemma3' is supported.")
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path}: the tensor 'token_embd.weight' is missing.")
    attention = "gemma3.attention."
    facts = ArchitectureFacts(
        layers=file.integer("gemma3.block_count"),
        d_model=file.integer("gemma3.embedding_length"),
        d_ff=file.integer("gemma3.feed_forward_length"),
        heads=file.integer(attention + "head_count"),
        kv_heads=file.integer(attention + "head_count_kv"),
        head_dim=file.integer(attention + "key_length"),
        window=file.integer(attention + "sliding_window"),
        vocab=file.tensors["token_embd.weight"].shape[0],
        context=file.integer("gemma3.context_length"),
        rms_eps=file.number(attention + "layer_norm_rms_epsilon"),
        rope_base_global=file.number("gemma3.rope.freq_base"),
        rope_scale_global=_rope_scale(file),
    )
    for name, value in vars(facts).items():
        if value <= 0:
            raise UserError(f"{file.path}: the metadata says that {name} is {value}; it must be positive.")
    if facts.heads % facts.kv_heads:
        raise UserError(f"{file.path}: {facts.heads} query heads can't share {facts.kv_heads} KV heads evenly.")
    if (value_length := file.integer(attention + "value_length")) != facts.head_dim:
        raise UserError(f"{file.path}: keys of {facts.head_dim} and values of {value_length}: Gemma 3 has equal ones.")
    return facts


def _rope_scale(file: GgufFile) -> float:
    """1 when the file names no scaling; the factor when it is linear; anything else is no Gemma 3."""
    if "gemma3.rope.scaling.type" not in file.metadata:
        return 1.0
    kind = file.text("gemma3.rope.scaling.type")
    if kind == "none":
        return 1.0
    if kind != "linear":
        raise UserError(f"{file.path}: rope scaling of type {clip(kind)}; Gemma 3 has 'linear' or none.")
    return file.number("gemma3.rope.scaling.factor")


def _leaf_table(facts: ArchitectureFacts) -> Iterator[tuple[str, _Leaf]]:
    """Every official leaf, in the order in which it is cached. Lazy: a file may claim four billion layers."""
    d, ff, n, k, h = facts.d_model, facts.d_ff, facts.heads, facts.kv_heads, facts.head_dim
    yield "embedder/input_embedding", _Leaf((facts.vocab, d), _Layout.AS_IS, ("token_embd.weight",))
    for layer in range(facts.layers):
        to, of = f"layer_{layer}/", f"blk.{layer}."
        yield to + "pre_attention_norm/scale", _Leaf((d,), _Layout.SCALE, (of + "attn_norm.weight",))
        yield to + "attn/q_einsum/w", _Leaf((n, d, h), _Layout.HEADS_OUT, (of + "attn_q.weight",))
        yield (
            to + "attn/kv_einsum/w",
            _Leaf((2, k, d, h), _Layout.HEADS_OUT, (of + "attn_k.weight", of + "attn_v.weight")),
        )
        yield to + "attn/_query_norm/scale", _Leaf((h,), _Layout.SCALE, (of + "attn_q_norm.weight",))
        yield to + "attn/_key_norm/scale", _Leaf((h,), _Layout.SCALE, (of + "attn_k_norm.weight",))
        yield to + "attn/attn_vec_einsum/w", _Leaf((n, h, d), _Layout.HEADS_IN, (of + "attn_output.weight",))
        yield to + "post_attention_norm/scale", _Leaf((d,), _Layout.SCALE, (of + "post_attention_norm.weight",))
        yield to + "pre_ffw_norm/scale", _Leaf((d,), _Layout.SCALE, (of + "ffn_norm.weight",))
        yield (
            to + "mlp/gating_einsum",
            _Leaf((2, ff, d), _Layout.AS_IS, (of + "ffn_gate.weight", of + "ffn_up.weight")),
        )
        yield to + "mlp/linear", _Leaf((ff, d), _Layout.TRANSPOSED, (of + "ffn_down.weight",))
        yield to + "post_ffw_norm/scale", _Leaf((d,), _Layout.SCALE, (of + "post_ffw_norm.weight",))
    yield "final_norm/scale", _Leaf((d,), _Layout.SCALE, ("output_norm.weight",))


class GgufGemma3:
    """A Gemma 3 GGUF as a `Checkpoint`: float32 leaves, dequantized at every `read`. Checked when constructed."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.facts: ArchitectureFacts | None = read_facts(file)
        self.source = str(file.path)
        self.tokenizer_path: Path | None = None
        self._table: dict[str, _Leaf] = {}
        for name, leaf in _leaf_table(self.facts):
            for tensor in leaf.tensors:
                self._check(tensor, leaf.layout.gguf_shape(leaf.entry))
            self._table[name] = leaf
        known = {tensor for leaf in self._table.values() for tensor in leaf.tensors}
        if unknown := sorted(set(file.tensors) - known):
            names = ", ".join(clip(name) for name in unknown[:3])
            raise UserError(f"{file.path}: {len(unknown)} of its tensors have no place in Gemma 3 ({names}).")
        self.leaves: Mapping[str, LeafSpec] = {
            name: LeafSpec(leaf.shape, np.dtype(np.float32)) for name, leaf in self._table.items()
        }

    def _check(self, tensor: str, shape: tuple[int, ...]) -> None:
        if tensor not in self._file.tensors:
            raise UserError(f"{self._file.path}: the tensor {tensor!r} is missing.")
        if (found := self._file.tensors[tensor].shape) != shape:
            raise UserError(
                f"{self._file.path}: the tensor {tensor!r} has shape {found}; the metadata ask for {shape}."
            )

    def read(self, name: str, index: tuple[slice, ...]) -> Float32[np.ndarray, "..."]:
        """A C-contiguous copy of the slice. Rows (embedding, q, k, v, gate, up) are read alone; for the attention
        output and the down projection, which lie transposed, the whole tensor is dequantized first."""
        leaf = self._table[name]
        ranges = bounds(name, self.leaves[name], index)
        if not leaf.stacked:
            return np.ascontiguousarray(self._entry(leaf, leaf.tensors[0], ranges))
        (start, stop), *rest = ranges
        out = np.empty([last - first for first, last in ranges], np.float32)
        for position in range(start, stop):
            out[position - start] = self._entry(leaf, leaf.tensors[position], tuple(rest))
        return out

    def _entry(self, leaf: _Leaf, tensor: str, ranges: tuple[tuple[int, int], ...]) -> Float32[np.ndarray, "..."]:
        first, *rest = (slice(start, stop) for start, stop in ranges)
        if leaf.layout is _Layout.SCALE:
            return self._file.read(tensor)[first] - np.float32(1)
        if leaf.layout is _Layout.AS_IS:
            return self._file.read(tensor, first.start, first.stop)[:, rest[0]]
        if leaf.layout is _Layout.TRANSPOSED:
            return self._file.read(tensor).T[first, rest[0]]
        if leaf.layout is _Layout.HEADS_OUT:
            _, d, h = leaf.entry
            rows = self._file.read(tensor, first.start * h, first.stop * h)
            return rows.reshape(-1, h, d).transpose(0, 2, 1)[:, rest[0], rest[1]]
        n, h, d = leaf.entry
        return self._file.read(tensor).reshape(d, n, h).transpose(1, 2, 0)[first, rest[0], rest[1]]
