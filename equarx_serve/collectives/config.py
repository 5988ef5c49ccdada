"""What a collective is asked to do: `CollectiveConfig`, frozen and checked on construction, and its one-line text form.

Does: hold the choice (algorithm, wire format, block, codes, scales, rotation, thresholds), refuse nonsense with the
value, the rule and the legal choices, and turn to and from text (`int6:block=64,scale=byte`).
Assumes: nothing about shapes; whether a shape suits the choice is `policy.py`'s question.
Leaves to others: byte counts (`layout.py`), steps (`schedule.py`), arithmetic (`blockwise.py`, `reference.py`).
"""

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args, no_type_check

Algorithm = Literal["psum", "ring", "two_ended_ring", "two_shot"]
Format = Literal["float32", "bfloat16", "int8", "int7", "int6", "int5", "int4", "fp8_e4m3"]
Codes = Literal["symmetric", "full_range"]
Scale = Literal["float32", "bfloat16", "byte"]
OnUnsupported = Literal["fallback", "raise"]
RawFormat = Literal["float32", "bfloat16"]

ALGORITHMS: Final = get_args(Algorithm)
FORMATS: Final = get_args(Format)
ROTATIONS: Final = (0, 8, 16, 32, 64, 128, 256)
MAX_CHUNKS: Final = 64
"""More pieces a hop than this only add messages."""

WHOLE_TOKEN: Final = 0
"""`block=WHOLE_TOKEN` (in text `block=token`): one scale a token, whatever the feature size."""

_SHORT: Final[dict[str, str]] = {"f32": "float32", "bf16": "bfloat16", "fp8": "fp8_e4m3"}
_LONG_TO_SHORT: Final = {long: short for short, long in _SHORT.items()}


class CollectiveError(ValueError):
    """What was asked of a collective cannot be done: says the value given, the rule and the legal choices."""


def nearest(word: str, choices: tuple[str, ...]) -> str:
    """`; did you mean 'x'?` for the choice most like `word`, or nothing when none is like it."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


@no_type_check  # for runtime checkers only: the constructor checks every field itself, with a sentence
@dataclass(frozen=True)
class CollectiveConfig:
    """How one AllReduce (ReduceScatter, AllGather) travels.

    The defaults are the project's choice for int8; the measurements behind them are in docs/collective.md.

    Attributes:
        algorithm: `psum` (the platform's own), `ring` (once round the ring), `two_ended_ring` (from both sides,
            half the steps), `two_shot` (direct sends, two steps). `psum` goes with float32 and bfloat16 only.
        format: what one feature is on the wire. float32 and bfloat16 are sent as they are (a bfloat16 ring as uint16
            bits: XLA:CPU would widen bf16); the others are codes with a scale for each block.
        block: features that share a scale, within one token; must divide the feature size. 0 means the whole token.
        codes: `symmetric` (-L..L, L = 2^(bits-1) - 1) or `full_range` (all 2^bits levels; the scale carries the sign
            that sends the largest magnitude to -2^(bits-1)). fp8 is symmetric only.
        scale: a block's scale on the wire: float32 (17 significant bits used), bfloat16, or byte (three mantissa
            bits relative to a one-byte exponent of the token).
        rotation: length of the Hadamard rotation over neighbouring features, 0 for none. Used by coded formats.
        clip_search: choose the best of three clip factors a block by squared error. Pays at 4 bits.
        chunks: pieces each shard is cut into, so that coding one overlaps with sending another. An upper limit:
            the policy uses fewer when there are not that many tokens.
        min_bytes: with fewer bytes of payload a rank (counted in bf16) the path is not taken: psum. 0 means that the
            path is always taken, also where padding makes it send more than psum.
        quantize_min_bytes: with fewer bytes the path is taken but sends bfloat16.
        fallback: dtype in which a fallback psum adds and sends.
        on_unsupported: `fallback` (psum, counted, with its reason) or `raise` (CollectiveError with the reason).
    """

    algorithm: Algorithm = "two_ended_ring"
    format: Format = "int8"
    block: int = 128
    codes: Codes = "symmetric"
    scale: Scale = "bfloat16"
    rotation: int = 128
    clip_search: bool = False
    chunks: int = 2
    min_bytes: int = 64 * 1024
    quantize_min_bytes: int = 64 * 1024
    fallback: RawFormat = "float32"
    on_unsupported: OnUnsupported = "fallback"

    def __post_init__(self) -> None:
        for field, kind in _CHOICES.items():
            _check_choice(field, getattr(self, field), get_args(kind))
        for field, low in (("block", 0), ("rotation", 0), ("chunks", 1), ("min_bytes", 0), ("quantize_min_bytes", 0)):
            value = getattr(self, field)
            if type(value) is not int or value < low:
                raise CollectiveError(f"{field}={value!r}: must be an integer of at least {low}")
        if type(self.clip_search) is not bool:
            raise CollectiveError(f"clip_search={self.clip_search!r}: must be True or False")
        if self.rotation not in ROTATIONS:
            raise CollectiveError(f"rotation={self.rotation}: the Hadamard length must be one of {_listed(ROTATIONS)}")
        if self.chunks > MAX_CHUNKS:
            raise CollectiveError(f"chunks={self.chunks}: at most {MAX_CHUNKS}")
        if self.algorithm == "psum" and self.quantized:
            raise CollectiveError(
                f"algorithm='psum' with format={self.format!r}: psum adds float32 or bfloat16; "
                "for codes choose ring, two_ended_ring or two_shot"
            )
        if self.format == "fp8_e4m3" and self.codes != "symmetric":
            raise CollectiveError(f"codes={self.codes!r} with format='fp8_e4m3': fp8 codes are symmetric only")
        if self.format == "fp8_e4m3" and self.clip_search:
            raise CollectiveError("clip_search=True with format='fp8_e4m3': clip search is for integer codes only")

    @property
    def quantized(self) -> bool:
        """Whether the wire holds codes with scales."""
        return self.format not in ("float32", "bfloat16")

    @property
    def bits(self) -> int:
        """Bits one feature takes on the wire, without its share of the scale."""
        return {"float32": 32, "bfloat16": 16, "fp8_e4m3": 8}.get(self.format) or int(self.format[3:])

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON-ready values."""
        return dataclasses.asdict(self)

    def label(self) -> str:
        """The shortest text that `parse` turns back into this config."""
        short = _LONG_TO_SHORT.get(self.format, self.format)
        base = self._start(self.format)
        options = [
            f"{field.name}={_show(field.name, getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if field.name != "format" and getattr(self, field.name) != getattr(base, field.name)
        ]
        return short + (":" + ",".join(options) if options else "")

    def __str__(self) -> str:
        return self.label()

    @classmethod
    def _start(cls, format: Any) -> "CollectiveConfig":
        """The config that a bare format name means: float32 and bfloat16 are the platform's psum."""
        if format in ("float32", "bfloat16"):
            return cls(format=format, algorithm="psum")
        return cls(format=format)

    @classmethod
    def parse(cls, text: str) -> "CollectiveConfig":
        """Read `format[:option=value,...]`, e.g. `bf16`, `int8:algorithm=ring,block=256,rotation=none`.

        Raises:
            CollectiveError: an unknown format, option or value, naming the nearest one; or an option given twice.
        """
        name, _, rest = text.strip().partition(":")
        format = _SHORT.get(name, name)
        if format not in FORMATS:
            known = (*FORMATS, *_SHORT)
            raise CollectiveError(f"format={name!r}: must be one of {_listed(known)}{nearest(name, known)}")
        start = cls._start(format)
        names = tuple(field.name for field in dataclasses.fields(cls) if field.name != "format")
        given: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in rest.split(","))):
            key, equals, value = (part.strip() for part in item.partition("="))
            if key not in names:
                raise CollectiveError(f"option {key!r}: must be one of {_listed(names)}{nearest(key, names)}")
            if not equals:
                raise CollectiveError(f"option {key!r} has no value: write {key}=VALUE")
            if key in given:
                raise CollectiveError(f"option {key!r} is given twice in {text!r}")
            if not start.quantized and key in ("block", "codes", "scale", "clip_search", "quantize_min_bytes"):
                raise CollectiveError(f"option {key!r} has no effect with format={format!r}, which sends no codes")
            given[key] = _read(key, value)
        return dataclasses.replace(start, **given)


_CHOICES: Final[dict[str, Any]] = {
    "algorithm": Algorithm,
    "format": Format,
    "codes": Codes,
    "scale": Scale,
    "fallback": RawFormat,
    "on_unsupported": OnUnsupported,
}


def _listed(choices: tuple[object, ...]) -> str:
    return ", ".join(str(choice) for choice in choices)


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise CollectiveError(f"{field}={value!r}: must be one of {_listed(choices)}{nearest(str(value), choices)}")


def _show(field: str, value: object) -> str:
    """A field's value in `parse`'s words."""
    if field == "rotation" and value == 0:
        return "none"
    if field == "block" and value == WHOLE_TOKEN:
        return "token"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(field: str, text: str) -> object:
    """A field's value from `parse`'s words; what is no number is left to the constructor's check."""
    if field in _CHOICES:
        return text
    if field == "clip_search":
        if text not in ("true", "false"):
            raise CollectiveError(f"clip_search={text!r}: must be true or false")
        return text == "true"
    words = {"rotation": {"none": 0}, "block": {"token": WHOLE_TOKEN}}.get(field, {})
    if text in words:
        return words[text]
    try:
        return int(text)
    except ValueError:
        also = f" or {_listed(tuple(words))}" if words else ""
        raise CollectiveError(f"{field}={text!r}: must be an integer{also}") from None
