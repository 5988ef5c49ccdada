"""The Python API of sharded prefill: a model on a mesh, prompts in, logits and KV cache out.

    model = load_model("gemma3-270m", tp=4, reduce="int8")
    result = model.prefill("The capital of France is")

Programs are compiled once for each (AllReduce, batch, bucket) and kept; compile time is on record apart from running.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from equarx_serve.collectives import CollectiveConfig, Plan
from equarx_serve.errors import UserError
from equarx_serve.gemma3 import TP_AXIS, Gemma3Config, gemma3_config
from equarx_serve.inference.batching import Batch, make_batch
from equarx_serve.inference.loading import config_of, load_parameters, parse_dtype
from equarx_serve.inference.mesh import make_mesh
from equarx_serve.inference.prefill import PrefillOutput, prefill_function
from equarx_serve.inference.reduce import EXACT, ReduceConfig, parameter_specs, prepared_parameters
from equarx_serve.inference.tokenizer import Tokenizer
from equarx_serve.weights import open_checkpoint

EMBEDDED_MODEL = "gemma3-270m"
"""The model whose weights come as a package."""

Progress = Callable[[int, int, str], None]
Prompt = str | Sequence[int] | np.ndarray | jax.Array
Reduce = ReduceConfig | CollectiveConfig | str


@dataclass(frozen=True)
class CompiledPrefill:
    """One program and what it took to make it."""

    run: Callable[[Batch], PrefillOutput]
    seconds: float
    """Tracing, lowering and compiling (or fetching from jax's compilation cache)."""
    plan: Plan
    """What each of the model's AllReduces does in it."""
    hlo: Callable[[], str] = field(repr=False)
    """The optimized HLO, as text."""


def likeliest_tokens(logits: Float[Array, " V"], count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens with their probabilities; ties go to the lowest id."""
    values = np.asarray(logits, np.float64)
    values = np.exp(values - values.max())
    best = np.argsort(-values, kind="stable")[:count]
    return [(int(token), float(values[token] / values.sum())) for token in best]


@dataclass(frozen=True)
class PrefillResult:
    """Outputs of one prefill with the plan that ran."""

    output: PrefillOutput
    batch: Batch
    plan: Plan

    @property
    def logits(self) -> Array:
        """[B, V] f32, of the last real token of each prompt."""
        return self.output.logits

    def top(self, count: int = 5, row: int = 0) -> list[tuple[int, float]]:
        """The likeliest next tokens of one prompt, with their probabilities."""
        return likeliest_tokens(self.logits[row], count)


def as_reduce(reduce: Reduce) -> ReduceConfig:
    """An AllReduce given as text, as the collective's config or as a `ReduceConfig`. `UserError` for anything else."""
    if isinstance(reduce, str):
        return ReduceConfig.parse(reduce)
    if isinstance(reduce, CollectiveConfig):
        return ReduceConfig(reduce)
    if not isinstance(reduce, ReduceConfig):
        raise UserError(
            f'reduce={reduce!r} ({type(reduce).__name__}): give text like "int8", a CollectiveConfig or a ReduceConfig'
        )
    return reduce


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or several, each text or token ids (any one-dimensional array of integers too), as a list."""

    def ids(prompt: Any) -> Any:
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, (Sequence, np.ndarray, jax.Array)) and not isinstance(prompt, bytes):
            return list(prompt) if isinstance(prompt, Sequence) else np.asarray(prompt).tolist()
        raise UserError(f"{prompt!r} ({type(prompt).__name__}) is no prompt; give text or a list of token ids")

    given = ids(prompts)
    several = isinstance(given, list) and any(isinstance(one, (str, Sequence, np.ndarray, jax.Array)) for one in given)
    return [ids(one) for one in given] if several or given == [] else [given]


class ServingModel:
    """Gemma 3 on a mesh. Make one with `load_model`, or from parameters that are on the mesh already."""

    def __init__(
        self,
        config: Gemma3Config,
        mesh: Mesh,
        params: Mapping[str, Array],
        dtype: np.dtype,
        reduce: ReduceConfig = EXACT,
        tokenizer: Tokenizer | None = None,
        source: str = "parameters given from outside",
    ) -> None:
        config.check_tp(mesh.shape[TP_AXIS])
        self.config, self.mesh, self.dtype, self.reduce, self.source = config, mesh, dtype, reduce, source
        self._tokenizer = tokenizer
        self._params = {EXACT: dict(params)}
        self._programs: dict[tuple[ReduceConfig, tuple[int, int]], CompiledPrefill] = {}

    @property
    def tp(self) -> int:
        return self.mesh.shape[TP_AXIS]

    @property
    def platform(self) -> str:
        """cpu, gpu or tpu: where the mesh really is."""
        return self.mesh.devices.flat[0].platform

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise UserError("these weights came without a tokenizer; pass token ids instead of text")
        return self._tokenizer

    @property
    def parameter_count(self) -> int:
        """Parameters of the checkpoint (repeated KV heads count once for each repeat)."""
        return sum(array.size for array in self._params[EXACT].values())

    def parameters(self, reduce: ReduceConfig) -> dict[str, Array]:
        """The parameters as `reduce` needs them (channel scales, folded weights), made once."""
        if reduce.channel_scale == "none" and not reduce.fold:
            return self._params[EXACT]
        if reduce not in self._params:
            self._params[reduce] = prepared_parameters(self._params[EXACT], self.config, reduce)
        return self._params[reduce]

    def batch(self, prompts: Prompt | Sequence[Prompt], side: str = "right") -> Batch:
        """Text (tokenized, one BOS in front) or token ids (as they are) as one padded batch."""
        rows = []
        for prompt in as_prompts(prompts):
            if isinstance(prompt, str) and not prompt:
                raise UserError("the prompt is empty; a prefill needs at least one token")
            rows.append(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        return make_batch(rows, self.config.vocab_size, side=side)

    def compiled(self, batch: Batch, reduce: Reduce | None = None) -> CompiledPrefill:
        """The program for batches of this shape under `reduce`, compiled at the first call."""
        reduce = self.reduce if reduce is None else as_reduce(reduce)
        key = (reduce, batch.tokens.shape)
        if key not in self._programs:
            self._programs[key] = self._compile(batch, reduce)
        return self._programs[key]

    def _compile(self, batch: Batch, reduce: ReduceConfig) -> CompiledPrefill:
        plan = reduce.plan(self.config, self.tp, batch.tokens.size, self.dtype, self.platform)
        params = self.parameters(reduce)
        start = time.perf_counter()
        specs = parameter_specs(self.config, self.tp, reduce)
        function = prefill_function(self.config, self.mesh, reduce.tensor_parallel(self.tp), specs, self.dtype)
        compiled = jax.jit(function).lower(params, batch.tokens, batch.valid).compile()
        seconds = time.perf_counter() - start

        def run(other: Batch) -> PrefillOutput:
            return compiled(params, other.tokens, other.valid)

        return CompiledPrefill(run, seconds, plan, lambda: compiled.as_text() or "")

    def prefill(
        self, prompts: Prompt | Sequence[Prompt], reduce: Reduce | None = None, side: str = "right"
    ) -> PrefillResult:
        """Runs whole prompts through the model.

        Args:
            prompts: a text, a list of token ids (BOS included), or a list of either.
            reduce: how the row-parallel sums travel in this call; default: the model's own.
            side: where shorter prompts are padded.

        Raises `UserError` for an empty prompt, one beyond the context, or ids outside the vocabulary.
        """
        batch = self.batch(prompts, side)
        program = self.compiled(batch, reduce)
        return PrefillResult(program.run(batch), batch, program.plan)


def load_model(
    model: str | None = None,
    weights: str | Path | None = None,
    tp: int = 1,
    reduce: Reduce | None = None,
    dtype: str = "float32",
    devices: Sequence[jax.Device] | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> ServingModel:
    """A Gemma 3 on a mesh of `tp` devices.

    Args:
        model: "gemma3-270m", ...; default: what the weights say they are.
        weights: a GGUF file; default: the embedded Gemma 3 270M (4-bit, dequantized once into the cache folder).
        tp: tensor-parallel ranks, a divisor of the model's query heads.
        reduce: the AllReduce of the row-parallel layers: text ("f32", "int8:block=64"), a `CollectiveConfig` or a
            `ReduceConfig`.
        dtype: of weights and activations, "float32" or "bfloat16".
        devices: to lie on; default: the first `tp` of `jax.devices()`.
        cache_dir: where dequantized weights are kept; default: the user's cache folder.
        progress: called as progress(done, total, what) on long work.

    Raises `UserError` (or `CollectiveError` for `reduce`) in one sentence for everything that cannot be.
    """
    # What can be refused without opening a file is refused first.
    if isinstance(tp, bool) or not isinstance(tp, int):
        raise UserError(f"tp={tp!r} ({type(tp).__name__}): the number of ranks is an integer")
    if model is not None or weights is None:
        named = gemma3_config(EMBEDDED_MODEL if model is None else model)
        if weights is None and named.name != EMBEDDED_MODEL:
            raise UserError(
                f"only {EMBEDDED_MODEL} comes with weights; for {named.name} name a GGUF file as its weights"
            )
        named.check_tp(tp)
    numpy_dtype = parse_dtype(dtype)
    chosen = ReduceConfig() if reduce is None else as_reduce(reduce)
    checkpoint = open_checkpoint(weights, cache_dir, progress)
    config = config_of(checkpoint, model)
    config.check_tp(tp)
    mesh = make_mesh(tp, devices)
    params = load_parameters(checkpoint, config, mesh, numpy_dtype, progress or (lambda done, total, what: None))
    tokenizer = Tokenizer(checkpoint.tokenizer_path) if checkpoint.tokenizer_path is not None else None
    return ServingModel(config, mesh, params, numpy_dtype, chosen, tokenizer, checkpoint.source)
