"""One token's features to bytes and back: block scales, codes, and the message that holds both.

Does: `quantize` / `dequantize` (codes and scales apart), `encode` / `decode` (the bytes that are sent).
Assumes: float32 in and out; a shape that `layout.unsupported` found fit.
Leaves to others: rotation (`rotation.py`), who sends what (`schedule.py`).

The arithmetic is chosen so that every IEEE machine gives the same bits, whether or not it fuses multiply and add:
- A sent scale has at most 17 significant bits and a code at most 8 (7 and a sign), so code / half * scale is exact in
  float32, and a fused multiply-add of it rounds just as a multiply and an add do.
- A scale is the block's largest magnitude times half / top, rounded *up* to the scale's grid by integer arithmetic.
  It is never smaller than the magnitudes in its block, so it is normal whenever they are, and no code overflows.
- Coding multiplies by the correctly rounded 4 / scale (finite and normal for every scale) and rounds half to even.
Largest magnitudes are found on the bits as integers: NaN is above infinity is above every finite number.

A block with NaN or inf has scale NaN and decodes to NaN throughout. A block of zeros decodes to zeros. Subnormal inputs
count as zero, as in every float32 addition of XLA on CPU and TPU.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int8, UInt, UInt8, UInt32

from equarx_serve.collectives.layout import Layout
from equarx_serve.collectives.packing import pack, unpack

INFINITY_BITS: Final = 0x7F800000
NAN_BITS: Final = 0x7FC00000
SMALLEST_NORMAL_BITS: Final = 0x00800000
DROPPED_BITS: Final = {"float32": 7, "bfloat16": 16, "byte": 20}
"""Mantissa bits that a scale of each kind does without: 17, 8 and 4 significant bits stay."""
BYTE_SPAN: Final = {"symmetric": 31, "full_range": 15}
"""Binades below the token's largest scale that a byte scale reaches: 8 bits of magnitude, or 7 and a sign."""
CLIPS: Final = (1.0, 59 / 64, 55 / 64)
"""The clip factors that `clip_search` tries. Dyadic, so that code * factor is exact."""
ERROR_STEPS: Final = 64.0
"""Clip search adds errors as integers (in 1/64 of a code step, at most `Layout.error_limit`): any order, one result."""


def quantize(x: Float32[Array, "*lead D"], layout: Layout) -> tuple[Int8[Array, "*lead D"], UInt8[Array, "*lead S"]]:
    """Codes and the scales' bytes, S = layout.scale_bytes. fp8 codes are its bits seen as int8."""
    blocks = x.reshape(*x.shape[:-1], layout.blocks, layout.block)
    signs, magnitudes = _largest(blocks, layout)
    wire, scales = _scales(signs, magnitudes, layout)
    codes = _codes(blocks, scales, layout)
    if layout.clip_search:
        codes, wire = _search(blocks, signs, magnitudes, codes, wire, scales, layout)
    return codes.reshape(x.shape), _scale_bytes(wire, layout)


def dequantize(
    codes: Int8[Array, "*lead D"], scales: UInt8[Array, "*lead S"], layout: Layout
) -> Float32[Array, "*lead D"]:
    """The values that codes and scales stand for: code / half * scale, exact."""
    blocks = codes.reshape(*codes.shape[:-1], layout.blocks, layout.block)
    values = _values(blocks, _read_scales(scales, layout), layout)
    return values.reshape(codes.shape)


@functools.partial(jax.jit, static_argnames="layout")
def encode(x: Float32[Array, "*lead D"], layout: Layout) -> UInt[Array, "*lead row"]:
    """One message row a token: payload and scales together, row = layout.row_bytes in uint8.

    float32 and bfloat16 are sent as their bits, uint32 and uint16: XLA:CPU would widen bf16 on the wire.

    Jitted like `decode`, so that the hops of a schedule are traced once; XLA inlines both.
    """
    if layout.format == "float32":
        return lax.bitcast_convert_type(x, jnp.uint32)
    if layout.format == "bfloat16":
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    codes, scales = quantize(x, layout)
    return jnp.concatenate([pack(codes, layout.bits), scales], axis=-1)


@functools.partial(jax.jit, static_argnames="layout")
def decode(rows: UInt[Array, "*lead row"], layout: Layout) -> Float32[Array, "*lead D"]:
    """What `encode`'s rows stand for."""
    if layout.format == "float32":
        return lax.bitcast_convert_type(rows, jnp.float32)
    if layout.format == "bfloat16":
        return lax.bitcast_convert_type(rows, jnp.bfloat16).astype(jnp.float32)
    codes = unpack(rows[..., : layout.payload_bytes], layout.bits)
    return dequantize(codes, rows[..., layout.payload_bytes :], layout)


def _to_bytes(x: Array) -> UInt8[Array, "*lead bytes"]:
    raw = lax.bitcast_convert_type(x, jnp.uint8)
    return raw.reshape(*x.shape[:-1], -1)


def _from_bytes(rows: UInt8[Array, "*lead bytes"], dtype: DTypeLike) -> Array:
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(rows.reshape(*rows.shape[:-1], rows.shape[-1] // size, size), dtype)


def _largest(
    blocks: Float32[Array, "*lead N B"], layout: Layout
) -> tuple[UInt32[Array, "*lead N"], UInt32[Array, "*lead N"]]:
    """Sign bit of the scale (opposite to the largest element's; 0 if symmetric) and the largest magnitude's bits."""
    bits = lax.bitcast_convert_type(blocks, jnp.uint32)
    # The sign becomes the lowest bit, so that one integer maximum gives the magnitude and, with it, its sign.
    turned = (bits << jnp.uint32(1)) | (bits >> jnp.uint32(31))
    top = jnp.max(turned, axis=-1)
    magnitudes = top >> jnp.uint32(1)
    magnitudes = jnp.where(magnitudes < jnp.uint32(SMALLEST_NORMAL_BITS), jnp.uint32(0), magnitudes)
    if layout.codes == "symmetric":
        return jnp.zeros_like(magnitudes), magnitudes
    return jnp.where(magnitudes == 0, jnp.uint32(0), (~top & jnp.uint32(1)) << jnp.uint32(31)), magnitudes


def _scales(
    signs: UInt32[Array, "*lead N"],
    magnitudes: UInt32[Array, "*lead N"],
    layout: Layout,
    clip: float = 1.0,
    exponent: UInt32[Array, "*lead 1"] | None = None,
) -> tuple[UInt32[Array, "*lead Nw"], Float32[Array, "*lead N"]]:
    """The scales as sent (bits, or byte codes followed by the token's exponent) and as every receiver reads them."""
    ratio = clip * (layout.half / layout.top if layout.codes == "symmetric" else 1.0)
    target = magnitudes
    if ratio != 1.0:
        scaled = lax.bitcast_convert_type(magnitudes, jnp.float32) * jnp.float32(ratio)
        target = lax.bitcast_convert_type(scaled, jnp.uint32) & jnp.uint32(0x7FFFFFFF)
    dropped = DROPPED_BITS[layout.scale]
    rounded = (target + jnp.uint32(2**dropped - 1)) >> jnp.uint32(dropped)
    bad = rounded >= jnp.uint32(INFINITY_BITS >> dropped)
    # At least one step above the smallest normal number, so that 4 / scale is finite.
    lowest = jnp.uint32((SMALLEST_NORMAL_BITS >> dropped) + 1)
    rounded = jnp.where(rounded == 0, rounded, jnp.maximum(rounded, lowest))
    if layout.scale != "byte":
        bits = jnp.where(bad, jnp.uint32(NAN_BITS), rounded << jnp.uint32(dropped)) | signs
        return bits, lax.bitcast_convert_type(bits, jnp.float32)
    if exponent is None:
        exponent = jnp.max(jnp.where(bad, jnp.uint32(0), rounded) >> jnp.uint32(3), axis=-1, keepdims=True)
    sent = jnp.concatenate([_byte_codes(signs, rounded, bad, exponent, layout), exponent], axis=-1)
    return sent, _from_byte_codes(sent, layout)


def _byte_codes(
    signs: UInt32[Array, "*lead N"],
    rounded: UInt32[Array, "*lead N"],
    bad: Array,
    exponent: UInt32[Array, "*lead 1"],
    layout: Layout,
) -> UInt32[Array, "*lead N"]:
    """exponent and three mantissa bits, counted from BYTE_SPAN binades below the token's exponent. 0 means NaN."""
    span = BYTE_SPAN[layout.codes]
    above = rounded.astype(jnp.int32) - (exponent.astype(jnp.int32) - span) * 8
    codes = jnp.clip(above, 1, span * 8 + 7).astype(jnp.uint32)
    return jnp.where(bad, jnp.uint32(0), codes | (signs >> jnp.uint32(24)))


def _from_byte_codes(sent: UInt32[Array, "*lead Nw"], layout: Layout) -> Float32[Array, "*lead N"]:
    span = BYTE_SPAN[layout.codes]
    codes, exponent = sent[..., :-1], sent[..., -1:].astype(jnp.int32)
    sign = jnp.uint32(0)
    magnitude = codes
    if layout.codes == "full_range":
        sign = (codes >> jnp.uint32(7)) << jnp.uint32(31)
        magnitude = codes & jnp.uint32(0x7F)
    lowest = (SMALLEST_NORMAL_BITS >> DROPPED_BITS["byte"]) + 1
    rounded = jnp.maximum(magnitude.astype(jnp.int32) + (exponent - span) * 8, lowest).astype(jnp.uint32)
    bits = (rounded << jnp.uint32(DROPPED_BITS["byte"])) | sign
    scales = lax.bitcast_convert_type(jnp.where(codes == 0, jnp.uint32(NAN_BITS), bits), jnp.float32)
    # Else XLA:CPU works a block's scale out again for each of its features.
    return lax.optimization_barrier(scales)


def _codes(
    blocks: Float32[Array, "*lead N B"], scales: Float32[Array, "*lead N"], layout: Layout
) -> Int8[Array, "*lead N B"]:
    """round(value / scale * half), half to even. What stands for NaN is of no matter: its scale is NaN."""
    inverse = jnp.float32(4) / jnp.where(scales == 0, jnp.float32(1), scales)
    steps = (blocks * inverse[..., None]) * jnp.float32(layout.half / 4)
    if layout.format == "fp8_e4m3":
        return lax.bitcast_convert_type(steps.astype(jnp.float8_e4m3fn), jnp.int8)
    rounded = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
    if layout.codes == "full_range" or layout.clip_search:
        low = -layout.half if layout.codes == "full_range" else -layout.top
        rounded = jnp.clip(rounded, low, layout.half - 1)
    return rounded.astype(jnp.int8)


def _values(
    codes: Int8[Array, "*lead N B"], scales: Float32[Array, "*lead N"], layout: Layout
) -> Float32[Array, "*lead N B"]:
    if layout.format == "fp8_e4m3":
        numbers = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    else:
        numbers = codes.astype(jnp.float32)
    return (numbers * jnp.float32(1 / layout.half)) * scales[..., None]


def _search(
    blocks: Float32[Array, "*lead N B"],
    signs: UInt32[Array, "*lead N"],
    magnitudes: UInt32[Array, "*lead N"],
    codes: Int8[Array, "*lead N B"],
    wire: UInt32[Array, "*lead Nw"],
    scales: Float32[Array, "*lead N"],
    layout: Layout,
) -> tuple[Int8[Array, "*lead N B"], UInt32[Array, "*lead Nw"]]:
    """The clip factor of CLIPS with the least squared error, block by block; the larger factor when equal."""
    unit = jnp.float32(4) / jnp.where(scales == 0, jnp.float32(1), scales)

    def cost(codes: Int8[Array, "*lead N B"], scales: Float32[Array, "*lead N"]) -> Array:
        error = (blocks - _values(codes, scales, layout)) * unit[..., None] * jnp.float32(layout.half / 4 * ERROR_STEPS)
        limit = layout.error_limit
        steps = jnp.clip(lax.round(error, lax.RoundingMethod.TO_NEAREST_EVEN), -limit, limit)
        whole = steps.astype(jnp.int32)
        return jnp.sum(whole * whole, axis=-1)

    exponent = wire[..., layout.blocks :] if layout.scale == "byte" else None
    best = cost(codes, scales)
    for clip in CLIPS[1:]:
        tried_wire, tried_scales = _scales(signs, magnitudes, layout, clip, exponent)
        tried = _codes(blocks, tried_scales, layout)
        error = cost(tried, tried_scales)
        better = error < best
        best = jnp.where(better, error, best)
        codes = jnp.where(better[..., None], tried, codes)
        chosen = jnp.where(better, tried_wire[..., : layout.blocks], wire[..., : layout.blocks])
        wire = jnp.concatenate([chosen, wire[..., layout.blocks :]], axis=-1)
    return codes, wire


def _scale_bytes(wire: UInt32[Array, "*lead Nw"], layout: Layout) -> UInt8[Array, "*lead S"]:
    if layout.scale == "float32":
        return _to_bytes(wire)
    if layout.scale == "bfloat16":
        return _to_bytes((wire >> jnp.uint32(16)).astype(jnp.uint16))
    return wire.astype(jnp.uint8)


def _read_scales(sent: UInt8[Array, "*lead S"], layout: Layout) -> Float32[Array, "*lead N"]:
    if layout.scale == "float32":
        return _from_bytes(sent, jnp.float32)
    if layout.scale == "bfloat16":
        return _from_bytes(sent, jnp.bfloat16).astype(jnp.float32)
    return _from_byte_codes(sent.astype(jnp.uint32), layout)
