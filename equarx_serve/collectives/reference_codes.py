"""One message in NumPy: scales, codes, packing, rotation; the arithmetic of `blockwise.py` said in plain numbers.

Does: what `blockwise.py`, `packing.py` and `rotation.py` do, bit for bit, but with frexp, ceil and bit lists where they
shift and mask, so that a slip in one is not repeated in the other.
Assumes: little-endian IEEE float32; subnormal numbers count as zero.
Leaves to others: who sends what (`reference.py`).
"""

from typing import Final

import ml_dtypes
import numpy as np

from equarx_serve.collectives.layout import Layout

F32: Final = np.float32
NORMAL: Final = F32(2.0**-126)
SIGNIFICANT_BITS: Final = {"float32": 17, "bfloat16": 8, "byte": 4}
SPAN: Final = {"symmetric": 31, "full_range": 15}
CLIPS: Final = (1.0, 59 / 64, 55 / 64)


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal numbers to zero, sign kept."""
    return np.where(np.abs(x) < NORMAL, np.copysign(F32(0), x), x)


def hadamard(x: np.ndarray, length: int) -> np.ndarray:
    """Butterflies at distance 1, 2, 4, ...: (lower + upper, lower - upper)."""
    distance = 1
    while distance < length:
        pairs = x.reshape(*x.shape[:-1], -1, 2, distance)
        lower, upper = pairs[..., 0, :], pairs[..., 1, :]
        x = flush(np.stack([lower + upper, lower - upper], axis=-2)).reshape(x.shape)
        distance *= 2
    return x


def sixteen_bits(x: np.ndarray) -> np.ndarray:
    """Rounded to 16 significant bits, half to even."""
    fraction, power = np.frexp(np.where(np.isfinite(x), x, 0).astype(np.float64))
    with np.errstate(over="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(fraction, 16)), power - 16).astype(F32)
    return np.where(np.isfinite(x), rounded, x)


def encode(x: np.ndarray, layout: Layout) -> np.ndarray:
    """[..., D] float32 -> [..., row_bytes] uint8."""
    if layout.format == "float32":
        return np.ascontiguousarray(x).view(np.uint8)
    if layout.format == "bfloat16":
        return np.ascontiguousarray(x.astype(ml_dtypes.bfloat16)).view(np.uint8)
    codes, scales = quantize(x, layout)
    return np.concatenate([pack(codes, layout), scales], axis=-1)


def decode(rows: np.ndarray, layout: Layout) -> np.ndarray:
    """[..., row_bytes] uint8 -> [..., D] float32."""
    if layout.format == "float32":
        return np.ascontiguousarray(rows).view(F32)
    if layout.format == "bfloat16":
        return np.ascontiguousarray(rows).view(ml_dtypes.bfloat16).astype(F32)
    codes = unpack(rows[..., : layout.payload_bytes], layout)
    return dequantize(codes, rows[..., layout.payload_bytes :], layout)


def quantize(x: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Codes [..., D] int8 (fp8: its bits) and scale bytes [..., scale_bytes] uint8."""
    blocks = flush(x).reshape(*x.shape[:-1], layout.blocks, layout.block)
    scales, exponent = block_scales(blocks, layout)
    codes = block_codes(blocks, scales, layout)
    if layout.clip_search:
        first, best = scales, _cost(blocks, codes, scales, scales, layout)
        for clip in CLIPS[1:]:
            tried, _ = block_scales(blocks, layout, clip, exponent)
            tried_codes = block_codes(blocks, tried, layout)
            cost = _cost(blocks, tried_codes, tried, first, layout)
            better = cost < best
            best = np.where(better, cost, best)
            codes = np.where(better[..., None], tried_codes, codes)
            scales = np.where(better, tried, scales)
    return codes.reshape(x.shape), _scales_to_bytes(scales, exponent, layout)


def dequantize(codes: np.ndarray, scale_bytes: np.ndarray, layout: Layout) -> np.ndarray:
    """The values [..., D] float32."""
    scales = _scales_from_bytes(scale_bytes, layout)
    blocks = codes.reshape(*codes.shape[:-1], layout.blocks, layout.block)
    return block_values(blocks, scales, layout).reshape(codes.shape)


def block_scales(
    blocks: np.ndarray, layout: Layout, clip: float = 1.0, exponent: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The scale of each block as receivers read it, and each token's exponent (byte scales; else zeros)."""
    magnitude = np.max(np.abs(blocks), axis=-1)  # NaN if there is one
    ratio = clip * (layout.half / layout.top if layout.codes == "symmetric" else 1.0)
    with np.errstate(over="ignore"):
        target = flush(magnitude * F32(ratio))
    significant = SIGNIFICANT_BITS[layout.scale]
    with np.errstate(invalid="ignore"):
        fraction, power = np.frexp(target.astype(np.float64))
        grid = np.ldexp(np.ceil(np.ldexp(fraction, significant)), power - significant)
    # Written so that NaN is bad too. A scale that float32 cannot hold would be a wrong finite number.
    bad = ~(grid <= np.finfo(F32).max)
    lowest = 2.0**-126 * (1 + 2.0 ** (1 - significant))
    scales = np.where(bad, 0.0, np.where(grid > 0, np.maximum(grid, lowest), 0.0))
    negative = np.zeros(scales.shape, bool)
    if layout.codes == "full_range":
        # The largest magnitude gets code -half: its scale has the opposite sign. Equal magnitudes: the negative one.
        negative = (scales > 0) & (blocks.min(axis=-1) > -blocks.max(axis=-1))
    biased = np.zeros((*scales.shape[:-1], 1), np.int64)
    if layout.scale == "byte":
        top = np.max(scales, axis=-1, keepdims=True)
        biased = np.where(top > 0, np.frexp(top)[1] + 126, 0) if exponent is None else exponent
        # The smallest byte is one step above `span` binades below the token's exponent.
        floor = np.ldexp(1 + 1 / 8, biased - 127 - SPAN[layout.codes])
        scales = np.maximum(scales, np.maximum(floor, lowest))
    scales = np.where(negative, -scales, scales).astype(F32)
    return np.where(bad, F32(np.nan), scales), biased


def block_codes(blocks: np.ndarray, scales: np.ndarray, layout: Layout) -> np.ndarray:
    """round(value / scale * half); 0 in a block that is NaN."""
    inverse = F32(4) / np.where((scales == 0) | np.isnan(scales), F32(1), scales)
    blocks = np.where(np.isnan(scales)[..., None], F32(0), blocks)
    steps = flush(flush(blocks * inverse[..., None]) * F32(layout.half / 4))
    if layout.format == "fp8_e4m3":
        return steps.astype(ml_dtypes.float8_e4m3fn).view(np.int8)
    low = -layout.half if layout.codes == "full_range" else -layout.top
    return np.clip(np.rint(steps), low, layout.half - 1).astype(np.int8)


def block_values(codes: np.ndarray, scales: np.ndarray, layout: Layout) -> np.ndarray:
    """code / half * scale."""
    numbers = codes.view(ml_dtypes.float8_e4m3fn) if layout.format == "fp8_e4m3" else codes
    return flush(numbers.astype(F32) * F32(1 / layout.half) * scales[..., None])


def _cost(blocks: np.ndarray, codes: np.ndarray, scales: np.ndarray, first: np.ndarray, layout: Layout) -> np.ndarray:
    """Squared error of each block in integers: errors in 1/64 of a step of the unclipped scale."""
    unit = F32(4) / np.where((first == 0) | np.isnan(first), F32(1), first)
    # A block that is NaN unclipped costs nothing, so that no clip factor is better and it stays NaN.
    broken = np.isnan(first)[..., None]
    blocks = np.where(broken, F32(0), blocks)
    values = np.where(broken, F32(0), block_values(codes, scales, layout))
    error = (blocks - values) * unit[..., None] * F32(layout.half / 4 * 64)
    return np.sum(np.clip(np.rint(error), -layout.error_limit, layout.error_limit).astype(np.int64) ** 2, axis=-1)


def _scales_to_bytes(scales: np.ndarray, exponent: np.ndarray, layout: Layout) -> np.ndarray:
    if layout.scale == "float32":
        return np.ascontiguousarray(scales).view(np.uint8)
    if layout.scale == "bfloat16":
        return np.ascontiguousarray(scales.astype(ml_dtypes.bfloat16)).view(np.uint8)
    fraction, power = np.frexp(np.where(np.isnan(scales), F32(1), np.abs(scales)))
    eighths = np.rint(fraction * 16).astype(np.int64) - 8
    magnitude = (power - 1 - (exponent - 127 - SPAN[layout.codes])) * 8 + eighths
    # Only a token of zeros (exponent 0) would pass the top; every byte does for it.
    magnitude = np.minimum(magnitude, SPAN[layout.codes] * 8 + 7)
    code = np.where(scales < 0, magnitude + 128, magnitude)
    return np.concatenate([np.where(np.isnan(scales), 0, code), exponent], axis=-1).astype(np.uint8)


def _scales_from_bytes(sent: np.ndarray, layout: Layout) -> np.ndarray:
    if layout.scale == "float32":
        return np.ascontiguousarray(sent).view(F32)
    if layout.scale == "bfloat16":
        return np.ascontiguousarray(sent).view(ml_dtypes.bfloat16).astype(F32)
    code, exponent = sent[..., :-1].astype(np.int64), sent[..., -1:].astype(np.int64)
    signed = layout.codes == "full_range"
    magnitude = code % 128 if signed else code
    value = np.ldexp(1 + magnitude % 8 / 8, magnitude // 8 + exponent - 127 - SPAN[layout.codes])
    value = np.maximum(value, 2.0**-126 * (1 + 1 / 8))
    value = np.where(signed & (code >= 128), -value, value)
    return np.where(code == 0, np.nan, value).astype(F32)


def pack(codes: np.ndarray, layout: Layout) -> np.ndarray:
    """Codes to bytes, bit by bit: see the drawing in `packing.py`."""
    bits = layout.bits
    if bits == 8:
        return codes.view(np.uint8)
    field = np.gcd(bits, 8)
    kept = bits // field
    planes = np.split(codes.astype(np.int64) % 2**bits, layout.planes, axis=-1)
    out = np.stack(planes[:kept], axis=-2)
    for k, plane in enumerate(planes[kept:]):
        for i in range(kept):
            out[..., i, :] += plane // 2 ** (field * i) % 2**field * 2 ** (bits + field * k)
    return out.reshape(*codes.shape[:-1], layout.payload_bytes).astype(np.uint8)


def unpack(packed: np.ndarray, layout: Layout) -> np.ndarray:
    """The codes that `pack` packed."""
    bits = layout.bits
    if bits == 8:
        return np.ascontiguousarray(packed).view(np.int8)
    field = np.gcd(bits, 8)
    kept = bits // field
    rows = packed.reshape(*packed.shape[:-1], kept, -1).astype(np.int64)
    planes = [rows[..., i, :] % 2**bits for i in range(kept)]
    for k in range(layout.planes - kept):
        fields = [rows[..., i, :] // 2 ** (bits + field * k) % 2**field * 2 ** (field * i) for i in range(kept)]
        planes.append(sum(fields))
    codes = np.concatenate(planes, axis=-1)
    return np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes).astype(np.int8)
