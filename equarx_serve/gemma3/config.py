"""What a Gemma 3 is made of: the five published sizes and the rules that follow from them.

Knows: layer counts, widths, heads, rope bases, the local:global pattern, which tensor-parallel degrees are legal.
Does not know: weights, devices, collectives. Every field is compared with `gemma.gm.nn.Gemma3_*.config` by a parity
test. Source: the Gemma 3 report (arXiv 2503.19786) and google-deepmind/gemma.
"""

import difflib
from dataclasses import dataclass

from equarx_serve.errors import UserError

MAX_CONTEXT = 131_072
"""Longest prompt in tokens: Gemma 3's context of 128K (the 270M and 1B were trained for 32K; nothing stops there)."""


@dataclass(frozen=True)
class Gemma3Config:
    """One size of Gemma 3 (text part).

    Axis letters used everywhere: B batch, T tokens, D embed_dim, F hidden_dim, N query heads, K KV heads, H head_dim,
    V vocabulary.
    """

    name: str
    num_layers: int
    embed_dim: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    """A local layer's token sees itself and the `window - 1` tokens before it."""
    global_rope_scale: float = 1.0
    """Positions of global layers are divided by it (8 from 4B up: the 32K -> 128K extension)."""
    query_scale: float | None = None
    """Factor on the queries; None means head_dim ** -0.5."""
    vocab_size: int = 262_144
    local_rope_base: float = 10_000.0
    global_rope_base: float = 1_000_000.0
    layers_per_global: int = 6
    """Every sixth layer attends globally, the five before it locally."""
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"{self.name}: {self.num_heads} query heads are no multiple of {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise UserError(f"{self.name}: head_dim {self.head_dim} is odd; rotary embedding needs an even one")

    def is_global(self, layer: int) -> bool:
        """Whether `layer` (from 0) attends to the whole context: 5, 11, 17, ... do."""
        return layer % self.layers_per_global == self.layers_per_global - 1

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def legal_tp(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that split no query head: the divisors of `num_heads`.

        KV heads are replicated in groups when there are fewer of them than ranks. A degree must also divide the
        hidden width and the vocabulary (true for all divisors in the published sizes).
        """
        return tuple(
            n
            for n in range(1, self.num_heads + 1)
            if self.num_heads % n == 0
            and (self.num_kv_heads % n == 0 or n % self.num_kv_heads == 0)
            and self.hidden_dim % n == 0
            and self.vocab_size % n == 0
        )

    def check_tp(self, tp: int) -> None:
        """Raises `UserError` naming the legal degrees when `tp` would split a head."""
        if tp not in self.legal_tp:
            legal = ", ".join(map(str, self.legal_tp))
            raise UserError(
                f"tp={tp} is not possible for {self.name}: its {self.num_heads} query heads must divide evenly over "
                f"the ranks; legal values: {legal}"
            )


GEMMA3_SIZES: dict[str, Gemma3Config] = {
    config.name: config
    for config in (
        Gemma3Config("gemma3-270m", 18, 640, 2048, 4, 1, 256, window=512),
        Gemma3Config("gemma3-1b", 26, 1152, 6 * 1152, 4, 1, 256, window=512),
        Gemma3Config("gemma3-4b", 34, 2560, 2560 * 8 // 2, 8, 4, 256, window=1024, global_rope_scale=8.0),
        Gemma3Config("gemma3-12b", 48, 3840, 8 * 3840 // 2, 16, 8, 256, window=1024, global_rope_scale=8.0),
        Gemma3Config(
            "gemma3-27b", 62, 5376, 5376 * 8 // 2, 32, 16, 128, window=1024, global_rope_scale=8.0,
            query_scale=(5376 / 32) ** -0.5,
        ),
    )
}  # fmt: skip


def gemma3_config(name: str) -> Gemma3Config:
    """The published size called `name` ("gemma3-270m", ...); `UserError` names the nearest one otherwise."""
    if name in GEMMA3_SIZES:
        return GEMMA3_SIZES[name]
    near = difflib.get_close_matches(str(name), GEMMA3_SIZES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"unknown model {name!r}; {hint}known: {', '.join(GEMMA3_SIZES)}")
