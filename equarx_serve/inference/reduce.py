"""The AllReduce of the model's row-parallel layers: `equarx_serve.collectives` bound to the tensor-parallel axis.

This is the one place where model and collective meet. `ReduceConfig` adds to `CollectiveConfig` the two choices that
need the model's weights: a scale a channel, and folding the forward half of the transform into the weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from equarx_serve.collectives import CollectiveConfig, CollectiveError, Plan, all_reduce, column_scale, explain, fold
from equarx_serve.gemma3 import TP_AXIS, Gemma3Config, ReducePoint, TensorParallel, leaf_shardings

CHANNEL_SCALES = ("none", "column")


@dataclass(frozen=True)
class ReduceConfig:
    """How the row-parallel sums of a model travel.

    `channel_scale="column"` divides each output channel by the norm of its weight column (no data needed) before
    coding. `fold` applies that and the forward rotation to the weights once, when they are loaded, so that only the
    inverse runs in the forward pass; it costs a second copy of the row-parallel weights per configuration in use.
    """

    collective: CollectiveConfig = field(default_factory=CollectiveConfig)
    channel_scale: str = "none"
    fold: bool = False

    def __post_init__(self) -> None:
        if self.channel_scale not in CHANNEL_SCALES:
            raise CollectiveError(f"channel_scale={self.channel_scale!r}: must be one of {', '.join(CHANNEL_SCALES)}")
        if not self.collective.quantized and (self.channel_scale != "none" or self.fold):
            raise CollectiveError(
                f"channel_scale and fold have no effect with format={self.collective.format!r}, which sends no codes"
            )
        if self.fold and self.channel_scale == "none" and not self.collective.rotation:
            raise CollectiveError("fold=true with rotation=none and channel_scale=none: there is nothing to fold")

    @classmethod
    def parse(cls, text: str) -> "ReduceConfig":
        """`format[:option=value,...]` as `CollectiveConfig.parse`, and `channel_scale=column`, `fold=true`."""
        name, colon, rest = text.partition(":")
        own: dict[str, Any] = {}
        kept = []
        for item in rest.split(",") if colon else ():
            key, _, value = (part.strip() for part in item.partition("="))
            if key not in ("channel_scale", "fold"):
                kept.append(item)
                continue
            if key in own:
                raise CollectiveError(f"option {key!r} is given twice in {text!r}")
            if key == "fold" and value not in ("true", "false"):
                raise CollectiveError(f"fold={value!r}: must be true or false")
            own[key] = value == "true" if key == "fold" else value
        return cls(CollectiveConfig.parse(name + (":" + ",".join(kept) if kept else "")), **own)

    def label(self) -> str:
        """The text that `parse` reads back."""
        text = self.collective.label()
        extra = [] if self.channel_scale == "none" else [f"channel_scale={self.channel_scale}"]
        extra += ["fold=true"] if self.fold else []
        return text + ("," if ":" in text else ":" if extra else "") + ",".join(extra) if extra else text

    def as_dict(self) -> dict[str, Any]:
        return {**self.collective.as_dict(), "channel_scale": self.channel_scale, "fold": self.fold}

    def plan(self, config: Gemma3Config, tp: int, tokens: int, dtype: Any, platform: str) -> Plan:
        """What one AllReduce of a forward pass over `tokens` tokens does, and why."""
        return explain((tokens, config.embed_dim), dtype, (tp,), platform, self.collective)

    def tensor_parallel(self, size: int) -> TensorParallel:
        """The model's view of `size` ranks that reduce this way."""
        return TensorParallel(size, CollectiveReduce(self.collective, self.fold), self.channel_scale != "none")


EXACT = ReduceConfig(CollectiveConfig.parse("f32"))
"""What every other AllReduce is compared with: `lax.psum` in float32."""


@dataclass(frozen=True)
class CollectiveReduce:
    """`collectives.all_reduce` over one axis, as the model's callable."""

    collective: CollectiveConfig
    folded: bool
    axis: str = TP_AXIS

    def __call__(
        self, partial: Float[Array, "B T D"], point: ReducePoint, channel_scale: Float[Array, " D"] | None
    ) -> Float[Array, "B T D"]:
        return all_reduce(partial, self.axis, self.collective, channel_scale=channel_scale, folded=self.folded)


ROW_PARALLEL = ("attn/attn_vec_einsum/w", "mlp/linear")
"""The leaves of a layer whose products are summed by the AllReduce; the last axis is the output channel."""


def prepared_parameters(params: Mapping[str, Array], config: Gemma3Config, reduce: ReduceConfig) -> dict[str, Array]:
    """`params` as `reduce` needs them: channel scales added, weights folded. Other leaves are shared, not copied."""
    out = dict(params)
    if reduce.channel_scale == "none" and not reduce.fold:
        return out
    for layer in range(config.num_layers):
        for name in ROW_PARALLEL:
            leaf = f"layer_{layer}/{name}"
            weight = params[leaf]
            sharding = weight.sharding
            if not isinstance(sharding, NamedSharding):
                raise ValueError(f"{leaf} does not lie on a mesh but on {sharding}")
            scale = None
            if reduce.channel_scale == "column":
                # The norm runs over the contracted axes, which are split: XLA adds the ranks' parts up.
                scale = jax.jit(_column_scale, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))(weight)
                out[f"layer_{layer}/{name.split('/')[0]}/channel_scale"] = scale
            if reduce.fold:
                out[leaf] = jax.jit(fold, static_argnums=1, out_shardings=sharding)(weight, reduce.collective, scale)
    return out


def _column_scale(weight: Float[Array, "*contracted D"]) -> Float[Array, " D"]:
    return column_scale(weight.reshape(-1, weight.shape[-1]))


def parameter_specs(config: Gemma3Config, tp: int, reduce: ReduceConfig) -> dict[str, PartitionSpec]:
    """How each parameter of the prepared tree lies on the mesh."""
    specs = {name: leaf.spec for name, leaf in leaf_shardings(config, tp).items()}
    if reduce.channel_scale != "none":
        for layer in range(config.num_layers):
            specs |= {f"layer_{layer}/{part}/channel_scale": PartitionSpec() for part in ("attn", "mlp")}
    return specs
