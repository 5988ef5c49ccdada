"""The bytes of one token on the wire: payload, then the block scales, then (byte scales) the token's exponent.

Does: every size that follows from (format, block, scale, features). Plain arithmetic, no arrays.
Assumes: block divides features and features fill the packing groups; `unsupported` says in words when they don't.
Leaves to others: making the bytes (`blockwise.py`, `packing.py`, `reference.py`).

    row of one token, int6, D = 640, B = 64, byte scales:
    | 480 bytes payload | 10 bytes: one a block | 1 byte: exponent of the token's largest scale |
"""

import math
from dataclasses import dataclass
from typing import Final

from equarx_serve.collectives.config import WHOLE_TOKEN, Codes, CollectiveConfig, Format, Scale

SCALE_BYTES: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2, "byte": 1}


@dataclass(frozen=True)
class Layout:
    """One token's row on the wire. Invariants: blocks * block == features; row_bytes == payload + scales.

    Attributes:
        features: D, features of a token.
        block: B, features that share a scale.
        bits: bits of one code (32 and 16 for the raw formats).
    """

    features: int
    block: int
    format: Format
    bits: int
    codes: Codes
    scale: Scale
    clip_search: bool

    @classmethod
    def of(cls, config: CollectiveConfig, features: int) -> "Layout":
        """The layout that `config` gives tokens of `features` features."""
        block = features if config.block == WHOLE_TOKEN or not config.quantized else config.block
        return cls(features, block, config.format, config.bits, config.codes, config.scale, config.clip_search)

    @property
    def quantized(self) -> bool:
        """Whether the payload is codes with scales."""
        return self.format not in ("float32", "bfloat16")

    @property
    def blocks(self) -> int:
        """Scales a token has."""
        return self.features // self.block

    @property
    def half(self) -> int:
        """The code that the sent scale itself would have: 2^(bits-1), for fp8 512. value = code / half * scale."""
        return 512 if self.format == "fp8_e4m3" else 2 ** (self.bits - 1)

    @property
    def top(self) -> int:
        """The largest code a symmetric block uses: 2^(bits-1) - 1, for fp8 448."""
        return 448 if self.format == "fp8_e4m3" else 2 ** (self.bits - 1) - 1

    @property
    def error_limit(self) -> int:
        """Clip search's largest error, in 1/64 of a code step: so that a block's sum of squares fits in 31 bits."""
        return min(500, math.isqrt((2**31 - 1) // self.block))

    @property
    def planes(self) -> int:
        """Equal contiguous parts into which packing cuts the features: 8 / gcd(bits, 8)."""
        return 8 // math.gcd(self.bits, 8) if self.bits < 8 else 1

    @property
    def payload_bytes(self) -> int:
        """Bytes of a token's codes."""
        return self.features * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of a token's scales, the token's exponent byte included."""
        if not self.quantized:
            return 0
        return self.blocks * SCALE_BYTES[self.scale] + (1 if self.scale == "byte" else 0)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token on the wire."""
        return self.payload_bytes + self.scale_bytes


def unsupported(config: CollectiveConfig, features: int) -> str | None:
    """Why tokens of `features` features can't be coded by `config`, or None when they can."""
    if not config.quantized:
        return None
    layout = Layout.of(config, features)
    if features % layout.block:
        return f"block {layout.block} does not divide the feature size {features}"
    if features % layout.planes:
        return (
            f"{config.format} packs groups of {layout.planes} features, which do not fill the feature size {features}"
        )
    if config.rotation and features % config.rotation:
        return f"rotation length {config.rotation} does not divide the feature size {features}"
    return None
