"""Codes of 4 to 7 bits, packed without a gap: a token's D codes become D * bits / 8 bytes.

Does: `pack` and `unpack`, exact inverses, by shifts of whole contiguous parts of the token (no gather, no strides).
Assumes: the feature size is a multiple of the number of planes (`Layout.planes`); `layout.unsupported` said so before.
Leaves to others: making the codes (`blockwise.py`).

With g = gcd(bits, 8) the features are cut into 8/g planes. The first bits/g planes keep their codes in the low bits of
one byte each; the other planes are cut into fields of g bits and fill the high bits:

    int4: 2 planes -> 1 byte    a | b << 4
    int6: 4 planes -> 3 bytes   a | (d & 3) << 6,  b | (d >> 2 & 3) << 6,  c | (d >> 4) << 6
    int5, int7: 8 planes -> 5 or 7 bytes, fields of one bit
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Int8, UInt8


def pack(codes: Int8[Array, "*lead D"], bits: int) -> UInt8[Array, "*lead P"]:
    """Signed codes in [-2^(bits-1), 2^(bits-1) - 1] to bytes, P = D * bits / 8."""
    raw = codes.astype(jnp.uint8)
    if bits == 8:
        return raw
    group = math.gcd(bits, 8)
    kept = bits // group
    planes = jnp.split(raw & jnp.uint8(2**bits - 1), 8 // group, axis=-1)
    field = jnp.uint8(2**group - 1)
    packed = []
    for i in range(kept):
        byte = planes[i]
        for k, spread in enumerate(planes[kept:]):
            byte = byte | (((spread >> jnp.uint8(group * i)) & field) << jnp.uint8(bits + group * k))
        packed.append(byte)
    return jnp.concatenate(packed, axis=-1)


def unpack(packed: UInt8[Array, "*lead P"], bits: int) -> Int8[Array, "*lead D"]:
    """The codes that `pack` packed."""
    if bits == 8:
        return packed.astype(jnp.int8)
    group = math.gcd(bits, 8)
    kept = bits // group
    parts = jnp.split(packed, kept, axis=-1)
    field = jnp.uint8(2**group - 1)
    planes = [part & jnp.uint8(2**bits - 1) for part in parts]
    for k in range((8 - bits) // group):
        plane = jnp.zeros_like(parts[0])
        for i, part in enumerate(parts):
            plane = plane | (((part >> jnp.uint8(bits + group * k)) & field) << jnp.uint8(group * i))
        planes.append(plane)
    # Sign: move the code's top bit to bit 7, and back down with an arithmetic shift.
    raised = jnp.concatenate(planes, axis=-1) << jnp.uint8(8 - bits)
    return raised.astype(jnp.int8) >> jnp.int8(8 - bits)
